"""The first stage: frozen features of every image, once, and logistic heads on them.

Shapes: n images, D width of the features, K classes.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

from vitlab.data.source import Data, ImageSource
from vitlab.evaluation.cross_validation import CrossValidation, cross_validate
from vitlab.evaluation.extract import Features, extract
from vitlab.evaluation.probe import Linear, logistic
from vitlab.models.variants import Model

SOFT = 0.1  # least penalty of the head that fine-tuning starts from: a confident head leaves nothing to learn


@dataclass(frozen=True)
class FrozenFeatures:
    """Features of the training and validation images, and the seconds that one image takes, decoding included."""

    train: Features
    validation: Features
    seconds: float

    @property
    def all(self) -> Features:
        values = np.concatenate([self.train.values, self.validation.values])
        return Features(values, np.concatenate([self.train.labels, self.validation.labels]))


def frozen_features(model: Model, data: Data, keep: Path, device: str) -> FrozenFeatures:
    """Compute the features, or read those that are kept already; then the speed is that of reading."""
    assert data.validation is not None
    began = time.monotonic()
    images = len(data.train) + len(data.validation)
    train = extract(model, data.train, device=device, keep=keep, title="training features")
    validation = extract(model, data.validation, device=device, keep=keep, title="validation features")
    return FrozenFeatures(train, validation, (time.monotonic() - began) / images)


@dataclass(frozen=True)
class Heads:
    """The heads of the first stage.

    `final` has learned from all images, `start` from the training images alone and with a penalty that leaves
    fine-tuning something to learn. `accuracy` is that of the training images' head on the validation images.
    """

    chosen: CrossValidation
    final: Linear
    start: Linear
    accuracy: float


def fit_heads(features: FrozenFeatures, classes: int) -> Heads:
    train, held = features.train, features.validation
    chosen = cross_validate(train, classes)
    alone = logistic(train.values, train.labels, classes, chosen.l2)
    soft = max(chosen.l2, SOFT)
    start = alone if soft == chosen.l2 else logistic(train.values, train.labels, classes, soft)
    every = features.all
    final = logistic(every.values, every.labels, classes, chosen.l2, start=alone)
    return Heads(chosen, final, start, float((alone.guesses(held.values) == held.labels).mean()))


def set_head(model: Model, linear: Linear) -> None:
    """Make a fit the model's head; the standardization of features goes into weights and biases."""
    head = model.head
    assert isinstance(head, nn.Linear)
    mean, deviation = (torch.from_numpy(x) for x in (linear.standardizer.mean, linear.standardizer.deviation))
    weights = linear.weights[:-1].cpu() / deviation[:, None]  # (D, K)
    with torch.no_grad():
        head.weight.copy_(weights.T)
        head.bias.copy_(linear.weights[-1].cpu() - mean @ weights)


def head_logits(model: Model, source: ImageSource, device: str, keep: Path | None = None) -> Features:
    """The model's logits of every image of a source."""
    return extract(model, source, what="logits", device=device, keep=keep, title="held-out images")
