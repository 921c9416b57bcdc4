"""small_size: a run starts with smaller images, and resumes to the bit on either side of the switch."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import SMALL, assert_same_run, records, train_small
from test_minutes import stored, train_in_time
from test_parallel import train as train_by
from test_resume import killed_at

from vitlab.errors import UserError
from vitlab.training.recipe import change, make_recipe, small_until
from vitlab.training.recipes import run_flops
from vitlab.training.teacher import Teacher
from vitlab.training.trainer import Trainer
from vitlab.weights import load

GROWN = change(SMALL, model="Ti/2", small_size=(4, 6), small_start=0.5, steps=12, depth=1)


def watch_sizes(patch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of the images that training sees from now on, micro-batch by micro-batch."""
    seen: list[tuple[int, ...]] = []
    plain = Trainer.backward

    def backward(self: Trainer, batch: Any, step: int) -> torch.Tensor:
        seen.append(tuple(batch.images.shape[2:]))
        return plain(self, batch, step)

    patch.setattr(Trainer, "backward", backward)
    return seen


def test_a_run_resumes_to_the_bit_before_and_after_the_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at step 5 of the small half and at step 10 of the other, from checkpoints at 4 and 8; evaluated at 7."""
    seen = watch_sizes(monkeypatch)
    train_small(tmp_path / "plain", recipe=GROWN)
    assert seen == [(4, 6)] * 12 + [(8, 8)] * 12  # two micro-batches a step
    with killed_at(5, monkeypatch):
        train_small(tmp_path / "killed", recipe=GROWN)
    for step in (6, 10):
        with killed_at(step, monkeypatch):
            train_small(tmp_path / "killed", recipe=GROWN, resume=True)
    seen.clear()
    train_small(tmp_path / "killed", recipe=GROWN, resume=True)
    assert seen == [(8, 8)] * 8
    assert_same_run(tmp_path / "plain", tmp_path / "killed")
    assert load(tmp_path / "plain").config.image_size == (8, 8)
    with pytest.raises(UserError, match="another small_start"):
        train_small(tmp_path / "plain", recipe=change(GROWN, small_start=0.25), resume=True)


def test_without_a_small_size_its_share_changes_nothing(tmp_path: Path) -> None:
    """And a share of 0 is a run without small images."""
    plain = change(GROWN, steps=4, small_size=None)
    runs = {"plain": plain, "share": change(plain, small_start=0.9), "none": change(GROWN, steps=4, small_start=0.0)}
    for name, recipe in runs.items():
        train_small(tmp_path / name, recipe=recipe)
    assert_same_run(tmp_path / "plain", tmp_path / "share")
    assert_same_run(tmp_path / "plain", tmp_path / "none")


@pytest.mark.slow
def test_a_run_by_the_clock_measures_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And equals the run with its number of steps."""
    train_small(tmp_path / "first", recipe=GROWN, steps=1, warmup=0)  # what the first run of a process imports
    seen = watch_sizes(monkeypatch)
    _, recipe = train_in_time(tmp_path / "timed", change(GROWN, minutes=0.1, evaluate_every=None))
    about = stored(tmp_path / "timed")
    run = small_until(change(recipe, steps=about["steps"])) // 16, about["steps"] * 2
    tried = seen[: -run[1]]
    assert {(4, 6), (8, 8)} == set(tried)
    assert seen[-run[1] :] == [(4, 6)] * run[0] + [(8, 8)] * (run[1] - run[0])
    train_small(tmp_path / "plain", recipe=recipe, steps=about["steps"], warmup=about["warmup"])
    assert_same_run(tmp_path / "timed", tmp_path / "plain")


