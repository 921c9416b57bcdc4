"""Every common format becomes the same upright RGB image."""

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, picture
from PIL import Image

from vitlab.data.images import BrokenImage, decode


def read(image: Image.Image, kind: str, **options: object) -> np.ndarray:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return np.asarray(decode(io.BytesIO(buffer.getvalue()), "test")).astype(int)


GREY = np.asarray(picture(0).convert("L")).astype(int)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "GIF"])
def test_lossless_kinds(kind: str) -> None:
    image = picture(1)
    close = 40 if kind == "GIF" else 0  # a palette of 256 colors
    assert np.abs(read(image, kind) - np.asarray(image)).max() <= close


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_lossy_kinds(kind: str) -> None:
    image = picture(1, 80, 96)
    assert np.abs(read(image, kind, quality=98) - np.asarray(image)).mean() < 3


def test_grey_bilevel_and_palette() -> None:
    grey = picture(0).convert("L")
    assert (read(grey, "PNG") == GREY[..., None]).all()
    assert (read(grey.convert("1"), "PNG") == np.asarray(grey.convert("1")).astype(int)[..., None] * 255).all()
    palette = picture(0).quantize(16)
    assert (read(palette, "PNG") == np.asarray(palette.convert("RGB"))).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_sixteen_bits_keep_their_range(kind: str) -> None:
    deep = Image.fromarray((GREY * 257).astype(np.uint16))
    assert (read(deep, kind) == GREY[..., None]).all()


def test_wide_integers_and_floats() -> None:
    assert (read(Image.fromarray((GREY * 257).astype(np.int32)), "TIFF") == GREY[..., None]).all()
    assert (read(Image.fromarray(GREY.astype(np.int32)), "TIFF") == GREY[..., None]).all()
    assert (read(Image.fromarray((GREY / 255).astype(np.float32)), "TIFF") == GREY[..., None]).all()


def test_transparency_shows_white() -> None:
    image = picture(2).convert("RGBA")
    alpha = np.tile(np.linspace(0, 255, image.width).round().astype(np.uint8), (image.height, 1))
    image.putalpha(Image.fromarray(alpha))
    share = alpha[..., None] / 255
    expected = np.asarray(picture(2)) * share + 255 * (1 - share)
    assert np.abs(read(image, "PNG") - expected).max() <= 1
    grey = picture(2).convert("LA")
    grey.putalpha(0)
    assert (read(grey, "PNG") == 255).all()
    palette = picture(2).quantize(8)
    index = int(np.asarray(palette)[0, 0])
    assert (read(palette, "PNG", transparency=index)[0, 0] == 255).all()


def test_cmyk() -> None:
    image = picture(3)
    found = read(image.convert("CMYK"), "JPEG", quality=98)
    assert np.abs(found - np.asarray(image)).mean() < 4


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation: int) -> None:
    """A camera held sideways records that in EXIF; the expected rotation is written out here."""
    upright = np.asarray(picture(4))
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("PNG", "TIFF"):
        assert (read(Image.fromarray(np.ascontiguousarray(stored)), kind, exif=exif) == upright).all()


def test_shrunk_jpeg_keeps_its_picture_and_orientation() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    picture(5, 400, 640).save(buffer, "JPEG", exif=exif, quality=95)
    asked = []

    def shrink(size: tuple[int, int]) -> float:
        asked.append(size)
        return 3.0

    full = decode(io.BytesIO(buffer.getvalue()), "x")
    small = decode(io.BytesIO(buffer.getvalue()), "x", shrink)
    assert asked == [(640, 400)]  # the upright size
    assert (full.size, small.size) == ((400, 640), (200, 320))  # never below a third
    assert np.abs(np.asarray(full.resize(small.size)).astype(int) - np.asarray(small)).mean() < 2


@pytest.mark.parametrize(
    "data",
    [b"", b"not an image", encoded(picture(0))[:200], encoded(picture(0, 64, 64), "JPEG")[:300], b"\xff\xd8\xff\xe0"],
)
def test_broken_files_are_named(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "photo.jpg"
    path.write_bytes(data)
    with pytest.raises(BrokenImage) as caught:
        decode(path, str(path))
    assert caught.value.name == str(path)
    assert caught.value.why


def test_only_readers_of_pictures_see_a_file(tmp_path: Path) -> None:
    """PostScript under an image's name is not passed to the program that Pillow would start for it."""
    disguised = tmp_path / "cat.jpg"
    disguised.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")
    with Image.open(disguised) as seen:
        assert seen.format == "EPS"  # as Pillow alone would identify it
    with pytest.raises(BrokenImage, match="not an image of a known kind"):
        decode(disguised, "cat.jpg")


def test_large_photos_give_no_warnings_of_pillow(tmp_path: Path) -> None:
    """In a new process, with Pillow's limit lowered: above it there is a warning, above twice of it an error."""
    Image.new("RGB", (1500, 1000)).save(tmp_path / "a.png")
    code = f"""
from PIL import Image
from vitlab.data.decoder import DecodeError, decode_bytes
data = open({str(tmp_path / "a.png")!r}, "rb").read()
Image.MAX_IMAGE_PIXELS = 1_000_000
print(decode_bytes(data).size)
Image.MAX_IMAGE_PIXELS = 500_000
try:
    decode_bytes(data)
except DecodeError as error:
    print(error.fault, error.why)
"""
    done = subprocess.run([sys.executable, "-W", "default", "-c", code], capture_output=True, text=True)
    assert done.stdout == "(1500, 1000)\nlarge it has more than 1 million pixels; shrink it\n"
    assert "Decompression" not in done.stderr
