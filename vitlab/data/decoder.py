"""From a file's bytes to an upright RGB picture, in this process and without any limit; see images.py for files."""

import functools
import io
import math
import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitlab.data.av1 import largest_frame
from vitlab.models.config import Size

ORIENTATION = 0x0112  # the EXIF tag; from 5 on the picture lies on its side
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Pillow's names of the kinds that are read. No other reader sees a file, whatever it is called: some start programs.
READERS = ("JPEG", "PNG", "WEBP", "AVIF", "BMP", "GIF", "TIFF", "JPEG2000", "PPM", "TGA")
DEEP = 4  # greys of 16 and more bits pass through floats, which take so many times the memory

warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")  # odd tags, which nobody reading can change

Shrink = Callable[[Size], float]  # how many times smaller a picture of this size (height, width) may come
Fault = Literal["broken", "unknown", "large"]


class Undecodable(Exception):
    """Bytes that give no picture: in which way, and why."""

    def __init__(self, fault: Fault, why: str) -> None:
        super().__init__(why)
        self.fault, self.why = fault, why


@functools.cache
def readers() -> tuple[str, ...]:
    """Those that this Pillow was built with."""
    Image.init()
    return tuple(name for name in READERS if name in Image.OPEN)


def unpack(
    data: bytes | bytearray,
    shrink: Shrink | None = None,
    formats: tuple[str, ...] | None = None,
    most_pixels: int | None = None,
) -> Image.Image:
    """The picture, turned as its EXIF says, in RGB; where `shrink` allows, a JPEG is decoded at a fraction of its size.

    Transparent pixels show white behind them; of an animation the first frame is taken.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=formats or readers())
        check_pixels(image, data, most_pixels)
        if shrink is not None and image.format == "JPEG":
            _draft(image, shrink)
        image.load()  # a TIFF is turned by its reader, which then forgets the tag
        turn = orientation(image)
        return to_rgb(image if turn == 1 else image.transpose(TURNS[turn]))
    except (Undecodable, MemoryError):
        raise
    except UnidentifiedImageError:
        raise Undecodable("unknown", "it is not an image of a known kind") from None
    except Exception as error:  # decoders raise nearly anything on broken bytes
        raise Undecodable("broken", str(error)[:200] or type(error).__name__) from None


def check_pixels(image: Image.Image, data: bytes | bytearray, most: int | None) -> None:
    deep = image.mode.startswith(("I", "F"))
    width, height = max(image.size, largest_frame(data) if image.format == "AVIF" else (0, 0), key=math.prod)
    if most is not None and width * height * (DEEP if deep else 1) > most:
        fourfold = " that count fourfold, being of 16 bits or more" if deep else ""
        raise Undecodable("large", f"{width} x {height} pixels{fourfold}")


def orientation(image: Image.Image) -> int:
    """How the camera was held, 1 to 8; EXIF that cannot be read says nothing."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # its reader, too, raises nearly anything, and the picture may be good all the same
        return 1
    return value if value in TURNS else 1


def _draft(image: Image.Image, shrink: Shrink) -> None:
    width, height = image.size
    factor = shrink((width, height) if orientation(image) >= 5 else (height, width))
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
