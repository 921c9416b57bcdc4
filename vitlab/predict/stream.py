"""Thousands of files through a model in bounded memory: decoded by workers, answered in batches, given out in order.

Shapes: b pictures in a batch, h and w the model's height and width, K classes.
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
from vitlab.data.workers import CHUNK, Broken, Chunk, Order, read_chunks
from vitlab.models.config import Preprocess, Size
from vitlab.predict.classifier import Classifier
from vitlab.predict.inputs import Inputs

AHEAD = 4  # chunks that each worker keeps ready
BATCH = {"cuda": 256, "mps": 64}  # on a CPU:
CPU_BATCH = 16


@dataclass(frozen=True)
class Prediction:
    """The likeliest classes of one picture, best first."""

    path: str
    classes: tuple[tuple[str, float], ...]  # name, probability


@dataclass(frozen=True)
class PredictionBatch:
    """What came of one batch, in the order of the inputs."""

    good: tuple[Prediction, ...]
    broken: tuple[Broken, ...]


@dataclass
class Framer(Dataset[Chunk]):
    """Runs in the workers: frames pictures for the model; broken ones stay black and are named."""

    inputs: Inputs
    size: Size
    preprocess: Preprocess

    def __getitems__(self, order: Order) -> Chunk:
        pixels = torch.zeros(len(order), 3, *self.size, dtype=torch.uint8)
        broken = []
        for place, (index, _) in enumerate(order):
            try:
                pixels[place] = eval_pixels(self.inputs.image(index), self.size, self.preprocess)
            except BrokenImage as bad:
                broken.append((index, bad.name, bad.why))
        return Chunk(pixels, torch.tensor([index for index, _ in order]), tuple(broken))


def predictions(
    classifier: Classifier, inputs: Inputs, part: range, *, top: int, batch: int | None = None, workers: int
) -> Iterator[PredictionBatch]:
    """The answers to the inputs of `part`, batch by batch."""
    device = classifier.device.type
    size = batch or BATCH.get(device, CPU_BATCH)
    starts = range(part.start, part.stop, size)
    parts = [range(start, min(start + size, part.stop)) for start in starts]
    piece = min(CHUNK, math.ceil(size / max(1, workers)))
    orders = ([(i, 0) for i in each[at : at + piece]] for each in parts for at in range(0, len(each), piece))
    framer = Framer(inputs, classifier.model.config.image_size, classifier.preprocess)
    chunks = read_chunks(framer, orders, workers, AHEAD, device == "cuda")
    for each in parts:
        taken = list(itertools.islice(chunks, math.ceil(len(each) / piece)))
        broken = tuple(bad for chunk in taken for bad in chunk.broken)
        pixels = torch.cat([chunk.pixels for chunk in taken])
        yield PredictionBatch(
            tuple(_best(classifier, inputs, each, pixels, {bad[0] for bad in broken}, top, size)), broken
        )


def _best(
    classifier: Classifier, inputs: Inputs, part: range, pixels: Tensor, broken: set[int], top: int, size: int
) -> Iterator[Prediction]:
    """The best classes of each whole picture; of equal ones the first."""
    if len(broken) == len(part):
        return
    if classifier.device.type == "cuda" and len(pixels) < size:
        # kernels for another batch size round otherwise, in bf16 visibly; no answer may hang on what else is asked
        pixels = torch.cat([pixels, pixels.new_zeros(size - len(pixels), *pixels.shape[1:])])
    value, label = classifier.probabilities(pixels)[: len(part)].sort(stable=True, dim=1, descending=True)
    for index, values, labels in zip(part, value[:, :top].tolist(), label[:, :top].tolist(), strict=True):
        if index not in broken:
            names = (classifier.labels[number] for number in labels)
            yield Prediction(inputs.name(index), tuple(zip(names, values, strict=True)))
