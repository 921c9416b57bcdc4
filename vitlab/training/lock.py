"""One process at a time trains in a run's folder.

The lock belongs to the process: the system drops it with the process, however that ends. The lock's file remains, and
names the process that holds it.
"""

import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vitlab.errors import UserError
from vitlab.terminal import warn
from vitlab.training.checkpoint import disk_errors
from vitlab.training.parallel import Cluster

NAME = ".lock"
HELD = (errno.EACCES, errno.EAGAIN)


class Held(UserError):
    """A folder that another process has locked, or this one."""


own_folders: set[str] = set()  # locked by this process: the system would let it lock them again


@contextmanager
def run_lock(out: Path, cluster: Cluster) -> Iterator[None]:
    """Lock a run's folder. Of several processes the first holds the lock; if it cannot, all of them end."""
    with ExitStack() as stack:
        cluster.agree(lambda: stack.enter_context(folder_lock(out)))
        yield


@contextmanager
def folder_lock(out: Path) -> Iterator[None]:
    """Lock a folder for this process; raises Held where it is locked already."""
    try:
        import fcntl
    except ImportError:
        warn(f"this system has no file locks: make sure that nothing else trains in {out}")
        yield
        return
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        place = str(out.resolve())
        if place in own_folders:  # before the file is opened: closing it would drop the lock this process holds
            raise Held(f"this process trains in {out} already; choose another --out")
        handle = os.open(out / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with os.fdopen(handle, "r+b", buffering=0) as file:
        try:
            # POSIX locks, not flock: child processes do not inherit them, and all versions of NFS have them
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in HELD:
                holder = describe_holder(file.read(4096))
                raise Held(f"{out} is in use by {holder}; wait for it, or stop it") from None
            warn(f"files in {out} cannot be locked ({error.strerror}): make sure that nothing else trains there")
        with disk_errors(out):
            file.truncate()
            about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            file.write(json.dumps(about).encode())
        own_folders.add(place)
        try:
            yield
        finally:
            own_folders.discard(place)


def describe_holder(text: bytes) -> str:
    """The process that a lock file names; the file may hold anything, so its content is checked."""
    try:
        about = json.loads(text)
        pid, host, since = int(about["pid"]), str(about["host"])[:64], str(about["since"])[:32]
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
    return f"process {pid} on {host!r} since {since!r}"
