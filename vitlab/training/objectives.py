"""What a run minimizes and how it is measured.

An objective gives the mean loss per image of a batch. Each mean divides by a number that does not depend on chance, so
that the mean over equal micro-batches is exactly the mean over the batch. For the test set an objective gives sums,
which add up over batches and processes, and turns them into a report at the end.

Shapes: B batch, K classes.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.data.loader import Batch
from vitlab.data.rng import Floats, Ints
from vitlab.evaluation.accuracy import count_hits
from vitlab.evaluation.multi_label import STEPS, choose_thresholds, count_logits, mean_of_known, rounded_precisions
from vitlab.models.config import Size
from vitlab.training.parallel import Cluster

SIGMOID_BIAS = -10.0  # of a fresh head: with thousands of classes, almost every answer begins as "no"

ObjectiveName = Literal["softmax", "sigmoid", "masked"]
Forward = Callable[..., Tensor]  # a module as a loss calls it


class Objective(Protocol):
    def loss(self, module: Forward, batch: Batch, step: int) -> Tensor:
        """The mean loss of a micro-batch."""
        ...

    def sums(self, module: nn.Module, batch: Batch) -> Tensor:
        """Sums over a test batch, as one row of numbers."""
        ...

    def report(self, sums: list[float]) -> dict[str, float]:
        """Accuracy, loss and the like from the sums over the test set."""
        ...

    def score(self, report: dict[str, float]) -> float:
        """A number that is higher for the better of two reports."""
        ...


# ---- classification


def at_least_float32(logits: Tensor) -> Tensor:
    """Logits in which a loss is computed, whatever precision the model computes in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def softmax_loss(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of logits (B, K) against soft targets (B, K), times the weights of classes (K,): one class of K."""
    targets = targets if weights is None else targets * weights
    return -(targets * F.log_softmax(at_least_float32(logits), -1)).sum(-1).mean()


def sigmoid_loss(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Binary cross-entropy of logits (B, K) against targets (B, K), summed over classes: any number of classes.

    With weights of classes (K,), each image counts as much as its classes do.
    """
    logits = at_least_float32(logits)
    losses = F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").sum(-1)
    return (losses if weights is None else losses * (targets @ weights)).mean()


LOSSES = {"softmax": softmax_loss, "sigmoid": sigmoid_loss}


def start_sigmoid(head: nn.Linear | None, bias: float = SIGMOID_BIAS) -> None:
    """Initialize the bias of a head so that it begins by answering "no" to every class."""
    if head is not None:
        nn.init.constant_(head.bias, bias)


@dataclass(frozen=True)
class Classification:
    """Supervised training with one of the losses above."""

    loss_function: Callable[..., Tensor]
    weights: Tensor | None = None  # of the classes, (K,), while training

    def loss(self, module: Forward, batch: Batch, step: int) -> Tensor:
        return self.loss_function(module(batch.images), batch.targets, self.weights)

    def sums(self, module: nn.Module, batch: Batch) -> Tensor:
        logits = module(batch.images)
        targets = F.one_hot(batch.labels, logits.shape[-1]).float()
        loss = self.loss_function(logits, targets) * len(logits)
        return torch.cat([count_hits(logits, batch.labels).to(loss), loss[None]])

    def report(self, sums: list[float]) -> dict[str, float]:
        images, top1, top5, loss = sums
        return {"accuracy": top1 / images, "accuracy5": top5 / images, "loss": loss / images}

    def score(self, report: dict[str, float]) -> float:
        return report["accuracy"]


# ---- classification with any number of labels


def start_at_frequency(head: nn.Linear | None, images: Ints, total: int) -> None:
    """Initialize the bias of a head to the log-odds of each class: (images + 1) of (total + 2)."""
    if head is not None:
        odds = (images + 1) / (total - images + 1)
        head.bias.data.copy_(torch.from_numpy(np.log(odds)))


@dataclass(frozen=True)
class MultiLabel:
    """Training on a multi-label set, one yes or no for each class."""

    def loss(self, module: Forward, batch: Batch, step: int) -> Tensor:
        return sigmoid_loss(module(batch.images), batch.targets)

    def sums(self, module: nn.Module, batch: Batch) -> Tensor:
        logits = module(batch.images)
        loss = sigmoid_loss(logits, batch.labels) * len(logits)
        return torch.cat([loss.new_tensor([len(logits)]), loss[None], count_logits(logits, batch.labels).flatten()])

    def report(self, sums: list[float]) -> dict[str, float]:
        """`map` is the mean average precision of the classes, of logits rounded to an eighth."""
        precisions = rounded_precisions(self.counts(sums))
        return {"map": mean_of_known(precisions), "loss": sums[1] / sums[0]}

    def score(self, report: dict[str, float]) -> float:
        return report["map"]

    def thresholds(self, sums: list[float]) -> tuple[float, ...]:
        return choose_thresholds(self.counts(sums))

    def counts(self, sums: list[float]) -> Floats:
        return np.array(sums[2:]).reshape(2, -1, STEPS)


# ---- the test set, every image exactly once over all processes


@torch.no_grad()
def measure_sums(
    objective: Objective, module: nn.Module, batches: Iterable[Batch], spare: Batch, cluster: Cluster, passes: int
) -> list[float]:
    """The objective's sums over all batches of all processes, which may differ in size and number.

    A sharded model gathers its weights from all processes in every pass, so each process makes `passes` of them, the
    last ones on the `spare` batch, which does not count.
    """
    total: Tensor | None = None
    done = 0
    for batch in batches:
        sums = to_float64(objective.sums(module, batch))
        total, done = sums if total is None else total + sums, done + 1
    while done < passes or total is None:
        sums = to_float64(objective.sums(module, spare))
        total, done = torch.zeros_like(sums) if total is None else total, done + 1
    summed: list[float] = cluster.sum(total).tolist()
    return summed


def to_float64(sums: Tensor) -> Tensor:
    """Sums in which counts stay exact; MPS has no float64, so there they move to the CPU."""
    return (sums.cpu() if sums.device.type == "mps" else sums).double()


def blank_batch(size: Size, device: torch.device, classes: int = 0) -> Batch:
    """A batch of one black image; of a multi-label set of so many `classes`, where there are any."""
    index = torch.zeros(1, dtype=torch.long, device=device)
    labels = torch.zeros(1, classes, dtype=torch.bool, device=device) if classes else index
    return Batch(torch.zeros(1, 3, *size, device=device), labels, torch.zeros(1, 1, device=device), index)
