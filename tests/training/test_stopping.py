"""SIGTERM and Ctrl-C are heard the first time, whatever a run is doing; what was done is kept, to the bit."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same_run, go
from test_resume import VITLAB

from vitlab.errors import Stopped
from vitlab.report import make, write_report
from vitlab.training.loop import Run

Command = Callable[..., tuple[int, str, str]]
BOTH = pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])


@pytest.fixture(scope="module")
def uncut(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("uncut") / "run"
    go(out)
    return out


def signalled(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, call: int) -> None:
    """The call of that number starts with a signal to this process, and goes on if nothing stops it."""
    plain, calls = getattr(owner, name), []

    def act(*given: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return plain(*given, **named)

    patch.setattr(owner, name, act)


@BOTH
def test_while_data_is_opened(tmp_path: Path, number: signal.Signals) -> None:
    """The real command, waiting for a piped set that never comes."""
    data = f"data=pipe:touch {tmp_path}/asked; exec sleep 60"
    words = [VITLAB, "train", "digits", data, "--out", tmp_path / "run"]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "asked").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    began = time.monotonic()
    process.send_signal(number)
    _, printed = process.communicate(timeout=30)
    assert time.monotonic() - began < 10
    assert process.returncode == 128 + number
    assert len(printed.strip().splitlines()) == 1, printed
    assert "--resume goes on" in printed


@BOTH
def test_in_the_first_step_which_may_compile(
    uncut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with monkeypatch.context() as patch:
        signalled(patch, Run, "backward", number, 1)
        with pytest.raises(Stopped, match="--resume") as stop:
            go(tmp_path / "run")
    assert stop.value.code == 128 + number
    assert not (tmp_path / "run" / "checkpoints").exists()  # it did not go on to the end of the step
    go(tmp_path / "run", resume=True)
    assert_same_run(uncut, tmp_path / "run")


@pytest.mark.parametrize("call", [2, 5])  # with averaged weights in the middle; after the last step
def test_while_testing(uncut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    with monkeypatch.context() as patch:
        signalled(patch, Run, "measure", signal.SIGTERM, call)
        with pytest.raises(Stopped, match="saved; continue with --resume"):
            go(tmp_path / "run")
    state = json.loads((tmp_path / "run" / "checkpoints" / "last" / "state.json").read_text())
    assert (state["step"], state["tested"]) == ({2: 7, 5: 20}[call], False)
    go(tmp_path / "run", resume=True)
    assert_same_run(uncut, tmp_path / "run")
    assert go(tmp_path / "run", resume=True).report
    assert_same_run(uncut, tmp_path / "run")


def test_after_the_last_step_the_run_is_complete(uncut: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        signalled(patch, Run, "finish", signal.SIGTERM, 1)
        with pytest.raises(Stopped, match="is complete"):
            go(tmp_path / "run")
    assert_same_run(uncut, tmp_path / "run")


@BOTH
def test_while_a_report_is_written(
    uncut: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(uncut, run)
    before = sorted(run.iterdir())
    signalled(monkeypatch, make, "draw_figures", number, 1)
    code, _, printed = command("report", str(run))
    assert (code, printed.strip()) == (128 + number, "stopped; the folder is as it was")
    assert sorted(run.iterdir()) == before


@BOTH
def test_while_a_run_writes_its_report(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    signalled(monkeypatch, make, "evaluate_test", number, 1)
    small = ["depth=1", "width=16", "heads=2", "mlp=16", "steps=2", "warmup=0", "batch=8"]
    code, _, printed = command("train", "digits", *small, "--out", str(tmp_path / "run"))
    assert code == 128 + number
    assert "the model is saved, the report is not finished" in printed
    assert write_report(tmp_path / "run").exists()


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    go(tmp_path / "run", steps=4)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
