"""What a data set is: sources of labeled images with random access, and the splits of a set."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlab.data.decoder import DecodeHint
from vitlab.data.rng import Ints


class ImageSource:
    """Labeled images with random access; pickled to the loader's workers. Subclasses read the images."""

    groups: Ints | None = None  # (n,) the shard of each image, where shards are best read one after another

    def __init__(self, labels: Ints, classes: tuple[str, ...]) -> None:
        self.labels, self.classes = labels, classes  # labels: (n,)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        """The file or row, for logs."""
        raise NotImplementedError

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        """The upright RGB image; raises BrokenImage. `shrink` allows a smaller one, see decoder.py."""
        raise NotImplementedError


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


class ArraySource(ImageSource):
    """Images held as one array (n, height, width, 3) of uint8."""

    def __init__(self, title: str, pixels: NDArray[np.uint8], labels: Ints, classes: tuple[str, ...]) -> None:
        super().__init__(labels, classes)
        self.title, self.pixels = title, pixels

    def name(self, index: int) -> str:
        return f"{self.title} {index}"

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        return Image.fromarray(self.pixels[index])


class Subset(ImageSource):
    """Some images of a source, by index."""

    def __init__(self, source: ImageSource, indices: Ints) -> None:
        super().__init__(source.labels[indices], source.classes)
        self.source, self.indices = source, indices
        self.groups = None if source.groups is None else source.groups[indices]

    def name(self, index: int) -> str:
        return self.source.name(int(self.indices[index]))

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        return self.source.image(int(self.indices[index]), shrink)
