"""Train by a recipe, print the result and write the report: shared by demo, train and finetune."""

from collections.abc import Mapping
from pathlib import Path

from vitlab.errors import UserError
from vitlab.report.make import write_report
from vitlab.signals import stoppable
from vitlab.terminal import Terminal
from vitlab.text import duration
from vitlab.training.loop import TrainResult, train
from vitlab.training.recipe import Recipe

NAMES = {"accuracy5": "top-5", "map": "mAP"}  # of a report's numbers, in print


def train_and_report(
    recipe: Recipe, out: Path, resume: bool, accept: bool, console: Terminal, began: float | None = None
) -> None:
    """Train into `out`, print the test scores and write report.html; `began` as `train` has it."""
    write_run_report(train_run(recipe, out, resume, accept, console, began), recipe.device, console)


def train_run(
    recipe: Recipe, out: Path, resume: bool, accept: bool, console: Terminal, began: float | None = None
) -> TrainResult:
    """Train, and print the test scores; of several processes only the first one prints."""
    result = train(recipe, out, resume=resume, accept_data_changes=accept, console=console, began=began)
    if result.first:
        line = f"test: {score_text(result.report, len(result.data.classes))}; {duration(result.seconds)}"
        console.print(f"{line}; the model is in {out}", soft_wrap=True)
    return result


def score_text(report: Mapping[str, float], classes: int) -> str:
    """A test's report in words; of at most five classes, one of the best five is always right."""
    shown = {key: value for key, value in report.items() if key != "accuracy5" or classes > 5}
    shares = ("accuracy", "accuracy5", "map")
    return ", ".join(f"{NAMES.get(key, key)} {v:{'.2%' if key in shares else '.4f'}}" for key, v in shown.items())


def write_run_report(result: TrainResult, device: str, console: Terminal) -> None:
    """Write the report of a finished run. The model is saved by now: an error here is a note.

    Only the first of several processes does so, after the process group has ended: it takes a while, and no other
    process should wait for it.
    """
    if not result.first:
        return
    later = f"`vitlab report {result.folder}` writes it later"
    with stoppable(f"the model is saved, the report is not finished; {later}"):
        try:
            path = write_report(result.folder, result.data, device=device).path
            console.print(f"report: {path}", soft_wrap=True)
        except (UserError, OSError) as error:
            console.remark("note", f"the model is saved, but there is no report: {error}; {later}")
