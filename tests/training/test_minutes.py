"""minutes=: the steps that fit into the time, and a run that equals one with that number of steps."""

import dataclasses
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import SMALL, assert_same_run, few_digits, plain_run, train_small
from test_parallel import command as torchrun

import vitlab
from vitlab.cli.training import process_start
from vitlab.errors import UserError
from vitlab.training.loop import train
from vitlab.training.minutes import Pace
from vitlab.training.recipe import Recipe, change, override, settle
from vitlab.training.recipes import find, length, operations, run_flops
from vitlab.training.trainer import Trainer

TIMED = change(SMALL, minutes=0.07, evaluate_every=None, checkpoint_every=4)
LONGER = 6  # times the minutes, where others use the machine too


@pytest.fixture(autouse=True)
def imported() -> None:
    """What the first run of a process imports takes longer than these runs have."""
    plain_run()


def stored(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "recipe.json").read_text())["recipe"])


def train_timed(out: Path, recipe: Recipe, **settings: Any) -> str:
    """Train on few digits; what is printed."""
    printed = io.StringIO()
    train(recipe, out, console=Console(file=printed, width=200), data=few_digits(), **settings)
    return printed.getvalue()


def train_in_time(out: Path, recipe: Recipe) -> tuple[str, Recipe]:
    """Train in the minutes of the recipe, or in more if they are too few here; what is printed, and the recipe."""
    try:
        return train_timed(out, recipe), recipe
    except UserError as error:
        if "leaves no time" not in str(error):
            raise
        shutil.rmtree(out)
        recipe = change(recipe, minutes=LONGER * (recipe.minutes or 0))
        return train_timed(out, recipe), recipe


@pytest.mark.slow
def test_a_timed_run_equals_one_with_its_steps(tmp_path: Path) -> None:
    began = time.monotonic()
    line, recipe = train_in_time(tmp_path / "timed", TIMED)
    took, about = time.monotonic() - began, stored(tmp_path / "timed")
    assert about["minutes"] == recipe.minutes
    assert f"minutes={recipe.minutes:g}: {about['steps']:,} steps" in line
    assert 0.3 * 60 * (recipe.minutes or 0) < took  # the time is used
    train_small(tmp_path / "plain", recipe=TIMED, steps=about["steps"], warmup=about["warmup"])
    assert_same_run(tmp_path / "timed", tmp_path / "plain")
    assert not list((tmp_path / "timed").glob("timing*"))
    how = vitlab.load(tmp_path / "timed").card.provenance
    assert how is not None
    assert how["training"].startswith(f"{about['steps']} steps of ")


@pytest.mark.long
def test_a_run_that_was_killed_goes_on_with_the_stored_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same command, and nothing is measured again."""
    recipe, step = change(TIMED, minutes=0.5, optimizer="sgd"), Trainer.step

    def failing(trainer: Trainer, number: int) -> Any:
        if number == 7 and trainer.recipe.steps:  # not while steps are tried
            raise OSError("the power failed")
        return step(trainer, number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", failing)
        with pytest.raises(OSError, match="power"):
            train_timed(tmp_path / "timed", recipe)
    about = stored(tmp_path / "timed")
    with pytest.raises(UserError, match=r"another minutes \(the run has 0.5, not 0.4\)"):
        train_timed(tmp_path / "timed", change(recipe, minutes=0.4), resume=True)
    assert "minutes=" not in train_timed(tmp_path / "timed", recipe, resume=True)
    assert stored(tmp_path / "timed") == about
    train_small(tmp_path / "plain", recipe=recipe, steps=about["steps"], warmup=about["warmup"])
    assert_same_run(tmp_path / "timed", tmp_path / "plain")


def test_the_number_of_steps_uses_the_time_up() -> None:
    """Adding up everything that happens in the run gives the time, less than a step short."""
    pace = Pace(step=0.05, save=0.4, validate=0.7, test=3.0)
    recipe = change(SMALL, minutes=10, evaluate_every=None, checkpoint_every=500)
    n = pace.steps_in(560.0, recipe)
    spent = n * 0.05 + n / 500 * 0.4 + 10 * (0.7 + 0.4) + 3.0 + 0.7 + 2 * 0.4
    assert 560 - 0.06 < spent <= 560
    often = dataclasses.replace(recipe, evaluate_every=100)
    n = pace.steps_in(560.0, often)
    spent = n * 0.05 + n / 500 * 0.4 + n / 100 * (0.7 + 0.4) + 3.0 + 0.7 + 2 * 0.4
    assert 560 - 0.07 < spent <= 560


def test_too_little_time(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"minutes=0\.07 leaves no time for a step on this machine"):
        train_timed(tmp_path / "run", TIMED, began=time.monotonic() - 5)
    assert stored(tmp_path / "run")["steps"] is None  # so that it is measured again when it is continued


def test_a_warm_up_that_does_not_fit() -> None:
    assert settle(change(TIMED, warmup=100), 101).warmup == 100
    assert settle(change(TIMED, warmup=100), 100).warmup == 10


def test_one_length() -> None:
    assert override(SMALL, ["minutes=3"]).steps is None
    assert override(TIMED, ["steps=3"]).minutes is None
    assert override(TIMED, ["epochs=3"]).minutes is None
    with pytest.raises(UserError, match="one length: minutes or steps, not both"):
        override(SMALL, ["minutes=3", "steps=5"])
    with pytest.raises(UserError, match="one length: epochs, minutes or steps"):
        dataclasses.replace(SMALL, minutes=3.0, epochs=1.0)
    with pytest.raises(UserError, match="one length"):
        dataclasses.replace(TIMED, minutes=None)


def test_texts_of_a_timed_recipe() -> None:
    recipe = change(find("tiny-imagenet").recipe, minutes=10)
    assert length(recipe) == "10 minutes"
    assert operations(run_flops(recipe)) == "what the machine computes in its time"


def test_minutes_count_from_the_start_of_the_process() -> None:
    code = "import time; time.sleep(0.4); began = time.monotonic(); import vitlab.cli.training as t;"
    code += "print(began - t.process_start(), time.monotonic() - t.process_start())"
    before = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    took = time.monotonic() - before
    slept, age = map(float, done.stdout.split())
    assert 0.38 < slept <= age < took + 0.02  # its unit is 10 ms
    assert time.monotonic() - process_start() > 0


@pytest.mark.slow
def test_two_processes_agree(tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = ["depth=1", "width=16", "mlp=32", "heads=2", "batch=32", "warmup=2", "minutes=0.4", "device=cpu"]
    done = subprocess.run(
        torchrun(2, "vitlab", "train", "digits", *settings, "--out", str(out)),
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.findall(r"minutes=0\.4: ([\d,]+) steps", done.stdout)
    assert len(found) == 1
    assert stored(out)["steps"] == int(found[0].replace(",", ""))
    last = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert max(record.get("step", 0) for record in last) == stored(out)["steps"]
