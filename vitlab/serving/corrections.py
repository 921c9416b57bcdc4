"""Photos with the class that a person gave them, kept as a folder of class folders: what `vitlab finetune` takes.

A photo is stored under its digest, so nothing that a client sends becomes part of a path but the number of a class.
Sent again with another class it moves there: one photo never has two labels.
"""

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

from vitlab.data.split_names import SPLIT_NAMES
from vitlab.errors import UserError
from vitlab.files import atomic_file
from vitlab.serving.limits import RequestError

MAX_FILES = 10_000
MAX_BYTES = 4_000_000_000
DIGITS = 20  # of the digest in a file's name
MAX_NAME = 255  # bytes of a folder's name
STARTS = {b"\xff\xd8\xff": ".jpg", b"\x89PNG\r\n\x1a\n": ".png", b"GIF8": ".gif"}
FULL = "the corrections folder is full; its owner can move photos out of it"


class Corrections:
    """A folder of corrections for a model with these labels; methods may be called from any thread."""

    def __init__(
        self, folder: Path, labels: Sequence[str], max_files: int = MAX_FILES, max_bytes: int = MAX_BYTES
    ) -> None:
        self.folder, self.labels, self.max_files, self.max_bytes = folder, labels, max_files, max_bytes
        self.lock = threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.stored()
        except OSError as error:
            raise UserError(f"--corrections '{folder}' cannot be used as a folder: {error.strerror}") from None

    def stored(self) -> dict[Path, int]:
        """The files in the class folders with their sizes; its owner may have moved some out of them."""
        return {path: path.stat().st_size for path in self.folder.glob("*/*") if path.is_file()}

    def add(self, data: bytes, label: int) -> str:
        """Store one image, which must be known to be one, under a class; returns its path in the folder."""
        place = self.class_folder(label)
        path = place / f"{hashlib.sha256(data).hexdigest()[:DIGITS]}{extension(data)}"
        with self.lock:
            try:
                stored = self.stored()
                earlier = [old for old in stored if old.name == path.name]
                others = sum(stored.values()) - sum(stored[old] for old in earlier)
                if len(stored) - len(earlier) >= self.max_files or others + len(data) > self.max_bytes:
                    raise RequestError(507, FULL)
                with atomic_file(path) as file:
                    file.write(data)
                for old in earlier:
                    if old != path:
                        old.unlink(missing_ok=True)
            except (OSError, UserError):
                raise RequestError(507, "the correction cannot be written; the server's disk may be full") from None
        return str(path.relative_to(self.folder))

    def class_folder(self, label: int) -> Path:
        """The folder of a class; a class whose name cannot be that of a folder of a data set is an error."""
        if not 0 <= label < len(self.labels):
            raise RequestError(422, f"label: there is no class {label}; the classes are 0 to {len(self.labels) - 1}")
        name = self.labels[label]
        hidden = not name or name.startswith((".", "__")) or name != name.strip() or not name.isprintable()
        if hidden or "/" in name or "\\" in name or name.lower() in SPLIT_NAMES or len(name.encode()) > MAX_NAME:
            raise RequestError(422, f"the class '{name[:80]}' has a name that no class folder can have")
        return self.folder / name


def extension(data: bytes) -> str:
    """The ending of an image's file by its first bytes."""
    for start, ending in STARTS.items():
        if data.startswith(start):
            return ending
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return ".webp"
    if data[4:8] == b"ftyp" and data[8:11] == b"avi":
        return ".avif"
    raise RequestError(422, "a correction must be a JPEG, PNG, WebP, GIF or AVIF")
