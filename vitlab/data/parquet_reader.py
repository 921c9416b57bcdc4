"""Parquet to a flat copy, in a process of its own: `python -m vitlab.data.parquet_reader FILE COPY`.

A few bytes of parquet can stand for any amount of data: nulls in runs, one long value repeated, pages of zeros. So
nothing else reads parquet. This process may use little memory, and what crashes it harms nobody. It writes the
pictures one after another to COPY.bin, where each is, with labels and class names, to COPY.npz, and one line of JSON
to its output: {"note": ...} or {"error": ...}.
"""

import json
import os
import sys
from array import array
from typing import IO, Any

import numpy as np

from vitlab.data.pieces import LARGEST
from vitlab.data.storage import ALL_LABELS, LONGEST_LABEL
from vitlab.errors import UserError
from vitlab.models.config import MOST_CLASSES
from vitlab.text import listed, valid_text

IMAGES, LABELS = ("image", "img", "jpg", "png", "webp"), ("label", "labels", "fine_label", "cls", "class")
MEMORY = 1 << 30  # bytes for this process
BATCH = 32  # rows unpacked at a time
FREE_ROWS, MOST_ROWS = 1_000_000, 20_000_000  # more than the first need a byte of the file each
FREE_BYTES, GROWTH = 256 << 20, 10  # what a file may unpack to: this, and so many times its size
LONGEST_PATH = 1000  # letters of a picture's name


def main(path: str, copy: str) -> None:
    limit_memory()
    try:
        note = Flat(path, copy).write()
        print(json.dumps({"note": note}))
    except UserError as error:
        print(json.dumps({"error": str(error)}))
    except MemoryError:
        print(json.dumps({"error": f"'{path}' unpacks to more than there is memory for; is it what it claims to be?"}))
    except Exception as error:  # the reader raises nearly anything on broken bytes
        why = (str(error).splitlines() or [type(error).__name__])[0]
        print(json.dumps({"error": f"'{path}' cannot be read as parquet: {why}"}))


def limit_memory() -> None:
    try:
        import resource  # not on every system
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


