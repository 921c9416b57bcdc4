"""A run that was interrupted anywhere and resumed equals the run that was not."""

import dataclasses
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from preloaded import program
from rich.console import Console
from small_runs import SMALL, assert_same_run, assert_same_tensors, few_digits, plain_run, records, train_small

from vitlab.errors import Stopped, UserError
from vitlab.evaluation.evaluate import evaluate
from vitlab.training.checkpoint import read_checkpoint
from vitlab.training.loop import train
from vitlab.training.recipe import change
from vitlab.training.trainer import Trainer
from vitlab.weights import load as load_model

VITLAB = Path(sys.executable).with_name("vitlab")


class Killed(BaseException):
    """Stands for SIGKILL inside one process: nothing catches it, nothing is saved on its way."""


@contextmanager
def killed_at(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The run dies in the middle of a step."""
    plain = Trainer.accumulate

    def accumulate(self: Trainer, now: int) -> torch.Tensor:
        loss = plain(self, now)
        if now == step:
            raise Killed
        return loss

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "accumulate", accumulate)
        with pytest.raises(Killed):
            yield


@pytest.mark.slow
def test_killed_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    for i, step in enumerate((2, 4, 9, 10, 19)):  # before the first checkpoint, after one, between two, at the end
        with killed_at(step, monkeypatch):
            train_small(out, resume=i > 0)
    train_small(out, resume=True)
    assert_same_run(plain_run(), out)


def test_another_seed_is_another_run(tmp_path: Path) -> None:
    """The comparison would notice."""
    train_small(tmp_path / "run", seed=6)
    with pytest.raises(AssertionError):
        assert_same_run(plain_run(), tmp_path / "run")


def test_stopping_saves_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    plain = Trainer.accumulate

    def accumulate(self: Trainer, step: int) -> torch.Tensor:
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "accumulate", accumulate)
        with pytest.raises(Stopped, match="step 7 of 20") as stop:
            train_small(out)
    assert stop.value.code == 128 + signal.SIGTERM
    assert json.loads((out / "checkpoints" / "last" / "state.json").read_text())["step"] == 7
    train_small(out, resume=True)
    assert_same_run(plain_run(), out)


def test_finishing_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run"
    train_small(out)
    assert train_small(out, resume=True).report == train_small(out, resume=True).report
    assert_same_run(plain_run(), out)


def photos(folder: Path) -> Path:
    """Too large to be held in memory on a CPU, so that workers read them."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 9), ("test", 3)):
        for label in range(3):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True)
            for i in range(count):
                pixels = rng.integers(0, 256, (112, 112 + 8 * i, 3), dtype=np.uint8) // (label + 1)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return folder


@pytest.mark.slow
def test_another_number_of_workers_mid_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(
        SMALL, model="Ti/28", data=str(photos(tmp_path / "photos")), image_size=(112, 112), batch=6, micro=3, steps=8
    )
    recipe = dataclasses.replace(recipe, evaluate_every=8)  # every test starts its own workers
    train_small(tmp_path / "one", recipe=recipe, workers=0)
    with killed_at(5, monkeypatch):  # in the second epoch of 27 images; the checkpoint is at 24 of the first
        train_small(tmp_path / "two", recipe=recipe, workers=1)
    train_small(tmp_path / "two", recipe=recipe, workers=2, resume=True)
    assert_same_run(tmp_path / "one", tmp_path / "two")


# ---- what can go wrong


def test_a_run_is_not_overwritten() -> None:
    with pytest.raises(UserError, match="--resume"):
        train_small(plain_run())


@pytest.mark.parametrize(("change", "named"), [({"lr": 1e-4}, "lr"), ({"steps": 30}, "steps"), ({"seed": 1}, "seed")])
def test_another_recipe_is_rejected_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"another {named} "):
        train_small(plain_run(), resume=True, **change)


def test_another_augmentation_is_rejected_by_name() -> None:
    augment = dataclasses.replace(SMALL.augment, mixup=0.1)
    with pytest.raises(UserError, match="another mixup "):
        train_small(plain_run(), resume=True, augment=augment)


def test_a_damaged_checkpoint_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    with killed_at(13, monkeypatch):
        train_small(out)
    path = out / "checkpoints" / "last" / "state.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    train_small(out, resume=True)
    assert "damaged" in capsys.readouterr().err
    assert_same_run(plain_run(), out)


