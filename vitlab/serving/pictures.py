"""From bytes that anyone may have sent to the model's pixels: the header is judged first, and only then decoded.

Large pictures are decoded one at a time on a thread of their own, so that they add up to no more memory than one of
them takes, and so that everybody else's pass by them.
"""

import asyncio
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vitlab.data.images import readers, to_rgb
from vitlab.serving.limits import Limits, Refused, short
from vitlab.serving.uploads import Upload

DEEP = 4
LARGE = 1 / 8  # of the limit on pixels: from here on a picture is decoded by itself


class Decoders:
    """Threads that turn uploads into pixels, (3, h, w), uint8; `frame` makes them of a picture in RGB."""

    def __init__(self, frame: Callable[[Image.Image], Tensor], limits: Limits, threads: int) -> None:
        self.frame, self.limits = frame, limits
        self.many = ThreadPoolExecutor(threads, "decode")
        self.large = ThreadPoolExecutor(1, "decode-large")

    async def pixels(self, uploads: list[Upload]) -> list[Tensor]:
        """All of a request's pictures; the first that is refused refuses the request and ends the others' work."""
        if len(uploads) == 1:
            return [await self._one(uploads[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(upload)) for upload in uploads]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _one(self, upload: Upload) -> Tensor:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self.many, self._small, upload)
        if isinstance(found, Image.Image):
            return await loop.run_in_executor(self.large, self._decode, found, upload.name)
        return found

    def _small(self, upload: Upload) -> Tensor | Image.Image:
        """The pixels; of a large picture only the open file."""
        image = opened(upload, self.limits)
        if cost(image) > LARGE * self.limits.max_pixels:
            return image
        return self._decode(image, upload.name)

    def _decode(self, image: Image.Image, name: str) -> Tensor:
        return self.frame(upright(image, name))

    def close(self) -> None:
        self.many.shutdown(wait=False, cancel_futures=True)
        self.large.shutdown(wait=False, cancel_futures=True)


def opened(upload: Upload, limits: Limits) -> Image.Image:
    """The picture's header, found good; its pixels are still packed."""
    try:
        image: Image.Image = Image.open(io.BytesIO(upload.data), formats=readers())
    except Image.DecompressionBombError:
        raise too_many_pixels(upload.name, "far more pixels", limits) from None
    except UnidentifiedImageError:
        raise Refused(422, f"'{upload.name}' is not a picture of a kind that is read here{hint(upload.data)}") from None
    except Exception as error:  # readers raise nearly anything on broken bytes
        raise broken(upload.name, error) from None
    if (counted := cost(image)) > limits.max_pixels:
        deep = " that count fourfold, being of 16 bits or more" if counted > image.width * image.height else ""
        raise too_many_pixels(upload.name, f"{image.width} x {image.height} pixels{deep}", limits)
    return image


def cost(image: Image.Image) -> int:
    """Pixels to decode; greys of 16 and more bits pass through floats, which take four times the memory."""
    return image.width * image.height * (DEEP if image.mode.startswith(("I", "F")) else 1)


def upright(image: Image.Image, name: str) -> Image.Image:
    """As `vitlab.data.images.decode` does it, from a picture that is open already."""
    try:
        ImageOps.exif_transpose(image, in_place=True)
        return to_rgb(image)
    except Exception as error:  # decoders raise nearly anything on broken bytes
        raise broken(name, error) from None


def broken(name: str, error: Exception) -> Refused:
    return Refused(422, f"'{name}' is broken: {str(error)[:200] or type(error).__name__}")


def too_many_pixels(name: str, what: str, limits: Limits) -> Refused:
    return Refused(413, f"'{name}' has {what}, and {short(limits.max_pixels).rstrip()} are allowed; send it smaller")


def hint(data: bytearray) -> str:
    """A word for what people send most often by mistake."""
    start = bytes(data[:512])
    if start.lstrip().lower().startswith((b"<svg", b"<?xml", b"<!doctype")):
        return ": it is text such as SVG or HTML; send a JPEG or PNG"
    if start[4:8] == b"ftyp" and start[8:12] in (b"heic", b"heix", b"mif1", b"hevc"):
        return ": it is HEIC; send it as JPEG"
    return "; send a JPEG, PNG, WebP, AVIF, GIF, BMP or TIFF"
