"""Class labels from untrusted files: limits of length and number, and names for classes that have only numbers."""

from vitlab.errors import UserError
from vitlab.models.config import MOST_CLASSES

MAX_LABEL_LENGTH = 256  # characters
MAX_TOTAL_LENGTH = 64 << 20  # characters of all class names together
FREE_CLASSES, CLASSES_PER_IMAGE = 50_000, 100  # any set may number so many classes, or so many for each of its images


def are_too_many(words: int, characters: int) -> bool:
    """Whether that many class names, of that many characters in all, are beyond any real data set."""
    return words > MOST_CLASSES or characters > MAX_TOTAL_LENGTH


def number_names(highest: int, images: int, where: str) -> tuple[str, ...]:
    """Names of classes that have only numbers, "0" up to `highest`; raises UserError where it is out of proportion."""
    most = min(MOST_CLASSES, max(FREE_CLASSES, CLASSES_PER_IMAGE * images))
    if highest >= most:
        raise UserError(
            f"'{where}' has the class number {highest:,} in a set of {images:,} images; "
            "number the classes from 0 on, without gaps"
        )
    return tuple(map(str, range(highest + 1)))
