"""Two processes on one machine: the same run as one, resumable, tested over every image once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import records

VITLAB = Path(sys.executable).with_name("vitlab")
SETTINGS = (
    *("depth=2", "width=32", "mlp=32", "heads=2", "steps=6", "warmup=1", "batch=16", "micro=4", "log_every=1"),
    *("evaluate_every=3", "checkpoint_every=2", "mixup=0.3", "device=cpu", "ema=0.9", "optimiser=adamw"),
)


def start(out: Path, processes: int, *settings: str, resume: bool = False) -> None:
    words = [str(VITLAB), "train", "digits", "--out", str(out), *SETTINGS, *settings, *(["--resume"] if resume else [])]
    if processes > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
        words = [*torchrun, "--no-python", *words]
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    start(out, 1)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_are_the_same_run(alone: Path, tmp_path: Path, parallel: str) -> None:
    out = tmp_path / "run"
    start(out, 2, f"parallel={parallel}")
    ours, theirs = records(alone), records(out)
    for a, b in zip(ours, theirs, strict=True):
        assert a.keys() == b.keys()
        if "loss" in a:
            assert b["loss"] == pytest.approx(a["loss"], rel=1e-4)
            assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-3)
        else:
            for kind in ("test", "ema"):  # 599 images: 300 and 299
                assert b[kind]["accuracy"] == pytest.approx(a[kind]["accuracy"], abs=2.5 / 599)
                assert b[kind]["accuracy"] * 599 == pytest.approx(round(b[kind]["accuracy"] * 599), abs=1e-9)
                assert b[kind]["loss"] == pytest.approx(a[kind]["loss"], rel=1e-3)
    one, two = load_file(alone / "model.safetensors"), load_file(out / "model.safetensors")
    assert one.keys() == two.keys()
    for key in one:
        torch.testing.assert_close(two[key], one[key], rtol=1e-2, atol=2e-4, msg=key)


@pytest.mark.slow
def test_a_sharded_run_is_taken_up_again(tmp_path: Path) -> None:
    """Cut back to the checkpoint before, it ends with the same weights and log."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    for out in (whole, cut):
        start(out, 2, "parallel=fsdp")
    last, old = cut / "checkpoints" / "last", cut / "checkpoints" / "last.old"
    assert json.loads((old / "state.json").read_text())["step"] == 4
    assert not (last / "state.safetensors").exists()  # in pieces
    (last / "state.json").unlink()
    (cut / "model.safetensors").unlink()
    (cut / "config.json").unlink()
    start(cut, 2, "parallel=fsdp", resume=True)
    assert records(whole) == records(cut)
    one, two = load_file(whole / "model.safetensors"), load_file(cut / "model.safetensors")
    assert all(torch.equal(one[key], two[key]) for key in one)
