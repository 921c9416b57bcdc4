"""A Ctrl-C for the chaos run, which is not lost to a training in the same process.

Training has a handler of its own, and blocking the signal meanwhile only keeps it from this thread: another one may
receive it. Python writes the number of every signal to the wake-up file, whatever handler it has, so a Ctrl-C that was
taken by another handler is found there.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

FILES: list[int] = []  # the pipe's ends, once `watch` has been called


def watch() -> None:
    """Record the signals of this process from now on, and Ctrl-C even where a shell that started it ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    FILES[:] = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(FILES[1], warn_on_full_buffer=False)


def ignore() -> None:
    """In a copy of the process: its signals are not the chaos run's."""
    signal.set_wakeup_fd(-1)


def check() -> None:
    """Raise KeyboardInterrupt if there was a Ctrl-C since the last time."""
    with contextlib.suppress(BlockingIOError):
        if FILES and signal.SIGINT in os.read(FILES[0], 4096):
            raise KeyboardInterrupt


@contextlib.contextmanager
def later() -> Iterator[None]:
    """Keep a Ctrl-C until the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        check()
