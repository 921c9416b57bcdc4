"""The labels of a multi-label set, where an image has any number of classes, none included.

Shapes: n images, m labels of all images together, K classes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitlab.data.rng import Ints


@dataclass(frozen=True, eq=False)
class LabelSets:
    """Image i has the classes `numbers[offsets[i] : offsets[i + 1]]`, ascending, each once.

    A matrix of 21,000 classes by 14 million images would not fit in memory; these are as long as there are labels.
    """

    offsets: Ints  # (n + 1,)
    numbers: Ints  # (m,)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: slice | Ints) -> "LabelSets":
        """The labels of some images; the time it takes does not grow with the set."""
        chosen = np.arange(*index.indices(len(self))) if isinstance(index, slice) else index
        counts = self.offsets[chosen + 1] - self.offsets[chosen]
        ends = np.cumsum(counts)
        place = np.arange(counts.sum()) + np.repeat(self.offsets[chosen] - ends + counts, counts)
        return LabelSets(np.concatenate([[0], ends]).astype(np.int64), self.numbers[place])

    @property
    def rows(self) -> Ints:
        """The image of each label, (m,)."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def of(self, index: int) -> list[int]:
        """The classes of one image."""
        found: list[int] = self.numbers[self.offsets[index] : self.offsets[index + 1]].tolist()
        return found

    def multi_hot(self, classes: int) -> NDArray[np.bool_]:
        """Whether each image has each class, (n, K)."""
        hot = np.zeros((len(self), classes), bool)
        hot[self.rows, self.numbers] = True
        return hot

    @property
    def rarest(self) -> Ints:
        """The rarest class of each image, (n,), and -1 for those without any: how a set is split class by class."""
        _, inverse, counts = np.unique(self.numbers, return_inverse=True, return_counts=True)
        rarest = np.full(len(self), -1)
        order = np.lexsort((self.numbers, counts[inverse]))[::-1]
        rarest[self.rows[order]] = self.numbers[order]  # of several assignments the last one, the rarest, stays
        return rarest

    def tobytes(self) -> bytes:
        return self.offsets.tobytes() + self.numbers.tobytes()


Truth = Ints | LabelSets  # one class of each image, (n,), or any number of them


def make_sets(numbers: Ints, counts: Ints) -> LabelSets:
    """Labels as files have them: `numbers` (m,) image after image, `counts` (n,) of each; repetitions count once."""
    rows = np.repeat(np.arange(len(counts)), counts)
    order = np.lexsort((numbers, rows))
    rows, numbers = rows[order], np.asarray(numbers, np.int64)[order]
    again = (np.diff(rows, prepend=-1) == 0) & (np.diff(numbers, prepend=0) == 0)
    kept = np.bincount(rows[~again], minlength=len(counts))
    return LabelSets(np.concatenate([[0], np.cumsum(kept)]).astype(np.int64), numbers[~again])


def sets_of(rows: Iterable[Sequence[int]]) -> LabelSets:
    """The labels of images from lists of classes.

    >>> sets_of([[3, 7], [], [7, 7, 1]]).numbers.tolist()
    [3, 7, 1, 7]
    """
    listed = list(rows)
    flat = [number for row in listed for number in row]
    return make_sets(np.array(flat, np.int64), np.array([len(row) for row in listed], np.int64))
