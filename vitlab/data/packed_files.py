"""Files that hold many encoded images: tar shards, and the flat copies of parquet files."""

import hashlib
import io
import os
from collections.abc import Callable
from typing import Any

from vitlab.data.images import MAX_FILE_BYTES, BrokenImage
from vitlab.errors import UserError

MAX_OPEN = 16  # files open at a time


class PackedFiles:
    """Reads ranges of bytes from files, given by number; pickled without those that are open."""

    def __init__(self, names: list[str], opener: Callable[[str], io.FileIO]) -> None:
        self.names, self.opener = names, opener
        self.files: dict[int, io.FileIO] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "files": {}}

    def read(self, file: int, offset: int, length: int) -> bytes:
        """That many bytes, or fewer where the file ends."""
        if file not in self.files:
            if len(self.files) >= MAX_OPEN:
                self.files.pop(next(iter(self.files))).close()
            self.files[file] = self.opener(self.names[file])
        return os.pread(self.files[file].fileno(), length, offset)

    def image_bytes(self, file: int, offset: int, length: int, name: str) -> bytes:
        """The bytes of an image; raises BrokenImage where there are too many or too few."""
        if length > MAX_FILE_BYTES:  # a file may claim any number
            raise BrokenImage(name, f"it is larger than {MAX_FILE_BYTES >> 20} MB")
        data = self.read(file, offset, length)
        if len(data) < length:
            raise BrokenImage(name, "its file ends before it does")
        return data


def open_unbuffered(path: str, kind: str) -> io.FileIO:
    """Open a file for reading; `kind` describes it in the UserError."""
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise UserError(f"the {kind} '{path}' cannot be opened: {error.strerror}") from None


def file_state(path: str) -> str:
    """A digest of a file's path, size and time of change, which names what is derived from it in the cache."""
    about = os.stat(path)
    return short_digest(f"{os.path.realpath(path)} {about.st_size} {about.st_mtime_ns}")


def short_digest(text: str) -> str:
    return hashlib.sha256(os.fsencode(text)).hexdigest()[:20]
