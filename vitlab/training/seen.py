"""Which images a run has learned from, by the list in its folder: it should not be tested on them.

The images that are held out of a set follow from their names, so they stay the same as others are added or removed; but
their share is kept too, and so a photo of a class whose number changes may change sides, see open.py.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vitlab.data.parquet import ParquetSource
from vitlab.data.source import Data, ImageSource, Subset
from vitlab.errors import UserError
from vitlab.terminal import warn
from vitlab.text import counted
from vitlab.training.manifest import LEARNED, NAME, PAST, containers, entries, escape_name, parse, read_manifest

LINE = 1_000  # bytes of an image in the list of the same set, at most


def is_seen(run: Path, source: ImageSource) -> NDArray[np.bool_]:
    """Whether a run was trained or validated on each image, (n,), by the names and sizes in its list."""
    try:
        stored = read_manifest(run, LINE * len(source)) if (run / NAME).is_file() else ""
    except UserError as error:
        warn(f"{error}, so it is not known which images the run has learned from")
        stored = ""
    known = set()
    for line, (size, *_) in parse(stored).items():
        split = next((split for split in (*LEARNED, PAST) if line.startswith(split)), None)
        known |= set() if split is None else {(line.removeprefix(split), size)}
    files = {(escape_name(name), f"{size}") for name, size in containers(source)}
    if isinstance(base(source), ParquetSource) and not files <= known:  # rows are numbers, which any file has
        known = set()
    if not known:
        return np.zeros(len(source), np.bool_)
    listed = entries(source, np.arange(len(source)), hashed=False)
    return np.array([(escape_name(name), f"{size}") in known for name, size, _ in listed], np.bool_)


def base(source: ImageSource) -> ImageSource:
    """What a part of a set is a part of."""
    return base(source.source) if isinstance(source, Subset) else source


def seen_tests(run: Path, data: Data) -> NDArray[np.bool_]:
    """Whether a run has learned from each test image, (n,), where they are held out of the training images: a test
    split of a set's own may have files of the same names."""
    return is_seen(run, data.test) if base(data.train) is base(data.test) else np.zeros(len(data.test), np.bool_)


def seen_since(run: Path, data: Data) -> NDArray[np.bool_]:
    """As `seen_tests`, of a run that goes on: false for all unless its data has changed since it began, since a set may
    name one file twice."""
    path = run / NAME
    most = LINE * sum(len(base(split)) for split in data.splits.values())
    changed = path.is_file() and f"\n{PAST}" in read_manifest(run, most)
    return seen_tests(run, data) if changed else np.zeros(len(data.test), np.bool_)


def unseen(run: Path, data: Data) -> Data:
    """The data without the test images that a run has learned from; UserError where none is left."""
    seen = seen_tests(run, data)
    if len(seen) and seen.all():
        raise UserError(f"{run} has learned from every test image of {data.name}; test it on other images")
    return without_seen(data, seen)


def without_seen(data: Data, seen: NDArray[np.bool_]) -> Data:
    """The data without these test images, unless they are all there are."""
    if not seen.any():
        return data
    if seen.all():
        warn(f"the run has learned from every test image of {data.name}, so its accuracy on them means nothing")
        return data
    note = f"{data.note}, without {counted(int(seen.sum()), 'image')} that the run has learned from"
    return replace(data, test=Subset(data.test, np.flatnonzero(~seen)), note=note)


def seen_warnings(weights: str, data: Data) -> list[str]:
    """A line where a run that another one begins with has learned from test images, as the set has changed since."""
    run = Path(weights).expanduser()
    if not run.is_dir() or not (seen := int(seen_tests(run, data).sum())):
        return []
    few = f"{weights} has learned from {seen} of the {counted(len(data.test), 'test image')}"
    return [f"{few}, so the accuracy on them may be too high; begin with the weights that it began with"]
