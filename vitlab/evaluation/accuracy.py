"""Top-1 and top-5 accuracy, counted over every image exactly once.

Counts add up, over batches and over processes; rates are taken at the end.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor


class Labelled(Protocol):
    """A batch: images (B, 3, height, width) and labels (B,)."""

    @property
    def images(self) -> Tensor: ...

    @property
    def labels(self) -> Tensor: ...


@dataclass(frozen=True)
class Counts:
    """How many images were seen, and how many had their label first or among the first five."""

    images: int = 0
    top1: int = 0
    top5: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(self.images + other.images, self.top1 + other.top1, self.top5 + other.top5)

    @property
    def accuracy(self) -> float:
        return self.top1 / self.images if self.images else 0.0

    @property
    def accuracy5(self) -> float:
        return self.top5 / self.images if self.images else 0.0


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """[images, top-1 hits, top-5 hits] of a batch, as a tensor on its device; fewer than five classes all count."""
    first = logits.topk(min(5, logits.shape[-1]), -1).indices == labels[:, None]
    return torch.stack([first.new_tensor(len(labels), dtype=torch.long), first[:, 0].sum(), first.sum()])


@torch.no_grad()
def count(predict: Callable[[Tensor], Tensor], batches: Iterable[Labelled]) -> Counts:
    """The counts of a model, or of any function from images to logits, over batches."""
    total: Tensor | None = None
    for batch in batches:
        found = hits(predict(batch.images), batch.labels)
        total = found if total is None else total + found  # stays on the device: nothing waits for it
    return Counts() if total is None else Counts(*(int(n) for n in total.tolist()))
