"""Splits by the names people give them, classes by number, and where downloads and indices are kept."""

import re
from collections.abc import Iterable

from vitlab.errors import UserError
from vitlab.models.config import MOST_CLASSES

LONGEST_LABEL = 256  # letters
ALL_LABELS = 64 << 20  # letters of all class names together
FREE_CLASSES, PER_IMAGE = 50_000, 100  # a set may number so many classes, or so many for each of its images
WORDS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
}
_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(WORDS, key=len, reverse=True))})(?![a-z])")


def split_of(path: str) -> str | None:
    """The split that a path names, by its last such word: data/train-00000-of-00002.parquet is train."""
    found = _WORD.findall(path.lower())
    return WORDS[found[-1]] if found else None


def by_split(paths: Iterable[str], root: str) -> dict[str, list[str]]:
    """Paths grouped by the split that they name below `root`; those that name none are training data."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(split_of(path.removeprefix(root)) or "train", []).append(path)
    return groups


def numbered(top: int, images: int, where: str) -> tuple[str, ...]:
    """Names of classes that only have numbers, up to `top`, which may be any number that a stranger wrote."""
    most = min(MOST_CLASSES, max(FREE_CLASSES, PER_IMAGE * images))
    if top >= most:
        raise UserError(
            f"'{where}' has the class number {top:,} in a set of {images:,} images; "
            "number the classes from 0 on, without gaps"
        )
    return tuple(map(str, range(top + 1)))
