"""Parquet to a flat copy, in a process of its own that runs `main(FILE, COPY, SECONDS)`.

A few bytes of parquet can expand to any amount of data: nulls in runs, one long value repeated, pages of zeros. So
nothing else reads parquet. This process has little memory and SECONDS of a core, and a crash affects no other. It
writes the images one after another to COPY.bin, their positions, labels and class names to COPY.npz, and one line of
JSON to its standard output: {"note": ...} or {"error": ...}. A column of lists is that of a multi-label set: its labels
follow each other, and their number in each row is kept beside them.
"""

import contextlib
import json
import os
from array import array
from typing import IO, Any

import numpy as np

from vitlab.data.images import MAX_FILE_BYTES
from vitlab.data.labels import MAX_LABEL_LENGTH, are_too_many
from vitlab.errors import UserError
from vitlab.models.config import MOST_CLASSES
from vitlab.text import brief, listed, valid_text

IMAGE_COLUMNS = ("image", "img", "jpg", "png", "webp")
LABEL_COLUMNS = ("label", "labels", "fine_label", "cls", "class")
STRAY = "; if it only lies beside photos, move it out of their folder"
MEMORY = 1 << 30  # bytes for this process
BATCH = 32  # rows unpacked at a time
FREE_ROWS, MAX_ROWS = 1_000_000, 20_000_000  # beyond the first, each row needs a byte of the file
FREE_BYTES, MAX_GROWTH = 256 << 20, 10  # a file may unpack to so many bytes, and so many times its size
MAX_NAME_LENGTH = 1000  # characters of an image's name
MAX_LABELS = 1000  # of one image, in a column of lists


def main(path: str, copy: str, seconds: int) -> None:
    with contextlib.suppress(ImportError):  # not a POSIX system
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(ValueError):  # the user's own limit is lower
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    try:
        reply = {"note": FlatCopyWriter(path, copy).write()}
    except UserError as error:
        reply = {"error": str(error)}
    except MemoryError:
        reply = {"error": f"'{path}' unpacks to more than there is memory for; is it what it claims to be?"}
    except Exception as error:  # the reader raises nearly anything on broken bytes
        reply = {"error": f"'{path}' cannot be read as parquet: {brief(error)}"}
    print(json.dumps(reply))


