"""Parquet files as the Hugging Face hub lays them out: columns of images and labels, class names in the schema.

Parquet cannot be read row by row, and training asks for rows in any order. So each file is copied once, to a flat file
in the cache folder; `vitlab/data/flat.py` does that in a process of its own, since the files may be a stranger's.
"""

import bisect
import hashlib
import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlab.data.images import BrokenImage, Shrink, decode
from vitlab.data.pieces import Pieces
from vitlab.data.rng import Ints
from vitlab.data.storage import by_split, numbered
from vitlab.errors import UserError
from vitlab.files import cache_folder, file_lock

PATIENCE, SLOWEST = 20, 2 << 20  # seconds for any copy, and for each so many bytes one more
log = logging.getLogger("vitlab")


@dataclass(frozen=True)
class Copy:
    """The flat copy of one file, and its index."""

    path: str
    index: dict[str, NDArray[Any]]
    names: tuple[str, ...]  # of classes, by the schema
    words: tuple[str, ...]  # that the numbers of the label column stand for; none: they are the labels

    def __len__(self) -> int:
        return len(self.index["label"])


class ParquetSource:
    """The rows of parquet files, one after another."""

    groups = None

    def __init__(self, files: list[str], copies: list[Copy], labels: Ints, classes: tuple[str, ...]) -> None:
        self.files, self.labels, self.classes = files, labels, classes
        self.pieces = Pieces([copy.path for copy in copies], open_copy)
        self.starts: list[int] = np.cumsum([0] + [len(copy) for copy in copies]).tolist()
        self.offset, self.length, self.named = (
            np.concatenate([copy.index[key] for copy in copies]) for key in ("offset", "length", "name")
        )

    def __len__(self) -> int:
        return len(self.labels)

    def _file(self, index: int) -> int:
        return bisect.bisect_right(self.starts, index) - 1

    def name(self, index: int) -> str:
        size = int(self.named[index])
        path = self.pieces.read(self._file(index), int(self.offset[index]) - size, size).decode("utf-8", "replace")
        where = self.files[0] if len(self.files) == 1 else str(Path(self.files[0]).parent)
        return f"{where} row {index}" + (f" ({path})" if path else "")

    def image(self, index: int, shrink: Shrink | None = None) -> Image.Image:
        length = int(self.length[index])
        try:
            if length < 0:
                raise BrokenImage("", "the row holds no bytes")
            data = self.pieces.picture(self._file(index), int(self.offset[index]), length, "")
            return decode(data, "", shrink)
        except BrokenImage as broken:
            raise BrokenImage(self.name(index), broken.why) from None


def splits(files: Iterable[Path], root: Path) -> dict[str, ParquetSource]:
    """The splits that the files' names tell apart."""
    files = list(files)
    for file in files:
        if not file.is_file():
            raise UserError(f"'{file}' is no file" if file.exists() else f"there is no file '{file}'")
    grouped = by_split(map(str, files), str(root))
    copies = {split: [flat(name) for name in names] for split, names in grouped.items()}
    classes = agreed([copy for each in copies.values() for copy in each], root)
    number = {name: i for i, name in enumerate(classes)}
    return {
        split: ParquetSource(grouped[split], each, np.concatenate([labels_of(copy, number) for copy in each]), classes)
        for split, each in copies.items()
    }


def agreed(copies: list[Copy], root: Path) -> tuple[str, ...]:
    """The class names of all files: the schema's, else the words of the label column, else numbers."""
    given = [copy.names for copy in copies if copy.names]
    if any(names != given[0] for names in given):
        raise UserError(f"the splits in '{root}' name different classes; make their schemas agree")
    if given:
        return given[0]
    words = {word for copy in copies for word in copy.words}
    if words:
        return tuple(sorted(words))
    top = max((int(copy.index["label"].max(initial=-1)) for copy in copies), default=-1)
    return numbered(top, sum(map(len, copies)), str(root))


def labels_of(copy: Copy, number: dict[str, int]) -> Ints:
    labels: Ints = copy.index["label"]
    if not copy.words:
        return labels
    table = np.array([*(number.get(word, -1) for word in copy.words), -1], np.int64)  # the last for rows without
    return table[labels]


# ---- copies


def flat(path: str) -> Copy:
    """The copy of a file, made when first needed."""
    about = os.stat(path)
    state = f"{os.path.realpath(path)} {about.st_size} {about.st_mtime_ns}"
    name = cache_folder() / "flat" / hashlib.sha256(os.fsencode(state)).hexdigest()[:20]
    try:
        name.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(f"{name}.lock"):  # ranks that want the same copy wait for one
            if not Path(f"{name}.npz").exists():
                make(path, str(name), about.st_size)
        with np.load(f"{name}.npz", allow_pickle=False) as kept:
            index = dict(kept)
    except OSError as error:
        raise UserError(
            f"'{path}' cannot be copied to '{name.parent}': {error}; VITLAB_DATA names another place"
        ) from None
    known = json.loads(index.pop("about").tobytes())
    return Copy(f"{name}.bin", index, tuple(known["names"]), tuple(known["words"]))


def make(path: str, name: str, size: int) -> None:
    if find_spec("pyarrow") is None:
        raise UserError("parquet files need the package pyarrow: pip install vitlab[data]")
    part = f"{name}.part"
    here = str(Path(__file__).parents[2])  # this package, for a Python that runs elsewhere
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    plain = {
        "PYTHONPATH": paths,
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "1",
    }
    # -P: no module of the folder the user happens to be in
    command = [sys.executable, "-P", "-m", "vitlab.data.parquet_reader", path, part]
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE + size / SLOWEST, env=os.environ | plain)
        outcome = (
            json.loads(done.stdout) if done.returncode == 0 else {"error": f"'{path}' crashes the reader of parquet"}
        )
        if "error" in outcome:
            raise UserError(outcome["error"])
        if outcome["note"]:
            log.warning("%s", outcome["note"])
        os.replace(f"{part}.bin", f"{name}.bin")
        os.replace(f"{part}.npz", f"{name}.npz")
    except subprocess.TimeoutExpired as late:
        raise UserError(
            f"'{path}' is not unpacked after {late.timeout:.0f} seconds; is it what it claims to be?"
        ) from None
    finally:
        for ending in ("bin", "npz"):
            Path(f"{part}.{ending}").unlink(missing_ok=True)


def open_copy(path: str) -> io.FileIO:
    try:
        return open(path, "rb", buffering=0)
    except OSError as error:
        raise UserError(f"the copy '{path}' of a parquet file cannot be opened: {error.strerror}") from None
