"""Parquet files as the Hugging Face hub lays them out: columns of images and labels, class names in the schema.

Parquet cannot be read row by row, and training asks for rows in any order. So the images of a file are held in
memory, or, where there are too many, copied once into a flat file that is mapped.
"""

import bisect
import hashlib
import io
import json
import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vitlab.config import UserError, listed
from vitlab.data.draws import Ints
from vitlab.data.images import BrokenImage, Shrink, decode
from vitlab.data.splits import by_split, cache_folder

IN_MEMORY = 4 << 30  # bytes of a split that are held in memory; more are mapped from a flat copy
IMAGES, LABELS = ("image", "img", "jpg", "png", "webp"), ("label", "labels", "fine_label", "cls", "class")


class Rows:
    """The rows of parquet files, one after another."""

    groups = None

    def __init__(self, files: list[str], labels: Ints, classes: tuple[str, ...], column: str) -> None:
        self.files, self.labels, self.classes, self.column = files, labels, classes, column
        self._open()

    def _open(self) -> None:
        self.chunks = read_images(self.files, self.column)
        self.starts = np.cumsum([0] + [len(chunk) for chunk in self.chunks]).tolist()

    def __getstate__(self) -> dict[str, Any]:  # a worker reads the files itself rather than be sent them
        return {k: v for k, v in self.__dict__.items() if k not in ("chunks", "starts")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()

    def __len__(self) -> int:
        return len(self.labels)

    def _row(self, index: int) -> tuple[bytes | None, str]:
        part = bisect.bisect_right(self.starts, index) - 1
        value = self.chunks[part][index - self.starts[part]].as_py()
        if isinstance(value, dict):
            return value.get("bytes"), value.get("path") or ""
        return value, ""

    def name(self, index: int) -> str:
        path = self._row(index)[1]
        where = self.files[0] if len(self.files) == 1 else str(Path(self.files[0]).parent)
        return f"{where} row {index}" + (f" ({path})" if path else "")

    def image(self, index: int, shrink: Shrink | None = None) -> Image.Image:
        data, _ = self._row(index)
        if data is None:
            raise BrokenImage(self.name(index), "the row holds no bytes")
        try:
            return decode(io.BytesIO(data), "", shrink)
        except BrokenImage as broken:
            raise BrokenImage(self.name(index), broken.why) from None


def splits(files: Iterable[Path], root: Path) -> dict[str, Rows]:
    """The splits that the files' names tell apart."""
    files = list(files)
    for file in files:
        if not file.is_file():
            raise UserError(f"there is no file '{file}'")
    grouped = by_split(map(str, files), str(root))
    labels = {split: read_labels(names) for split, names in grouped.items()}
    classes = agreed(labels, root)
    number = {name: i for i, name in enumerate(classes)}
    return {
        split: Rows(
            grouped[split],
            np.array([number[str(word)] for word in column], np.int64) if isinstance(column, list) else column,
            classes,
            image_column(grouped[split][0]),
        )
        for split, (column, _) in labels.items()
    }


def agreed(labels: dict[str, tuple[Ints | list[str], tuple[str, ...]]], root: Path) -> tuple[str, ...]:
    """The class names of all splits: the schema's, else the words of the label column, else numbers."""
    given = [classes for _, classes in labels.values() if classes]
    if any(classes != given[0] for classes in given):
        raise UserError(f"the splits in '{root}' name different classes; make their schemas agree")
    if given:
        return given[0]
    words, top = set(), -1
    for column, _ in labels.values():
        if isinstance(column, list):
            words |= {str(word) for word in column}
        else:
            top = max(top, int(column.max(initial=-1)))
    return tuple(sorted(words)) or tuple(str(i) for i in range(top + 1))


# ---- reading


def _arrow(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise UserError("parquet files need the package pyarrow: pip install vitlab[data]") from None


def _file(path: str) -> Any:
    pq = _arrow("pyarrow.parquet")
    try:
        return pq.ParquetFile(path)
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read as parquet: {str(error).splitlines()[0]}") from None


def image_column(path: str) -> str:
    schema = _file(path).schema_arrow
    for name in IMAGES:
        if name in schema.names:
            return name
    raise UserError(f"'{path}' has the columns {', '.join(schema.names)} and none called {listed(IMAGES)}")


def read_labels(files: list[str]) -> tuple[Ints | list[str], tuple[str, ...]]:
    """The labels of the rows, as numbers or, where the column holds words, as a list; and the schema's class names."""
    pa = _arrow("pyarrow")

    columns: list[Any] = []
    names: tuple[str, ...] = ()
    for path in files:
        file = _file(path)
        schema = file.schema_arrow
        found = next((name for name in LABELS if name in schema.names), None)
        if found is None:
            raise UserError(f"'{path}' has the columns {', '.join(schema.names)} and none called {listed(LABELS)}")
        names = class_names(schema.metadata or {}, found) or names
        columns.append(file.read([found]).column(0))
    merged = pa.chunked_array([chunk for column in columns for chunk in column.chunks], columns[0].type)
    if pa.types.is_integer(merged.type):
        return merged.fill_null(-1).to_numpy().astype(np.int64), names
    return merged.to_pylist(), names


def class_names(metadata: dict[bytes, bytes], column: str) -> tuple[str, ...]:
    info = json.loads(metadata.get(b"huggingface", b"{}"))
    feature = info.get("info", {}).get("features", {}).get(column, {})
    return tuple(feature.get("names") or ())


def read_images(files: list[str], column: str) -> list[Any]:
    """The image column as arrays that are read in any order."""
    opened = [_file(path) for path in files]
    size = sum(file.metadata.row_group(i).total_byte_size for file in opened for i in range(file.num_row_groups))
    if size <= IN_MEMORY:
        return [chunk for file in opened for chunk in file.read([column]).column(0).chunks]
    return [chunk for path in files for chunk in mapped(path, column)]


def mapped(path: str, column: str) -> list[Any]:
    """The same from a flat copy in the cache folder, made when first needed."""
    pa = _arrow("pyarrow")

    about = os.stat(path)
    tag = hashlib.sha256(f"{os.path.realpath(path)} {about.st_size} {about.st_mtime_ns}".encode()).hexdigest()[:20]
    copy = cache_folder() / "parquet" / f"{tag}.arrow"
    if not copy.exists():
        copy.parent.mkdir(parents=True, exist_ok=True)
        part = copy.with_suffix(f".{os.getpid()}")
        file = _file(path)
        field = file.schema_arrow.field(column)
        with pa.OSFile(str(part), "wb") as sink, pa.ipc.new_file(sink, pa.schema([field])) as writer:
            for batch in file.iter_batches(1000, columns=[column]):
                writer.write_batch(batch)
        os.replace(part, copy)
    return pa.ipc.open_file(pa.memory_map(str(copy))).read_all().column(0).chunks
