"""Small runs for the tests, and the comparison of two runs."""

import atexit
import dataclasses
import functools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from vitlab.data.open import open_data
from vitlab.data.source import Data, Subset
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.training.loop import TrainResult, train
from vitlab.training.recipe import Recipe, change, make_recipe

# Everything random and everything averaged is on: dropout, stochastic depth, crops, Mixup, Polyak.
SMALL = make_recipe(
    "Ti/4",
    "digits",
    image_size=(8, 8),
    depth=2,
    width=16,
    mlp=32,
    heads=2,
    dropout=0.1,
    drop_path=0.2,
    steps=20,
    batch=32,
    micro=16,
    lr=3e-3,
    warmup=3,
    weight_decay=0.1,
    clip=1.0,
    ema=0.9,
    seed=5,
    augment=Augment(area=(0.5, 1.0), mixup=0.3, label_smoothing=0.1),
    checkpoint_every=4,
    evaluate_every=7,
    log_every=3,
)


@functools.cache
def few_digits() -> Data:
    """193 training, 41 validation and 59 test images of digits, numbers that no batch divides."""
    data = open_data("digits")
    return dataclasses.replace(
        data,
        train=Subset(data.train, np.arange(193)),
        validation=Subset(data.train, np.arange(200, 241)),
        test=Subset(data.test, np.arange(59)),
    )


def train_small(out: Path, *, resume: bool = False, recipe: Recipe = SMALL, **changes: Any) -> TrainResult:
    """A small run, on few images where its data is digits."""
    recipe = change(recipe, **changes)
    data = few_digits() if recipe.data == "digits" else None
    return train(recipe, out, resume=resume, console=Console(quiet=True), data=data)


def skip_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands that train end without a report, which takes longer than a small run."""

    def no_report(*_: object, **__: object) -> Path:
        raise UserError("not in this test")

    monkeypatch.setattr("vitlab.report.write_report", no_report)


@functools.cache
def plain_run() -> Path:
    """A small run that nothing interrupts, made once for all tests of a process; not to be changed."""
    folder = Path(tempfile.mkdtemp(prefix="plain-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train_small(folder / "run")
    return folder / "run"


def records(out: Path) -> list[dict[str, Any]]:
    """The log without its records of speed."""
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "speed" not in line]


def assert_same_run(a: Path, b: Path) -> None:
    """Raise unless two runs are equal bit for bit: weights, optimizer, average, logged losses, final model."""
    state = assert_same_tensors(a, b, "checkpoints/last/state.safetensors")
    assert {key.partition("/")[0] for key in state} == {"model", "optimizer", "ema"}
    assert_same_tensors(a, b, "model.safetensors")
    assert records(a) == records(b)


def assert_same_tensors(a: Path, b: Path, name: str) -> set[str]:
    """Raise unless a file of two runs holds the same tensors; their names."""
    ours, theirs = load_file(a / name), load_file(b / name)
    assert ours.keys() == theirs.keys()
    for key in ours:
        assert torch.equal(ours[key], theirs[key]), key
    return set(ours)
