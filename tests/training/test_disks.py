"""Disks that are read-only or full: real ones, where this user may mount a small disk; each time one error line."""

import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same_run, train_small
from test_resume import killed_at

from vitlab.errors import UserError
from vitlab.report import write_report
from vitlab.training.log import Log


def mount(*words: str) -> bool:
    return subprocess.run(["mount", *words], capture_output=True).returncode == 0


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    if shutil.which("mount") is None or not mount("-t", "tmpfs", "-o", "size=2m", "none", str(place)):
        pytest.skip("needs the right to mount a disk")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def freeze(disk: Path) -> None:
    assert mount("-o", "remount,ro", str(disk))


@pytest.mark.parametrize("left", ["all", "old"])
def test_resuming_on_a_read_only_disk(disk: Path, monkeypatch: pytest.MonkeyPatch, left: str) -> None:
    with killed_at(13, monkeypatch):
        train_small(disk / "run")
    if left == "old":  # one that has to be moved into its place first
        shutil.rmtree(disk / "run" / "checkpoints" / "last")
    freeze(disk)
    with pytest.raises(UserError, match=r"could not write .*Read-only file system"):
        train_small(disk / "run", resume=True)


def test_starting_on_a_read_only_disk(disk: Path) -> None:
    freeze(disk)
    with pytest.raises(UserError, match=r"could not write .*Read-only file system"):
        train_small(disk / "run")


@pytest.mark.slow
def test_a_report_on_a_read_only_disk(disk: Path) -> None:
    train_small(disk / "run", steps=4)
    freeze(disk)
    with pytest.raises(UserError, match=r"report\.html cannot be written: Read-only file system"):
        write_report(disk / "run")


@pytest.mark.slow
@pytest.mark.parametrize("tensorboard", [False, True])
def test_the_disk_fills_up_while_logging(disk: Path, tmp_path: Path, tensorboard: bool) -> None:
    """The error is one line, and once there is space the resumed run equals the one that never met it."""
    if tensorboard:
        pytest.importorskip("tensorboard")
    settings: dict[str, Any] = {"checkpoint_every": 1000, "log_every": 1, "tensorboard": tensorboard}
    (disk / "run").mkdir()
    ballast = disk / "ballast"
    room = os.statvfs(disk)
    ballast.write_bytes(b"x" * room.f_frsize * (room.f_bavail - 6))  # six blocks for what comes before the first step
    with pytest.raises(UserError, match=r"could not write .*No space left on device.*--resume"):
        train_small(disk / "run", steps=100, evaluate_every=100, **settings)
    ballast.unlink()
    train_small(disk / "run", steps=100, evaluate_every=100, resume=True, **settings)
    train_small(tmp_path / "plain", steps=100, evaluate_every=100, **settings)
    assert_same_run(disk / "run", tmp_path / "plain")


def test_a_log_that_may_not_grow(tmp_path: Path) -> None:
    """Everywhere: closing it after the error raises nothing more, and no half line is left behind unseen."""
    log = Log(tmp_path / "log.jsonl", 0)
    log.write({"step": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            log.write({"step": 2, "text": "x" * 100})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    again = Log(tmp_path / "log.jsonl", 12)
    again.close()
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'


def test_a_log_that_lost_its_end_is_not_filled_with_zeros(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n')
    Log(tmp_path / "log.jsonl", 1000).close()
    assert (tmp_path / "log.jsonl").read_text() == '{"step": 1}\n'
    assert "shorter than its checkpoint expects" in capsys.readouterr().err.replace("\n", " ")
