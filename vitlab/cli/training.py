"""Training on the command line: shared by demo and train."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vitlab.cli.app import console

if TYPE_CHECKING:
    from vitlab.training.recipe import Recipe

LONGEST_START = 600.0  # seconds
IMPORTED = time.monotonic()
STOPPED_EARLY = "stopped before the first step; the same command starts again"


def train_and_report(recipe: "Recipe", out: Path, resume: bool, accept: bool = False) -> None:
    """Train into `out`, print the test scores and write report.html."""
    from vitlab.report import runs

    runs.train_and_report(recipe, out, resume, accept, console, began=process_start())


def process_start() -> float:
    """When this process started, as `time.monotonic` counts: by Linux's own record, elsewhere about when it was
    imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # after the name, from the third on
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return IMPORTED
    start = time.monotonic() - age
    return start if IMPORTED - LONGEST_START < start < IMPORTED else IMPORTED  # another clock's, as in some containers
