"""Scores of a classifier as pure functions of arrays: confusion, calibration, rates by class, and their intervals.

Shapes: n images, K classes, B bins, R rates.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitlab.data.rng import Floats, Ints
from vitlab.errors import UserError

DRAWS = 2000  # resamples of a bootstrap
LEVEL = 0.95
CELLS = 1000  # steps of confidence that the bootstrap of the calibration error tells apart
BLOCK = 4_000_000  # counts drawn at a time: 32 MB


@dataclass(frozen=True)
class Calibration:
    """How far confidence is from accuracy: `error` is the mean gap over bins, weighted by their images."""

    error: float
    count: Ints  # (B,) images by confidence; bin b holds (b / B, (b + 1) / B], the first one also 0
    confidence: Floats  # (B,) mean; nan where a bin is empty
    accuracy: Floats  # (B,) the same


@dataclass(frozen=True)
class ClassRow:
    """A class: how many images it has, how many of them were found; a rate of nothing is None."""

    name: str
    images: int
    correct: int
    precision: float | None  # share of the guesses of this class that are right
    recall: float | None  # share of its images that are found


def confusion(guesses: Ints, labels: Ints, classes: int) -> NDArray[np.int64]:
    """(K, K) images by class (rows) and by guess (columns)."""
    pairs = np.bincount(np.asarray(labels) * classes + guesses, minlength=classes * classes)
    return pairs.reshape(classes, classes).astype(np.int64)


def per_class(matrix: NDArray[np.int64], names: Sequence[str]) -> list[ClassRow]:
    """A row for every class, in their order."""
    images, guessed, right = matrix.sum(1).tolist(), matrix.sum(0).tolist(), np.diagonal(matrix).tolist()
    return [
        ClassRow(name, n, hits, hits / all_ if all_ else None, hits / n if n else None)
        for name, n, all_, hits in zip(names, images, guessed, right, strict=True)
    ]


def top_hits(logits: NDArray[np.floating], labels: Ints, k: int) -> NDArray[np.bool_]:
    """(n,) whether the label is among the k highest logits (n, K)."""
    if k >= logits.shape[1]:
        return np.ones(len(labels), bool)
    first = np.argpartition(logits, -k, axis=1)[:, -k:]
    return (first == np.asarray(labels)[:, None]).any(1)


# ---- calibration


def calibration(probabilities: NDArray[np.floating], labels: Ints, bins: int = 15) -> Calibration:
    """The expected calibration error of probabilities (n, K): images go into bins by the confidence of their guess."""
    confidence, hits = confidences(probabilities, labels)
    place = bin_of(confidence, bins)
    count = np.bincount(place, minlength=bins)
    gap = np.bincount(place, hits - confidence, bins)
    with np.errstate(invalid="ignore"):
        mean, right = np.bincount(place, confidence, bins) / count, np.bincount(place, hits, bins) / count
    return Calibration(float(np.abs(gap).sum() / len(hits)), count.astype(np.int64), mean, right)


def confidences(probabilities: NDArray[np.floating], labels: Ints) -> tuple[Floats, NDArray[np.bool_]]:
    """(n,) the probability of each guess, and whether it is right."""
    if len(probabilities) == 0:
        raise UserError("there are no images to take a rate of")
    guesses = probabilities.argmax(1)
    return probabilities[np.arange(len(guesses)), guesses].astype(np.float64), guesses == labels


def bin_of(confidence: Floats, bins: int) -> Ints:
    return np.searchsorted(np.arange(1, bins) / bins, confidence, "left").astype(np.int64)


def calibration_interval(
    probabilities: NDArray[np.floating],
    labels: Ints,
    bins: int = 15,
    *,
    draws: int = DRAWS,
    seed: int = 0,
    level: float = LEVEL,
) -> tuple[float, float]:
    """Bootstrap interval of the calibration error.

    Noise can only open gaps: the error of few images is too large, that of their resamples larger still. So what
    resampling adds is taken off: the percentiles are mirrored at the error itself, and stop at 0.

    A resample is drawn as counts of cells, images of one bin whose gap between hit and confidence is the same to a
    thousandth. So it costs the same whatever the number of images.
    """
    confidence, hits = confidences(probabilities, labels)
    gap, place = hits - confidence, bin_of(confidence, bins)
    _, cell = np.unique(place * 4 * CELLS + np.round(gap * CELLS).astype(np.int64), return_inverse=True)
    size = np.bincount(cell)
    mean = np.bincount(cell, gap) / size
    bin_of_cell = np.zeros(len(size), np.int64)
    bin_of_cell[cell] = place
    sums = np.zeros((len(size), bins))  # what an image of a cell adds to the gap of its bin
    sums[np.arange(len(size)), bin_of_cell] = mean / len(hits)
    rng, found = np.random.default_rng(seed), []
    for many in parts(draws, len(size)):
        counts = rng.multinomial(len(hits), size / len(hits), many)  # (draws, cells)
        found.append(np.abs(counts @ sums).sum(1))
    low, high = percentiles(np.concatenate(found)[:, None], level)[0].tolist()
    error = float(np.abs(np.bincount(place, gap)).sum() / len(hits))
    return max(0.0, 2 * error - high), max(0.0, 2 * error - low)


# ---- intervals


def interval(
    hits: NDArray[np.bool_], *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL
) -> tuple[float, float]:
    """Percentile bootstrap of the mean of hits (n,)."""
    if len(hits) == 0:
        raise UserError("there are no images to take a rate of")
    low, high = intervals(np.array([np.sum(hits)]), np.array([len(hits)]), draws=draws, seed=seed, level=level)[0]
    return float(low), float(high)


def intervals(hits: Ints, images: Ints, *, draws: int = DRAWS, seed: int = 0, level: float = LEVEL) -> Floats:
    """(R, 2) the same of many rates at once, hits (R,) of images (R,); nan for a rate of nothing.

    Drawing n images with replacement and counting the hits is one draw from a binomial distribution.
    """
    rng = np.random.default_rng(seed)
    share = hits / np.maximum(images, 1)
    bounds = np.full((len(hits), 2), np.nan)
    for rates in np.array_split(np.arange(len(hits)), max(1, -(-len(hits) * draws // BLOCK))):
        counts = rng.binomial(images[rates], share[rates], (draws, len(rates)))
        bounds[rates] = percentiles(counts / np.maximum(images[rates], 1), level)
    bounds[images == 0] = np.nan
    return bounds


def percentiles(drawn: Floats, level: float) -> Floats:
    """(R, 2) the middle `level` of draws (draws, R)."""
    tail = (1 - level) / 2
    return np.quantile(drawn, [tail, 1 - tail], axis=0).T


def parts(draws: int, cells: int) -> list[int]:
    """Draws in blocks that fit in little memory."""
    each = max(1, BLOCK // cells)
    return [min(each, draws - start) for start in range(0, draws, each)]
