"""The images `vitlab predict` reads: files, folders, patterns, addresses and standard input, in one fixed order."""

import glob
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.data.decoder import HEIC_FIX, DecodeHint
from vitlab.data.folder import is_special, log, walk_images, warn_skipped
from vitlab.data.images import EXTENSIONS, HEIC, BrokenImage, decode
from vitlab.errors import UserError
from vitlab.prediction.web import check_url, fetch, is_url, read_limited

STDIN = "-"


class Inputs:
    """Images by name, each decoded when asked for; pickled to the worker processes."""

    def __init__(self, names: Sequence[str], stdin: bytes = b"") -> None:
        self.names = np.array([os.fsencode(name) for name in names], np.bytes_)  # one block, which workers share
        self.stdin = stdin

    def __len__(self) -> int:
        return len(self.names)

    def name(self, index: int) -> str:
        return os.fsdecode(self.names[index])

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        """The upright RGB image, or BrokenImage."""
        name = self.name(index)
        if name == STDIN:
            return decode(self.stdin, "standard input", shrink)
        return decode(fetch(name) if is_url(name) else name, name, shrink)


def find_inputs(paths: Sequence[str], *, allow_url: bool = False) -> Inputs:
    """The images that arguments name: each once, in the order given, the files of a folder or pattern sorted."""
    skipped: list[str] = []
    names = dict.fromkeys(name for path in paths for name in expand(path, allow_url, skipped))
    if not names:
        has = (
            f"no image but {len(skipped)} HEIC photos; {HEIC_FIX}" if skipped else "no image here, such as .jpg or .png"
        )
        raise UserError(f"{', '.join(paths)}: there is {has}")
    warn_skipped(", ".join(paths), len(skipped))
    return Inputs(list(names), read_stdin() if STDIN in names else b"")


def expand(argument: str, allow_url: bool, skipped: list[str]) -> Iterator[str]:
    """The names of the images that one argument stands for; `skipped` gets HEIC photos that cannot be read here."""
    path = os.path.expanduser(argument)
    if argument == STDIN:
        yield STDIN
    elif "://" in argument:
        check_url(argument, allow_url)
        yield argument
    elif os.path.isdir(path):
        yield from sorted(walk_images(Path(path), skipped))
    elif os.path.exists(path):
        if is_special(path):
            raise UserError(f"'{argument}' is a pipe or a device, not a file; write '-' to read one image from a pipe")
        yield path  # named explicitly, so any file extension is accepted
    elif glob.has_magic(path):
        yield from match_pattern(path, skipped)
    else:
        raise UserError(f"there is no file or folder '{argument}'")


def match_pattern(pattern: str, skipped: list[str]) -> Iterator[str]:
    """The images a pattern matches and those in folders that it matches."""
    paths = sorted(glob.glob(pattern, recursive=True))
    if not paths:
        raise UserError(f"nothing matches '{pattern}'")
    for path in paths:
        if os.path.isdir(path):
            yield from sorted(walk_images(Path(path), skipped))
        elif os.path.splitext(path)[1].lower() in HEIC - EXTENSIONS:
            skipped.append(path)
        elif os.path.splitext(path)[1].lower() in EXTENSIONS:
            if is_special(path):
                log.warning("'%s' is not a regular file and is skipped", path)
            else:
                yield path


def read_stdin() -> bytes:
    if sys.stdin.isatty():
        raise UserError("'-' reads one image from standard input, and nothing is sent there; write: ... - < FILE")
    try:
        return read_limited(sys.stdin.buffer, "standard input")
    except BrokenImage as bad:
        raise UserError(str(bad)) from None
