"""What `vitlab predict` is asked about: files, folders, patterns, addresses and standard input, in one fixed order."""

import glob
import io
import os
import sys
import time
from collections.abc import Iterator, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO
from urllib import request
from urllib.error import URLError
from urllib.parse import urlsplit

import numpy as np
from PIL import Image

from vitlab import __version__
from vitlab.config import UserError
from vitlab.data.folder import walk
from vitlab.data.images import EXTENSIONS, BrokenImage, Shrink, decode

STDIN = "-"
LARGEST = 64 << 20  # bytes that one address or standard input may send
PATIENCE = 20.0  # seconds for a server to answer, and for a picture to come whole


class Inputs:
    """Pictures by name, each decoded when asked for; pickled to the processes that decode."""

    def __init__(self, names: Sequence[str], stdin: bytes = b"") -> None:
        self.names = np.array([os.fsencode(name) for name in names], np.bytes_)  # one block, which workers share
        self.stdin = stdin

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return os.fsdecode(self.names[index])

    def image(self, index: int, shrink: Shrink | None = None) -> Image.Image:
        """The upright RGB picture, or BrokenImage."""
        name = self.name(index)
        if name == STDIN:
            return decode(io.BytesIO(self.stdin), "standard input", shrink)
        if is_address(name):
            return decode(io.BytesIO(fetch(name)), name, shrink)
        return decode(name, name, shrink)


def find(words: Sequence[str], *, allow_url: bool = False) -> Inputs:
    """The pictures that words name: each once, words in their order, the files of a folder or pattern sorted."""
    names = dict.fromkeys(name for word in words for name in expand(word, allow_url))
    if not names:
        raise UserError(f"{', '.join(words)}: there is no image here, such as .jpg or .png")
    return Inputs(list(names), read_stdin() if STDIN in names else b"")


def expand(word: str, allow_url: bool) -> Iterator[str]:
    if word == STDIN:
        return iter([STDIN])
    if "://" in word:
        check_address(word, allow_url)
        return iter([word])
    path = os.path.expanduser(word)
    if os.path.isdir(path):
        return iter(sorted(walk(Path(path))))
    if os.path.exists(path):
        return iter([path])  # named by the user, so whatever its ending
    if glob.has_magic(path):
        return matches(path)
    raise UserError(f"there is no file or folder '{word}'")


def matches(pattern: str) -> Iterator[str]:
    """The images a pattern matches and those in folders that it matches."""
    found = sorted(glob.glob(pattern, recursive=True))
    if not found:
        raise UserError(f"nothing matches '{pattern}'")
    for path in found:
        if os.path.isdir(path):
            yield from sorted(walk(Path(path)))
        elif os.path.splitext(path)[1].lower() in EXTENSIONS:
            yield path


def read_stdin() -> bytes:
    if sys.stdin.isatty():
        raise UserError("'-' reads one image from standard input, and nothing is sent there; write: ... - < FILE")
    try:
        return read_limited(sys.stdin.buffer, "standard input", None)
    except BrokenImage as bad:
        raise UserError(str(bad)) from None


def read_limited(file: IO[bytes], name: str, deadline: float | None) -> bytes:
    """All of a stream that may send no more than LARGEST, and may not go on for ever."""
    parts, size = [], 0
    read = getattr(file, "read1", file.read)  # what is there, rather than waiting for a whole block
    while part := read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise BrokenImage(name, f"it is larger than {LARGEST >> 20} MB")
        if deadline is not None and time.monotonic() > deadline:
            raise BrokenImage(name, f"it did not come whole within {PATIENCE:.0f} seconds")
    return b"".join(parts)


# ---- addresses


def is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def check_address(word: str, allowed: bool) -> None:
    if not is_address(word):
        raise UserError(f"'{word}' is no address that can be fetched; only http:// and https:// are")
    if not allowed:
        raise UserError(f"'{word}' is an address, and nothing is fetched unless asked to: add --allow-url")
    if not urlsplit(word).hostname:
        raise UserError(f"'{word}' names no host")


def fetch(address: str) -> bytes:
    """The bytes behind an address; redirections stay within http and https."""
    opener = request.OpenerDirector()
    for handler in (
        request.ProxyHandler,
        request.HTTPHandler,
        request.HTTPSHandler,
        request.HTTPRedirectHandler,
        request.HTTPErrorProcessor,
        request.HTTPDefaultErrorHandler,
        request.UnknownHandler,
    ):
        opener.add_handler(handler())
    asked = request.Request(address, headers={"User-Agent": f"vitlab/{__version__}", "Accept": "image/*"})
    deadline = time.monotonic() + PATIENCE
    try:
        with opener.open(asked, timeout=PATIENCE) as answer:
            return read_limited(answer, address, deadline)
    except (OSError, HTTPException, ValueError) as error:
        why = error.reason if type(error) is URLError else error
        raise BrokenImage(address, str(why) or type(error).__name__) from None
