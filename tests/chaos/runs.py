"""The small run that is killed, starved and resumed, and what it must equal in the end."""

import dataclasses
import json
import os
import shutil
from collections import Counter
from pathlib import Path

from rich.console import Console
from training.small_runs import SMALL, assert_same_run, assert_same_tensors

from chaos import interrupts
from chaos.faults import Fault, arm
from chaos.processes import Ended, forked
from vitlab.training.loop import train

RECIPE = dataclasses.replace(SMALL, steps=12, workers=0, threads=1, device="cpu")


def once(out: Path, *, resume: bool, fault: Fault | None = None) -> Ended:
    """Train in a copy of this process, with a fault if one is given."""

    def work() -> None:
        if fault is not None:
            arm(out, fault)
        train(RECIPE, out, resume=resume, console=Console(quiet=True))

    return forked(work)


def profile(folder: Path) -> Counter[str]:
    """How often an uninterrupted run reaches every point; the run stays in `folder/reference`."""
    out, counts = folder / "reference", folder / "counts.json"
    with interrupts.later():  # in this process, so that no copy has to import or set up anything
        train(RECIPE, folder / "warm", console=Console(quiet=True))

    def work() -> None:
        armed = arm(out, None)
        train(RECIPE, out, console=Console(quiet=True))
        counts.write_text(json.dumps(armed.counts))

    ended = forked(work)
    if ended.code:
        raise RuntimeError(f"the uninterrupted run fails: {ended}")
    return Counter(json.loads(counts.read_text()))


def difference(reference: Path, out: Path) -> str | None:
    """What two finished runs do not have in common: weights, optimizer, average, log, best model, files left over."""
    try:
        assert_same_run(reference, out)
        assert_same_tensors(reference, out, "checkpoints/best/model.safetensors")
    except (AssertionError, OSError, ValueError) as error:
        return f"not the uninterrupted run: {type(error).__name__} {str(error).splitlines()[0] if str(error) else ''}"
    extra = names(out) - names(reference)
    return f"files left over: {', '.join(sorted(extra))}" if extra else None


def names(out: Path) -> set[str]:
    """Everything in a run's folder but the spare checkpoint, which a crash may have used up."""
    found = {os.path.relpath(path, out) for path in out.rglob("*")}
    return {name for name in found if not name.startswith("checkpoints/last.old")}


def fresh(folder: Path, name: str) -> Path:
    out = folder / name
    shutil.rmtree(out, ignore_errors=True)
    return out
