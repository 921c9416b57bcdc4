"""A small model for the examples: a few seconds of training on the built-in digits, offline."""

from pathlib import Path

from vitlab.training.loop import train
from vitlab.training.recipe import override
from vitlab.training.recipes import find

SETTINGS = ["steps=150", "warmup=20", "device=cpu", "workers=0"]


def train_digits(folder: Path, settings: list[str] | None = None) -> Path:
    """Train on handwritten digits, unless `folder` has a model already; writes sample.png, a test image, beside it."""
    if not (folder / "model.safetensors").exists():
        result = train(override(find("digits").recipe, SETTINGS if settings is None else settings), folder)
        if result.first:
            result.data.test.image(0).save(folder / "sample.png")
    return folder
