"""A logistic head on frozen features whose penalty is chosen by cross-validation.

The images of each class are dealt out to the folds in turn, in the order of hashes, the same every time. Every image
gets logits from a fit that has not seen it, at every penalty. The penalty with the most hits is chosen, of equals the
strongest; accuracy rather than log loss, since a strong penalty makes a good but timid head, whose confidence a
temperature corrects. The logits of the chosen penalty serve wherever predictions of unseen images are needed.

Shapes: n images, D width of the features, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitlab.data.balance import class_weights
from vitlab.data.rng import HOLDOUT, Floats, Ints, keys
from vitlab.evaluation.extract import Device, Features
from vitlab.evaluation.piece_cache import Values
from vitlab.evaluation.probe import Linear, Trial, logistic
from vitlab.terminal import progress

FOLDS = 5
PENALTIES = (1.0, 0.3, 0.1, 0.03, 0.01, 1e-3, 1e-4, 1e-5)
TOLERANCE = 1e-4  # of fits that only choose: ten times the steps change no choice


@dataclass(frozen=True)
class CrossValidation:
    """The penalties with their hits, the best of them, and its logits of every image by a fit without it."""

    tried: tuple[Trial, ...]
    l2: float
    logits: Values  # (n, K)

    @property
    def accuracy(self) -> float:
        best = next(trial for trial in self.tried if trial.l2 == self.l2)
        return best.hits / best.images

    def macro_f1(self, labels: Ints) -> float:
        """The mean over the classes of F1, 2 TP / (2 TP + FP + FN), which counts rare classes like all others."""
        guesses, classes = self.logits.argmax(1), self.logits.shape[1]
        hits = np.bincount(labels[guesses == labels], minlength=classes)
        images, guessed = (np.bincount(x, minlength=classes) for x in (labels, guesses))
        return float((2 * hits / np.maximum(1, images + guessed))[images > 0].mean())


def deal_folds(labels: Ints, folds: int = FOLDS) -> Ints:
    """The fold of each image, (n,), spread evenly over every class and over all images; the same every time."""
    order = np.lexsort((keys(0, HOLDOUT, np.arange(len(labels))), labels))
    found = np.empty(len(labels), np.int64)
    found[order] = np.arange(len(labels)) % folds
    return found


def cross_validate(
    train: Features,
    classes: int,
    penalties: Sequence[float] = PENALTIES,
    *,
    balanced: bool = False,
    device: Device = "cpu",
) -> CrossValidation:
    """Choose a penalty for the head of `classes` classes; a progress bar shows the fits.

    With `balanced`, every class has the same weight in the fits, however many images it has.
    """
    order = sorted(set(penalties), reverse=True)
    hits, steady = np.zeros(len(order), np.int64), np.ones(len(order), bool)
    fold, fits = deal_folds(train.labels), dict[int, list[Linear]]()
    with progress("head", FOLDS * len(order)) as advance:
        for held in range(FOLDS):
            aside = fold == held
            if not aside.any() or aside.all():
                continue
            x, y, fits[held] = train.values[~aside], train.labels[~aside], []
            weights = row_weights(y, classes) if balanced else None
            fitted: Linear | None = None
            for row, l2 in enumerate(order):  # the strongest converges soonest; each starts from the one before
                fitted = logistic(x, y, classes, l2, weights=weights, start=fitted, device=device, tolerance=TOLERANCE)
                fits[held].append(fitted)
                steady[row] &= fitted.slope <= TOLERANCE
                hits[row] += (fitted.guesses(train.values[aside]) == train.labels[aside]).sum()
                advance(1)
    best = int(hits.argmax())  # of equals the first: the strongest
    logits = np.zeros((len(fold), classes), np.float32)
    for held, fitted_to in fits.items():
        logits[fold == held] = fitted_to[best].scores(train.values[fold == held]).cpu().numpy()
    trials = (Trial(l2, int(h), len(fold), bool(s)) for l2, h, s in zip(order, hits, steady, strict=True))
    return CrossValidation(tuple(trials), order[best], logits)


def row_weights(labels: Ints, classes: int) -> Floats:
    """Weights of rows, (n,), by which every class weighs the same."""
    return class_weights(np.bincount(labels, minlength=classes))[labels]
