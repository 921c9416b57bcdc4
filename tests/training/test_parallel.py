"""Several processes on one machine: the same run as one, tested over every image once, resumed by any number."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections import Counter
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from preloaded import program
from safetensors.torch import load_file
from small_runs import records

HERE = Path(__file__).parent
VITLAB = Path(sys.executable).with_name("vitlab")
SETTINGS = (
    *("depth=2", "width=32", "mlp=32", "heads=2", "warmup=1", "batch=48", "log_every=1", "evaluate_every=1000"),
    *("mixup=0.1", "device=cpu", "threads=1"),
)
TESTS = 599  # digits held out: a prime, so no number of processes divides it


def command(processes: int, name: str, *words: str, restarts: int | None = None) -> list[str]:
    """A command, plain for one process and under torchrun for more; the installed torchrun where it is to restart."""
    start = [str(program(name)), *words]
    if processes == 1:
        return start
    torchrun = program("torchrun") if restarts is None else Path(sys.executable).with_name("torchrun")
    own = ["--standalone", f"--nproc-per-node={processes}", f"--max-restarts={restarts or 0}", "--no-python"]
    return [str(torchrun), *own, *start]


def call(*words: str) -> None:
    done = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def train(out: Path, processes: int, *settings: str, resume: bool = False) -> None:
    words = ["vitlab", "train", "digits", "--out", str(out), *SETTINGS, *settings]
    call(*command(processes, *words, *(["--resume"] if resume else [])))


def measure_by(run: Path, spare: Path, processes: int, *settings: str) -> dict[str, Any]:
    """The test report of a run's last checkpoint, by so many processes."""
    folder, target = spare / "copy", spare / "measured.json"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run, folder)
    call(*command(processes, "python", str(HERE / "measure_run.py"), str(folder), str(target), *settings))
    found: dict[str, Any] = json.loads(target.read_text())
    assert found["world"] == processes
    return found


# ---- the same run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "bound"), [pytest.param("float32", 1e-4, marks=pytest.mark.long), ("float64", 1e-9)]
)
def test_two_processes_give_the_loss_curve_of_one(tmp_path: Path, precision: str, bound: float) -> None:
    """50 steps at equal global batch, with everything random that does not belong to a process.

    The rate is below the recipe's, at which float32 rounding grows a thousandfold in 20 steps.
    """
    settings = ("steps=50", "lr=0.003", f"precision={precision}", "ema=0.9")
    train(tmp_path / "one", 1, *settings)
    alone = [r["loss"] for r in records(tmp_path / "one") if "loss" in r]
    assert len(alone) == 50
    assert sum(alone[-5:]) < 0.9 * sum(alone[:5])  # it learns, so a wrong gradient would show
    for parallel in ("ddp", "fsdp"):
        train(tmp_path / parallel, 2, *settings, f"parallel={parallel}")
        shared = [r["loss"] for r in records(tmp_path / parallel) if "loss" in r]
        np.testing.assert_allclose(shared, alone, rtol=bound, err_msg=parallel)


