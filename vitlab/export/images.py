"""The images that an export is calibrated and compared on: the user's own, or generated ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.data import parquet
from vitlab.data.images import BrokenImage
from vitlab.data.open import open_data
from vitlab.data.transforms import eval_pixels
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size
from vitlab.prediction.inputs import find_inputs
from vitlab.terminal import track

GENERATED = 64


class IndexedImages(Protocol):
    """Images by number."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> Image.Image: ...


@dataclass(frozen=True)
class ImageSet:
    """Some images of a source; `title` names where they come from."""

    title: str
    source: IndexedImages
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def pixels(self, size: Size, preprocess: Preprocess) -> Tensor:
        """Bytes (n, 3, height, width), resized and cropped as in evaluation; unreadable images are left out.

        Raises UserError if none can be read.
        """
        pixels, why = [], ""
        for index in track(self.indices, "reading images") if len(self) > GENERATED else self.indices:
            try:
                pixels.append(eval_pixels(self.source.image(index), size, preprocess))
            except BrokenImage as bad:
                why = str(bad)
        if not pixels:
            raise UserError(f"none of the images of {self.title} can be read, such as {why}")
        return torch.stack(pixels)

    def sample(self, count: int) -> "ImageSet":
        """At most `count` of them, evenly spread, since data sets are often sorted by class."""
        n = len(self)
        spread = np.unique(np.linspace(0, n - 1, min(n, count)).round().astype(int)).tolist()
        return replace(self, indices=[self.indices[i] for i in spread])

    def without(self, others: "ImageSet") -> "ImageSet":
        excluded = set(others.indices)
        return replace(self, indices=[index for index in self.indices if index not in excluded])


def open_images(name: str | None) -> ImageSet:
    """The images of a folder, a file, a pattern or a data set; None: generated ones."""
    if name is None:
        return ImageSet("generated images", GeneratedImages(), range(GENERATED))
    path = Path(name).expanduser()
    packed = name.lower().endswith((".parquet", ".tar")) or bool(parquet.files_in(path)) or any(path.glob("*.tar"))
    single_files = not packed and (path.exists() or "*" in name)
    source: IndexedImages = find_inputs([name]) if single_files else AllSplits(name)
    return ImageSet(name, source, range(len(source)))


class AllSplits:
    """All splits of a data set, one after another."""

    def __init__(self, name: str) -> None:
        self.parts = open_data(name).splits.values()

    def __len__(self) -> int:
        return sum(len(part) for part in self.parts)

    def image(self, index: int) -> Image.Image:
        for part in self.parts:
            if index < len(part):
                return part.image(index)
            index -= len(part)
        raise IndexError(index)


class GeneratedImages:
    """Random images of smooth noise and rectangles, with detail at several scales, as photos have."""

    def __len__(self) -> int:
        return GENERATED

    def image(self, index: int) -> Image.Image:
        rng = np.random.default_rng(index)
        pixels = np.zeros((256, 256, 3))
        for cells in (2, 5, 16, 64):
            cloud = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            pixels += np.asarray(cloud.resize((256, 256), Image.Resampling.BICUBIC)) / cells**0.5
        for _ in range(4):
            top, left, height, width = rng.integers(16, 192, 4)
            pixels[top : top + height, left : left + width] += rng.normal(0, 80, 3)
        low, high = pixels.min(), pixels.max()
        return Image.fromarray(((pixels - low) * (255 / (high - low))).astype(np.uint8))
