"""From a file's bytes to an upright RGB image, and to the fixed frame of evaluation.

Decodes in this process and without limits; images.py adds them. Imports no torch: small processes run this too.
"""

import contextlib
import functools
import io
import math
import warnings
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitlab.data.av1 import largest_frame
from vitlab.models.config import Interpolation, Preprocess, Size
from vitlab.text import brief

ORIENTATION = 0x0112  # the EXIF tag; from 5 on, width and height are swapped
TURNS = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90")
TRANSPOSE = {orientation: Image.Transpose[turn] for orientation, turn in enumerate(TURNS, 2)}
# Pillow's names of the formats that are read. No other reader sees a file, whatever its name: some start programs.
FORMATS = ("JPEG", "PNG", "WEBP", "AVIF", "HEIF", "BMP", "GIF", "TIFF", "JPEG2000", "PPM", "TGA")
HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
HEIC_FIX = "to read HEIC, pip install 'vitlab[heic]'"
DEEP_COST = 4  # grays of 16 bits or more are converted as floats, which take so many times the memory
FILTERS = {name: Image.Resampling[name.upper()] for name in get_args(Interpolation)}
MAX_ASPECT = 50  # a longer image is cropped to this ratio first: resizing all of it could fill the memory

warnings.filterwarnings("ignore", category=UserWarning, module=r"PIL\.")  # odd tags, which do not affect the pixels
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)  # images.py has its own limits

Buffer = bytes | bytearray
DecodeHint = Callable[[Size], float]  # how many times smaller an image of this size (height, width) may be decoded
DecodeFault = Literal["broken", "unknown", "large"]


class DecodeError(Exception):
    """Bytes that cannot be decoded: the kind of fault, and the reason."""

    def __init__(self, fault: DecodeFault, why: str) -> None:
        super().__init__(why)
        self.fault, self.why = fault, why


@functools.cache
def readers() -> tuple[str, ...]:
    """The formats that this build of Pillow can read, with HEIF where its plugin is installed."""
    Image.init()
    with contextlib.suppress(ImportError):
        import pillow_heif

        pillow_heif.register_heif_opener(decode_threads=1, thumbnails=False)
    return tuple(name for name in FORMATS if name in Image.OPEN)


def decode_bytes(
    data: Buffer,
    shrink: DecodeHint | None = None,
    formats: tuple[str, ...] | None = None,
    most_pixels: int | None = None,
) -> Image.Image:
    """The RGB image in the bytes of a file, rotated as its EXIF states; raises DecodeError and MemoryError.

    Where `shrink` allows, a JPEG is decoded at a fraction of its size. Transparent pixels are laid over white; of an
    animation the first frame is used. An image of more than `most_pixels` is refused.
    """
    try:
        image: Image.Image = Image.open(io.BytesIO(data), formats=formats or readers())
        check_pixel_count(image, data, most_pixels)
        if shrink is not None and image.format == "JPEG":
            _draft(image, shrink)
        image.load()  # a TIFF is rotated by its reader, which then removes the tag
        turn = orientation(image)
        return to_rgb(image if turn == 1 else image.transpose(TRANSPOSE[turn]))
    except (DecodeError, MemoryError):
        raise
    except Image.DecompressionBombError:  # without a process with limits, Pillow's own is left
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0) // 1_000_000
        raise DecodeError("large", f"it has more than {most:,} million pixels; shrink it") from None
    except UnidentifiedImageError:
        missing = is_heic(data) and "HEIF" not in readers()
        raise DecodeError("unknown", HEIC_FIX if missing else "it is not an image of a known kind") from None
    except Exception as error:  # decoders raise nearly anything on broken bytes
        raise DecodeError("broken", brief(error)) from None


def is_heic(data: Buffer) -> bool:
    """Whether a file is as iPhones write them; an AVIF, which may begin likewise, Pillow reads by itself."""
    return data[4:8] == b"ftyp" and bytes(data[8:12]) in HEIC_BRANDS


def check_pixel_count(image: Image.Image, data: Buffer, most: int | None) -> None:
    """Raise DecodeError for an image, or a frame inside it, of more than `most` pixels."""
    deep = image.mode.startswith(("I", "F"))
    width, height = max(image.size, largest_frame(data) if image.format == "AVIF" else (0, 0), key=math.prod)
    if most is not None and width * height * (DEEP_COST if deep else 1) > most:
        fourfold = " that count fourfold, being of 16 bits or more" if deep else ""
        raise DecodeError("large", f"{width} x {height} pixels{fourfold}")


def orientation(image: Image.Image) -> int:
    """The EXIF orientation, 1 to 8; 1 where it cannot be read."""
    try:
        value = image.getexif().get(ORIENTATION, 1)
    except Exception:  # its reader, too, raises nearly anything, and the image may be good all the same
        return 1
    return value if value in TRANSPOSE else 1


def _draft(image: Image.Image, shrink: DecodeHint) -> None:
    width, height = image.size
    factor = shrink((width, height) if orientation(image) >= 5 else (height, width))
    if factor >= 2:  # the decoder offers halves, quarters and eighths, and never goes below the requested size
        image.draft(None, (max(1, int(width / factor)), max(1, int(height / factor))))


def to_rgb(image: Image.Image) -> Image.Image:
    """The image in RGB, transparent pixels over white."""
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode.startswith(("I", "F")):
        image = to_eight_bits(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


def to_eight_bits(image: Image.Image) -> Image.Image:
    """Grays of 16 bits, of 32-bit integers and of floats as 8 bits."""
    gray = np.asarray(image).astype(np.float64)
    peak = gray.max(initial=0.0)
    top = 1.0 if image.mode == "F" and peak <= 1 else 255.0
    if image.mode.startswith("I;16") or peak > 255:
        top = 65535.0
    return Image.fromarray((gray.clip(0, top) * (255 / top)).round().astype(np.uint8))


# ---- framing


def frame_image(image: Image.Image, size: Size, preprocess: Preprocess) -> Image.Image:
    """Resize to cover `size / crop` and crop the center, or stretch to `size`; of a very long image only the middle."""
    height, width = size
    kind = FILTERS[preprocess.interpolation]
    if preprocess.fit == "stretch":
        return image.resize((width, height), kind)
    image = limit_aspect(image)
    least_h, least_w = int(height / preprocess.crop), int(width / preprocess.crop)
    if image.width * least_h <= image.height * least_w:  # the width needs the larger scale
        scaled = least_w, max(least_h, int(least_w * image.height / image.width))
    else:
        scaled = max(least_w, int(least_h * image.width / image.height)), least_h
    left, top = round((scaled[0] - width) / 2), round((scaled[1] - height) / 2)
    return image.resize(scaled, kind).crop((left, top, left + width, top + height))


def limit_aspect(image: Image.Image) -> Image.Image:
    """The middle of an image that is more than MAX_ASPECT times longer than wide, or wider than long."""
    width, height = image.size
    longest = MAX_ASPECT * min(width, height)
    if max(width, height) <= longest:
        return image
    across, down = min(width, longest), min(height, longest)
    left, top = (width - across) // 2, (height - down) // 2
    return image.crop((left, top, left + across, top + down))
