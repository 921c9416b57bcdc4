"""The process around a run: signals that ask it to stop, and the CPU's threads."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from vitlab.errors import Stopped


class Interrupted(KeyboardInterrupt):
    """A signal that stops work at once; like its parent, no `except Exception` on its way keeps it."""


class Signals:
    """SIGINT and SIGTERM: they stop the work at once, except inside `later`, where the first one is noted."""

    def __init__(self) -> None:
        self.number = 0  # of the last one, if any came
        self.waits = False

    def hear(self, number: int, frame: object) -> None:
        again, self.number = self.number != 0, number
        if again or not self.waits:
            raise Interrupted

    @contextmanager
    def later(self) -> Iterator[None]:
        """Work that finishes what it has begun, and looks at `number` then."""
        before, self.waits = self.waits, True
        try:
            yield
        finally:
            self.waits = before

    @contextmanager
    def now(self) -> Iterator[None]:
        """Inside `later`, work that can be dropped; a signal that waited is heard here."""
        before, self.waits = self.waits, False
        try:
            if self.number:
                raise Interrupted
            yield
        finally:
            self.waits = before


@contextmanager
def stoppable(message: str) -> Iterator[Signals]:
    """Work that SIGINT and SIGTERM end with this sentence."""
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals  # Python delivers signals to the main thread alone
        return
    before = {number: signal.signal(number, signals.hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    except KeyboardInterrupt:
        raise Stopped(signals.number or signal.SIGINT, message) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def catch_stop_signals() -> Iterator[list[int]]:
    """Signals that ask to stop, noted for the loop to see; a second one stops at once."""
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    if threading.current_thread() is not threading.main_thread():
        yield asked  # Python delivers signals to the main thread alone
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
