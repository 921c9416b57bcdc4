"""Faster ways to compute parts of a model, put into it from outside; the model's own code is the reference."""
