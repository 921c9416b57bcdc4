"""The confusion matrix as a table: its cells in steps of one color, and of many classes the most confused ones.

Shapes: K classes.
"""

from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np

from vitlab.data.rng import Ints

LEVELS = 8  # steps of color
COMPLETE = 40  # classes up to which all are shown
PART = 24  # of more, so many


@dataclass(frozen=True)
class Cell:
    """Images of a class (row) by prediction (column)."""

    truth: int
    guess: int
    count: int
    level: int  # of color, from 0 for none to LEVELS for all images of the class


@dataclass(frozen=True)
class Row:
    """A true class."""

    number: int
    images: int
    cells: list[Cell]
    rest: int  # images that were taken for classes that have no column


@dataclass(frozen=True)
class Matrix:
    """The classes that are shown, in order, and their rows."""

    classes: list[int]
    rows: list[Row]
    is_part: bool


def make_matrix(counts: Ints) -> Matrix:
    """The table of a confusion matrix (K, K)."""
    is_part = len(counts) > COMPLETE
    classes = most_confused(counts) if is_part else list(range(len(counts)))
    images = counts.sum(1)
    rows = []
    for i in classes:
        cells = [Cell(i, j, int(counts[i, j]), level(int(counts[i, j]), int(images[i]))) for j in classes]
        rows.append(Row(i, int(images[i]), cells, int(images[i]) - sum(cell.count for cell in cells)))
    return Matrix(classes, rows, is_part)


def level(count: int, images: int) -> int:
    """The step of color of a share; its square root, so that a few per cent are visible."""
    return ceil(LEVELS * sqrt(count / images)) if count else 0


def most_confused(counts: Ints) -> list[int]:
    """The classes of the most frequent confusions, in either direction; each beside the one it is confused with."""
    wrong = counts + counts.T
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-np.triu(wrong), axis=None, kind="stable").tolist()
    classes: list[int] = []
    for i, j in (divmod(place, len(counts)) for place in order):
        new = [k for k in (i, j) if k not in classes]
        if not wrong[i, j] or len(classes) + len(new) > PART:
            break
        classes += new
    return classes


def frequent_mistakes(counts: Ints, most: int = 20) -> list[tuple[int, int, int, int]]:
    """(truth, guess, images, all images of the class) of the most frequent mistakes."""
    wrong = counts - np.diag(np.diagonal(counts))
    order = np.argsort(-wrong, axis=None, kind="stable")[:most].tolist()
    pairs = ((*divmod(place, len(counts)), int(wrong.flat[place])) for place in order)
    return [(i, j, n, int(counts[i].sum())) for i, j, n in pairs if n]
