"""A model on a set: every image once, all scores of it as numbers and arrays, and how they are written to files.

Shapes: n images, K classes of the model, B bins.
"""

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlab.data.open import check, find_splits, open_data
from vitlab.data.rng import Floats, Ints
from vitlab.data.source import ImageSource
from vitlab.errors import UserError
from vitlab.evaluation.classes import match_classes
from vitlab.evaluation.extract import extract
from vitlab.evaluation.real import CLASSES, Lists, Real, counted, image_numbers, real_hits
from vitlab.evaluation.scores import (
    Calibration,
    ClassRow,
    calibration,
    calibration_interval,
    confusion,
    interval,
    intervals,
    per_class,
    top_hits,
)
from vitlab.files import write_text
from vitlab.models.variants import Model
from vitlab.text import listed

SPLITS = ("test", "validation", "train", "all")
PAIRS = 20  # most confused pairs that are kept


@dataclass(frozen=True)
class Rate:
    """A number with its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RealScore:
    """ReaL: the counts, the rate, and how many of the set's own labels are in their image's list."""

    counts: Real
    accuracy: Rate
    own: int


@dataclass(frozen=True)
class Evaluation:
    """Everything that is known of a model's guesses on a set; classes are in the model's order."""

    names: tuple[str, ...]  # (K,)
    note: str  # how the set's classes were matched to the model's
    files: tuple[str, ...]  # (n,)
    labels: Ints  # (n,)
    guesses: Ints  # (n,)
    confidence: Floats  # (n,) the probability of the guess
    top1: Rate
    top5: Rate | None  # None where there are five classes or fewer
    matrix: NDArray[np.int64]  # (K, K), rows: truth
    calibration: Calibration
    calibration_error: Rate
    real: RealScore | None

    @property
    def classes(self) -> list[ClassRow]:
        return per_class(self.matrix, self.names)

    @property
    def worst(self) -> list[int]:
        """The numbers of the classes, those with the lowest recall first, those without images last."""
        rows = self.classes
        return sorted(range(len(rows)), key=lambda i: (rows[i].recall is None, rows[i].recall, -rows[i].images))

    @property
    def confused(self) -> list[tuple[str, str, int]]:
        """(truth, guess, images) of the pairs of classes that are most often taken for each other."""
        wrong = self.matrix - np.diag(np.diagonal(self.matrix))
        order = np.argsort(-wrong, axis=None, kind="stable")[:PAIRS]
        pairs = [(int(i) // len(wrong), int(i) % len(wrong)) for i in order]
        return [(self.names[i], self.names[j], int(wrong[i, j])) for i, j in pairs if wrong[i, j]]


def open_split(spec: str, split: str, holdout: float = 0.2) -> tuple[ImageSource, str]:
    """The images of one split (train, validation, test or all), and how they came about, in words."""
    if split == "all":
        found, _ = find_splits(spec)
        if len(found) > 1:
            raise UserError(f"'{spec}' has the splits {listed(found)}; choose one of them with --split")
        source = next(iter(found.values()))
        check(source, spec, split)
        return source, "every image of the set"
    if split not in SPLITS:
        raise UserError(f"there is no split '{split}'; write {listed(SPLITS)}")
    data = open_data(spec, holdout=holdout)
    chosen: ImageSource | None = getattr(data, split)
    if chosen is None:
        raise UserError(f"'{spec}' has no validation split of its own ({data.note}); use --split test or train")
    return chosen, data.note


def evaluate(
    model: Model,
    source: ImageSource,
    *,
    labels: tuple[str, ...] | None = None,
    real: Lists | None = None,
    batch: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    keep: Path | None = None,
) -> Evaluation:
    """The scores of a model on every image of a source.

    `labels` are names of the model's classes, where its own will not do; `real` are the lists of ImageNet ReaL.
    """
    count = model.config.classes
    if count == 0:
        raise UserError("this model has no head, so it names no classes; fine-tune it first, or use fewshot or probe")
    match = match_classes(labels or model.card.labels, count, source.classes)
    files = tuple(source.name(i) for i in range(len(source)))
    numbers = None if real is None else find_real(files, real, count)
    logits = extract(
        model, source, what="logits", batch=batch, workers=workers, device=device, keep=keep, title="evaluating"
    ).values
    truth = match.place[source.labels]
    return score(logits, truth, match.names, match.note, files, None if numbers is None else (real or (), numbers))


def find_real(files: Sequence[str], lists: Lists, count: int) -> Ints:
    if count != CLASSES:
        raise UserError(f"ReaL is about ImageNet's {CLASSES} classes, and this model has {count}")
    return image_numbers(files, len(lists))


def score(
    logits: NDArray[np.float32],
    labels: Ints,
    names: tuple[str, ...],
    note: str,
    files: tuple[str, ...],
    real: tuple[Lists, Ints] | None = None,
) -> Evaluation:
    """The same from logits (n, K) that are there already."""
    guesses = logits.argmax(1)
    odds = softmax(logits)
    calibrated = calibration(odds, labels)
    return Evaluation(
        names,
        note,
        files,
        labels,
        guesses,
        odds[np.arange(len(odds)), guesses].astype(np.float64),
        rate(guesses == labels),
        rate(top_hits(logits, labels, 5)) if len(names) > 5 else None,
        confusion(guesses, labels, len(names)),
        calibrated,
        Rate(calibrated.error, *calibration_interval(odds, labels)),
        None if real is None else score_real(guesses, labels, *real),
    )


def softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    odds = np.exp(logits - logits.max(1, keepdims=True))
    odds /= odds.sum(1, keepdims=True)
    return odds


def rate(hits: NDArray[np.bool_]) -> Rate:
    return Rate(float(hits.mean()), *interval(hits))


def score_real(guesses: Ints, labels: Ints, lists: Lists, numbers: Ints) -> RealScore:
    hits, judged = real_hits(guesses, numbers, lists)
    own, _ = real_hits(labels, numbers, lists)
    if not judged.any():
        raise UserError(f"the ReaL lists of all {len(judged)} images are empty, so there is nothing to count")
    return RealScore(counted(hits, judged), rate(hits[judged]), int(own.sum()))


# ---- files


def to_json(found: Evaluation) -> dict[str, Any]:
    """All scores as plain JSON; the confusion matrix as [truth, guess, images] of its entries that are not zero."""
    rows, columns = np.nonzero(found.matrix)
    entries = zip(rows.tolist(), columns.tolist(), found.matrix[rows, columns].tolist(), strict=True)
    real = found.real
    return {
        "images": len(found.labels),
        "classes": list(found.names),
        "matched": found.note,
        "top1": dataclasses.asdict(found.top1),
        "top5": None if found.top5 is None else dataclasses.asdict(found.top5),
        "calibration_error": dataclasses.asdict(found.calibration_error),
        "real": None if real is None else {**vars(real.counts), "own": real.own} | dataclasses.asdict(real.accuracy),
        "calibration": bins(found.calibration),
        "per_class": class_table(found),
        "confused": [list(pair) for pair in found.confused],
        "confusion": [list(entry) for entry in entries],
    }


def bins(found: Calibration) -> list[dict[str, float | int | None]]:
    count = len(found.count)
    return [
        {
            "from": b / count,
            "to": (b + 1) / count,
            "images": int(found.count[b]),
            "confidence": plain(found.confidence[b]),
            "accuracy": plain(found.accuracy[b]),
        }
        for b in range(count)
    ]


def class_table(found: Evaluation) -> list[dict[str, Any]]:
    """The classes, worst first, with the intervals of their rates."""
    guessed, correct = found.matrix.sum(0), np.diagonal(found.matrix)
    recall, precision = intervals(correct, found.matrix.sum(1)), intervals(correct, guessed)
    rows = found.classes
    return [
        {
            "number": i,
            "class": rows[i].name,
            "images": rows[i].images,
            "guessed": int(guessed[i]),
            "correct": rows[i].correct,
            "recall": rows[i].recall,
            "recall_low": plain(recall[i, 0]),
            "recall_high": plain(recall[i, 1]),
            "precision": rows[i].precision,
            "precision_low": plain(precision[i, 0]),
            "precision_high": plain(precision[i, 1]),
        }
        for i in found.worst
    ]


def plain(value: float) -> float | None:
    """JSON has no nan."""
    return None if np.isnan(value) else float(value)


def write_json(found: Evaluation, path: Path, about: dict[str, Any]) -> None:
    """All scores, and before them what they are `about`."""
    write_text(path, json.dumps({**about, **to_json(found)}, allow_nan=False) + "\n")


def write_results(found: Evaluation, folder: Path, about: dict[str, Any]) -> None:
    """scores.json, per_class.csv, predictions.csv, confusion.png and calibration.png."""
    write_json(found, folder / "scores.json", about)
    table = class_table(found)
    write_text(folder / "per_class.csv", as_csv(table[0], (row.values() for row in table)))
    truth, guess = ([found.names[i] for i in index.tolist()] for index in (found.labels, found.guesses))
    confidence = (f"{value:.6f}" for value in found.confidence)
    rows = zip(found.files, truth, guess, confidence, strict=True)
    write_text(folder / "predictions.csv", as_csv(("image", "truth", "guess", "confidence"), rows))
    from vitlab.plots import scores, style

    style.write(scores.confusion_figure(found.matrix, found.names), folder / "confusion")
    style.write(scores.calibration_figure(found.calibration), folder / "calibration")


def as_csv(heading: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(heading)
    table.writerows(rows)
    return text.getvalue()