def test_disk_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file may grow beyond a size that the log keeps to and a checkpoint does not."""
    out = tmp_path / "run"
    with killed_at(6, monkeypatch):
        train_small(out)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        with pytest.raises(UserError, match=r"could not write .*checkpoints.*--resume"):
            train_small(out, resume=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert json.loads((out / "checkpoints" / "last" / "state.json").read_text())["step"] == 4
    train_small(out, resume=True)
    assert_same_run(plain_run(), out)


def test_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(UserError, match=r"diverged.*lower lr"):
        train_small(out, lr=1e30, warmup=0, clip=0.0, checkpoint_every=1)
    kept = out / "checkpoints" / "last"
    assert kept.exists()
    assert all(tensor.isfinite().all() for key, tensor in read_checkpoint(kept).items() if key.startswith("model/"))


def test_the_folder_is_the_model() -> None:
    model = load_model(plain_run())
    assert model.config.classes == 10
    best = load_model(plain_run() / "checkpoints" / "best")
    assert best.config == model.config
    last = records(plain_run())[-1]
    assert last["step"] == 20
    assert {"test", "ema"} <= last.keys()


def test_the_test_split_is_used_once_and_chooses_nothing() -> None:
    found = [(r["step"], split) for r in records(plain_run()) for split in ("validation", "test") if split in r]
    assert found == [(7, "validation"), (14, "validation"), (20, "validation"), (20, "test")]
    held = few_digits().validation
    assert held is not None
    best = evaluate(load_model(plain_run() / "checkpoints" / "best"), held, device="cpu")
    scores = [r["ema"]["accuracy"] for r in records(plain_run()) if "validation" in r]
    assert best.top1.value == pytest.approx(max(scores))


def test_without_validation_there_is_no_best(tmp_path: Path) -> None:
    data = dataclasses.replace(few_digits(), validation=None)
    train(change(SMALL, validation=0.0), tmp_path / "plain", console=Console(quiet=True), data=data)
    assert [r["step"] for r in records(tmp_path / "plain") if "ema" in r] == [20]
    assert not (tmp_path / "plain" / "checkpoints" / "best").exists()
    assert_same_tensors(tmp_path / "plain", plain_run(), "model.safetensors")  # evaluation changes no weight


@pytest.mark.parametrize(("share", "part"), [(None, 0.1), (0.2, 0.2)])
def test_a_part_of_train_is_held_out_to_choose_on(tmp_path: Path, share: float | None, part: float) -> None:
    data = dataclasses.replace(few_digits(), validation=None)
    result = train(change(SMALL, validation=share, steps=8), tmp_path / "run", console=Console(quiet=True), data=data)
    assert result.data.validation is not None
    assert len(result.data.train) + len(result.data.validation) == len(data.train)
    assert f"validation is {part} of the training images" in result.data.note
    assert [r["step"] for r in records(tmp_path / "run") if "validation" in r] == [7, 8]
    assert (tmp_path / "run" / "checkpoints" / "best").exists()


# ---- the real thing


@pytest.mark.slow
def test_sigkill_at_five_random_steps(tmp_path: Path) -> None:
    size = ["depth=2", "width=16", "mlp=32", "heads=2", "batch=32", "dropout=0.1"]
    settings = ["steps=120", "checkpoint_every=10", "seed=3", "log_every=1", *size]

    def start(out: Path, resume: bool) -> subprocess.Popen[bytes]:
        more = [*settings, *(["--resume"] if resume else [])]
        words: list[str | Path] = [program("vitlab"), "train", "digits", "--out", out, *more]
        return subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE)

    def finish(process: subprocess.Popen[bytes]) -> int:
        process.communicate(timeout=300)  # until its work has ended, too
        return process.returncode

    def done(out: Path) -> int:
        log = out / "log.jsonl"
        return log.read_bytes().count(b'"lr"') if log.exists() else 0

    assert finish(start(tmp_path / "plain", False)) == 0
    draw = random.Random(time.time())
    for i, step in enumerate(sorted(draw.sample(range(5, 115), 5))):
        process = start(tmp_path / "cut", i > 0)
        while done(tmp_path / "cut") < step and process.poll() is None:
            time.sleep(0.002)
        time.sleep(draw.random() * 0.05)
        process.kill()
        assert finish(process) in (-signal.SIGKILL, 0)
    assert finish(start(tmp_path / "cut", True)) == 0
    assert_same_run(tmp_path / "plain", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_asked_to_stop(tmp_path: Path, number: signal.Signals) -> None:
    words: list[str | Path] = [program("vitlab"), "train", "digits", "--out", tmp_path / "run", "steps=5000"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    log = tmp_path / "run" / "log.jsonl"
    while not log.exists() or log.stat().st_size == 0:
        time.sleep(0.02)
        assert process.poll() is None
    process.send_signal(number)
    _, printed = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "continue with --resume" in printed
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()


@pytest.mark.long
def test_digits_are_learned(tmp_path: Path) -> None:
    """The model learns. Processors draw the first weights and round differently: 98.0 to 99.2 % were measured."""
    words: list[str | Path] = [VITLAB, "train", "digits", "--out", tmp_path / "run"]
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True, timeout=1200)
    assert records(tmp_path / "run")[-1]["ema"]["accuracy"] >= 0.97
