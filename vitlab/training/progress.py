"""What a run says while it goes: a live bar, lines where there is no terminal, a log that can be cut back."""

import json
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitlab.config import UserError

# Dense bf16 tensor throughput by the vendors' data sheets, operations per second.
PEAKS = {
    "B200": 2.25e15,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100": 125e12,
    "T4": 65e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}
QUIET = 5.0  # seconds between lines where there is no terminal


def peak(device: torch.device) -> float | None:
    """The device's peak speed, if it is a GPU of the table."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((speed for key, speed in PEAKS.items() if key in name), None)


class Log:
    """log.jsonl: one record a line. Opened at the length a checkpoint remembers, it loses what came after."""

    def __init__(self, path: Path, length: int) -> None:
        path.touch()
        self.file = path.open("r+b")
        self.file.truncate(length)
        self.file.seek(0, 2)

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record).encode() + b"\n")
        self.file.flush()  # whoever follows the log sees every line at once

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


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min, 2.5 h, 4 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days"


def last_report(log: Path) -> dict[str, float]:
    records = [json.loads(line) for line in log.read_text().splitlines()]
    tests = [record for record in records if "test" in record]
    return dict(tests[-1].get("ema", tests[-1]["test"])) if tests else {}
