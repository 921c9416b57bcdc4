"""Pictures from files and bytes that anyone may have made: an upright RGB picture, or BrokenImage in bounded time.

Ordinary photos are decoded right here, since what they cost can be read off their headers. Everything else is decoded
in a process with limits, where a file that goes over its budget is a broken file like any other.
"""

import os
import stat
import threading
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from vitlab.data.decoder import Fault, Shrink, Undecodable, unpack
from vitlab.data.headers import Absurd, read_header
from vitlab.data.sandbox import Sandbox, Wanted

__all__ = ["EXTENSIONS", "BrokenImage", "Shrink", "decode"]

EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jp2"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".tga"}
)
LARGEST = 256 << 20  # bytes of a file
PLAIN_PIXELS = 32_000_000  # beyond it a picture goes to the process with limits,
PLAIN_WORK = 1_000_000_000  # as it does beyond so many pixels times passes: about a second


class BrokenImage(Exception):
    """An image that cannot be decoded: which, and why."""

    def __init__(self, name: str, why: str, fault: Fault = "broken") -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why, self.fault = name, why, fault


def decode(file: str | Path | BinaryIO | bytes, name: str, shrink: Shrink | None = None) -> Image.Image:
    """The picture in a file, turned as its EXIF says, in RGB.

    `shrink` says how many times smaller it may come: a JPEG is then decoded at a fraction of its size.
    """
    try:
        data = file if isinstance(file, bytes) else read(file)
        if is_plain(data) or os.name != "posix":  # elsewhere there are no such limits
            return unpack(data, shrink)
        return sandbox().decode(data, Wanted(), shrink)
    except Undecodable as bad:
        raise BrokenImage(name, bad.why, bad.fault) from None
    except MemoryError:
        raise BrokenImage(name, "there is not enough memory to decode it") from None


def is_plain(data: bytes | bytearray) -> bool:
    """Whether what a file costs is known, and small."""
    try:
        header = read_header(data)
    except Absurd as absurd:
        raise Undecodable("broken", str(absurd)) from None
    return header is not None and header.pixels <= PLAIN_PIXELS and header.work <= PLAIN_WORK


def read(file: str | Path | BinaryIO) -> bytes:
    """The bytes of a regular file, or of an open one; a FIFO or device would be waited for without end."""
    if not isinstance(file, str | Path):
        return file.read()
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as opened:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise Undecodable("broken", "it is not a regular file")
            if about.st_size > LARGEST:
                raise Undecodable("large", f"it is larger than {LARGEST >> 20} MB")
            return opened.read(LARGEST)
    except (OSError, ValueError) as error:  # a path may hold a zero byte
        raise Undecodable("broken", getattr(error, "strerror", None) or str(error)) from None


# ---- one process with limits for each thread that needs one

_own = threading.local()


def sandbox() -> Sandbox:
    """This thread's; a forked process must not use its parent's."""
    if getattr(_own, "pid", None) != os.getpid():
        _own.pid, _own.box = os.getpid(), Sandbox()
    box: Sandbox = _own.box
    return box
