"""Scores of a classifier as pure functions of arrays: confusion matrix, calibration, rates by class and intervals.

Shapes: n images, K classes, B bins, R rates.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from vitlab.data.rng import Floats, Ints
from vitlab.errors import UserError

Real = TypeVar("Real", np.float32, np.float64)

Z = 1.959963984540054  # the normal distribution's 97.5 % quantile: intervals hold 95 %
BINS = 15  # of confidence, for the calibration error
DRAWS = 2000  # resamples of the bootstrap of the calibration error
CELLS = 1000  # confidences are rounded to 1 / CELLS before they are resampled


@dataclass(frozen=True)
class Rate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Calibration:
    """How far confidence is from accuracy: `error` is the mean gap over bins, weighted by their images."""

    error: float
    count: Ints  # (B,) images by confidence; bin b holds (b / B, (b + 1) / B], the first one also 0
    confidence: Floats  # (B,) mean; nan where a bin is empty
    accuracy: Floats  # (B,) the same


def confusion(guesses: Ints, labels: Ints, classes: int) -> NDArray[np.int64]:
    """Count images by label (rows) and by prediction (columns), (K, K)."""
    pairs = np.bincount(np.asarray(labels) * classes + guesses, minlength=classes * classes)
    return pairs.reshape(classes, classes).astype(np.int64, copy=False)  # of many classes it is large


def top_hits(logits: NDArray[np.floating], labels: Ints, k: int) -> NDArray[np.bool_]:
    """Return whether each label is among the k highest logits (n, K), as (n,)."""
    k = min(k, logits.shape[1])
    first = np.argpartition(logits, -k, axis=1)[:, -k:]
    return (first == np.asarray(labels)[:, None]).any(1)


def softmax(logits: NDArray[Real]) -> NDArray[Real]:
    """Compute the probabilities of logits (n, K), in their precision."""
    odds = np.exp(logits - logits.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    return odds


# ---- calibration


def calibration(probabilities: NDArray[np.floating], labels: Ints, bins: int = BINS) -> Calibration:
    """Compute the expected calibration error of probabilities (n, K), binned by the highest of each image."""
    confidence, hits = confidences(probabilities, labels)
    place = bin_of(confidence, bins)
    count = np.bincount(place, minlength=bins)
    gap = np.bincount(place, hits - confidence, bins)
    with np.errstate(invalid="ignore"):
        mean, right = np.bincount(place, confidence, bins) / count, np.bincount(place, hits, bins) / count
    return Calibration(float(np.abs(gap).sum() / len(hits)), count.astype(np.int64), mean, right)


def confidences(probabilities: NDArray[np.floating], labels: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the probability of each image's prediction and whether it is correct, both (n,)."""
    check_images(len(probabilities))
    guesses = probabilities.argmax(1)
    return probabilities[np.arange(len(guesses)), guesses].astype(np.float64), guesses == labels


def bin_of(confidence: Floats, bins: int) -> Ints:
    return np.searchsorted(np.arange(1, bins) / bins, confidence, "left").astype(np.int64)


def calibration_interval(probabilities: NDArray[np.floating], labels: Ints, draws: int = DRAWS) -> tuple[float, float]:
    """Compute the 95 % bootstrap interval of the calibration error.

    Noise can only widen gaps: the error of few images is too large, and that of their resamples larger still. The
    percentiles are therefore reflected about the error itself ("basic" bootstrap) and cut off at 0.

    A resample is drawn as counts of cells: images of one bin whose gap between hit and confidence is the same to a
    thousandth. There are at most some 2,000 cells, so the cost hardly depends on the number of images.
    """
    confidence, hits = confidences(probabilities, labels)
    gap, place = hits - confidence, bin_of(confidence, BINS)
    keys = place * 4 * CELLS + np.round(gap * CELLS).astype(np.int64)
    cells, cell, size = np.unique(keys, return_inverse=True, return_counts=True)
    sums = np.zeros((len(size), BINS))  # what an image of a cell adds to the gap of its bin
    sums[np.arange(len(size)), (cells + 2 * CELLS) // (4 * CELLS)] = np.bincount(cell, gap) / size / len(hits)
    counts = np.random.default_rng(0).multinomial(len(hits), size / len(hits), draws)  # (draws, cells)
    low, high = np.quantile(np.abs(counts @ sums).sum(1), [0.025, 0.975]).tolist()
    error = float(np.abs(np.bincount(place, gap)).sum() / len(hits))
    return max(0.0, 2 * error - high), max(0.0, 2 * error - low)


# ---- intervals of proportions


def rate(hits: int, images: int) -> Rate:
    """Return hits / images with its 95 % Wilson interval; no images are a UserError."""
    check_images(images)
    return Rate(hits / images, *wilson(np.array([hits]), np.array([images]))[0].tolist())


def wilson(hits: Ints, images: Ints) -> Floats:
    """Compute the 95 % Wilson score intervals (R, 2) of the rates hits (R,) / images (R,); nan where images is 0.

    The interval holds every true rate p with |hits / n - p| <= Z sqrt(p (1 - p) / n); these are the roots of a
    quadratic equation in p. It has a width even where all or none of the images are hits.
    """
    n = np.where(images > 0, images, np.nan)
    share = hits / n
    center = (share + Z**2 / (2 * n)) / (1 + Z**2 / n)
    half = Z / (1 + Z**2 / n) * np.sqrt(share * (1 - share) / n + Z**2 / (4 * n**2))
    # rounding must not leave the rate itself outside
    return np.stack([np.minimum(center - half, share).clip(0), np.maximum(center + half, share).clip(None, 1)], 1)


def check_images(count: int) -> None:
    if count == 0:
        raise UserError("there are no images to compute a rate of")
