"""The numbers that a verdict is made of, and what they show beyond chance.

A pattern counts as one only if chance alone would hardly show it. The largest of many classes or pairs stands out by
chance as well, so its probability is multiplied by their number (Bonferroni).

Shapes: K classes, T evaluations during training.
"""

from dataclasses import dataclass
from math import ceil, log
from typing import Literal

import numpy as np

from vitlab.data.rng import Floats, Ints
from vitlab.evaluation.scores import Rate, Z, rate
from vitlab.report.chance import as_few, at_least, falls

RARE = 0.05  # the probability below which something is not taken for chance
LEAST = 4  # evaluations in which a trend can be seen at all
MOST = 12  # evaluations that are enough for it
CHANGE = 0.02  # relative change of the validation loss that matters
CLOSE = 0.75  # of the validation loss, from which on a training loss is close to it
PRECISE = 0.05  # half of the interval's width that is precise enough

Stage = Literal["head", "pending", "dropped", "trained"]
Trend = Literal["better", "worse", "flat", "unknown"]


@dataclass(frozen=True)
class Curve:
    """The validation images during training."""

    steps: int  # planned
    done: int  # taken
    patience: int | None
    evaluated: Ints  # (T,) steps
    score: Floats  # (T,) accuracy or mAP
    loss: Floats | None = None  # (T,)
    metric: str = "accuracy"

    @property
    def is_stale(self) -> bool:
        """Whether training ended since the score had not improved any more."""
        if self.patience is None or self.done == self.steps or not len(self.score):
            return False
        return len(self.score) - 1 - int(np.argmax(self.score)) >= self.patience

    @property
    def is_cut(self) -> bool:
        """Whether training ended since its time was up."""
        return self.done < self.steps and not self.is_stale

    @property
    def half(self) -> int:
        """The evaluation from which on a trend is looked for."""
        return max(0, len(self.score) - max(LEAST, ceil(len(self.score) / 2)))

    @property
    def trend(self) -> Trend:
        """What validation did towards the end."""
        if len(self.score) < LEAST:
            return "unknown"
        values = 1 - self.score if self.loss is None else self.loss
        values = values[np.unique(np.linspace(self.half, len(values) - 1, MOST).round().astype(int))]
        if abs(values[-1] - values[0]) < CHANGE * values[0]:
            return "flat"
        return "better" if falls(values) < RARE else "worse" if falls(-values) < RARE else "flat"


@dataclass(frozen=True)
class Pair:
    """The images of a class that were taken for another one."""

    truth: int
    guess: int
    count: int
    is_pattern: bool  # more than mistakes that go everywhere alike would give


