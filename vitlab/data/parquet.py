"""Parquet files as the Hugging Face hub lays them out: columns of images and labels, class names in the schema.

Parquet cannot be read row by row, and training asks for rows in any order. So each file is copied once, to a flat file
in the cache folder; `parquet_reader.py` does that in a process of its own, since the files may be untrusted.
"""

import json
import logging
import os
import signal
import subprocess
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from vitlab.data.label_sets import Truth, make_sets
from vitlab.data.labels import number_names, sort_classes
from vitlab.data.packed_files import Index, PackedSource, file_state, join_indexes
from vitlab.data.rng import Ints
from vitlab.data.sandbox import python_command
from vitlab.data.split_names import group_by_split
from vitlab.errors import UserError
from vitlab.files import cache_folder, file_lock
from vitlab.text import counted

FEATURES = "vitlab/features/"  # in the metadata of a file of features
TAIL = 1 << 16  # bytes of a file's end, which has its metadata
MIN_SECONDS, BYTES_PER_SECOND = 20, 2 << 20  # of a core, for a copy: so many, and one for each so many bytes
PATIENCE = 10  # times as long it may take where the disk is slow or others use the cores
log = logging.getLogger("vitlab")


@dataclass(frozen=True)
class FlatCopy:
    """The flat copy of one parquet file, and its index."""

    path: str
    index: Index
    names: tuple[str, ...]  # of the classes, from the schema
    words: tuple[str, ...]  # of a label column that holds text, in the order of its numbers; else empty


class ParquetSource(PackedSource):
    """The rows of parquet files, one after another."""

    def __init__(self, files: list[str], copies: list[FlatCopy], truth: Truth, classes: tuple[str, ...]) -> None:
        index = join_indexes([copy.index for copy in copies])
        super().__init__([copy.path for copy in copies], index, truth, classes)
        self.files, self.name_length = files, index["name"]

    def name(self, index: int) -> str:
        size = int(self.name_length[index])
        path = self.read(int(self.shard[index]), int(self.offset[index]) - size, size).decode("utf-8", "replace")
        where = self.files[0] if len(self.files) == 1 else str(Path(self.files[0]).parent)
        return f"{where} row {index}" + (f" ({path})" if path else "")


def files_in(folder: Path) -> list[Path]:
    """The parquet files of a folder that holds such a set, at any depth; [] of a folder of another kind."""
    near = (file for pattern in ("*.parquet", "data/*.parquet", "train*/*.parquet") for file in folder.glob(pattern))
    if all(map(is_features, near)):
        return []
    return [file for file in sorted(folder.rglob("*.parquet")) if not is_features(file)]


def is_features(path: Path) -> bool:
    """Whether a file holds what `vitlab embed` writes, which may be kept among the photos: its last bytes name it."""
    if not path.is_file():  # nor a pipe, which would wait
        return False
    try:
        with path.open("rb") as file:
            file.seek(-min(path.stat().st_size, TAIL), os.SEEK_END)
            return FEATURES.encode() in file.read(TAIL)
    except OSError:
        return False  # whoever reads the file reports it


def splits(files: list[Path], root: Path) -> dict[str, ParquetSource]:
    """The splits of parquet files, by their names below `root`."""
    for file in files:
        if not file.is_file():
            raise UserError(f"'{file}' is not a file" if file.exists() else f"there is no file '{file}'")
    grouped = group_by_split(map(str, files), str(root))
    copies = {split: [flat_copy(path) for path in paths] for split, paths in grouped.items()}
    every = [copy for each in copies.values() for copy in each]
    if len({"labels" in copy.index for copy in every}) > 1:
        raise UserError(f"some files in '{root}' have lists of labels and some have one label a row; make them agree")
    classes = class_names(every, root)
    number = {name: i for i, name in enumerate(classes)}
    return {
        split: ParquetSource(grouped[split], each, join_labels(each, number), classes) for split, each in copies.items()
    }


def join_labels(copies: list[FlatCopy], number: dict[str, int]) -> Truth:
    """The labels of all rows; of a column of lists, as a multi-label set has them."""
    labels = np.concatenate([labels_of(copy, number) for copy in copies])
    if "labels" not in copies[0].index:
        return labels
    return make_sets(labels, np.concatenate([copy.index["labels"] for copy in copies]))


def class_names(copies: list[FlatCopy], root: Path) -> tuple[str, ...]:
    """The class names of all files: from the schema, else the text of the label column, else numbers."""
    given = [copy.names for copy in copies if copy.names]
    if any(names != given[0] for names in given):
        raise UserError(f"the splits in '{root}' name different classes; make their schemas agree")
    if given:
        return given[0]
    words = {word for copy in copies for word in copy.words}
    if words:
        return sort_classes(words)
    labels = np.concatenate([np.zeros(0, np.int64), *(copy.index["label"] for copy in copies)])
    return number_names(int(labels.max(initial=-1)), len(labels), str(root))


def labels_of(copy: FlatCopy, number: dict[str, int]) -> Ints:
    """The label of each row, or those of each list, one after another; -1 where it has none."""
    labels: Ints = copy.index["label"]
    if not copy.words:
        return labels
    numbers = [number.get(word, -1) for word in copy.words]
    return np.array([*numbers, -1], np.int64)[labels]  # the last for rows without a label


# ---- copies


def flat_copy(path: str) -> FlatCopy:
    """The flat copy of a parquet file, made when first needed."""
    folder = cache_folder() / "flat"
    name = folder / file_state(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(f"{name}.lock"):  # ranks that need the same copy wait for one
            if not Path(f"{name}.npz").exists():
                make_copy(path, str(name))
        with np.load(f"{name}.npz", allow_pickle=False) as kept:
            index = dict(kept)
    except OSError as error:
        raise UserError(f"'{path}' cannot be copied to '{folder}': {error}; VITLAB_DATA names another place") from None
    known = json.loads(index.pop("about").tobytes())
    return FlatCopy(f"{name}.bin", index, tuple(known["names"]), tuple(known["words"]))


def make_copy(path: str, name: str) -> None:
    """Copy a parquet file to NAME.bin and NAME.npz in a process of its own, with limits of time and memory."""
    if find_spec("pyarrow") is None:
        raise UserError("parquet files need the package pyarrow: pip install 'vitlab[data]'")
    part = f"{name}.part"
    small = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    seconds = MIN_SECONDS + os.path.getsize(path) // BYTES_PER_SECOND
    limit = counted(seconds, "second")
    command = python_command(f"from vitlab.data.parquet_reader import main; main({path!r}, {part!r}, {seconds})")
    try:
        done = subprocess.run(command, capture_output=True, timeout=PATIENCE * seconds, env=os.environ | small)
        if done.returncode == -getattr(signal, "SIGXCPU", 0) != 0:
            raise UserError(f"'{path}' is not unpacked by {limit} of work; is it what it claims to be?")
        if done.returncode:
            raise UserError(f"'{path}' crashes the reader of parquet")
        reply = json.loads(done.stdout)
        if "error" in reply:
            raise UserError(reply["error"])
        if reply["note"]:
            log.warning("%s", reply["note"])
        os.replace(f"{part}.bin", f"{name}.bin")
        os.replace(f"{part}.npz", f"{name}.npz")
    except subprocess.TimeoutExpired:
        waited = f"'{path}' is not unpacked after {PATIENCE * seconds} seconds"
        raise UserError(f"{waited}; is it what it claims to be, and on a disk that answers?") from None
    finally:
        for extension in ("bin", "npz"):
            Path(f"{part}.{extension}").unlink(missing_ok=True)
