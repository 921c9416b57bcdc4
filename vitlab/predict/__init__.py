"""Asking a model what is in pictures: one of them, or thousands of files."""

from vitlab.predict.classifier import Classifier

__all__ = ["Classifier"]
