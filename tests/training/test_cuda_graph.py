"""A step recorded as a CUDA graph is the step."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import assert_same_run, records, train_small


def losses(out: Path, **changes: Any) -> list[float]:
    train_small(out, steps=30, micro=32, **changes)
    return [r["loss"] for r in records(out) if "loss" in r]


def test_without_a_gpu_nothing_changes(tmp_path: Path) -> None:
    for name, graph in (("asked", True), ("plain", False)):
        train_small(tmp_path / name, cuda_graph=graph, device="cpu", steps=8)
    assert_same_run(tmp_path / "asked", tmp_path / "plain")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("changes", [{"compile": "no"}, {"compile": "yes"}, {"compile": "no", "optimizer": "sgd"}])
def test_the_loss_curve_is_that_of_plain_steps(tmp_path: Path, changes: dict[str, str]) -> None:
    """With dropout, stochastic depth, clipping, a warm-up, averages and tests between the steps."""
    settings = {"device": "cuda", "precision": "float32", **changes}
    plain = losses(tmp_path / "plain", **settings)
    found = losses(tmp_path / "graph", cuda_graph=True, **settings)
    assert len(found) == 30
    np.testing.assert_allclose(found, plain, rtol=1e-3)
    tests = [[r["ema"]["loss"] for r in records(tmp_path / name) if "ema" in r] for name in ("plain", "graph")]
    np.testing.assert_allclose(tests[1], tests[0], rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_resumed_run_records_anew(tmp_path: Path, optimizer: str) -> None:
    """The checkpoint at step 20 of 30, resumed: the same losses as without the interruption."""
    settings: dict[str, Any] = {
        "device": "cuda",
        "precision": "float32",
        "compile": "no",
        "optimizer": optimizer,
        "cuda_graph": True,
        "checkpoint_every": 20,
    }
    plain = losses(tmp_path / "run", **settings)
    last, old = (tmp_path / "run" / "checkpoints" / name for name in ("last", "last.old"))
    last.rename(tmp_path / "end")
    old.rename(last)
    assert json.loads((last / "state.json").read_text())["step"] == 20
    train_small(tmp_path / "run", resume=True, steps=30, micro=32, **settings)
    again = [r["loss"] for r in records(tmp_path / "run") if "loss" in r]
    np.testing.assert_allclose(again, plain, rtol=1e-3)
