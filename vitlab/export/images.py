"""Pictures that an export is calibrated and checked with: the user's own, or generated ones where there are none."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor

from vitlab.data.images import BrokenImage
from vitlab.data.open import open_data
from vitlab.data.source import ImageSource
from vitlab.data.transforms import eval_pixels
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size
from vitlab.predict.inputs import find

GENERATED = 64
PACKED = ("*.parquet", "data/*.parquet", "train*/*.parquet", "*.tar")  # in a folder: a set, not loose pictures


class Shelf(Protocol):
    """Pictures by number."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image: ...


@dataclass(frozen=True)
class Pictures:
    """Some pictures of a shelf; `title` says where they come from."""

    title: str
    shelf: Shelf
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def pixels(self, size: Size, preprocess: Preprocess) -> Tensor:
        """(n, 3, height, width) bytes, framed as in evaluation; pictures that cannot be read are left out."""
        console = Console(stderr=True)
        found, why = [], ""
        for index in track(
            self.indices,
            "reading images",
            console=console,
            transient=True,
            disable=not console.is_terminal or len(self) <= GENERATED,
        ):
            try:
                found.append(eval_pixels(self.shelf.image(index), size, preprocess))
            except BrokenImage as bad:
                why = str(bad)
        if not found:
            raise UserError(f"none of the images of {self.title} can be read, such as {why}")
        return torch.stack(found)

    def some(self, count: int) -> "Pictures":
        """So many of them, evenly spread: sets often lie sorted by class."""
        return Pictures(self.title, self.shelf, [self.indices[i] for i in spread(len(self), count)])

    def without(self, others: "Pictures") -> "Pictures":
        taken = set(others.indices)
        return Pictures(self.title, self.shelf, [index for index in self.indices if index not in taken])


def spread(n: int, count: int) -> list[int]:
    return np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(int)).tolist()


def open_pictures(word: str | None) -> Pictures:
    """The pictures a word names: a folder, a file, a pattern or a data set; none: generated ones."""
    if word is None:
        return Pictures("generated pictures", Generated(), range(GENERATED))
    path = Path(word).expanduser()
    packed = word.endswith((".parquet", ".tar")) or any(next(path.glob(pattern), None) for pattern in PACKED)
    loose = not packed and (path.exists() or "*" in word)
    shelf: Shelf = find([word]) if loose else Splits(word)
    return Pictures(word, shelf, range(len(shelf)))


class Splits:
    """All splits of a data set, one after another."""

    def __init__(self, name: str) -> None:
        data = open_data(name)
        self.parts: list[ImageSource] = [part for part in (data.train, data.validation, data.test) if part is not None]

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def image(self, index: int) -> Image.Image:
        for part in self.parts:
            if index < len(part):
                return part.image(index)
            index -= len(part)
        raise IndexError(index)


class Generated:
    """Smooth clouds of color under a few hard edges: detail at several scales, as photos have."""

    def __len__(self) -> int:
        return GENERATED

    def image(self, index: int) -> Image.Image:
        draws = np.random.default_rng(index)
        picture = np.zeros((256, 256, 3))
        for cells in (2, 5, 16, 64):
            cloud = Image.fromarray(draws.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            picture += np.asarray(cloud.resize((256, 256), Image.Resampling.BICUBIC)) / cells**0.5
        for _ in range(4):
            top, left, height, width = draws.integers(16, 192, 4)
            picture[top : top + height, left : left + width] += draws.normal(0, 80, 3)
        low, high = picture.min(), picture.max()
        return Image.fromarray(((picture - low) * (255 / (high - low))).astype(np.uint8))
