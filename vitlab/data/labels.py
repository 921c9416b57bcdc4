"""Class labels from untrusted files: limits of length and number, their order, names for those that are numbers."""

import re
from collections.abc import Iterable

from vitlab.errors import UserError
from vitlab.models.config import MOST_CLASSES

MAX_LABEL_LENGTH = 256  # characters
MAX_TOTAL_LENGTH = 64 << 20  # characters of all class names together
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
