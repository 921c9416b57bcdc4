"""Small files that take a lot of time or memory to read."""

import io
import struct
import zlib
from base64 import b85decode

import numpy as np
from PIL import Image


def scans(side: int = 1500, count: int = 20_000) -> bytes:
    """A progressive JPEG whose last scan comes again and again: each is a pass over all pixels."""
    file = io.BytesIO()
    Image.fromarray(np.full((side, side), 128, np.uint8)).save(file, "JPEG", progressive=True, quality=30)
    data = file.getvalue()
    last, end = data.rindex(b"\xff\xda"), len(data) - 2
    return data[:end] + data[last:end] * count + data[end:]


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def chunks(count: int = 1_000_000) -> bytes:
    """A PNG that is mostly empty chunks of no meaning."""
    head = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(bytes(8 * 25)))
    return head + chunk(b"vtLb", b"") * count + pixels + chunk(b"IEND", b"")


def odd_maxval(side: int = 5_000) -> bytes:
    """A PPM whose greatest value is neither 255 nor 65535, so that Pillow scales every byte of it in Python."""
    return f"P6 {side} {side} 254\n".encode() + bytes(3 * side * side)


def tile(side: int = 26_000) -> bytes:
    """A TIFF of 16 x 16 pixels in one tile of side x side."""
    data = zlib.compress(bytes(1000))
    after = 8 + 2 + 12 * 10 + 4
    tags = [
        (256, 4, 1, 16),  # width
        (257, 4, 1, 16),  # height
        (258, 3, 3, after),  # bits of the three samples
        (259, 3, 1, 8),  # deflate
        (262, 3, 1, 2),  # RGB
        (277, 3, 1, 3),  # samples
        (322, 4, 1, side),  # tile width
        (323, 4, 1, side),  # tile height
        (324, 4, 1, after + 6),  # where the tile is
        (325, 4, 1, len(data)),
    ]
    entries = b"".join(struct.pack("<HHII", *tag) for tag in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + struct.pack("<IHHH", 0, 8, 8, 8) + data


def inner_frame() -> bytes:
    """An AVIF whose header has 16 x 16 pixels, with an AV1 frame of 16000 x 16000."""
    return zlib.decompress(b85decode(FRAME)).replace(
        b"ispe\0\0\0\0" + struct.pack(">II", 16_000, 16_000), b"ispe\0\0\0\0" + struct.pack(">II", 16, 16)
    )


FRAME = """
c-muNV30{GsVqn=%S>Yc0uY^>nP!-qnF!*)%uOvxWPkw0jFg-rD4U@mGr5ET4e%9YmgIt2j6f`xnUkLk;<$kLj1W;qUIqqsW*}Q5Gczv@u2u@jNo9ia6
3Yw>o%3_@!FFY278Df#Y0u1p<a{74l384k3bD?v0fIsHR%C)Ta{vjR#4<zYMtK>KfN*ktPElTRP6g0hUIsRhV)4v^T$qo5&SGI?YGwhti90tXu|$Z0i(
CGCUH#9$%b28i9gIHm3a}@wdH-Lmj)B4K{3)wN@7gS6*H4#Pd`p<`!NRml?$w)>4m>RWw{6azJoj^X23)&0sA&3I%O5mZ^2{iGuZ~W9`2l+CGsUNG{#l
FQyl(%7l(_eyQP(Of%u6&y;|&wS=WZDF-l+FRy*KK;QSXuJJtLB>+jD?kdPw$>1^{RHl%W
""".replace("\n", "")
