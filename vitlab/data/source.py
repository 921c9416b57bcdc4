"""What a data set is: sources of labeled images with random access, and the splits of a set."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlab.data.decoder import DecodeHint
from vitlab.data.label_sets import LabelSets, Truth
from vitlab.data.rng import Ints, Keys
from vitlab.errors import UserError


class ImageSource:
    """Labeled images with random access; pickled to the loader's workers. Subclasses read the images.

    `truth` holds one class of each image, or, in a multi-label set, any number of them.
    """

    groups: Ints | None = None  # (n,) the shard of each image, where shards are best read one after another

    def __init__(self, truth: Truth, classes: tuple[str, ...]) -> None:
        self.truth, self.classes = truth, classes  # truth: (n,)

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def label_sets(self) -> LabelSets | None:
        """The labels of a multi-label set; None where every image has one."""
        return self.truth if isinstance(self.truth, LabelSets) else None

    @property
    def labels(self) -> Ints:
        """The class of each image, (n,); raises UserError where images have several: what needs one says so here."""
        if isinstance(self.truth, LabelSets):
            raise UserError("this needs one label per image, and the set is multi-label; use a set with one label each")
        return self.truth

    def labels_of(self, index: int) -> list[int]:
        """The classes of one image."""
        return self.truth.of(index) if isinstance(self.truth, LabelSets) else [int(self.truth[index])]

    def class_counts(self) -> Ints:
        """Images per class, (K,)."""
        numbers = self.truth.numbers if isinstance(self.truth, LabelSets) else self.truth
        return np.bincount(numbers, minlength=len(self.classes))

    def has_class(self, number: int) -> NDArray[np.bool_]:
        """Whether each image has a class, (n,)."""
        if isinstance(self.truth, LabelSets):
            return np.isin(np.arange(len(self)), self.truth.rows[self.truth.numbers == number])
        return self.truth == number

    def name(self, index: int) -> str:
        """The file or row, for logs."""
        raise NotImplementedError

    def marks(self) -> Keys:
        """The numbers by which images are drawn, (n,): that of a file follows from its name, so that it is drawn again
        after others were added or removed; any other image has its place."""
        return np.arange(len(self), dtype=np.uint64)

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        """The upright RGB image; raises BrokenImage. `shrink` allows a smaller one, see decoder.py."""
        raise NotImplementedError

    def encoded(self, index: int) -> bytes | None:
        """The file that `image` decodes, where there is one; raises BrokenImage."""
        return None

    def identity(self) -> str | None:
        """A digest that equals another source's only if both have the same images; None where that takes too long."""
        return None


@dataclass(frozen=True)
class Data:
    """A data set with its splits; `note` explains how they were made."""

    name: str
    train: ImageSource
    test: ImageSource
    validation: ImageSource | None = None
    note: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes

    @property
    def splits(self) -> dict[str, ImageSource]:
        """The splits that there are, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: source for name, source in named.items() if source is not None}

    @property
    def is_multi_label(self) -> bool:
        return self.train.label_sets is not None


class ArraySource(ImageSource):
    """Images held as one array (n, height, width, 3) of uint8."""

    def __init__(self, title: str, pixels: NDArray[np.uint8], truth: Truth, classes: tuple[str, ...]) -> None:
        super().__init__(truth, classes)
        self.title, self.pixels = title, pixels

    def name(self, index: int) -> str:
        return f"{self.title} {index}"

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        return Image.fromarray(self.pixels[index])


class Subset(ImageSource):
    """Some images of a source, by index."""

    def __init__(self, source: ImageSource, indices: Ints) -> None:
        super().__init__(source.truth[indices], source.classes)
        self.source, self.indices = source, indices
        self.groups = None if source.groups is None else source.groups[indices]

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def marks(self) -> Keys:
        return self.source.marks()[self.indices]

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        return self.source.image(int(self.indices[index]), shrink)

    def encoded(self, index: int) -> bytes | None:
        return self.source.encoded(int(self.indices[index]))

    def identity(self) -> str | None:
        inside = self.source.identity()
        return None if inside is None else hashlib.sha256(inside.encode() + self.indices.tobytes()).hexdigest()
