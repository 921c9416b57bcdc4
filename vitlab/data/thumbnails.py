"""Small pictures of images, as JPEG files in memory: for notebooks and contact sheets."""

import io
import os

from PIL import Image

from vitlab.data.images import BrokenImage, decode

SIDE = 96  # pixels of the longer side


def thumbnail(image: Image.Image, side: int = SIDE) -> bytes:
    """An RGB image as a JPEG file of at most this many pixels on its longer side."""
    file = io.BytesIO()
    shrink(image, side).save(file, "JPEG", quality=85)
    return file.getvalue()


def file_thumbnail(path: str, side: int = SIDE) -> bytes | None:
    """That of a file; None where it cannot be read (any more)."""
    try:
        return thumbnail(read_small(path, side), side)
    except BrokenImage:
        return None


def read_small(path: str, side: int) -> Image.Image:
    """The image in a file, no larger than it has to be for a picture of this side; raises BrokenImage."""
    if not os.path.isfile(path):
        raise BrokenImage(path, "there is no such file")
    return decode(path, path, lambda size: max(size) / (2 * side))


def shrink(image: Image.Image, side: int) -> Image.Image:
    """An image that is no longer than `side` pixels; smaller ones stay as they are."""
    scale = side / max(image.size)
    if scale >= 1:
        return image
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=2.0)
