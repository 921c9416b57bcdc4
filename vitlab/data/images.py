"""From a file's bytes to an upright RGB picture, whatever the file holds."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from vitlab.config import Size

ORIENTATION = 0x0112  # the EXIF tag; from 5 on the picture lies on its side
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif", ".tif", ".tiff", ".jp2"}
    | {".ppm", ".pgm", ".pbm", ".pnm", ".tga"}
)

# Pillow's names of the kinds above. No other reader sees a file, whatever it is called: some of them start programs.
READERS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "GIF", "TIFF", "JPEG2000", "PPM", "TGA")

Shrink = Callable[[Size], float]  # how many times smaller a picture of this size (height, width) may come


@functools.cache
def readers() -> tuple[str, ...]:
    """Those that this Pillow was built with."""
    Image.init()
    return tuple(name for name in READERS if name in Image.OPEN)


class BrokenImage(Exception):
    """An image that cannot be decoded: which, and why."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")
        self.name, self.why = name, why


def decode(file: str | Path | BinaryIO, name: str, shrink: Shrink | None = None) -> Image.Image:
    """The picture, turned as its EXIF says, in RGB; where `shrink` allows, a JPEG is decoded at a fraction of its size.

    Transparent pixels show white behind them; of an animation the first frame is taken.
    """
    try:
        image: Image.Image = Image.open(file, formats=readers())
        if shrink is not None and image.format == "JPEG":
            _draft(image, shrink)
        ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image)
    except Exception as error:  # decoders raise nearly anything on broken bytes
        why = "it is not an image of a known kind" if isinstance(error, UnidentifiedImageError) else str(error)
        raise BrokenImage(name, why or type(error).__name__) from None


def _draft(image: Image.Image, shrink: Shrink) -> None:
    width, height = image.size
    size = (width, height) if image.getexif().get(ORIENTATION, 1) >= 5 else (height, width)
    factor = shrink(size)
    if factor >= 2:  # the decoder knows halves, quarters and eighths, and never goes below what is asked for
        image.draft(None, (max(1, int(width / factor)), max(1, int(height / factor))))


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith(("I", "F")):
        image = eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def eight_bits(image: Image.Image) -> Image.Image:
    """Greys of 16 bits, of 32-bit integers and of floats as 8 bits."""
    grey = np.asarray(image).astype(np.float64)
    peak = grey.max(initial=0.0)
    if image.mode.startswith("I;16") or peak > 255:
        top = 65535.0
    else:
        top = 1.0 if image.mode == "F" and peak <= 1 else 255.0
    return Image.fromarray((grey.clip(0, top) * (255 / top)).round().astype(np.uint8))
