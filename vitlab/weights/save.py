"""`vitlab.save`: a model as a folder for `vitlab.load`."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import atomic_path, check_names, write_errors
from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, Preprocess
from vitlab.models.resnet import ResNet
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.weights.formats.vitlab import check_temperature, check_thresholds, overwrite, write
from vitlab.weights.lora import Adapter


def save(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    preprocess: Preprocess | None = None,
    labels: Sequence[str] | None = None,
    thresholds: Sequence[float] | None = None,
) -> None:
    """Write a model to a folder that `vitlab.load` takes, completely or not at all.

    Args:
        model: a vitlab model, compiled by torch or not.
        folder: a new folder, or a vitlab run folder whose model is replaced. Other programs' models are never
            overwritten.
        preprocess: how images become the model's input; by default as in `model.card`.
        labels: class names in the model's order; by default those in `model.card`.
        thresholds: of a multi-label model, the probability from which each class counts as present; by default those
            in `model.card`.

    Raises:
        UserError: if it is not a vitlab model, the number of labels is not that of the classes, the folder holds
            something else, or it cannot be written.

    >>> import tempfile, vitlab
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> model = vitlab.create("Ti/16", image_size=32, depth=1, classes=2)
    >>> vitlab.save(model, folder, labels=["cat", "dog"])
    >>> vitlab.load(folder).card.labels
    ('cat', 'dog')
    """
    inner: Any = getattr(model, "_orig_mod", model)
    if not isinstance(inner, ViT | ResNet):
        raise UserError(f"save() needs a vitlab model, not {type(inner).__name__}")
    old = inner.card
    names = old.labels if labels is None else tuple(labels)
    if names is not None and len(names) != inner.config.classes:
        raise UserError(f"there are {len(names)} class names for {inner.config.classes} classes")
    check_names(names or ())
    limits = check_thresholds(old.thresholds if thresholds is None else tuple(thresholds), inner.config.classes)
    check_temperature(old.temperature)
    card = replace(old, preprocess=preprocess or old.preprocess, labels=names, thresholds=limits)
    tensors = {name: tensor.detach().cpu() for name, tensor in inner.state_dict().items()}
    write_folder(inner.config, tensors, card, Path(folder))


def write_folder(
    config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path, adapter: Adapter | None = None
) -> None:
    """Write a model to a folder, new or not; with `adapter` the tensors are low-rank updates and their head."""
    if path.exists():
        with write_errors(path):
            overwrite(config, tensors, card, path, adapter)
    else:
        with atomic_path(path, folder=True) as new:
            write(config, tensors, card, new, adapter)
