"""Files that hold many encoded images: tar shards, and the flat copies of parquet files."""

import hashlib
import io
import os
from typing import Any

import numpy as np
from PIL import Image

from vitlab.data.decoder import DecodeHint
from vitlab.data.images import MAX_FILE_BYTES, BrokenImage, decode
from vitlab.data.rng import Ints
from vitlab.data.source import LabeledSource
from vitlab.errors import UserError

MAX_OPEN = 16  # files open at a time


class PackedSource(LabeledSource):
    """Images inside larger files, by number of the file, offset and length; pickled without its open files."""

    def __init__(self, paths: list[str], labels: Ints, classes: tuple[str, ...]) -> None:
        super().__init__(labels, classes)
        self.paths = paths
        self.shard = self.offset = self.length = np.zeros(0, np.int64)  # (n,), set by subclasses
        self.opened: dict[int, io.FileIO] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": {}}

    def open_file(self, path: str) -> io.FileIO:
        return open_unbuffered(path)

    def read(self, file: int, offset: int, length: int) -> bytes:
        """That many bytes, or fewer where the file ends."""
        if file not in self.opened:
            if len(self.opened) >= MAX_OPEN:
                self.opened.pop(next(iter(self.opened))).close()
            self.opened[file] = self.open_file(self.paths[file])
        return os.pread(self.opened[file].fileno(), length, offset)

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        try:
            return decode(self._encoded(index), "", shrink)
        except BrokenImage as error:
            raise BrokenImage(self.name(index), error.why) from None

    def _encoded(self, index: int) -> bytes:
        length = int(self.length[index])
        if length < 0:
            raise BrokenImage("", "the row holds no bytes")
        if length > MAX_FILE_BYTES:  # a file may claim any number
            raise BrokenImage("", f"it is larger than {MAX_FILE_BYTES >> 20} MB")
        data = self.read(int(self.shard[index]), int(self.offset[index]), length)
        if len(data) < length:
            raise BrokenImage("", "its file ends before it does")
        return data


def open_unbuffered(path: str) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise UserError(f"'{path}' cannot be opened: {error.strerror}") from None


def file_state(path: str) -> str:
    """A digest of a file's path, size and time of change, which names what is derived from it in the cache."""
    about = os.stat(path)
    return short_digest(f"{os.path.realpath(path)} {about.st_size} {about.st_mtime_ns}")


def short_digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:20]
