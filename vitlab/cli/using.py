"""Using a model: predictions and export."""
