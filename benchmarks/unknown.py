"""Ways to refuse photos that are none of the classes: python -m benchmarks.unknown WEIGHTS DATA [KEEP]

DATA holds the folders pets/, flowers/ and tiny-imagenet/; features are kept in KEEP. Each way gives a photo a number,
higher for stranger ones, from features of 20 photos of each breed, 10 of each flower, and 10 or 40 of each of twenty
classes of Tiny-ImageNet, which have little in common. Rows: the way. Columns: the AUROC, the probability that a strange
photo has a higher number than a known one, for

- photos of another set: a model of pets sees flowers and Tiny-ImageNet, one of flowers pets and that, and so on;
- classes left out of training: 10 of 37 breeds, 30 of 102 flowers, in the mean of three draws;

and the share of known test photos that is refused where 5 % are promised, by a limit from out-of-fold distances.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import vitlab
from vitlab.data.open import find_splits
from vitlab.data.rng import Floats, Ints
from vitlab.data.source import Subset
from vitlab.evaluation.extract import Features, extract
from vitlab.evaluation.piece_cache import Values
from vitlab.evaluation.probe import logistic
from vitlab.evaluation.unknown import Strangeness, auroc, covariance, fit_strangeness, out_of_fold
from vitlab.models.unknown import held_out_limit

Way = Callable[[Values, Ints], Strangeness]  # fitted to training features and labels

RATE, DRAWS = 0.05, 3
L2 = 0.01  # of the logistic head
PHOTOS = {("pets", "train"): 20, ("pets", "test"): 20, ("flowers", "train"): 10, ("flowers", "test"): 8}
PHOTOS |= {("tiny-imagenet", "test"): 3}  # of each class
MIXED = range(0, 200, 10)  # the classes of Tiny-ImageNet that are known in cases of their own


# ---- the ways


def head_scores(x: Values, y: Ints) -> Strangeness:
    """Logits of a logistic head (m, K)."""
    names, labels = np.unique(y, return_inverse=True)
    head = logistic(x, labels, len(names), L2)
    return lambda values: head.scores(values).numpy()


def log_sum(z: Floats) -> Floats:
    most = z.max(1, keepdims=True)
    return most[:, 0] + np.log(np.exp(z - most).sum(1))


def max_softmax(x: Values, y: Ints) -> Strangeness:
    scores = head_scores(x, y)
    return lambda values: -np.exp((z := scores(values)).max(1) - log_sum(z))


def energy(x: Values, y: Ints) -> Strangeness:
    scores = head_scores(x, y)
    return lambda values: -log_sum(scores(values))


def unit(x: Floats | Values) -> Floats:
    return np.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), np.float64)


def class_means(x: Floats | Values, y: Ints) -> Floats:
    return np.stack([x[y == k].mean(0, dtype=np.float64) for k in np.unique(y)])


def cosine_to_mean(x: Values, y: Ints) -> Strangeness:
    means = unit(class_means(unit(x), y))
    return lambda values: 1 - (unit(values) @ means.T).max(1)


def neighbors(k: int) -> Way:
    """The cosine to the k-th nearest training photo."""

    def fit(x: Values, y: Ints) -> Strangeness:
        rows = unit(x)
        return lambda values: 1 - np.sort(unit(values) @ rows.T, 1)[:, -k]

    return fit


def squared(x: Floats, means: Floats, precision: Floats) -> Floats:
    """Squared Mahalanobis distances (m, C)."""
    root = np.linalg.cholesky(precision)
    a, b = x @ root, means @ root
    distances: Floats = (a**2).sum(1)[:, None] - 2 * a @ b.T + (b**2).sum(1)
    return distances


def mahalanobis(x: Values, y: Ints) -> Strangeness:
    means = class_means(x, y)
    within = covariance(x - means[np.unique(y, return_inverse=True)[1]])
    precision = np.asarray(np.linalg.inv(within), np.float64)
    return lambda values: squared(values.astype(np.float64), means, precision).min(1)


def relative_mahalanobis(x: Values, y: Ints) -> Strangeness:
    """Less the distance to the mean of all classes, under the covariance of all."""
    near, all_alike = mahalanobis(x, y), mahalanobis(x, np.zeros(len(x), np.int64))
    return lambda values: near(values) - all_alike(values)


def together(*ways: Way) -> Way:
    """The sum of several, each in units of its deviation over the training photos, out of fold."""

    def fit(x: Values, y: Ints) -> Strangeness:
        fitted = [(way(x, y), out_of_fold(way, Features(x, y))) for way in ways]
        return lambda values: np.sum([(d(values) - known.mean()) / known.std() for d, known in fitted], 0)

    return fit


WAYS: dict[str, Way] = {
    "largest probability of a logistic head": max_softmax,
    "its energy": energy,
    "cosine to the nearest photo": neighbors(1),
    "cosine to the fifth nearest": neighbors(5),
    "cosine to the nearest class mean": cosine_to_mean,
    "Mahalanobis": mahalanobis,
    "relative Mahalanobis": relative_mahalanobis,
    "both of these": together(mahalanobis, relative_mahalanobis),
    "Gaussian classes (vitlab)": fit_strangeness,
    "these and cosine to mean": together(fit_strangeness, cosine_to_mean),
}


# ---- the tests


@dataclass(frozen=True)
class Case:
    """Training features, test features of the same classes, and strange ones."""

    train: Features
    known: Values
    strange: dict[str, Values]


def read_features(weights: str, data: Path, keep: Path | None) -> dict[tuple[str, str], Features]:
    model, found = vitlab.load(weights), {}

    def read(name: str, split: str, count: int, classes: Iterable[int] | None = None) -> Features:
        source = find_splits(str(data / name))[0][split]
        rng, labels = np.random.default_rng(0), source.labels
        kept = np.unique(labels) if classes is None else classes
        chosen = [rng.permutation(np.flatnonzero(labels == k))[:count] for k in kept]
        part = Subset(source, np.sort(np.concatenate(chosen)))
        return extract(model, part, keep=keep, title=f"{name} {split}")

    for (name, split), count in PHOTOS.items():
        found[name, split] = read(name, split, count)
    for split, count in (("train", 40), ("test", 25)):
        found["mixed", split] = read("tiny-imagenet", split, count, MIXED)
    return found


def other_sets(found: dict[tuple[str, str], Features]) -> dict[str, list[Case]]:
    cases = {}
    for name, other in (("pets", "flowers"), ("flowers", "pets")):
        strange = {other: found[other, "test"].values, "Tiny-ImageNet": found["tiny-imagenet", "test"].values}
        cases[name] = [Case(found[name, "train"], found[name, "test"].values, strange)]
    strange = {name: found[name, "test"].values for name in ("flowers", "pets")}
    train, known = found["mixed", "train"], found["mixed", "test"].values
    for count in (10, 40):
        first = np.concatenate([np.flatnonzero(train.labels == k)[:count] for k in MIXED])
        few = Features(train.values[first], train.labels[first])
        cases[f"twenty classes of Tiny-ImageNet, {count} photos of each"] = [Case(few, known, strange)]
    return cases


def left_out(found: dict[tuple[str, str], Features]) -> dict[str, list[Case]]:
    cases: dict[str, list[Case]] = {}
    for name, classes, trained in (("pets", 37, 27), ("flowers", 102, 72)):
        train, test = found[name, "train"], found[name, "test"]
        cases[f"{name} left out"] = []
        for draw in range(DRAWS):
            order = np.random.default_rng(draw).permutation(classes)[:trained]
            a, b = np.isin(train.labels, order), np.isin(test.labels, order)
            part = Features(train.values[a], train.labels[a])
            cases[f"{name} left out"].append(Case(part, test.values[b], {"left out": test.values[~b]}))
    return cases


def measure(way: Way, cases: list[Case]) -> dict[str, float]:
    """The mean AUROC by kind of strange photos, the share of known photos refused, and of strange ones."""
    rows: dict[str, list[float]] = {}
    for case in cases:
        distance = way(case.train.values, case.train.labels)
        limit = held_out_limit(torch.from_numpy(np.sort(out_of_fold(way, case.train))), RATE)
        known = distance(case.known)
        rows.setdefault("refused", []).append(float((known > limit).mean()))
        for name, values in case.strange.items():
            strange = distance(values)
            rows.setdefault(name, []).append(auroc(known, strange))
            rows.setdefault(f"{name} refused", []).append(float((strange > limit).mean()))
    return {name: float(np.mean(values)) for name, values in rows.items()}


def main(weights: str, data: str, keep: str | None = None) -> None:
    found = read_features(weights, Path(data), None if keep is None else Path(keep))
    for name, cases in (other_sets(found) | left_out(found)).items():
        results = {way: measure(fit, cases) for way, fit in WAYS.items()}
        table = Table("way", *next(iter(results.values())), title=name, title_justify="left")
        for way, row in results.items():
            table.add_row(way, *(f"{value:.1%}" if "refused" in key else f"{value:.3f}" for key, value in row.items()))
        Console(width=160).print(table)


if __name__ == "__main__":
    main(*sys.argv[1:])
