"""`vitlab.save`: a model as a folder for `vitlab.load`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.files import atomic_path, write_errors
from vitlab.models.card import Card
from vitlab.models.config import Preprocess
from vitlab.models.resnet import ResNet
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.weights.formats.vitlab import overwrite, write


def save(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    preprocess: Preprocess | None = None,
    labels: Sequence[str] | None = None,
) -> None:
    """Write a model to a folder for `vitlab.load`, completely or not at all.

    Preprocessing and class names default to those the model was loaded with. An existing run folder keeps its other
    files; models of other programs are never overwritten.
    """
    inner: Any = getattr(model, "_orig_mod", model)
    if not isinstance(inner, ViT | ResNet):
        raise UserError(f"save() needs a vitlab model, not {type(inner).__name__}")
    old = inner.card
    names = old.labels if labels is None else tuple(labels)
    if names is not None and len(names) != inner.config.classes:
        raise UserError(f"there are {len(names)} class names for {inner.config.classes} classes")
    card = Card(preprocess or old.preprocess, names, old.provenance)
    tensors = {name: tensor.detach().cpu() for name, tensor in inner.state_dict().items()}
    path = Path(folder)
    if path.exists():
        with write_errors(path):
            overwrite(inner.config, tensors, card, path)
    else:
        with atomic_path(path, folder=True) as new:
            write(inner.config, tensors, card, new)
