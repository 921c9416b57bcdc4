"""Two starts in one folder: the second is rejected and names the first; the lock ends with its process."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from small_runs import train_small
from test_parallel import command
from test_resume import VITLAB

from vitlab.errors import UserError
from vitlab.training import lock


def hold(out: Path) -> int:
    """The id of another process that holds the lock of a folder until it is killed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lock.own_folders.clear()
            with lock.folder_lock(out):
                os.write(write, b"held")
                signal.pause()
        except UserError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = os.read(pipe.fileno(), 4096).decode()
    if answer != "held":
        os.waitpid(child, 0)
        raise UserError(answer)
    return child


def end(child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_the_second_is_rejected_until_the_first_is_gone(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = hold(out)
    try:
        host = re.escape(os.uname().nodename)
        with pytest.raises(UserError, match=rf"in use by process {first} on '{host}' since '20\d\d-"):
            train_small(out)
        assert not (out / "recipe.json").exists()
    finally:
        end(first)
    train_small(out, steps=4)  # nothing to clean up


def test_one_process_does_not_train_twice_in_a_folder(tmp_path: Path) -> None:
    with lock.folder_lock(tmp_path):
        with pytest.raises(UserError, match="already"):
            train_small(tmp_path)
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"):  # the attempt did not drop the lock
            hold(tmp_path)
    train_small(tmp_path, steps=4)


def test_where_files_cannot_be_locked_there_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import errno
    import fcntl

    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "lockf", none)
    train_small(tmp_path, steps=4)
    assert "cannot be locked" in capsys.readouterr().err.replace("\n", " ")
    assert (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("text", [b"", b"null", b"[" * 9999, b'{"pid": "x"}', b'{"pid": 1, "host": 2}', b"\xff"])
def test_any_content_of_the_file_is_described(text: bytes) -> None:
    assert lock.describe_holder(text) == "another process"


@pytest.mark.slow
def test_all_processes_end_with_one_error(tmp_path: Path) -> None:
    first = hold(tmp_path / "run")
    try:
        words = [str(VITLAB), "train", "digits", "--out", str(tmp_path / "run"), "steps=4", "warmup=0", "device=cpu"]
        began = time.monotonic()
        done = subprocess.run(command(2, *words), capture_output=True, text=True, timeout=120)
        assert time.monotonic() - began < 90
    finally:
        end(first)
    assert done.returncode != 0
    assert done.stderr.count("error: ") == 1, done.stderr
    assert f"in use by process {first}" in done.stderr
    assert not (tmp_path / "run" / "recipe.json").exists()
