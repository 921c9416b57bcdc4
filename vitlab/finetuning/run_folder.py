"""A finished run as Python has it: its model, its report and scores, and predictions."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Any, Unpack

from vitlab.data.summary import name_some
from vitlab.errors import UserError
from vitlab.evaluation.describe import describe_scores
from vitlab.html import value_table
from vitlab.models.variants import Model
from vitlab.prediction.classifier import Classifier
from vitlab.prediction.predict import PredictOptions, predict
from vitlab.report.results import ReportFile, find_report, read_scores
from vitlab.weights import load
from vitlab.weights.formats.vitlab import WEIGHTS


class Run:
    """The folder of a run, opened: what `vitlab.finetune` returns, or one from before.

    Args:
        folder: the run's folder, as `--out` names it.
        device: "auto" (the best there is), "cpu", "cuda" or "mps".
        refuse: the share of false refusals, as `vitlab.Classifier` has it.

    Raises:
        UserError: there is no model in the folder.

    >>> run = vitlab.Run("runs/pets")
    >>> run.predict("cat.jpg").label
    >>> run.labels
    ('beagle', 'pug', 'tabby')
    """

    def __init__(self, folder: str | os.PathLike[str], device: str = "auto", *, refuse: float | None = None) -> None:
        self.folder = Path(folder).expanduser()
        self.device, self.refuse = device, refuse
        if not (self.folder / WEIGHTS).is_file():
            what = "holds no model" if self.folder.is_dir() else "is not a folder"
            raise UserError(f"{self.folder} {what}; name a run's folder, as --out or out= did, once it has a model")

    @functools.cached_property
    def model(self) -> Model:
        """The model, in eval mode; on the run's device after the first prediction."""
        return load(self.folder)

    @functools.cached_property
    def classifier(self) -> Classifier:
        """The model with its preprocessing and class names, on the run's device."""
        return Classifier(self.model, self.device, refuse=self.refuse)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the logits."""
        return self.model.labels

    @property
    def report(self) -> ReportFile:
        """report.html: a path, which shows the page in a notebook; UserError where there is none."""
        return find_report(self.folder)

    @property
    def scores(self) -> dict[str, Any]:
        """The scores in the report, as `vitlab evaluate --json` has them; UserError where there are none."""
        return read_scores(self.folder)

    @property
    def accuracy(self) -> float | None:
        """The share of test images classified correctly; None of a multi-label model, whose scores have "map"."""
        top1 = self.scores.get("top1")
        return None if top1 is None else float(top1["value"])

    def predict(self, images: object, **options: Unpack[PredictOptions]) -> Any:
        """Classify an image, or many: as `vitlab.predict`, with the model loaded once."""
        return predict(self, images, **options)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        return f"Run({str(self.folder)!r}: {', '.join(f'{name} {value}' for name, value in self.summary())})"

    def _repr_html_(self) -> str:
        """A small table, for notebooks."""
        return value_table(str(self.folder), self.summary())

    def summary(self) -> list[tuple[str, str]]:
        """The classes and, where they have been written, the scores and the report."""
        rows = [("classes", f"{len(self.labels)} ({name_some(list(self.labels))})")]
        with contextlib.suppress(UserError):
            rows += describe_scores(self.scores)
        with contextlib.suppress(UserError):
            rows.append(("report", str(self.report)))
        return rows
