"""Few-shot accuracy: regularized least squares, in closed form, from frozen features to {-1, 1}^K.

The features are z-scored by the mean and deviation of the support (the few images that are learned from) and get a
constant column of 100 in place of a bias, so that the penalty hardly touches it. With X (n, D+1) and the targets
Y = 2 onehot - 1 (n, K), the weights W minimize |XW - Y|^2 + l2 |W|^2:

    W = (X'X + l2 I)^-1 X'Y                            normal equations
      = X' (XX' + l2 I)^-1 Y                           as (X'X + l2 I) X' = X' (XX' + l2 I)

Either inverse is that of a symmetric matrix plus l2 on its diagonal. Its eigenvectors do not depend on l2:

    X'X = Q diag(e) Q'   =>   W = Q      diag(1 / (e + l2)) Q'X'Y       tall, n > D: (D+1, D+1)
    XX' = Q diag(e) Q'   =>   W = X'Q    diag(1 / (e + l2)) Q'Y         wide, n <= D: (n, n)

So one eigendecomposition of the smaller matrix serves every l2: W = left diag(1 / (e + l2)) right.

Memory. Sums go over chunks of rows, so the features may be a memory map larger than memory. Beside them there are, in
float64, at most 6 (D+1)^2 numbers for the square matrices and the eigensolver, (3 + number of l2) (D+1) K for right
sides and weights, c (3D + K + 3) for a chunk of c rows and its scores, and some 10 n for labels and draws. (In the
wide case n <= D bounds X itself.) For ImageNet, n = 1.28 million, D = 768, K = 1000, c = 4096, that is 0.3 GB, beside
3.9 GB of features in memory or on disk.

Shapes: n support images, m test images, D width of the features, K classes, r = min(n, D+1), c rows of a chunk.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from vitlab.data.open import pick_per_class
from vitlab.data.rng import SUBSET, Floats, Ints, keys
from vitlab.errors import UserError
from vitlab.evaluation.classes import first_few
from vitlab.evaluation.extract import Features
from vitlab.evaluation.piece_cache import Values

BIAS = 100.0
EPSILON = 1e-5  # added to every deviation
L2 = 2.0**10
CHUNK = 4096


@dataclass(frozen=True)
class Standardizer:
    """Mean and deviation of some features, by which these and others are z-scored."""

    mean: Floats  # (D,)
    deviation: Floats  # (D,), never zero

    def with_bias(self, features: Values) -> Floats:
        """Standardize features (c, D) and append the constant column: X, (c, D+1)."""
        x = np.full((len(features), len(self.mean) + 1), BIAS)
        np.subtract(features, self.mean, out=x[:, :-1])
        x[:, :-1] /= self.deviation
        return x


def fit_standardizer(features: Values, rows: Ints, chunk: int = CHUNK) -> Standardizer:
    """Compute mean and deviation of the images `rows`, in two passes: a difference of large sums would lose digits."""
    parts = [rows[start : start + chunk] for start in range(0, len(rows), chunk)]
    zero = np.zeros(features.shape[1])
    mean = sum((features[part].sum(0, dtype=np.float64) / len(rows) for part in parts), zero)
    squares = sum((np.square(features[part] - mean).sum(0) for part in parts), zero)
    return Standardizer(mean, np.sqrt(squares / len(rows)) + EPSILON)


# ---- the closed form


@dataclass(frozen=True)
class Ridge:
    """The least-squares solutions for every l2."""

    standardizer: Standardizer
    eigenvalues: Floats  # (r,)
    left: Floats  # (D+1, r)
    right: Floats  # (r, K)

    def weights(self, l2: float) -> Floats:
        """Return W, (D+1, K), for one l2; its last row belongs to the constant column."""
        return self.left @ (self.right / (self.eigenvalues + l2)[:, None])

    def guesses(self, features: Values, l2: Sequence[float], chunk: int = CHUNK) -> Ints:
        """Return the class with the largest score for each l2 and image, (len(l2), m)."""
        each = [self.weights(value) for value in l2]
        best = np.empty((len(each), len(features)), np.int64)
        for start in range(0, len(features), chunk):
            x = self.standardizer.with_bias(features[start : start + chunk])
            for row, w in zip(best, each, strict=True):
                row[start : start + chunk] = (x @ w).argmax(1)
        return best


def fit(features: Values, labels: Ints, classes: int, rows: Ints | None = None, chunk: int = CHUNK) -> Ridge:
    """Solve for the images `rows` (None: all), whose labels are in 0 … classes - 1."""
    rows = np.arange(len(features)) if rows is None else rows
    standardizer = fit_standardizer(features, rows, chunk)
    if len(rows) <= features.shape[1]:  # wide
        x = standardizer.with_bias(features[rows])
        eigenvalues, q = np.linalg.eigh(x @ x.T)
        left, right = x.T @ q, q.T @ (2.0 * (labels[rows, None] == np.arange(classes)) - 1)
    else:
        square, goal = moments(features, labels, classes, rows, standardizer, chunk)
        eigenvalues, left = np.linalg.eigh(square)
        right = left.T @ goal
    return Ridge(standardizer, np.maximum(eigenvalues, 0), left, right)  # rounding may leave zeros below zero


def moments(
    features: Values, labels: Ints, classes: int, rows: Ints, standardizer: Standardizer, chunk: int
) -> tuple[Floats, Floats]:
    """Sum X'X and X'Y over chunks: column k of X'Y is twice the sum of class k's rows less that of all rows."""
    square = np.zeros((features.shape[1] + 1,) * 2)
    sums = np.zeros((classes, len(square)))
    for start in range(0, len(rows), chunk):
        part = rows[start : start + chunk]
        order = part[labels[part].argsort(kind="stable")]  # class by class, so that the sums of each are one slice
        x = standardizer.with_bias(features[order])
        square += x.T @ x
        present, first = np.unique(labels[order], return_index=True)
        sums[present] += np.add.reduceat(x, first)
    return square, (2 * sums - sums.sum(0)).T


# ---- the evaluation


@dataclass(frozen=True)
class FewShot:
    """Accuracy after learning from some images of each class: one draw of them for every seed."""

    shots: int | None  # None: all there are, which is one draw
    l2: float
    hits: tuple[int, ...]  # one for each seed
    images: int

    @property
    def accuracies(self) -> tuple[float, ...]:
        return tuple(hits / self.images for hits in self.hits)

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def std(self) -> float | None:
        """The sample's deviation over the seeds, where there are several."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.hits) > 1 else None


