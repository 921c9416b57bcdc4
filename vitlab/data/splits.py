"""Splits by the names people give them, and where downloads and indices are kept."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

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


def cache_folder() -> Path:
    """VITLAB_DATA, else ~/.cache/vitlab."""
    return Path(os.environ.get("VITLAB_DATA") or "~/.cache/vitlab").expanduser()
