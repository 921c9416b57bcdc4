"""Measuring a model: accuracy on a set, and VTAB."""