class Flat:
    """One file's pictures and labels, row by row."""

    def __init__(self, path: str, copy: str) -> None:
        import pyarrow.parquet as pq

        self.path, self.copy = path, copy
        self.size = os.path.getsize(path)
        self.file = pq.ParquetFile(path, buffer_size=1 << 20)
        self.image, self.label = self.column(IMAGES), self.column(LABELS)
        self.offset, self.length, self.name = array("q"), array("q"), array("H")
        self.labels: list[np.ndarray] = []
        self.words: dict[str, int] = {}  # of labels that are no numbers, by their own
        self.letters = 0
        self.written = 0

    def column(self, known: tuple[str, ...]) -> str:
        names = self.file.schema_arrow.names
        found = next((name for name in known if name in names), None)
        if found is None:
            raise UserError(f"'{self.path}' has the columns {', '.join(names)} and none called {listed(known)}")
        return found

    def write(self) -> str:
        """The copy; returns what the user should know."""
        self.check_rows(self.file.metadata.num_rows)
        names, note = class_names(self.file.schema_arrow.metadata or {}, self.label)
        columns = [self.image, self.label]
        with open(f"{self.copy}.bin", "wb") as out:
            for batch in self.file.iter_batches(BATCH, columns=columns, use_threads=False):
                self.add_pictures(batch.column(self.image), out)
                self.labels.append(self.numbers(batch.column(self.label)))
                self.check_rows(len(self.offset))
        about = json.dumps({"names": names, "words": list(self.words)}).encode()
        with open(f"{self.copy}.npz", "wb") as index:
            np.savez(
                index,
                offset=np.array(self.offset, np.int64),
                length=np.array(self.length, np.int64),
                name=np.array(self.name, np.uint16),
                label=np.concatenate([np.zeros(0, np.int64), *self.labels]),
                about=np.frombuffer(about, np.uint8),
            )
        return note and f"'{self.path}': {note}"

    def check_rows(self, count: int) -> None:
        if count > min(MOST_ROWS, max(FREE_ROWS, self.size)):
            raise UserError(
                f"'{self.path}' claims {count:,} rows in {self.size:,} bytes; split it, or look for a better copy"
            )

    def add_pictures(self, column: Any, out: IO[bytes]) -> None:
        """A picture's name, then its bytes; -1 is the length of a row without."""
        for row in getattr(column, "dictionary_decode", lambda: column)():
            data, name = parts(row)
            if not (data is None or hasattr(data, "as_buffer")):
                raise UserError(
                    f"the column '{self.image}' of '{self.path}' holds {data.type}, not the bytes of pictures"
                )
            buffer = None if data is None or not data.is_valid else data.as_buffer()
            size = -1 if buffer is None else buffer.size
            self.offset.append(self.written + len(name))
            self.length.append(size)
            self.name.append(len(name))
            out.write(name)
            self.written += len(name)
            if buffer is not None and size <= LARGEST:  # a larger one counts as broken
                out.write(buffer)
                self.written += size
            if self.written > FREE_BYTES + GROWTH * self.size:
                raise UserError(
                    f"'{self.path}' unpacks to more than {GROWTH} times its size; is it what it claims to be?"
                )

    def numbers(self, column: Any) -> np.ndarray:
        """Labels as numbers; of words, those of their first appearance; -1 where there is none."""
        import pyarrow as pa

        kind = column.type
        if pa.types.is_dictionary(kind):
            return self.numbers(column.dictionary_decode())
        if pa.types.is_integer(kind):
            return column.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        if pa.types.is_null(kind):
            return np.full(len(column), -1, np.int64)
        if not (pa.types.is_boolean(kind) or pa.types.is_floating(kind) or hasattr(pa.scalar(None, kind), "as_buffer")):
            raise UserError(f"the column '{self.label}' of '{self.path}' holds {kind}; labels are numbers or words")
        return np.array([-1 if not value.is_valid else self.number(text(value)) for value in column], np.int64)

    def number(self, word: str) -> int:
        if len(word) > LONGEST_LABEL:
            raise UserError(f"'{self.path}' has a label of {len(word):,} letters; {LONGEST_LABEL} are the most")
        if word not in self.words:
            self.letters += len(word)
            self.words[word] = len(self.words)
            if len(self.words) > MOST_CLASSES or self.letters > ALL_LABELS:
                raise UserError(f"'{self.path}' has more than {MOST_CLASSES:,} different labels, or very long ones")
        return self.words[word]


def parts(row: Any) -> tuple[Any, bytes]:
    """A picture's bytes and name, of the hub's pairs or of a plain column."""
    if not hasattr(row, "items"):
        return row, b""
    data, path = row.get("bytes"), row.get("path")
    name = "" if path is None or not path.is_valid else text(path)[-LONGEST_PATH:]
    return data, name.encode()


def text(value: Any) -> str:
    if hasattr(value, "as_buffer"):
        return value.as_buffer().to_pybytes().decode("utf-8", "backslashreplace")
    return str(value.as_py())


def class_names(metadata: dict[bytes, bytes], column: str) -> tuple[list[str], str]:
    """The class names that the hub keeps in the schema, and what is wrong with them."""
    if b"huggingface" not in metadata:
        return [], ""
    bad = "what its schema tells of classes cannot be read, and is not used"
    try:
        found = json.loads(metadata[b"huggingface"])
    except (ValueError, RecursionError):
        return [], bad
    for key in ("info", "features", column, "names"):
        if not isinstance(found, dict):
            return [], bad
        found = found.get(key)
        if found is None:
            return [], ""
    if not (isinstance(found, list) and all(isinstance(name, str) and len(name) <= LONGEST_LABEL for name in found)):
        return [], bad
    if len(found) > MOST_CLASSES or sum(map(len, found)) > ALL_LABELS:
        return [], bad
    return [valid_text(name) for name in found], ""


if __name__ == "__main__":
    main(*sys.argv[1:])
