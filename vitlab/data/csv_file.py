"""A CSV file of images: a heading that names the columns, then a line for each image.

file,labels,split
photos/1.jpg,cat;dog,train
photos/2.jpg,,test

Paths are relative to the CSV file; semicolons or tabs may separate the columns, too (delimited.py). Several labels are
separated by ";", and one line that has several makes the set a multi-label one, in which an image may also have none.
The split is optional: train, validation or test.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitlab.data.delimited import read_cells
from vitlab.data.folder import FileSource
from vitlab.data.label_sets import sets_of
from vitlab.data.labels import MAX_LABEL_LENGTH, number_words
from vitlab.data.split_names import SPLIT_NAMES
from vitlab.errors import UserError
from vitlab.text import listed

FILE_COLUMNS = ("file", "image", "path", "filename")
LABEL_COLUMNS = ("labels", "label", "classes", "class")
SPLIT = "split"
SEPARATOR = ";"


@dataclass(frozen=True)
class Row:
    """A line of the file."""

    file: str
    labels: list[str]
    split: str


def splits(path: Path) -> dict[str, FileSource]:
    """The splits of a CSV file; a classes.txt beside it may name the classes of numbers."""
    rows = list(read_rows(path))
    is_multi = any(len(row.labels) > 1 for row in rows)
    bare = next((row for row in rows if not row.labels), None)
    if bare is not None and not is_multi:
        raise UserError(f"'{path}' has no label for '{bare.file}'; give it one, or leave the line out")
    words = {word for row in rows for word in row.labels}
    classes, number = number_words(words, len(rows), path.parent / "classes.txt", str(path))
    sources = {}
    for split in dict.fromkeys(row.split for row in rows):
        own = [row for row in rows if row.split == split]
        labels = [[number.get(word, -1) for word in row.labels] for row in own]
        truth = sets_of(labels) if is_multi else np.array([first for first, *_ in labels], np.int64)
        sources[split] = FileSource(path.parent, [row.file for row in own], truth, classes)
    if not sources:
        raise UserError(f"'{path}' names no images; write a line for each below the heading")
    return sources


def read_rows(path: Path) -> Iterator[Row]:
    """The lines of the file; raises UserError for one that is wrong."""
    lines = read_cells(path, (*FILE_COLUMNS, *LABEL_COLUMNS, SPLIT))
    heading = [name.strip().lower() for name in next(lines, (0, []))[1]]
    columns = [find_column(path, heading, names) for names in (FILE_COLUMNS, LABEL_COLUMNS)]
    split_column = heading.index(SPLIT) if SPLIT in heading else None
    for number, cells in lines:
        if len(cells) < len(heading):
            raise UserError(f"line {number} of '{path}' has fewer columns than the heading")
        if any(cell.strip() for cell in cells[len(heading) :]):  # as a delimiter inside a cell makes them
            raise UserError(f"line {number} of '{path}' has more columns than the heading; put such a cell in quotes")
        name, text = (cells[column].strip() for column in columns)
        split = "train" if split_column is None else cells[split_column].strip().lower() or "train"
        labels = [word.strip() for word in text.split(SEPARATOR)] if text else []
        check_row(path, number, name, labels, split)
        yield Row(name, labels, SPLIT_NAMES[split])


def find_column(path: Path, heading: list[str], names: tuple[str, ...]) -> int:
    found = next((heading.index(name) for name in names if name in heading), None)
    if found is None:
        raise UserError(f"the first line of '{path}' names no column {listed(names)}; begin it with file,labels")
    return found


def check_row(path: Path, line: int, name: str, labels: list[str], split: str) -> None:
    where = f"line {line} of '{path}'"
    if not (path.parent / name).is_file():  # nor a pipe or a device
        raise UserError(f"{where} names '{name}', and there is no such file; paths are relative to the CSV file")
    if "" in labels or max(map(len, labels), default=0) > MAX_LABEL_LENGTH:
        raise UserError(f"{where} has a label that is empty or longer than {MAX_LABEL_LENGTH} characters")
    if split not in SPLIT_NAMES:
        raise UserError(f"{where} has the split '{split[:80]}'; write {listed(SPLIT_NAMES)}")
