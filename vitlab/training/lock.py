"""One process at a time works in a run's folder.

The lock belongs to the process: the system drops it with the process, however that ends. Its file stays, and says who
holds the lock.
"""

import contextlib
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vitlab.errors import UserError
from vitlab.terminal import warn
from vitlab.training.checkpoint import disk_errors
from vitlab.training.parallel import Cluster

NAME = ".lock"
HELD = (errno.EACCES, errno.EAGAIN)
ours: set[str] = set()  # folders this process works in: to the system, a process never stands in its own way


@contextmanager
def locked(out: Path, cluster: Cluster) -> Iterator[None]:
    """The folder for this run alone. Of many processes the first holds the lock; where it cannot, all of them end."""
    with contextlib.ExitStack() as stack:

        def take() -> None:
            stack.enter_context(held(out))

        cluster.agree(take)
        yield


@contextmanager
def held(out: Path) -> Iterator[None]:
    try:
        import fcntl
    except ImportError:
        warn(f"this system has no file locks: take care that nothing else trains in {out}")
        yield
        return
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        place = str(out.resolve())
        if place in ours:  # before the file is opened: closing it would drop the lock this process holds
            raise UserError(f"this process trains in {out} already; choose another --out")
        number = os.open(out / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(number, "r+b", buffering=0) as file:
        try:
            # of the two kinds, the one that children do not inherit and that NFS has always known
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                raise UserError(f"{out} is in use by {holder(file.read(4096))}; wait for it, or stop it") from None
            warn(f"{out} lies where files cannot be locked ({error.strerror}): nothing else may train there now")
        with disk_errors(out):
            file.truncate()
            about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            file.write(json.dumps(about).encode())
        ours.add(place)
        try:
            yield
        finally:
            ours.discard(place)


def holder(text: bytes) -> str:
    """Who wrote the lock file; anybody may have, so nothing in it is taken on trust."""
    try:
        about = json.loads(text)
        pid, host, since = int(about["pid"]), str(about["host"])[:64], str(about["since"])[:32]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
    return f"process {pid} on {host!r} since {since!r}"
