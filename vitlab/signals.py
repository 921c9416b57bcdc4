"""SIGINT and SIGTERM: they stop work at once or at its next good moment, with a message instead of a traceback."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from vitlab.errors import Stopped
from vitlab.files import remove, unfinished


class Interrupted(KeyboardInterrupt):
    """A signal stops work at once; like its parent, it is not caught by `except Exception`."""


class Signals:
    """The last signal received. It raises Interrupted, except inside `deferred`, where only a second one does."""

    def __init__(self) -> None:
        self.number = 0  # of the last signal, or 0
        self.is_deferred = False

    def handle(self, number: int, frame: object) -> None:
        again, self.number = self.number != 0, number
        if again or not self.is_deferred:
            raise Interrupted

    def deferred(self) -> AbstractContextManager[None]:
        """Work that finishes what it has begun, and looks at `number` then."""
        return self._handled(deferred=True)

    def immediate(self) -> AbstractContextManager[None]:
        """Inside `deferred`, work that can be dropped; a signal that was deferred interrupts it at its start."""
        return self._handled(deferred=False)

    @contextmanager
    def _handled(self, deferred: bool) -> Iterator[None]:
        before, self.is_deferred = self.is_deferred, deferred
        try:
            if self.number and not deferred:
                raise Interrupted
            yield
        finally:
            self.is_deferred = before


@contextmanager
def handle_signals(signals: Signals) -> Iterator[Signals]:
    """Handle SIGINT and SIGTERM inside a `with`; outside the main thread, to which Python delivers them, do nothing."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM) if is_main else ()
    before = {number: signal.signal(number, signals.handle) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def stoppable(message: str) -> Iterator[Signals]:
    """Work that a signal ends by raising Stopped with this message."""
    with handle_signals(Signals()) as signals:
        try:
            yield signals
        except KeyboardInterrupt:
            raise Stopped(signals.number or signal.SIGINT, message) from None


class Ending(Signals):
    """A signal ends the process where it is, with this message, after the removal of unfinished files."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    def handle(self, number: int, frame: object) -> None:
        for path in tuple(unfinished):
            remove(path)
        clear = "\r\x1b[K\x1b[?25h" if sys.stderr.isatty() else ""  # a spinner's line, and the cursor it hides
        text = f"{clear}{self.message}\n".encode(errors="backslashreplace")
        os.write(2, text)  # not by the stream, in the middle of whose own write the signal may have come
        os._exit(128 + number)


@contextmanager
def ending(message: str) -> Iterator[None]:
    """Work, mostly that of libraries in C++, through which an exception may crash or become an error of theirs."""
    with handle_signals(Ending(message)):
        yield


@contextmanager
def catch_stop_signals() -> Iterator[Signals]:
    """Work that looks at `number` from time to time; a second signal interrupts it."""
    signals = Signals()
    with signals.deferred(), handle_signals(signals):
        yield signals


@contextmanager
def postponed() -> Iterator[None]:
    """Work that a signal must not leave half done: one that comes meanwhile is handled after it."""
    with catch_stop_signals() as signals:
        yield
    if signals.number:
        signal.raise_signal(signals.number)


@contextmanager
def held_back() -> Iterator[None]:
    """Start processes in which SIGINT waits for `let_through`: until they have a handler it would be a traceback."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    from multiprocessing.resource_tracker import ensure_running  # takes 12 ms

    ensure_running()  # whose start would let it through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def let_through() -> None:
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
