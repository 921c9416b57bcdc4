"""Measuring what a model's features know: few-shot and probes."""
