"""The result of evaluating a model on a data set: scores and predictions, as tables, as JSON and as files.

Shapes: n images, K classes of the model, B bins.
"""

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlab.data.rng import Floats, Ints
from vitlab.evaluation.describe import describe_scores
from vitlab.evaluation.real import RealScore
from vitlab.evaluation.scores import Calibration, Rate, rate, wilson
from vitlab.files import mark_pictures, write_text
from vitlab.html import value_table

PAIRS = 20  # most confused pairs that are kept


@dataclass(frozen=True)
class Evaluation:
    """Predictions and scores of a model on a data set; classes are in the model's order."""

    names: tuple[str, ...]  # (K,)
    note: str  # how the data set's classes were matched to the model's
    files: tuple[str, ...]  # (n,)
    labels: Ints  # (n,)
    guesses: Ints  # (n,) predicted classes
    confidence: Floats  # (n,) the probability of the predicted class
    top1: Rate
    top5: Rate | None  # None where there are five classes or fewer
    matrix: NDArray[np.int64]  # (K, K), rows: labels
    calibration: Calibration
    calibration_error: Rate
    real: RealScore | None
    temperature: float = 1.0  # of the model; it is in `confidence` and `calibration`
    error_before: float | None = None  # the calibration error without the temperature, where the model has one
    distances: Floats | None = None  # (n,) of a model that can refuse: above 1 an image is none of the classes
    refuse: float | None = None  # the share of known images that such a model promises to refuse at most

    @property
    def refused(self) -> NDArray[np.bool_]:
        """Whether each image is refused, (n,)."""
        return np.zeros(len(self.labels), bool) if self.distances is None else self.distances > 1

    def refusals(self) -> dict[str, Any] | None:
        """How many of these images, all of known classes, are refused, and the accuracy on the others."""
        if self.refuse is None:
            return None
        refused, hits = self.refused, self.guesses == self.labels
        number, answered = int(refused.sum()), int((~refused).sum())
        accuracy = rate(int(hits[~refused].sum()), answered) if answered else None
        return {
            "promised": self.refuse,
            "images": number,
            "share": asdict(rate(number, len(refused))),
            "mistakes": int((refused & ~hits).sum()),
            "accuracy_of_others": None if accuracy is None else asdict(accuracy),
        }

    index: Ints | None = None  # (n,) of each image in its source, as `evaluate` fills it in
    broken: tuple[str, ...] = ()  # names of the images that could not be read and are left out

    @property
    def confused(self) -> list[tuple[str, str, int]]:
        """(label, prediction, images) of the pairs of classes that are confused most often."""
        labels, guesses = np.nonzero(self.matrix)
        wrong = labels != guesses
        labels, guesses = labels[wrong], guesses[wrong]
        counts = self.matrix[labels, guesses]
        order = np.argsort(-counts, kind="stable")[:PAIRS].tolist()
        return [(self.names[labels[i]], self.names[guesses[i]], int(counts[i])) for i in order]

    def class_table(self) -> list[dict[str, Any]]:
        """One dict per class with its rates and their intervals: lowest recall first, classes without images last.

        Recall is the share of the class's images that are classified correctly, precision the share of its predictions
        that are correct; None over no images.
        """
        images, guessed, correct = self.matrix.sum(1), self.matrix.sum(0), np.diagonal(self.matrix)
        recall, precision = rate_columns("recall", correct, images), rate_columns("precision", correct, guessed)
        rows: list[dict[str, Any]] = [
            {"number": i, "class": name, "images": int(images[i]), "guessed": int(guessed[i])}
            | {"correct": int(correct[i]), **recall[i], **precision[i]}
            for i, name in enumerate(self.names)
        ]
        return sorted(rows, key=lambda row: (row["recall"] is None, row["recall"], -row["images"]))

    def to_json(self) -> dict[str, Any]:
        """All scores as plain JSON; the confusion matrix as [label, prediction, images] of its nonzero entries."""
        places = np.nonzero(self.matrix)
        return {
            "images": len(self.labels),
            "broken": list(self.broken),
            "classes": list(self.names),
            "matched": self.note,
            "top1": asdict(self.top1),
            "top5": None if self.top5 is None else asdict(self.top5),
            "calibration_error": asdict(self.calibration_error),
            "temperature": self.temperature,
            "calibration_error_before": self.error_before,
            "refused": self.refusals(),
            "real": None if self.real is None else vars(self.real) | asdict(self.real.accuracy),
            "calibration": bins_to_json(self.calibration),
            "per_class": self.class_table(),
            "confused": [list(pair) for pair in self.confused],
            "confusion": np.column_stack([*places, self.matrix[places]]).tolist(),
        }

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        return value_table(f"{len(self.names)} classes", describe_scores(self.to_json()))

    def write_json(self, path: Path, about: dict[str, Any]) -> None:
        """Write all scores to a file, after the entries of `about`, which describe the model and the data."""
        write_text(path, json.dumps({**about, **self.to_json()}, allow_nan=False) + "\n")

    def write_results(self, folder: Path, about: dict[str, Any]) -> None:
        """Write scores.json, per_class.csv, predictions.csv, confusion.png and calibration.png into a folder."""
        from vitlab.plots import scores, style

        mark_pictures(folder)
        self.write_json(folder / "scores.json", about)
        table = self.class_table()
        write_text(folder / "per_class.csv", csv_text(table[0], (row.values() for row in table)))
        truth, guess = ([self.names[i] for i in index.tolist()] for index in (self.labels, self.guesses))
        columns = {"image": self.files, "truth": truth, "guess": guess, "confidence": six_digits(self.confidence)}
        if self.distances is not None:
            columns["distance"] = six_digits(self.distances)
        write_text(folder / "predictions.csv", csv_text(columns, zip(*columns.values(), strict=True)))
        style.write(scores.confusion_figure(self.matrix, self.names), folder / "confusion")
        style.write(scores.calibration_figure(**vars(self.calibration)), folder / "calibration")


def six_digits(values: Floats) -> list[str]:
    return [f"{value:.6f}" for value in values]


def rate_columns(name: str, hits: Ints, images: Ints) -> list[dict[str, float | None]]:
    """The rate hits / images of each class with its interval; None over no images."""
    shares = hits / np.where(images > 0, images, np.nan)
    rows = np.column_stack([shares, wilson(hits, images)])
    return [dict(zip((name, f"{name}_low", f"{name}_high"), map(nan_to_none, row), strict=True)) for row in rows]


def bins_to_json(c: Calibration) -> list[dict[str, float | int | None]]:
    bins, mean, right = len(c.count), [*map(nan_to_none, c.confidence)], [*map(nan_to_none, c.accuracy)]
    return [
        {"from": b / bins, "to": (b + 1) / bins, "images": int(n), "confidence": mean[b], "accuracy": right[b]}
        for b, n in enumerate(c.count)
    ]


def nan_to_none(value: float) -> float | None:
    """JSON has no nan."""
    return None if np.isnan(value) else float(value)


def csv_text(heading: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heading, *rows])
    return text.getvalue()
