"""A model behind a page."""