def test_a_teacher_sees_the_same_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its own size, whichever the student's is, as Pillow would resize them."""
    train_small(tmp_path / "teacher", steps=1, warmup=0)
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    plain = Teacher.see

    def see(self: Teacher, images: torch.Tensor) -> torch.Tensor:
        seen.append((images, plain(self, images)))
        return seen[-1][1]

    monkeypatch.setattr(Teacher, "see", see)
    taught = change(GROWN, teacher=str(tmp_path / "teacher"), steps=4, warmup=0)
    train_small(tmp_path / "student", recipe=taught)
    assert [tuple(images.shape[2:]) for images, _ in seen] == [(4, 6)] * 4 + [(8, 8)] * 4
    for images, taken in seen:
        expected = F.interpolate(images, (8, 8), mode="bilinear", align_corners=False, antialias=True)
        torch.testing.assert_close(taken, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
def test_compiled_there_is_a_graph_for_each_size(tmp_path: Path) -> None:
    """With the losses of a run that is not compiled; evaluations between the steps compile nothing."""
    torch._dynamo.reset()
    recipe = change(GROWN, dropout=0.0, drop_path=0.0, micro=32, evaluate_every=2)
    train_small(tmp_path / "plain", recipe=recipe)
    torch._dynamo.utils.counters.clear()
    train_small(tmp_path / "compiled", recipe=recipe, compile="yes")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    plain, compiled = ([r["loss"] for r in records(tmp_path / n) if "loss" in r] for n in ("plain", "compiled"))
    np.testing.assert_allclose(compiled, plain, rtol=1e-4)


def test_where_the_small_start_ends() -> None:
    recipe = make_recipe("Ti/4", "digits", image_size=(8, 8), steps=1000, batch=32, small_size=(4, 4), small_start=0.3)
    assert small_until(recipe) == 300 * 32
    assert small_until(change(recipe, small_size=None)) == 0
    assert small_until(change(recipe, minutes=3)) == 0  # not yet


def test_operations_count_both_sizes() -> None:
    """A share of the steps at each; the closed form of a run at one size is tested elsewhere."""
    recipe = make_recipe(
        "Ti/4", "digits", image_size=(32, 32), steps=100, batch=8, small_size=(16, 16), small_start=0.25
    )
    full, small = (run_flops(change(recipe, small_size=None, image_size=size)) for size in ((32, 32), (16, 16)))
    assert run_flops(recipe) == pytest.approx(0.75 * full + 0.25 * small, rel=1e-12)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "larger": ({"small_size": (16, 16)}, r"^small_size=16x16 is not smaller than image_size=8x8; set a smaller one$"),
    "one side": ({"small_size": (4, 12)}, "^small_size=4x12 is not smaller"),
    "same": ({"small_size": (8, 8)}, "^small_size=8x8 is not smaller"),
    "nothing": ({"small_size": (0, 4)}, "^small_size must be"),
    "masked": ({"objective": "masked"}, "^masked patch prediction .* leave small_size$"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(UserError, match=words):
        change(GROWN, **settings)


@pytest.mark.parametrize(
    ("settings", "words"), [({"small_size": (3, 4)}, "patches of 2 pixels"), ({"positions": "relative"}, "relative")]
)
def test_a_model_that_cannot_take_them_is_refused_before_the_run(
    settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=words):
        train_small(tmp_path / "run", recipe=change(GROWN, **settings))
    assert not (tmp_path / "run" / "recipe.json").exists()


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    """Over the switch, with a complete model in each and with its shards."""
    settings = ["model=Ti/2", "image_size=8", "small_size=4", "steps=20", "checkpoint_every=8", "lr=0.003"]
    settings += ["precision=float64", "ema=0.9"]
    train_by(tmp_path / "one", 1, *settings)
    alone = [r["loss"] for r in records(tmp_path / "one") if "loss" in r]
    assert len(alone) == 20
    for parallel in ("ddp", "fsdp"):
        train_by(tmp_path / parallel, 2, *settings, f"parallel={parallel}")
        shared = [r["loss"] for r in records(tmp_path / parallel) if "loss" in r]
        np.testing.assert_allclose(shared, alone, rtol=1e-9, err_msg=parallel)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [{}, {"patch_dropout": 0.25, "rotary": "cells"}])
@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_a_recorded_run_is_that_of_plain_steps(tmp_path: Path, compiled: str, settings: dict[str, Any]) -> None:
    """A graph for each size, with evaluations between the steps; resumed before the switch."""
    recipe = change(GROWN, steps=30, micro=32, small_size=(4, 4), checkpoint_every=20, small_start=0.8, **settings)
    common: dict[str, Any] = {"device": "cuda", "precision": "float32", "compile": compiled}
    found: dict[bool, list[float]] = {}
    for graph in (False, True):
        out = tmp_path / str(graph)
        train_small(out, recipe=recipe, cuda_graph=graph, **common)
        found[graph] = [r["loss"] for r in records(out) if "loss" in r]
    np.testing.assert_allclose(found[True], found[False], rtol=1e-3)
    last, old = (out / "checkpoints" / name for name in ("last", "last.old"))
    last.rename(tmp_path / "end")
    old.rename(last)
    assert json.loads((last / "state.json").read_text())["step"] == 20
    train_small(out, recipe=recipe, cuda_graph=True, resume=True, **common)
    np.testing.assert_allclose([r["loss"] for r in records(out) if "loss" in r], found[True], rtol=1e-3)
