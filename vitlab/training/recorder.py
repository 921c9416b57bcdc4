"""What a run says while it goes: a live bar, lines where there is no terminal, a log that can be cut back."""

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitlab.errors import UserError
from vitlab.terminal import warn
from vitlab.text import duration

QUIET = 5.0  # seconds between lines where there is no terminal


class Log:
    """log.jsonl: one record a line. Opened at the length a checkpoint remembers, it loses what came after."""

    def __init__(self, path: Path, length: int) -> None:
        # unbuffered: whoever follows the log sees every line at once, and on a full disk nothing is left to close
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self.file = os.fdopen(number, "r+b", buffering=0)
        there = os.fstat(self.file.fileno()).st_size
        if there < length:
            warn(f"{path} is {length - there} bytes shorter than its checkpoint says; some records are lost")
        self.file.truncate(min(there, length))
        self.file.seek(0, 2)

    def write(self, record: dict[str, Any]) -> None:
        line = json.dumps(record).encode() + b"\n"
        while line:  # a disk that fills up takes a part
            line = line[self.file.write(line) :]

    def flush(self) -> int:
        """Everything on disk, before a checkpoint speaks of it; the length so far."""
        os.fsync(self.file.fileno())
        return self.file.tell()

    def close(self) -> None:
        self.file.close()


class Board:
    """TensorBoard's event files, for those who ask for them."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("tensorboard=true needs TensorBoard: pip install vitlab[board]") from None
        self.writer = SummaryWriter(str(folder), purge_step=step)

    def write(self, record: dict[str, Any]) -> None:
        """The numbers of a log record; those of a test under its name, as in test/accuracy."""
        for name, value in record.items():
            for key, number in (value if isinstance(value, dict) else {"": value}).items():
                if name != "step":
                    self.writer.add_scalar(f"{name}/{key}" if key else name, number, record["step"])

    def close(self) -> None:
        self.writer.close()


class Bar:
    """Loss, accuracy, images a second, time left and, on a GPU of the table, the share of its peak in use."""

    def __init__(self, console: Console, steps: int, start: int, *, shown: bool) -> None:
        self.console, self.steps, self.shown = console, steps, shown
        self.live = shown and console.is_terminal
        self.words: dict[str, str] = {}
        self.began, self.start, self.spoke = time.monotonic(), start, 0.0
        words = TextColumn("{task.fields[words]}")
        columns = (MofNCompleteColumn(), BarColumn(10), words, TextColumn("left"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, disable=not self.live)  # fits 80 characters
        self.task = self.progress.add_task("train", total=steps, completed=start, words="")

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.progress.stop()

    def update(self, done: int, **words: str) -> None:
        """`done` steps are done; the words stay until they are replaced."""
        self.words |= words
        text = "  ".join(f"{key} {value}" for key, value in self.words.items())
        if self.live:
            self.progress.update(self.task, completed=done, words=text)
        elif self.shown and time.monotonic() - self.spoke > QUIET:
            self.spoke = time.monotonic()
            rate = (self.spoke - self.began) / max(1, done - self.start)
            self.say(f"step {done}/{self.steps}  {text}  left {duration(rate * (self.steps - done))}")

    def say(self, line: str) -> None:
        if self.shown:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


# ---- reading the log, which may be anybody's


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records, of which `number` and `part` take what they need."""
    records = []
    try:
        with path.open("rb") as file:
            for count, line in enumerate(file, 1):
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError(f"line {count} is no object")
                records.append(record)
    except json.JSONDecodeError:
        raise UserError(f"line {len(records) + 1} of {path} is no JSON; remove it, or restore the file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}), so there is no course of the run to show") from None
    return records


def part(record: dict[str, Any], key: str) -> dict[str, Any]:
    """A record inside a record."""
    value = record.get(key)
    if not isinstance(value, dict):
        raise UserError(f"the log has a record whose '{key}' is no object; restore the file")
    return value


def number(record: dict[str, Any], key: str) -> float:
    """A number of a record: finite, and no larger than anything a run counts."""
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e18:
        raise UserError(f"the log has a record whose '{key}' is missing or no sensible number; restore the file")
    return value


def last_report(log: Path) -> dict[str, float]:
    tests = [record for record in read_log(log) if "test" in record]
    found = part(tests[-1], "ema" if "ema" in tests[-1] else "test") if tests else {}
    return {key: float(value) for key, value in found.items() if isinstance(value, float)}