# ---- the same counts, whatever loads the checkpoint


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded run of three processes that has a checkpoint at step 20 of 30."""
    out = tmp_path_factory.mktemp("three") / "run"
    train(out, 3, "steps=30", "checkpoint_every=10", "parallel=fsdp", "ema=0.9")
    last, old = out / "checkpoints" / "last", out / "checkpoints" / "last.old"
    assert not (last / "state.safetensors").exists()  # in shards
    shutil.rmtree(last)
    old.rename(last)
    return out


@pytest.mark.slow
def test_any_number_of_processes_tests_to_the_same_counts(stopped: Path, tmp_path: Path) -> None:
    """1, 2 and 3 processes, sharded or not, load what three wrote and count every image once."""
    reports = [measure_by(stopped, tmp_path, 1)]
    reports += [measure_by(stopped, tmp_path, n, f"parallel={kind}") for n in (2, 3) for kind in ("ddp", "fsdp")]
    for report in reports:
        assert report["step"] == 20
        for key in ("accuracy", "accuracy5"):
            assert round(report[key] * TESTS) == pytest.approx(report[key] * TESTS, abs=1e-9)  # of all 599
            assert report[key] == reports[0][key], key
    assert 0.1 < reports[0]["accuracy"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "parallel"), [(1, "ddp"), (2, "fsdp"), (2, "ddp")])
def test_another_number_of_processes_continues(stopped: Path, tmp_path: Path, processes: int, parallel: str) -> None:
    out = tmp_path / "run"
    shutil.copytree(stopped, out)
    before = [r for r in records(stopped) if "loss" in r]
    train(out, processes, "steps=30", "checkpoint_every=10", f"parallel={parallel}", "ema=0.9", resume=True)
    after = [r for r in records(out) if "loss" in r]
    assert [r["step"] for r in after] == list(range(1, 31))
    np.testing.assert_allclose([r["loss"] for r in after], [r["loss"] for r in before], rtol=1e-4)
    ours, theirs = load_file(out / "model.safetensors"), load_file(stopped / "model.safetensors")
    for key in theirs:
        torch.testing.assert_close(ours[key], theirs[key], rtol=1e-2, atol=1e-3, msg=key)


# ---- a lost process


@pytest.mark.slow
def test_a_killed_process_costs_nothing(tmp_path: Path) -> None:
    """One of three is killed in the middle: torchrun starts them again, and the run ends as if nothing had happened."""
    settings = ("steps=40", "checkpoint_every=10", "ema=0.9", "parallel=fsdp")
    train(tmp_path / "plain", 3, *settings)
    out = tmp_path / "cut"
    words = command(3, "vitlab", "train", "digits", "--out", str(out), *SETTINGS, *settings, restarts=2)
    with subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True) as run:
        wait_for(lambda: steps_logged(out) > 15, run)
        assert (out / "checkpoints" / "last").exists()
        victim = next(p for p in psutil.Process(run.pid).children(recursive=True) if p.environ().get("RANK") == "1")
        victim.send_signal(signal.SIGKILL)
        _, printed = run.communicate(timeout=240)
    assert run.returncode == 0, printed[-3000:]
    assert "exitcode: -9" in printed  # it was really lost
    plain, cut = ([r for r in records(folder) if "loss" in r] for folder in (tmp_path / "plain", out))
    assert [r["step"] for r in cut] == list(range(1, 41))
    assert cut[-1]["loss"] == pytest.approx(plain[-1]["loss"], rel=1e-6)
    assert records(tmp_path / "plain")[-1]["test"]["accuracy"] == records(out)[-1]["test"]["accuracy"]


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_the_run(tmp_path: Path) -> None:
    """As docs/scaling-out.md has it: the run is saved, torchrun ends by its own error with code 1, --resume works."""
    settings = ("steps=80", "checkpoint_every=1000", "ema=0.9")
    train(tmp_path / "plain", 2, *settings)
    out = tmp_path / "cut"
    words = command(2, "vitlab", "train", "digits", "--out", str(out), *SETTINGS, *settings, restarts=3)
    with subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True) as run:
        wait_for(lambda: steps_logged(out) > 20, run)
        run.send_signal(signal.SIGTERM)
        _, printed = run.communicate(timeout=60)
    assert run.returncode == 1, printed[-3000:]
    assert "SignalException" in printed  # torchrun's own, and no process was started again
    found = re.search(r"stopped at step (\d+) of 80, saved; continue with --resume", printed)
    assert found is not None, printed[-3000:]
    assert json.loads((out / "checkpoints" / "last" / "state.json").read_text())["step"] == int(found[1])
    train(out, 2, *settings, resume=True)
    plain, cut = ([r["loss"] for r in records(folder) if "loss" in r] for folder in (tmp_path / "plain", out))
    np.testing.assert_allclose(cut, plain, rtol=1e-6)


@pytest.mark.slow
def test_a_signal_ends_the_wait_for_other_processes(tmp_path: Path) -> None:
    """The first of two processes waits for the second, which never starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    words = [str(VITLAB), "train", "digits", "--out", str(tmp_path / "run"), *SETTINGS, "steps=2"]

    def is_waiting() -> bool:
        return any(c.laddr and c.laddr.port == port for c in psutil.Process(run.pid).net_connections())

    with subprocess.Popen(words, env=os.environ | group, stderr=subprocess.PIPE, text=True) as run:
        wait_for(is_waiting, run)
        time.sleep(0.5)
        run.send_signal(signal.SIGTERM)
        try:
            _, printed = run.communicate(timeout=20)
        finally:
            run.kill()
    assert run.returncode == 128 + signal.SIGTERM, printed
    assert "--resume" in printed


def steps_logged(out: Path) -> int:
    return len((out / "log.jsonl").read_text().splitlines()) // 2 if (out / "log.jsonl").exists() else 0


def wait_for(happened: Any, run: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 200
    while not happened():
        assert run.poll() is None, "the run ended too soon"
        assert time.monotonic() < deadline
        time.sleep(0.05)


# ---- tar shards


@pytest.mark.slow
def test_shards_give_every_image_once_per_epoch(tmp_path: Path) -> None:
    """60 images in 5 shards, read by 1, 2 and 3 processes with two workers each, for two epochs."""
    names = set()
    for shard in range(5):
        with tarfile.open(tmp_path / f"train-{shard}.tar", "w") as tar:
            for i in range(12):
                key = f"{shard}-{i}"
                names.add(f"{tmp_path}/train-{shard}.tar: {key}")
                add(tar, f"{key}.png", picture(shard * 12 + i))
                add(tar, f"{key}.cls", str(i % 3).encode())
    with tarfile.open(tmp_path / "test-0.tar", "w") as tar:
        for i in range(3):
            add(tar, f"t{i}.png", picture(i))
            add(tar, f"t{i}.cls", str(i).encode())
    batches = {}
    for world in (1, 2, 3):
        target = tmp_path / f"world{world}"
        target.mkdir()
        call(*command(world, "python", str(HERE / "read_shards.py"), f"{tmp_path}/*.tar", str(target), "12", "10"))
        ranks = [(target / f"rank{r}.jsonl").read_text().splitlines() for r in range(world)]
        batches[world] = [[name for line in step for name in json.loads(line)] for step in zip(*ranks, strict=True)]
    for world, steps in batches.items():
        for epoch in (steps[:5], steps[5:]):
            counts = Counter(name for batch in epoch for name in batch)
            assert counts == dict.fromkeys(names, 1), world
        assert steps == batches[1]  # and in the same global batches


def picture(seed: int) -> bytes:
    file = BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, BytesIO(data))
