"""The result of evaluating a multi-label model: average precision, F1 and predictions, as tables, JSON and files.

Shapes: n images, K classes of the model.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlab.data.rng import Floats
from vitlab.evaluation.describe import describe_scores
from vitlab.evaluation.multi_label import Bools, average_precisions, f1, mean_of_known
from vitlab.evaluation.result import csv_text, nan_to_none
from vitlab.files import write_text
from vitlab.html import value_table

JOIN = ";"  # between the classes of an image, as in a CSV file of a data set


@dataclass(frozen=True)
class MultiEvaluation:
    """Predictions and scores of a multi-label model on a data set; classes are in the model's order."""

    names: tuple[str, ...]  # (K,)
    note: str  # how the data set's classes were matched to the model's
    files: tuple[str, ...]  # (n,)
    truth: Bools  # (n, K)
    probabilities: NDArray[np.float32]  # (n, K)
    thresholds: NDArray[np.float32]  # (K,)
    known: Bools  # (K,) the model's classes that the set has; guesses of others are not counted
    precisions: Floats  # (K,) average precision; nan for a class without images
    broken: tuple[str, ...] = ()  # names of the images that could not be read and are left out

    @property
    def guesses(self) -> Bools:
        """Whether each class is predicted, (n, K)."""
        return (self.probabilities >= self.thresholds) & self.known

    @property
    def mean_precision(self) -> float:
        """mAP: the mean average precision of the classes that have images."""
        return mean_of_known(self.precisions)

    def overall(self) -> dict[str, float]:
        """mAP; F1 of all labels together (micro) and its mean over classes (macro); images without any mistake."""
        truth, guesses = self.truth, self.guesses
        hits, guessed, images = (truth & guesses).sum(0), guesses.sum(0), truth.sum(0)
        return {
            "map": self.mean_precision,
            "f1_micro": float(np.nan_to_num(f1(hits.sum(), guessed.sum(), images.sum()))),
            "f1_macro": mean_of_known(f1(hits, guessed, images)),
            "exact": float((truth == guesses).all(1).mean()),
        }

    def class_table(self) -> list[dict[str, Any]]:
        """One dict per class: lowest average precision first, classes without images last."""
        truth, guesses = self.truth, self.guesses
        hits, guessed, images = (truth & guesses).sum(0), guesses.sum(0), truth.sum(0)
        shares = f1(hits, guessed, images)
        rows: list[dict[str, Any]] = [
            {"number": k, "class": name, "images": int(images[k]), "guessed": int(guessed[k]), "correct": int(hits[k])}
            | {"average_precision": nan_to_none(self.precisions[k]), "f1": nan_to_none(shares[k])}
            | {"precision": share_of(hits[k], guessed[k]), "recall": share_of(hits[k], images[k])}
            | {"threshold": float(self.thresholds[k])}
            for k, name in enumerate(self.names)
        ]
        return sorted(rows, key=lambda row: (row["images"] == 0, row["average_precision"], -row["images"]))

    def to_json(self) -> dict[str, Any]:
        about = {"images": len(self.files), "broken": list(self.broken), "classes": list(self.names)}
        about |= {"matched": self.note, "multi_label": True}
        return about | self.overall() | {"per_class": self.class_table()}

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        return value_table(f"{len(self.names)} classes", describe_scores(self.to_json()))

    def write_json(self, path: Path, about: dict[str, Any]) -> None:
        """Write all scores to a file, after the entries of `about`, which describe the model and the data."""
        write_text(path, json.dumps({**about, **self.to_json()}, allow_nan=False) + "\n")

    def write_results(self, folder: Path, about: dict[str, Any]) -> None:
        """Write scores.json, per_class.csv and predictions.csv into a folder."""
        self.write_json(folder / "scores.json", about)
        table = self.class_table()
        write_text(folder / "per_class.csv", csv_text(table[0], (row.values() for row in table)))
        guesses = self.guesses
        rows = ((file, self.words(self.truth[i]), self.words(guesses[i])) for i, file in enumerate(self.files))
        write_text(folder / "predictions.csv", csv_text(("image", "truth", "guess"), rows))

    def words(self, chosen: Bools) -> str:
        return JOIN.join(self.names[k] for k in np.flatnonzero(chosen))


def share_of(part: int, total: int) -> float | None:
    return float(part / total) if total else None


def score_sets(
    logits: NDArray[np.float32],
    truth: Bools,
    known: Bools,
    thresholds: tuple[float, ...],
    names: tuple[str, ...],
    note: str,
    files: tuple[str, ...],
) -> MultiEvaluation:
    """Score logits (n, K) computed before against truth (n, K)."""
    probabilities = sigmoid(logits)
    precisions = average_precisions(logits, truth)
    return MultiEvaluation(
        names, note, files, truth, probabilities, np.array(thresholds, np.float32), known, precisions
    )


def sigmoid(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / (1 + exp(-x)), without overflow: half of a hyperbolic tangent."""
    return 0.5 * np.tanh(0.5 * logits) + 0.5
