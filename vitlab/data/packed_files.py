"""Files that hold many encoded images: tar shards, and the flat copies of parquet files."""

import hashlib
import io
import os
from typing import Any

import numpy as np
from PIL import Image

from vitlab.data.decoder import DecodeHint
from vitlab.data.images import MAX_FILE_BYTES, BrokenImage, decode
from vitlab.data.label_sets import Truth
from vitlab.data.source import ImageSource
from vitlab.errors import UserError

MAX_OPEN = 16  # files open at a time
Index = dict[str, np.ndarray]  # offset and length of each image, and more for each kind of file


def join_indexes(parts: list[Index]) -> Index:
    """One index of the images in several files; adds the number of each image's file, its shard."""
    joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return joined | {"shard": np.repeat(np.arange(len(parts)), [len(part["offset"]) for part in parts])}


def open_unbuffered(path: str) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise UserError(f"'{path}' cannot be opened: {error.strerror}") from None


class PackedSource(ImageSource):
    """Images inside larger files, by number of the file, offset and length; pickled without its open files."""

    open_file = staticmethod(open_unbuffered)

    def __init__(self, paths: list[str], index: Index, truth: Truth, classes: tuple[str, ...]) -> None:
        super().__init__(truth, classes)
        self.paths, self.shard, self.offset, self.length = paths, index["shard"], index["offset"], index["length"]
        self.opened: dict[int, io.FileIO] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "opened": {}}

    def read(self, file: int, offset: int, length: int) -> bytes:
        """That many bytes, or fewer where the file ends."""
        if file not in self.opened:
            if len(self.opened) >= MAX_OPEN:
                self.opened.pop(next(iter(self.opened))).close()
            self.opened[file] = self.open_file(self.paths[file])
        return os.pread(self.opened[file].fileno(), length, offset)

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        try:
            return decode(self._bytes(index), "", shrink)
        except BrokenImage as error:  # its name may take a read
            raise BrokenImage(self.name(index), error.why) from None

    def encoded(self, index: int) -> bytes:
        try:
            return self._bytes(index)
        except BrokenImage as error:
            raise BrokenImage(self.name(index), error.why) from None

    def identity(self) -> str | None:
        try:
            files = " ".join(map(file_state, self.paths))
        except OSError:  # a pipe's shard has no file
            return None
        index = b"".join(part.tobytes() for part in (self.shard, self.offset, self.length))
        return hashlib.sha256(files.encode() + index).hexdigest()

    def _bytes(self, index: int) -> bytes:
        length = int(self.length[index])
        if length < 0:
            raise BrokenImage("", "the row holds no bytes")
        if length > MAX_FILE_BYTES:  # a file may claim any number
            raise BrokenImage("", f"it is larger than {MAX_FILE_BYTES >> 20} MB")
        data = self.read(int(self.shard[index]), int(self.offset[index]), length)
        if len(data) < length:
            raise BrokenImage("", "its file ends before it does")
        return data


def file_state(path: str) -> str:
    """A digest of a file's path, size and time of change, which names what is derived from it in the cache."""
    about = os.stat(path)
    return short_digest(f"{os.path.realpath(path)} {about.st_size} {about.st_mtime_ns}")


def short_digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:20]
