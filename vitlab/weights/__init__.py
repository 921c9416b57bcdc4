"""Everyone's checkpoints in, ours out to everyone."""

from vitlab.weights.convert import convert
from vitlab.weights.load import load
from vitlab.weights.save import save

__all__ = ["convert", "load", "save"]
