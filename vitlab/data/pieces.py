"""Pieces of large files, read where they lie: pictures in tar shards and in the flat copies of parquet files."""

import io
import os
from collections.abc import Callable
from typing import Any

from vitlab.data.images import BrokenImage

KEEP = 16  # files open at a time
LARGEST = 256 << 20  # bytes of one encoded picture; a file may claim any number


class Pieces:
    """Files by number; pickled without those that are open."""

    def __init__(self, names: list[str], opener: Callable[[str], io.FileIO]) -> None:
        self.names, self.opener = names, opener
        self.files: dict[int, io.FileIO] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "files": {}}

    def read(self, file: int, offset: int, length: int) -> bytes:
        """That many bytes, or fewer where the file ends."""
        if file not in self.files:
            if len(self.files) >= KEEP:
                self.files.pop(next(iter(self.files))).close()
            self.files[file] = self.opener(self.names[file])
        return os.pread(self.files[file].fileno(), length, offset)

    def picture(self, file: int, offset: int, length: int, name: str) -> io.BytesIO:
        """A picture's bytes, all of them, or BrokenImage."""
        if length > LARGEST:
            raise BrokenImage(name, f"it is larger than {LARGEST >> 20} MB")
        data = self.read(file, offset, length)
        if len(data) < length:
            raise BrokenImage(name, "its file ends before it does")
        return io.BytesIO(data)
