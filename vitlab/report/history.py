"""How a run was trained, from its recipe.json and log.jsonl.

Shapes: S steps that were logged, T evaluations.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vitlab.errors import UserError
from vitlab.training.checkpoint import check_own_files
from vitlab.training.log import LOG, number_field, read_log, record_field
from vitlab.training.recipe import Recipe
from vitlab.training.setup import RECIPE, StoredRun, read_run
from vitlab.weights.formats.vitlab import WEIGHTS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class History:
    """A finished run: its recipe with all defaults filled in, the size of its training set, and its log."""

    recipe: Recipe
    images: int  # of the training set
    steps: Ints  # (S,)
    loss: Floats  # (S,)
    rate: Floats  # (S,)
    split: str  # that was evaluated between steps: "validation", or "test" in runs of earlier versions
    evaluated: Ints  # (T,) steps
    metric: str  # of the evaluations: accuracy, or map (mean average precision) on a multi-label set
    accuracy: Floats  # (T,) that on the split
    averaged: Floats | None  # (T,) likewise, with averaged weights
    held_loss: Floats | None  # (T,) the loss on the split, with averaged weights where there are; None if not logged
    seconds: float  # spent on training steps alone, without tests
    speed: float  # images a second, the median; 0 where nothing was logged

    @property
    def newest(self) -> Floats:
        """The metric of the evaluations, with averaged weights where the run has them, (T,)."""
        return self.accuracy if self.averaged is None else self.averaged


def read_history(folder: Path) -> History:
    """The history of the run in a folder; UserError if it is none, is not finished, or has a broken log."""
    stored = read_run(folder)
    if stored is None:
        raise UserError(
            f"{folder} has no {RECIPE}, so it is not the folder of a run; only runs of `vitlab finetune` and "
            "`vitlab train` have reports, but `vitlab evaluate` tests any model"
        )
    if not (folder / WEIGHTS).exists():
        raise UserError(f"the run in {folder} is not finished; continue it with --resume")
    check_own_files(folder)
    try:
        return parse_history(stored, read_log(folder / LOG))
    except UserError as error:
        raise UserError(f"{folder / LOG} is not the log of this run: {error}") from None


def parse_history(stored: StoredRun, records: list[dict[str, Any]]) -> History:
    steps = [record for record in records if "loss" in record]
    split = "validation" if any("validation" in record for record in records) else "test"
    tests = [record for record in records if split in record] if has_metric(stored.recipe) else []
    speeds = [record_field(record, "speed") for record in records if "speed" in record]
    averaged = all("ema" in record for record in tests) and tests
    metric = "map" if tests and "map" in record_field(tests[0], split) else "accuracy"
    newest = [record_field(record, "ema" if averaged else split) for record in tests]
    return History(
        stored.recipe,
        stored.images,
        *(column(steps, "step", np.int64), column(steps, "loss"), column(steps, "lr")),
        split,
        column(tests, "step", np.int64),
        metric,
        column([record_field(record, split) for record in tests], metric),
        column(newest, metric) if averaged else None,
        column(newest, "loss") if newest and all("loss" in record for record in newest) else None,
        training_seconds(speeds, stored.recipe.batch),
        float(np.median(column(speeds, "images_per_second"))) if speeds else 0.0,
    )


def has_metric(recipe: Recipe) -> bool:
    """Whether a run's evaluations have a share of right answers; pixels that are predicted have a loss alone."""
    return recipe.objective != "masked" or recipe.masked_target != "pixels"


def column(records: list[dict[str, Any]], key: str, kind: type = np.float64) -> Any:
    return np.array([number_field(record, key) for record in records], kind)


def training_seconds(speeds: list[dict[str, Any]], batch: int) -> float:
    """Seconds of all steps, from the speed between each two log records."""
    steps, speed = column(speeds, "step"), column(speeds, "images_per_second")
    return float((np.diff(steps, prepend=0) * batch / np.maximum(1e-9, speed)).sum())
