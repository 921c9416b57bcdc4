"""Processes that are meant to break: forked from a warm one that has imported torch once, or begun anew.

The warm one must have no threads, so nothing here starts any.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

import psutil

from chaos import interrupts

BOUND = 120.0  # seconds for any process; a run here takes one
TESTS = Path(__file__).parents[1]
VITLAB = Path(sys.executable).with_name("vitlab")
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, or minus the signal; what it printed."""

    code: int
    printed: str

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL

    @property
    def clean(self) -> bool:
        """One error line and exit code 1, as every user error or full disk should end."""
        lines = self.printed.strip().splitlines()
        return self.code == 1 and "Traceback" not in self.printed and bool(lines) and lines[-1].startswith("error: ")

    def __str__(self) -> str:
        return f"exit code {self.code}: {cause(self.printed)}"


def cause(printed: str) -> str:
    """What a process printed last, and where in the package a traceback comes from."""
    lines = printed.strip().splitlines() or ["nothing printed"]
    frames = [line.partition('"')[2] for line in lines if line.startswith("  File ") and "/vitlab/" in line]
    where = f" at vitlab/{frames[-1].rpartition('/vitlab/')[2]}".replace('"', "") if frames else ""
    return f"{lines[-1][:300]}{where}"


def forked(work: Callable[[], None], bound: float = BOUND) -> Ended:
    """Run `work` in a copy of this process, errors handled as the command line does."""
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            interrupts.ignore()
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os._exit(finish(work))
        code = wait(child, bound)
        file.seek(0)
        printed = file.read().decode(errors="replace")
    return Ended(code, printed if code != -signal.SIGALRM else f"{printed}\nno end within {bound:.0f} s")


def finish(work: Callable[[], None]) -> int:
    from vitlab.errors import UserError

    try:
        work()
        code = 0
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        code = 1
    except BaseException:
        traceback.print_exc()
        code = 2
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def wait(child: int, bound: float) -> int:
    """Its exit code; -SIGALRM, which it never gets, if it had to be ended at the bound."""
    deadline = time.monotonic() + bound
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return -signal.SIGALRM


def end_tree(pid: int) -> None:
    """End a process and all that it started."""
    try:
        tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def spread(jobs: Iterable[Callable[[], Any]], deadline: float, lanes: int = 2) -> Iterator[Any]:
    """The jobs' answers, a few at a time, each lane a process of its own; none is begun after the deadline."""
    pending = iter(jobs)
    running: dict[int, BufferedRandom] = {}
    try:
        while True:
            while len(running) < lanes and time.monotonic() < deadline and (job := next(pending, None)) is not None:
                file = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the answer is read
                child = os.fork()
                if child == 0:
                    interrupts.ignore()
                    os._exit(answer(job, file.fileno()))
                running[child] = file
            if not running:
                return
            child, status = os.wait()
            with running.pop(child) as file:
                file.seek(0)
                text = file.read()
            if status:
                code = os.waitstatus_to_exitcode(status)
                raise RuntimeError(f"a job of the chaos run ended with {code}: {text.decode(errors='replace')}")
            yield json.loads(text)
    finally:
        for child in running:
            end_tree(child)
            os.waitpid(child, 0)


def answer(job: Callable[[], Any], handle: int) -> int:
    try:
        text, code = json.dumps(job()), 0
    except BaseException:
        text, code = traceback.format_exc(), 1
    os.write(handle, text.encode())
    return code
