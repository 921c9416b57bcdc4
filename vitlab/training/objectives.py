"""What a run minimizes and how it is measured.

A goal gives the mean loss per image of a batch. Each mean divides by a number that does not depend on chance, so
that the mean of equal micro-batches is exactly the mean of the whole batch. For the test set a goal gives sums,
which add up over batches and processes, and reads rates off them at the end.

Shapes: B batch, K classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.data.loader import Batch
from vitlab.evaluation.accuracy import hits

SIGMOID_BIAS = -10.0  # of a fresh head: with thousands of classes, almost every answer begins as "no"

ObjectiveName = Literal["softmax", "sigmoid", "masked"]


class Objective(Protocol):
    def loss(self, module: nn.Module, batch: Batch, step: int) -> Tensor:
        """The mean loss of a micro-batch."""
        ...

    def measure(self, module: nn.Module, batch: Batch) -> Tensor:
        """Sums over a test batch, as one row of numbers."""
        ...

    def report(self, sums: list[float]) -> dict[str, float]:
        """Rates from the sums over the test set."""
        ...

    def score(self, report: dict[str, float]) -> float:
        """Of two reports, the better one has the higher score."""
        ...


def precise(logits: Tensor) -> Tensor:
    """Losses are float32 at least, whatever the model computes in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def softmax_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy against soft targets, (B, K): one of K."""
    return -(targets * F.log_softmax(precise(logits), -1)).sum(-1).mean()


def sigmoid_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of K yes-or-no questions, summed over classes: any number of K."""
    logits = precise(logits)
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").sum(-1).mean()


@dataclass(frozen=True)
class Classify:
    """Supervised: softmax or sigmoid."""

    loss_of: Callable[[Tensor, Tensor], Tensor]

    def loss(self, module: nn.Module, batch: Batch, step: int) -> Tensor:
        return self.loss_of(module(batch.images), batch.targets)

    def measure(self, module: nn.Module, batch: Batch) -> Tensor:
        logits = module(batch.images)
        targets = F.one_hot(batch.labels, logits.shape[-1]).float()
        loss = self.loss_of(logits, targets) * len(logits)
        return torch.cat([hits(logits, batch.labels).to(loss), loss[None]])

    def report(self, sums: list[float]) -> dict[str, float]:
        images, top1, top5, loss = sums
        return {"accuracy": top1 / images, "accuracy5": top5 / images, "loss": loss / images}

    def score(self, report: dict[str, float]) -> float:
        return report["accuracy"]


def start_sigmoid(head: nn.Linear | None) -> None:
    """A head that begins by saying no to every class."""
    if head is not None:
        nn.init.constant_(head.bias, SIGMOID_BIAS)