def few_shot(
    train: Features,
    test: Features,
    *,
    shots: Sequence[int | None] = (1, 5, 10, 25),
    l2: Sequence[float] = (L2,),
    seeds: int = 3,
    classes: Sequence[str] = (),
) -> Iterator[FewShot]:
    """Yield the result of each number of shots and each l2, in this order; `classes` are names for error messages."""
    check_shots(train.labels, test.labels, shots, classes)
    if min(l2, default=1) <= 0 or seeds < 1:
        raise UserError(f"l2 must be positive and there must be a seed, not {list(l2)} and {seeds}")
    present = np.unique(train.labels)
    labels, truth = np.searchsorted(present, train.labels), np.searchsorted(present, test.labels)
    for number in shots:
        hits = []
        for seed in range(1 if number is None else seeds):
            rows = None if number is None else support(labels, number, seed)
            ridge = fit(train.values, labels, len(present), rows)
            hits.append((ridge.guesses(test.values, l2) == truth).sum(1))
        for value, row in zip(l2, np.transpose(hits).tolist(), strict=True):
            yield FewShot(number, value, tuple(row), len(truth))


def support(labels: Ints, shots: int, seed: int) -> Ints:
    """Draw `shots` images of every class, as ascending indices: those with the lowest hash of seed, class and place.

    One class's draw thus depends on no other class, and fewer shots are a subset of more.
    """
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.argsort(inverse, kind="stable")
    place = np.empty_like(labels)
    place[order] = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return pick_per_class(labels, lambda count: shots, keys(seed, SUBSET, labels, place))


def check_shots(
    train: Ints, test: Ints, shots: Sequence[int | None] = (), classes: Sequence[str] = (), split: str = "test"
) -> list[str]:
    """Raise a UserError where labels (n,) and (m,) do not fit each other or the shots; return notes on the result."""
    present, counts = np.unique(train, return_counts=True)
    unknown = np.setdiff1d(test, present)
    if len(unknown):
        raise UserError(
            f"the {split} images have {describe_classes(unknown, classes)}, which no training image has; add some to "
            f"the training images, or take these out of the {split}"
        )
    for number in shots:
        if number is not None and number < 1:
            raise UserError(f"shots must be at least 1, not {number}")
        if number is not None and counts.min() < number:
            name, least = describe_classes(present[[counts.argmin()]], classes), counts.min()
            raise UserError(
                f"{name} has {least} of the {number} training images that {number} shots need; "
                f"ask for at most {least}, or add images to it"
            )
    untested = np.setdiff1d(present, test)
    if len(untested):
        names = describe_classes(untested, classes)
        return [f"no {split} image is of {names}; accuracy is over the {len(test)} images there are"]
    return []


def describe_classes(labels: Ints, classes: Sequence[str]) -> str:
    """The first three classes by name, or by number where there are no names."""
    names = [f"'{classes[i]}'" if classes else str(i) for i in labels.tolist()]
    return f"class{'es' if len(names) > 1 else ''} {first_few(names)}"
