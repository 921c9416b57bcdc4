"""Class labels from untrusted files: limits of length and number, their order, names for those that are numbers."""

import re
from collections.abc import Iterable
from pathlib import Path

from vitlab.errors import UserError
from vitlab.models.config import MOST_CLASSES

MAX_LABEL_LENGTH = 256  # characters
MAX_TOTAL_LENGTH = 64 << 20  # characters of all class names together
NUMBER = re.compile(r"-?[0-9]{1,18}")
FREE_CLASSES, CLASSES_PER_IMAGE = 50_000, 100  # any set may number so many classes, or so many for each of its images


def are_too_many(words: int, characters: int) -> bool:
    """Whether that many class names, of that many characters in all, are beyond any real data set."""
    return words > MOST_CLASSES or characters > MAX_TOTAL_LENGTH


def are_numbers(names: Iterable[str]) -> bool:
    """Whether all class names are numbers: 0, 7, 042."""
    return all(re.fullmatch("[0-9]+", name) for name in names)


def sort_classes(names: Iterable[str]) -> tuple[str, ...]:
    """Class names in the order of their numbers where all are numbers, so that 10 follows 9; else as text."""
    words = set(names)
    return tuple(sorted(words, key=lambda name: (int(name), name)) if are_numbers(words) else sorted(words))


def number_names(highest: int, images: int, where: str) -> tuple[str, ...]:
    """Names of classes that have only numbers, "0" up to `highest`; raises UserError where it is out of proportion."""
    most = min(MOST_CLASSES, max(FREE_CLASSES, CLASSES_PER_IMAGE * images))
    if highest >= most:
        raise UserError(
            f"'{where}' has the class number {highest:,} in a set of {images:,} images; "
            "number the classes from 0 on, without gaps"
        )
    return tuple(map(str, range(highest + 1)))


def number_words(words: set[str], images: int, listed: Path, where: str) -> tuple[tuple[str, ...], dict[str, int]]:
    """The class names of a set whose labels are `words`, and the class of each word.

    Numbers are numbers of classes, named by the file `listed` where it exists; other words are the names.
    """
    if are_too_many(len(words), sum(map(len, words))):
        raise UserError(f"'{where}' has more than {MOST_CLASSES:,} different labels, or very long ones")
    is_numeric = all(NUMBER.fullmatch(word) for word in words)
    classes = read_classes(listed)
    if classes is None and is_numeric:
        classes = number_names(max(map(int, words), default=-1), images, where)
    classes = sort_classes(words) if classes is None else classes
    return classes, {word: int(word) for word in words} if is_numeric else {name: i for i, name in enumerate(classes)}


def to_text(word: bytes) -> str:
    return word.decode("utf-8", "backslashreplace")


def read_classes(path: Path) -> tuple[str, ...] | None:
    """The class names in a file, one per line; None where there is no such file."""
    if not path.is_file():
        return None
    if path.stat().st_size > MAX_TOTAL_LENGTH:
        raise UserError(f"'{path}' is larger than {MAX_TOTAL_LENGTH >> 20} MB, too large for a list of class names")
    names = tuple(line[:MAX_LABEL_LENGTH] for line in to_text(path.read_bytes()).splitlines())
    if len(names) > MOST_CLASSES:
        raise UserError(f"'{path}' has {len(names):,} lines; a set has at most {MOST_CLASSES:,} classes")
    return names