class FlatCopyWriter:
    """Copies the images and labels of one file, row by row."""

    def __init__(self, path: str, copy: str) -> None:
        import pyarrow.parquet as pq

        self.path, self.copy = path, copy
        self.size = os.path.getsize(path)
        self.file = pq.ParquetFile(path, buffer_size=1 << 20)
        self.image, self.label = self.find_column(IMAGE_COLUMNS, STRAY), self.find_column(LABEL_COLUMNS)
        self.offset, self.length, self.name_length = array("q"), array("q"), array("H")
        self.labels: list[np.ndarray] = []
        self.counts: list[np.ndarray] | None = None  # of each image's labels, in a column of lists
        self.words: dict[str, int] = {}  # labels that are text, with their numbers
        self.characters = 0

    def find_column(self, known: tuple[str, ...], hint: str = "") -> str:
        names = self.file.schema_arrow.names
        found = next((name for name in known if name in names), None)
        if found is None:
            raise UserError(f"'{self.path}' has the columns {', '.join(names)} and none called {listed(known)}{hint}")
        return found

    def write(self) -> str:
        """Write the copy; returns a warning for the user, or ""."""
        self.check_rows(self.file.metadata.num_rows)
        names, note = class_names(self.file.schema_arrow.metadata or {}, self.label)
        with open(f"{self.copy}.bin", "wb") as out:
            for batch in self.file.iter_batches(BATCH, columns=[self.image, self.label], use_threads=False):
                self.write_images(batch.column(self.image), out)
                self.labels.append(self.to_numbers(self.flatten(batch.column(self.label))))
                self.check_rows(len(self.offset))
        about = np.frombuffer(json.dumps({"names": names, "words": list(self.words)}).encode(), np.uint8)
        arrays: dict[str, Any] = {"label": np.concatenate([np.zeros(0, np.int64), *self.labels])}
        if self.counts is not None:
            arrays["labels"] = np.concatenate([np.zeros(0, np.int64), *self.counts])
        with open(f"{self.copy}.npz", "wb") as index:
            np.savez(index, offset=self.offset, length=self.length, name=self.name_length, about=about, **arrays)
        return note and f"'{self.path}': {note}"

    def check_rows(self, count: int) -> None:
        if count > min(MAX_ROWS, max(FREE_ROWS, self.size)):
            raise UserError(
                f"'{self.path}' claims {count:,} rows in {self.size:,} bytes; split it, or look for a better copy"
            )

    def write_images(self, column: Any, out: IO[bytes]) -> None:
        """Write each image's name, then its bytes; the length of a row without bytes is -1."""
        for row in getattr(column, "dictionary_decode", lambda: column)():
            buffer, name = self.image_parts(row)
            size = -1 if buffer is None else buffer.size
            out.write(name)
            self.offset.append(out.tell())
            self.length.append(size)
            self.name_length.append(len(name))
            if buffer is not None and size <= MAX_FILE_BYTES:  # a larger one counts as broken
                out.write(buffer)
            if out.tell() > FREE_BYTES + MAX_GROWTH * self.size:
                raise UserError(
                    f"'{self.path}' unpacks to more than {MAX_GROWTH} times its size; is it what it claims to be?"
                )

    def image_parts(self, row: Any) -> tuple[Any, bytes]:
        """An image's bytes, or None, and its name, from the hub's pairs or from a plain column."""
        data, path = (row.get("bytes"), row.get("path")) if hasattr(row, "items") else (row, None)
        if not (data is None or hasattr(data, "as_buffer")):
            raise UserError(f"the column '{self.image}' of '{self.path}' holds {data.type}, not the bytes of images")
        name = "" if path is None or not path.is_valid else to_text(path)[-MAX_NAME_LENGTH:]
        return None if data is None or not data.is_valid else data.as_buffer(), name.encode()

    def flatten(self, column: Any) -> Any:
        """The labels of a column of lists one after another, with their number noted; a null is an empty list."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if not (pa.types.is_list(column.type) or pa.types.is_large_list(column.type)):
            return column
        counts = pc.list_value_length(column).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if counts.max(initial=0) > MAX_LABELS:
            raise UserError(f"'{self.path}' has an image of {counts.max():,} labels; {MAX_LABELS:,} are the most")
        self.counts = [] if self.counts is None else self.counts
        self.counts.append(counts)
        return column.flatten()

    def to_numbers(self, column: Any) -> np.ndarray:
        """Labels as numbers; text is numbered in order of appearance; -1 where there is none."""
        import pyarrow as pa

        kind = column.type
        if pa.types.is_dictionary(kind):
            return self.to_numbers(column.dictionary_decode())
        if pa.types.is_integer(kind):
            return column.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        if pa.types.is_null(kind):
            return np.full(len(column), -1, np.int64)
        if not (pa.types.is_boolean(kind) or pa.types.is_floating(kind) or hasattr(pa.scalar(None, kind), "as_buffer")):
            raise UserError(f"the column '{self.label}' of '{self.path}' holds {kind}; labels are numbers or text")
        return np.array([-1 if not value.is_valid else self.word_number(to_text(value)) for value in column], np.int64)

    def word_number(self, word: str) -> int:
        """The number of a label that is text; raises UserError where it is too long, or one too many."""
        if len(word) > MAX_LABEL_LENGTH:
            raise UserError(f"'{self.path}' has a label of {len(word):,} characters; {MAX_LABEL_LENGTH} are the most")
        if word not in self.words:
            self.characters += len(word)
            self.words[word] = len(self.words)
            if are_too_many(len(self.words), self.characters):
                raise UserError(f"'{self.path}' has more than {MOST_CLASSES:,} different labels, or very long ones")
        return self.words[word]


def to_text(value: Any) -> str:
    if hasattr(value, "as_buffer"):
        return value.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
    return str(value.as_py())


def class_names(metadata: dict[bytes, bytes], column: str) -> tuple[list[str], str]:
    """The class names that the hub keeps in the schema, and a warning where they cannot be used, or ""."""
    bad: tuple[list[str], str] = [], "the class names in its schema cannot be read and are not used"
    try:
        found = json.loads(metadata.get(b"huggingface", b"{}"))
        for key in ("info", "features", column):
            found = found.get(key, {})
        found = found[0] if isinstance(found, list) else found  # lists of labels, in two spellings
        found = found.get("feature", found).get("names")
        if found is None:
            return [], ""
    except (ValueError, RecursionError, AttributeError, IndexError):  # no JSON, or no objects inside each other
        return bad
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        return bad
    if max(map(len, found), default=0) > MAX_LABEL_LENGTH or are_too_many(len(found), sum(map(len, found))):
        return bad
    return [valid_text(name) for name in found], ""
