"""Checkpoints: reading those of other libraries and our own, writing all of them."""

from vitlab.weights.convert import convert
from vitlab.weights.load import load
from vitlab.weights.save import save

__all__ = ["convert", "load", "save"]
