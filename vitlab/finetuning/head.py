"""The first stage: frozen features of the images, once, and logistic heads on them.

Shapes: n images, D width of the features, K classes.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitlab.data.balance import Balance
from vitlab.data.source import Data, ImageSource, Subset
from vitlab.device import pick_device
from vitlab.evaluation.cross_validation import CrossValidation, cross_validate, row_weights
from vitlab.evaluation.extract import ExtractOptions, Features, extract, sizes
from vitlab.evaluation.probe import Linear, logistic
from vitlab.models.variants import Model

UNEVEN = 2.0  # times as many images in the largest class as in the smallest, from which balancing is tried
GAIN = 0.005  # of the mean F1, by which balancing is chosen
WARM_UP, FEW = 4, 32  # images on which a CPU's speed is measured
LARGE = 2_000_000  # logits: below that, a fit is no faster on a GPU
# Least penalty of the head that fine-tuning starts from, by the passes over the images from which it is right: a
# confident head leaves nothing to learn, and a timid one has to be learned again. See docs/finetuning.md.
SOFT = ((6.0, 1.0), (3.0, 0.3), (0.0, 0.1))


@dataclass(frozen=True)
class FrozenFeatures:
    """Features of the training and validation images."""

    train: Features
    validation: Features

    @cached_property
    def all(self) -> Features:
        values = np.concatenate([self.train.values, self.validation.values])
        return Features(values, np.concatenate([self.train.labels, self.validation.labels]))


def frozen_features(model: Model, data: Data, keep: Path, options: ExtractOptions) -> FrozenFeatures:
    """Compute the features, or read those that are kept already."""
    assert data.validation is not None
    train = extract(model, data.train, keep=keep, title="training features", **options)
    return FrozenFeatures(train, extract(model, data.validation, keep=keep, title="validation features", **options))


def image_seconds(model: Model, data: Data, keep: Path, options: ExtractOptions) -> float:
    """Seconds of a forward pass with decoding, on some of the images.

    A GPU, whose speed shows on many images only, keeps their features, so no time is lost. A CPU that is busy needs
    minutes for as many: a few, read without processes that would have to start, and some before them to warm up.
    """
    device = pick_device(options["device"])
    if device.type == "cpu":
        few: ExtractOptions = {**options, "workers": 0, "broken_limit": 1}
        extract(model, spread(data.train, WARM_UP), title="warm-up", **few)
        return seconds(lambda: extract(model, spread(data.train, FEW), title="speed", **few), FEW)
    images = Subset(data.train, np.arange(min(sizes(device)[1], len(data.train))))
    return seconds(lambda: extract(model, images, keep=keep, title="first features", **options), len(images))


def spread(source: ImageSource, count: int) -> ImageSource:
    """So many images from everywhere in a source; the same ones again where it has fewer."""
    return Subset(source, np.linspace(0, len(source) - 1, count).astype(int))


def seconds(act: Callable[[], object], images: int) -> float:
    """Seconds for each of the images."""
    began = time.monotonic()
    act()
    return (time.monotonic() - began) / images


@dataclass(frozen=True)
class Heads:
    """The heads of the first stage.

    `final` has learned from all images, `alone` from the training images. If `balanced`, every class weighs the same.
    """

    chosen: CrossValidation
    balanced: bool
    final: Linear
    alone: Linear
    accuracy: float  # of `alone` on the validation images


def fit_heads(features: FrozenFeatures, classes: int, *, balance: Balance | None = None, device: str = "cpu") -> Heads:
    """Choose a penalty, and whether to balance classes of uneven size unless `balance` does; fit the heads."""
    train, held = features.train, features.validation
    place = fit_device(device, len(train.labels) * classes)
    if balance is None:
        chosen, balanced = choose(train, classes, place)
    else:
        balanced = balance != "none"
        chosen = cross_validate(train, classes, balanced=balanced, device=place)

    alone = fit_head(train, classes, chosen.l2, balanced, place)
    final = fit_head(features.all, classes, chosen.l2, balanced, place, alone)
    accuracy = float((alone.guesses(held.values) == held.labels).mean())
    return Heads(chosen, balanced, final, alone, accuracy)


def fit_device(device: str, logits: int) -> torch.device:
    """Where to fit: a large problem on the GPU, if it has float64."""
    place = pick_device(device)
    return place if place.type == "cuda" and logits > LARGE else torch.device("cpu")


def fit_head(
    rows: Features, classes: int, l2: float, balanced: bool, device: torch.device, start: Linear | None = None
) -> Linear:
    weights = row_weights(rows.labels, classes) if balanced else None
    return logistic(rows.values, rows.labels, classes, l2, weights=weights, start=start, device=device)


def soft_head(train: Features, heads: Heads, epochs: float) -> Linear:
    """The head from which fine-tuning for so many passes over the images starts."""
    least = next(l2 for passes, l2 in SOFT if epochs >= passes)
    if heads.chosen.l2 >= least:
        return heads.alone
    weights = heads.alone.weights
    return fit_head(train, weights.shape[1], least, heads.balanced, weights.device)


def choose(train: Features, classes: int, device: torch.device) -> tuple[CrossValidation, bool]:
    """The cross-validation by plain rows or, where classes are uneven and their mean F1 gains by it, balanced ones."""
    plain = cross_validate(train, classes, device=device)
    counts = np.bincount(train.labels, minlength=classes)
    if counts.max() < UNEVEN * counts[counts > 0].min():
        return plain, False
    balanced = cross_validate(train, classes, balanced=True, device=device)
    gain = balanced.macro_f1(train.labels) - plain.macro_f1(train.labels)
    return (balanced, True) if gain > GAIN else (plain, False)


def set_head(model: Model, linear: Linear) -> None:
    """Make a fit the model's head; the standardization of features goes into weights and biases."""
    head = model.head
    assert isinstance(head, nn.Linear)
    mean, deviation = (torch.from_numpy(x) for x in (linear.standardizer.mean, linear.standardizer.deviation))
    weights = linear.weights[:-1].cpu() / deviation[:, None]  # (D, K)
    with torch.no_grad():
        head.weight.copy_(weights.T)
        head.bias.copy_(linear.weights[-1].cpu() - mean @ weights)
