"""Predicting the classes of images: one at a time in Python, or thousands of files."""

from vitlab.prediction.classifier import Classifier, Prediction

__all__ = ["Classifier", "Prediction"]
