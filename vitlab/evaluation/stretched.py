"""Images as the authors' few-shot evaluator frames them: stretched to a square, of which the center is cut out."""

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlab.data.decoder import DecodeHint
from vitlab.data.source import ImageSource
from vitlab.models.config import Size


class Stretched(ImageSource):
    """A source whose images are stretched to `side` pixels in height and width and cropped to `size` at the center."""

    def __init__(self, source: ImageSource, side: int, size: Size) -> None:
        super().__init__(source.labels, source.classes)
        self.source, self.side, self.size, self.groups = source, side, size, source.groups

    def name(self, index: int) -> str:
        return self.source.name(index)

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        pixels = stretch(np.asarray(self.source.image(index)), self.side)
        top, left = ((self.side - side) // 2 for side in self.size)
        return Image.fromarray(pixels[top : top + self.size[0], left : left + self.size[1]])


def stretch(pixels: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """An image (h, w, 3) as one of (side, side, 3), as TensorFlow resizes without antialiasing.

    Each pixel is interpolated linearly between the nearest four, however much smaller the image becomes; fractions are
    dropped.
    """
    (above, below, down), (before, after, across) = (neighbors(length, side) for length in pixels.shape[:2])
    across = across[None, :, None]
    first, second = (blend(row[:, before], row[:, after], across) for row in (pixels[above], pixels[below]))
    return blend(first, second, down[:, None, None]).astype(np.uint8)


def neighbors(length: int, side: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """For each new pixel along an axis, the old pixels on both sides of its center, and its distance to the first."""
    centers = (np.arange(side, dtype=np.float32) + np.float32(0.5)) * np.float32(length / side) - np.float32(0.5)
    low = np.floor(centers)
    first, second = (np.clip(x, 0, length - 1).astype(np.int64) for x in (low, low + 1))
    return first, second, centers - low


def blend(a: NDArray[np.generic], b: NDArray[np.generic], share: NDArray[np.float32]) -> NDArray[np.float32]:
    start = a.astype(np.float32)
    return start + (b.astype(np.float32) - start) * share
