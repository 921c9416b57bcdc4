"""k nearest neighbors: each of the k training images most similar to a test image votes for its class.

Similarity is the cosine s of two features; a vote weighs exp(s / T), so a small temperature T favors the nearest.
Nothing is trained, so the accuracy measures the features alone.

Memory: beside the features, a block of b training images against a chunk of c test images takes b D + c D + b c
numbers of 4 bytes, and the best so far 20 m k bytes: 0.2 GB for ImageNet's D = 768, m = 50,000, k = 20.

Shapes: n training images, m test images, D width of the features, K classes, k neighbors.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.errors import UserError
from vitlab.evaluation.extract import Device, Features
from vitlab.evaluation.piece_cache import Values
from vitlab.terminal import progress

NEIGHBORS = (10, 20)
TEMPERATURE = 0.07
BLOCK, CHUNK = 16384, 1024  # training and test images that are compared at a time


@dataclass(frozen=True)
class Neighbors:
    """The hits of a vote of k neighbors on the test images."""

    k: int
    hits: int
    images: int

    @property
    def accuracy(self) -> float:
        return self.hits / self.images


def knn(
    train: Features,
    test: Features,
    *,
    k: Sequence[int] = NEIGHBORS,
    temperature: float = TEMPERATURE,
    device: Device = "cpu",
) -> Iterator[Neighbors]:
    """Yield the result for each k, in this order, with a progress bar."""
    check_neighbors(k, temperature, len(train.labels))
    cosines, index = nearest(train.values, test.values, max(k), device=device)
    labels, truth = torch.from_numpy(train.labels)[index], torch.from_numpy(test.labels)  # (m, k) and (m,)
    for number in k:
        chunks = zip(cosines[:, :number].split(CHUNK), labels[:, :number].split(CHUNK), strict=True)
        winners = torch.cat([vote(near, voters, temperature) for near, voters in chunks])
        yield Neighbors(number, int((winners == truth).sum()), len(labels))


def check_neighbors(k: Sequence[int], temperature: float, images: int) -> None:
    if not 0 < temperature < math.inf:
        raise UserError(f"the temperature must be positive, not {temperature:g}")
    for number in k:
        if not 1 <= number <= images:
            raise UserError(f"k must be at least 1 and at most the {images} training images there are, not {number}")


def nearest(
    train: Values, test: Values, k: int, *, device: Device = "cpu", block: int = BLOCK, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Find the k training images most similar to each test image: cosines and indices, (m, k), highest first."""
    cosines = torch.full((len(test), k), -torch.inf)
    index = torch.zeros(len(test), k, dtype=torch.long)
    with progress("neighbors", len(train)) as advance:
        for first in range(0, len(train), block):
            rows = normalize(train[first : first + block], device)
            for start in range(0, len(test), chunk):
                at = slice(start, start + chunk)
                near = (normalize(test[at], device) @ rows.T).topk(min(k, len(rows)), 1)
                both = torch.cat([cosines[at], near.values.cpu()], 1)
                best = both.topk(k, 1)
                cosines[at] = best.values
                index[at] = torch.cat([index[at], near.indices.cpu() + first], 1).gather(1, best.indices)
            advance(len(rows))
    return cosines, index


def normalize(features: Values, device: Device) -> Tensor:
    return F.normalize(torch.from_numpy(features).to(device), dim=1)


def vote(cosines: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the class with the most weight among the neighbors, (m,), of cosines and labels (m, k)."""
    weight = ((cosines - cosines[:, :1]) / temperature).double().exp()  # relative to the nearest, so none overflows
    total = torch.zeros(len(labels), int(labels.max()) + 1, dtype=torch.float64)
    return total.scatter_add_(1, labels, weight).argmax(1)
