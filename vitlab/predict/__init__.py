"""Predicting the classes of images: one at a time in Python, or thousands of files."""

from vitlab.predict.classifier import Classifier, Prediction

__all__ = ["Classifier", "Prediction"]
