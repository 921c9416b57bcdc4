"""SIGTERM and Ctrl-C stop a run the first time, whatever it is doing; what was done is kept, to the bit."""

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same_run, plain_run, train_small

from vitlab.errors import Stopped
from vitlab.report import make, write_report
from vitlab.training.optim import Average
from vitlab.training.saver import Saver
from vitlab.training.trainer import Trainer

Command = Callable[..., tuple[int, str, str]]
BOTH = pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])


def send_signal_in(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, call: int) -> None:
    """Make the call of that number start with a signal to this process."""
    plain, calls = getattr(owner, name), []

    def act(*given: Any, **named: Any) -> Any:
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), number)
        return plain(*given, **named)

    patch.setattr(owner, name, act)


@BOTH
def test_while_data_is_opened(tmp_path: Path, command: Command, number: int) -> None:
    """The command waits for a piped set that never comes."""
    opened = tmp_path / "opened"

    def send() -> None:
        while not opened.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    began = time.monotonic()
    data = f"data=pipe:touch {opened}; exec sleep 60"
    code, _, printed = command("train", "digits", data, "--out", str(tmp_path / "run"))
    sender.join()
    assert time.monotonic() - began < 30
    assert code == 128 + number
    assert len(printed.strip().splitlines()) == 1, printed
    assert "continue by the same command with --resume" in printed


@BOTH
def test_in_the_first_step_which_may_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    with monkeypatch.context() as patch:
        send_signal_in(patch, Trainer, "accumulate", number, 1)
        with pytest.raises(Stopped, match="--resume") as stop:
            train_small(tmp_path / "run")
    assert stop.value.code == 128 + number
    assert not (tmp_path / "run" / "checkpoints").exists()  # the step was not finished
    train_small(tmp_path / "run", resume=True)
    assert_same_run(plain_run(), tmp_path / "run")


# with averaged weights in the middle; in the test after the last step
@pytest.mark.parametrize("call", [pytest.param(2, marks=pytest.mark.slow), 7])
def test_while_testing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    with monkeypatch.context() as patch:
        send_signal_in(patch, Trainer, "measure", signal.SIGTERM, call)
        with pytest.raises(Stopped, match="saved; continue with --resume"):
            train_small(tmp_path / "run")
    state = json.loads((tmp_path / "run" / "checkpoints" / "last" / "state.json").read_text())
    assert (state["step"], state["tested"]) == ({2: 7, 7: 20}[call], False)
    train_small(tmp_path / "run", resume=True)
    assert_same_run(plain_run(), tmp_path / "run")
    assert train_small(tmp_path / "run", resume=True).report
    assert_same_run(plain_run(), tmp_path / "run")


def test_while_the_weights_are_put_back_after_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint has the run's own weights all the same, not the averaged ones that were tested."""
    with monkeypatch.context() as patch:
        send_signal_in(patch, Average, "fill", signal.SIGTERM, 2)
        with pytest.raises(Stopped, match="saved; continue with --resume"):
            train_small(tmp_path / "run")
    train_small(tmp_path / "run", resume=True)
    assert_same_run(plain_run(), tmp_path / "run")


def test_after_the_last_step_the_run_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        send_signal_in(patch, Saver, "save_final", signal.SIGTERM, 1)
        with pytest.raises(Stopped, match="is complete"):
            train_small(tmp_path / "run")
    assert_same_run(plain_run(), tmp_path / "run")


@BOTH
def test_while_a_report_is_written(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    run = tmp_path / "run"
    shutil.copytree(plain_run(), run)
    before = sorted(run.iterdir())
    send_signal_in(monkeypatch, make, "draw_figures", number, 1)
    code, _, printed = command("report", str(run))
    assert (code, printed.strip()) == (128 + number, "stopped; the folder is as it was")
    assert sorted(run.iterdir()) == before


@pytest.mark.slow
@BOTH
def test_while_a_run_writes_its_report(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    send_signal_in(monkeypatch, make, "evaluate", number, 1)
    small = ["depth=1", "width=16", "heads=2", "mlp=16", "steps=2", "warmup=0", "batch=8"]
    code, _, printed = command("train", "digits", *small, "--out", str(tmp_path / "run"))
    assert code == 128 + number
    assert "the model is saved, the report is not finished" in printed
    assert write_report(tmp_path / "run").path.exists()


def test_handlers_are_put_back(tmp_path: Path) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    train_small(tmp_path / "run", steps=4)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