@dataclass(frozen=True)
class Facts:
    """What is known about a model and the images it was tested on."""

    split: str  # of the images: test or validation
    names: tuple[str, ...]  # (K,)
    right: int  # images without a mistake
    total: int
    found: Ints  # (K,) images of a class that are found
    images: Ints  # (K,) and all of them
    matrix: Ints | None = None  # (K, K), rows: truth; None where an image has several classes
    stage: Stage = "trained"
    curve: Curve | None = None
    train_loss: float | None = None  # softmax loss in the last pass over the training images
    train_images: Ints | None = None  # (K,)
    validation: tuple[int, int] | None = None  # images that were right, and all of them
    refused: tuple[int, float] | None = None  # images, and the share that was promised at most
    refused_before: tuple[int, int] = (0, 0)  # of the images that set the limit for it, those beyond it, and all
    unsure: tuple[int, int, float] | None = None  # right ones of the least confident images, all of these, confidence
    doubtful: int = 0  # labels that are worth a look
    scratch: bool = False  # whether training started from random weights

    @property
    def accuracy(self) -> Rate:
        return rate(self.right, self.total)

    @property
    def mistakes(self) -> int:
        return self.total - self.right

    @property
    def error(self) -> float:
        return self.mistakes / self.total

    @property
    def wanted(self) -> int:
        """Images for a precise accuracy, to two digits or so; `total` where it is precise."""
        low, high = self.accuracy.low, self.accuracy.high
        if (high - low) / 2 <= PRECISE:
            return self.total
        middle = (low + high) / 2  # not the accuracy: 100 % has no spread
        return max(self.total, 10 * ceil(Z**2 * middle * (1 - middle) / PRECISE**2 / 10))

    @property
    def largest(self) -> int:
        """The class with the most images."""
        return int(self.images.argmax())

    @property
    def is_useless(self) -> bool:
        """Whether it cannot be shown to be better than the most frequent class."""
        share = float(self.images[self.largest]) / self.total
        return self.matrix is not None and share < 1 and at_least(self.right, self.total, share) >= RARE

    @property
    def is_unfinished(self) -> bool:
        """Whether training ended before validation stopped to get better."""
        curve = self.curve
        if self.stage != "trained" or curve is None or not self.mistakes:
            return False
        return curve.is_cut or (not curve.is_stale and (curve.trend == "better" or self.is_underfit))

    @property
    def is_underfit(self) -> bool:
        """Whether the training images are hardly easier for it than others: then its learning rate ended learning."""
        if self.curve is None or self.curve.loss is None or not len(self.curve.loss) or self.train_loss is None:
            return False
        return self.train_loss / log(2) > self.error and self.train_loss > CLOSE * self.curve.loss[-1]

    @property
    def train_error(self) -> float | None:
        """The share of training images that is wrong at most.

        A wrong answer gives the truth a probability of at most 1/2, so it adds at least log 2 to the softmax loss.
        """
        return None if self.train_loss is None else self.train_loss / log(2)

    @property
    def is_by_heart(self) -> bool:
        """Whether more of these images are wrong than of the training images, beyond chance."""
        if self.stage != "trained" or self.train_error is None:
            return False
        return at_least(self.mistakes, self.total, self.train_error) < RARE

    @property
    def pair(self) -> Pair | None:
        """The most frequent mistake; of equals the one in the smallest class."""
        if self.matrix is None or not self.mistakes:
            return None
        wrong, k = self.matrix - np.diag(np.diagonal(self.matrix)), len(self.names)
        places: list[list[int]] = np.argwhere(wrong == wrong.max()).tolist()
        i, j = min(places, key=lambda place: int(self.images[place[0]]))
        chance = at_least(int(wrong[i, j]), int(self.images[i]), self.error / (k - 1))
        return Pair(i, j, int(wrong[i, j]), chance * k * (k - 1) < RARE)

    @property
    def weakest(self) -> int | None:
        """The class that is found more rarely than the others, beyond chance."""
        hits, images = int(self.found.sum()), int(self.images.sum())
        chances = [
            (as_few(int(f), int(n), hits - int(f), images - int(n)), k)
            for k, (f, n) in enumerate(zip(self.found, self.images, strict=True))
            if 0 < n < images
        ]
        chance, k = min(chances, default=(1.0, -1))
        return k if chances and chance * len(chances) < RARE else None

    def share_of_others(self, k: int) -> float:
        """The share of the other classes' images that is found."""
        return float((self.found.sum() - self.found[k]) / (self.images.sum() - self.images[k]))

    @property
    def is_shifted(self) -> bool:
        """Whether the test images are harder than the validation images, beyond chance.

        The validation images chose among the model's states, and the best of many is too good by chance as well.
        """
        if self.split != "test" or self.validation is None:
            return False
        states = 1 if self.curve is None else max(1, len(self.curve.score))
        return as_few(self.right, self.total, *self.validation_counts) * states < RARE

    @property
    def validation_counts(self) -> tuple[int, int]:
        return self.validation or (0, 0)

    @property
    def refuses_too_many(self) -> bool:
        """Whether images of known classes are refused more often than promised, beyond chance.

        The limit is an order statistic of held-out images. If these are like the others, the number of images beyond
        it has the distribution of Fisher's exact test.
        """
        if self.refused is None or self.refused[0] <= self.refused[1] * self.total:
            return False
        return as_few(*self.refused_before, self.refused[0], self.total) < RARE

    @property
    def knows_doubt(self) -> bool:
        """Whether the least confident answers are wrong more often than the others, beyond chance."""
        if self.unsure is None:
            return False
        right, images, _ = self.unsure
        return as_few(right, images, self.right - right, self.total - images) < RARE
