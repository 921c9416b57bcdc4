"""Everyone's checkpoints in, ours out to everyone."""

from vitlab.weights.convert import convert
from vitlab.weights.load import load
from vitlab.weights.store import labels_of, preprocess_of, save

__all__ = ["convert", "labels_of", "load", "preprocess_of", "save"]
