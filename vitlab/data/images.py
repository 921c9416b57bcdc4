"""Images from untrusted files: an upright RGB image, or BrokenImage, in bounded time and memory.

Ordinary photos are decoded in this process, since their headers state what they cost. Everything else is decoded in a
process with limits, where a file that exceeds its budget is a broken file like any other.
"""

import os
import stat
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import BinaryIO

from PIL import Image

from vitlab.data.decoder import Buffer, DecodeError, DecodeFault, DecodeHint, decode_bytes
from vitlab.data.headers import Header, read_header
from vitlab.data.sandbox import DecodeRequest, Sandbox

HEIC = frozenset({".heic", ".heif", ".hif"})
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jp2"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".tga"}
    | (HEIC if find_spec("pillow_heif") else set())
)
MAX_FILE_BYTES = 256 << 20
PLAIN_PIXELS = 32_000_000  # an image with more is decoded in the process with limits,
PLAIN_WORK = 1_000_000_000  # as is one with more pixels times passes: about a second


class BrokenImage(Exception):
    """An image that cannot be decoded: its name, the reason, and the kind of fault."""

    def __init__(self, name: str, why: str, fault: DecodeFault = "broken") -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why, self.fault = name, why, fault


def decode(file: str | Path | BinaryIO | bytes, name: str, shrink: DecodeHint | None = None) -> Image.Image:
    """The RGB image in a file, rotated as its EXIF states; raises BrokenImage with the given name.

    `shrink` returns how many times smaller it may be: a JPEG is then decoded at a fraction of its size.
    """
    try:
        data = file if isinstance(file, bytes) else read_file(file)
        if is_plain(data) or os.name != "posix":  # other systems have no such limits
            return decode_bytes(data, shrink)
        return sandbox().decode(data, DecodeRequest(), shrink)
    except DecodeError as error:
        raise BrokenImage(name, error.why, error.fault) from None
    except MemoryError:
        raise BrokenImage(name, "there is not enough memory to decode it") from None


def is_plain(data: Buffer) -> bool:
    """Whether the cost of decoding a file is known, and small; raises ImpossibleHeader where it is absurd."""
    header = read_header(data)
    return not data or (header is not None and is_cheap(header))


def is_cheap(header: Header) -> bool:
    """Whether an image of this header may be decoded in this process."""
    return header.pixels <= PLAIN_PIXELS and header.work <= PLAIN_WORK


def read_file(file: str | Path | BinaryIO) -> bytes:
    """The bytes of a regular file, or of an open one; reading a FIFO or a device might never end."""
    if not isinstance(file, str | Path):
        return file.read()
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as opened:
            about = os.fstat(handle)
            if not stat.S_ISREG(about.st_mode):
                raise DecodeError("broken", "it is not a regular file")
            if about.st_size > MAX_FILE_BYTES:
                raise DecodeError("large", f"it is larger than {MAX_FILE_BYTES >> 20} MB")
            return opened.read(MAX_FILE_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte
        raise DecodeError("broken", getattr(error, "strerror", None) or str(error)) from None


# ---- one process with limits for each thread that needs one

_local = threading.local()


def sandbox() -> Sandbox:
    """The process of this thread; a forked process must not use its parent's."""
    if getattr(_local, "pid", None) != os.getpid():
        _local.pid, _local.box = os.getpid(), Sandbox()
    return _local.box
