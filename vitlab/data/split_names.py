"""Which split a file or folder belongs to, by the words in its path."""

import re
from collections.abc import Iterable

SYNONYMS = {"train": ["training"], "test": ["testing"], "validation": ["val", "valid", "dev"]}
SPLIT_NAMES = {word: split for split, words in SYNONYMS.items() for word in (split, *words)}
_WORD = re.compile(rf"(?<![a-z])({'|'.join(sorted(SPLIT_NAMES, key=len, reverse=True))})(?![a-z])")


def split_of(path: str) -> str | None:
    """The split that a path names, by the last such word: data/train-00000-of-00002.parquet is train."""
    words = _WORD.findall(path.lower())
    return SPLIT_NAMES[words[-1]] if words else None


def group_by_split(paths: Iterable[str], root: str) -> dict[str, list[str]]:
    """Paths grouped by the split that they name below `root`; those that name none are training data."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(split_of(path.removeprefix(root)) or "train", []).append(path)
    return groups
