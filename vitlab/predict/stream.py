"""Predictions of thousands of images in bounded memory: decoded by workers, classified in batches, yielded in order.

Shapes: b images in a batch, h and w the model's height and width, K classes.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitlab.data.images import BrokenImage
from vitlab.data.transforms import eval_pixels
from vitlab.data.workers import CHUNK, BrokenEntry, Chunk, Samples, read_chunks
from vitlab.models.config import Preprocess, Size
from vitlab.predict.classifier import Classifier, Prediction
from vitlab.predict.inputs import Inputs

PREFETCH = 4  # chunks that each worker keeps ready
BATCH = {"cuda": 256, "mps": 64}
CPU_BATCH = 16


@dataclass(frozen=True)
class PredictionBatch:
    """The predictions of one batch, in the order of the inputs, and the files that could not be read."""

    good: tuple[Prediction, ...]
    broken: tuple[BrokenEntry, ...]


@dataclass
class ImageReader(Dataset[Chunk]):
    """Runs in the workers: images as pixels for the model; broken ones stay black and are listed."""

    inputs: Inputs
    size: Size
    preprocess: Preprocess

    def __getitems__(self, order: Samples) -> Chunk:
        pixels = torch.zeros(len(order), 3, *self.size, dtype=torch.uint8)
        broken = []
        for row, (index, _) in enumerate(order):
            try:
                pixels[row] = eval_pixels(self.inputs.image(index), self.size, self.preprocess)
            except BrokenImage as bad:
                broken.append((index, bad.name, bad.why))
        return Chunk(pixels, torch.tensor([index for index, _ in order]), tuple(broken))


def predict_stream(
    classifier: Classifier, inputs: Inputs, indices: range, *, top: int, batch: int | None = None, workers: int
) -> Iterator[PredictionBatch]:
    """Yield the predictions of the inputs at `indices`, batch by batch."""
    device = classifier.device.type
    size = batch or BATCH.get(device, CPU_BATCH)
    batches = [range(start, min(start + size, indices.stop)) for start in range(indices.start, indices.stop, size)]
    step = min(CHUNK, math.ceil(size / max(1, workers)))
    orders = ([(i, 0) for i in each[at : at + step]] for each in batches for at in range(0, len(each), step))
    reader = ImageReader(inputs, classifier.model.config.image_size, classifier.preprocess)
    chunks = read_chunks(reader, orders, workers, PREFETCH, device == "cuda")
    for each in batches:
        parts = list(itertools.islice(chunks, math.ceil(len(each) / step)))
        broken = tuple(bad for part in parts for bad in part.broken)
        unread = {index for index, _, _ in broken}
        rows = [row for row, index in enumerate(each) if index not in unread]
        good: list[Prediction] = []
        if rows:
            probabilities = predict_batch(classifier, torch.cat([part.pixels for part in parts]), size)
            good = classifier.best(probabilities[rows], top, [inputs.name(each[row]) for row in rows])
        yield PredictionBatch(tuple(good), broken)


def predict_batch(classifier: Classifier, pixels: Tensor, size: int) -> Tensor:
    """Probabilities (b, K) of bytes (b, 3, h, w); on a GPU always computed in batches of `size`.

    Kernels for another batch size round differently, in bf16 visibly; a prediction must not depend on its neighbors.
    """
    count = len(pixels)
    if classifier.device.type == "cuda" and count < size:
        pixels = torch.cat([pixels, pixels.new_zeros(size - count, *pixels.shape[1:])])
    return classifier.probabilities(pixels)[:count]
