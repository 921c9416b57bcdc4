"""Scores of multi-label models as pure functions: average precision, F1, and the thresholds that decide.

Sums over a large test set hold counts of logits rounded to an eighth, which add up over batches and processes; the
average precision of these is that of the rounded logits. Where all logits are at hand, it is exact.

Shapes: n images, B of a batch, K classes, S steps of rounded logits.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.rng import Floats

PER_LOGIT, MOST = 8, 16  # steps to a unit of a logit; logits beyond are counted as the outermost
STEPS = 2 * PER_LOGIT * MOST + 1
EVEN = 0.5  # the threshold of a class that nothing is known about

Bools = NDArray[np.bool_]


# ---- from counts of rounded logits


def count_logits(logits: Tensor, truth: Tensor) -> Tensor:
    """Images with and without each class by rounded logit, (2, K, S), of logits (B, K) and truth (B, K)."""
    classes = logits.shape[1]
    step = (logits.float() * PER_LOGIT).round().clamp(-PER_LOGIT * MOST, PER_LOGIT * MOST).long() + PER_LOGIT * MOST
    place = step + torch.arange(classes, device=logits.device) * STEPS
    counts = [torch.bincount(place[chosen], minlength=classes * STEPS) for chosen in (truth, ~truth)]
    return torch.stack(counts).view(2, classes, STEPS)


def hits_above(counts: Floats) -> tuple[Floats, Floats]:
    """For each step as a threshold the images at or above it, with and without the class, both (K, S)."""
    positives, negatives = np.flip(np.cumsum(np.flip(counts, 2), 2), 2)
    return positives, negatives


def rounded_precisions(counts: Floats) -> Floats:
    """The average precision of each class, (K,), of counts (2, K, S); nan for a class without images."""
    hits, others = hits_above(counts)
    with np.errstate(invalid="ignore"):
        precision = np.nan_to_num(hits / (hits + others))
        share: Floats = (precision * counts[0]).sum(1) / counts[0].sum(1)
    return share


def choose_thresholds(counts: Floats) -> tuple[float, ...]:
    """The probability of each class at which F1 is highest, (K,), of counts (2, K, S); of equals the middle one."""
    hits, others = hits_above(counts)
    images = counts[0].sum(1, keepdims=True)
    f1 = 2 * hits / np.maximum(1, hits + others + images)
    chosen = []
    for row, known in zip(f1, images[:, 0] > 0, strict=True):
        best = np.flatnonzero(row == row.max())
        logit = (int(best[len(best) // 2]) - PER_LOGIT * MOST - 0.5) / PER_LOGIT  # between two steps
        chosen.append(float(1 / (1 + np.exp(-logit))) if known else EVEN)
    return tuple(chosen)


# ---- from all logits


def average_precision(scores: NDArray[np.floating], truth: Bools) -> float:
    """The mean precision over the images (n,) of a class, each at its own score; nan where there are none."""
    order = np.argsort(-scores, kind="stable")
    last = np.append(np.diff(scores[order]) != 0, True)  # of images with equal scores all count
    hits, seen = np.cumsum(truth[order])[last], np.flatnonzero(last) + 1
    if not truth.any():
        return float("nan")
    return float((hits / seen * np.diff(hits, prepend=0)).sum() / truth.sum())


def average_precisions(scores: NDArray[np.floating], truth: Bools) -> Floats:
    """The average precision of each class, (K,), of scores (n, K) and truth (n, K)."""
    return np.array([average_precision(scores[:, k], truth[:, k]) for k in range(truth.shape[1])])


def f1(hits: NDArray[np.int64], guessed: NDArray[np.int64], images: NDArray[np.int64]) -> Floats:
    """2 · hits / (guessed + images), of counts of any shape; nan where nothing is there and nothing was guessed."""
    total = guessed + images
    return np.where(total > 0, 2 * hits / np.maximum(1, total), np.nan)


def mean_of_known(values: Floats) -> float:
    """The mean over classes that have images; 0 where none has."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0
