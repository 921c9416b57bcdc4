"""Predictions of thousands of images in bounded memory: decoded by workers, classified in batches, yielded in order.

Shapes: b images in a batch, h and w the model's height and width, K classes.
"""

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from vitlab.data.workers import AHEAD, BrokenEntry, EvalReader, Images, chunk_size, read_batches
from vitlab.inference.payback import Payback
from vitlab.prediction.classifier import Classifier, Prediction, Scores

BATCH = {"cuda": 256, "mps": 64}
CPU_BATCH = 16


class NamedImages(Images, Protocol):
    """Images by index, each with the name that its prediction has."""

    def name(self, index: int) -> str: ...


@dataclass(frozen=True)
class PredictionBatch:
    """The predictions of one batch, in the order of the inputs, and the files that could not be read."""

    good: tuple[Prediction, ...]
    broken: tuple[BrokenEntry, ...]


def predict_stream(
    classifier: Classifier,
    inputs: NamedImages,
    indices: range,
    *,
    top: int | None,
    batch: int | None = None,
    workers: int,
) -> Iterator[PredictionBatch]:
    """Yield the predictions of the inputs at `indices`, batch by batch."""
    size = batch or BATCH.get(classifier.device.type, CPU_BATCH)
    samples = ([(i, 0) for i in indices[start : start + size]] for start in range(0, len(indices), size))
    reader = EvalReader(inputs, classifier.model.config.image_size, classifier.preprocess)
    payback = Payback(classifier.engine, size, len(indices))
    with closing(classifier.engine):
        for chunk in read_batches(reader, samples, chunk_size(size, workers), workers, AHEAD, classifier.device):
            unread = {index for index, _, _ in chunk.broken}
            order = chunk.index.tolist()
            rows = [row for row, index in enumerate(order) if index not in unread]
            good: list[Prediction] = []
            if rows:
                began = time.monotonic()
                scores = predict_batch(classifier, chunk.pixels, size)
                payback.count(len(chunk.pixels), time.monotonic() - began)
                good = classifier.best(scores[rows], top, [inputs.name(order[row]) for row in rows])
            yield PredictionBatch(tuple(good), chunk.broken)


def predict_batch(classifier: Classifier, pixels: Tensor, size: int) -> Scores:
    """Scores of bytes (b, 3, h, w); on a GPU always computed in batches of `size`.

    Kernels for another batch size round differently, in bf16 visibly; a prediction must not depend on its neighbors.
    """
    count = len(pixels)
    if classifier.device.type == "cuda" and count < size:
        pixels = torch.cat([pixels, pixels.new_zeros(size - count, *pixels.shape[1:])])
    return classifier.scores(pixels)[:count]
