"""Training on the command line: shared by demo and train."""

from pathlib import Path
from typing import TYPE_CHECKING

from vitlab.cli.app import console

if TYPE_CHECKING:
    from vitlab.training.recipe import Recipe

STOPPED_EARLY = "stopped before the first step; the same command starts again"


def train_and_report(recipe: "Recipe", out: Path, resume: bool, accept: bool = False) -> None:
    """Train into `out`, print the test scores and write report.html."""
    from vitlab.report import runs

    runs.train_and_report(recipe, out, resume, accept, console)
