"""Runs with patch_dropout: their draws follow from seed and step, so they resume to the bit, in one process or two."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, assert_same_run, records, train_small
from test_parallel import train as train_by
from test_resume import killed_at

from vitlab.errors import UserError
from vitlab.training.recipe import change
from vitlab.weights import load

DROPPED = change(SMALL, patch_dropout=0.5, steps=12)


def test_a_killed_run_resumes_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_small(tmp_path / "plain", recipe=DROPPED)
    with killed_at(9, monkeypatch):
        train_small(tmp_path / "killed", recipe=DROPPED)
    train_small(tmp_path / "killed", recipe=DROPPED, resume=True)
    assert_same_run(tmp_path / "plain", tmp_path / "killed")
    with pytest.raises(UserError, match="another patch_dropout"):
        train_small(tmp_path / "plain", recipe=change(DROPPED, patch_dropout=0.25), resume=True)


def test_loaded_weights_take_the_rate(tmp_path: Path) -> None:
    """It is a setting of training alone, so weights without it can have it; and the model that is written keeps it."""
    train_small(tmp_path / "first", steps=1, warmup=0)
    again = change(DROPPED, weights=str(tmp_path / "first"), steps=1, warmup=0)
    train_small(tmp_path / "second", recipe=again)
    assert load(tmp_path / "first").config.patch_dropout == 0  # type: ignore[union-attr]
    assert load(tmp_path / "second").config.patch_dropout == 0.5  # type: ignore[union-attr]


@pytest.mark.long
def test_two_processes_learn_and_resume(tmp_path: Path) -> None:
    """Each draws for its own images, sharded or not; from the checkpoint in the middle they go on to the same end."""
    settings = ("steps=20", "checkpoint_every=10", "lr=0.003", "patch_dropout=0.5", "rotary=cells")
    train_by(tmp_path / "run", 2, *settings)
    losses = [r["loss"] for r in records(tmp_path / "run") if "loss" in r]
    assert np.mean(losses[-5:]) < np.mean(losses[:5]) - 0.03
    train_by(tmp_path / "sharded", 2, *settings, "parallel=fsdp")
    np.testing.assert_allclose([r["loss"] for r in records(tmp_path / "sharded") if "loss" in r], losses, rtol=1e-4)
    weights = load_file(tmp_path / "run" / "model.safetensors")
    last, old = (tmp_path / "run" / "checkpoints" / name for name in ("last", "last.old"))
    last.rename(tmp_path / "end")
    old.rename(last)
    train_by(tmp_path / "run", 2, *settings, resume=True)
    again = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(weights[name], again[name]) for name in weights)
    assert [r["loss"] for r in records(tmp_path / "run") if "loss" in r] == losses
