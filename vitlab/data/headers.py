"""What an image's bytes claim, read without decoding: its size, and how much work its decoder will have.

A few bytes can ask for minutes of work: a progressive JPEG of 20,000 scans passes over all pixels with each of them, a
PNG may consist of a million chunks. Such files are refused here. Where the decoder only passes over the claimed pixels
a known number of times, the cost is known; for all other files it is not, and `read_header` returns None.
"""

import re
from dataclasses import dataclass

from vitlab.data.decoder import Buffer, DecodeError

MAX_SCANS = 500  # encoders write about ten, and never a hundred
MAX_SEGMENTS = 1_000  # of a JPEG before its first scan
MAX_CHUNKS = 20_000  # of a PNG; encoders write 8 kB or more in each
MIN_CHUNK = 64  # bytes of a chunk on average, in a PNG with that many
EXIF, ADOBE = 0xE1, 0xEE  # segments of a JPEG that may have a rotation, and other colors
SCAN = re.compile(rb"\xff\xda")  # found three times as fast as by bytes.count


class ImpossibleHeader(DecodeError):
    """A file that no encoder writes and that would cost far more than its size suggests."""


@dataclass(frozen=True)
class Header:
    """The claimed size of an image whose decoding cost is known."""

    width: int
    height: int
    passes: int = 1  # over all pixels
    is_usual: bool = False  # a JPEG of three components of 8 bits, neither rotated nor in other colors

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def work(self) -> int:
        return self.pixels * self.passes


def read_header(data: Buffer) -> Header | None:
    """The header of an ordinary still JPEG, PNG or WebP; None for anything else. Raises ImpossibleHeader."""
    if data[:3] == b"\xff\xd8\xff":
        return jpeg_header(data)
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return png_header(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return webp_header(data)
    return None


def jpeg_header(data: Buffer) -> Header | None:
    """Reads the segments up to the first scan and counts the scans: 0xFFDA cannot occur within one."""
    at, frame, usual = 2, None, True
    for _ in range(MAX_SEGMENTS):
        if at + 4 > len(data) or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xDA:
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = marker, big_endian(data, at + 5, 2), big_endian(data, at + 7, 2)
            usual = usual and data[at + 4 : at + 10 : 5] == b"\x08\x03"  # 8 bits, three components
        usual = usual and marker not in (EXIF, ADOBE)
        at += 2 + max(2, big_endian(data, at + 2, 2))
    else:
        return None
    scans = len(SCAN.findall(data, at))
    if scans > MAX_SCANS:
        raise ImpossibleHeader("broken", f"it has {scans:,} scans, and a photo has about ten")
    if frame is None or frame[0] > 0xC2 or not frame[1] or not frame[2]:  # only sequential and progressive
        return None
    return Header(frame[2], frame[1], scans, usual)


def png_header(data: Buffer) -> Header | None:
    at, count = 8, 0
    while at + 8 <= len(data) and data[at + 4 : at + 8] != b"IEND":
        if data[at + 4 : at + 8] == b"acTL":  # an animation
            return None
        at += 12 + big_endian(data, at, 4)
        count += 1
        if count > MAX_CHUNKS:
            if at < MIN_CHUNK * count:
                raise ImpossibleHeader("broken", f"it is cut into more than {MAX_CHUNKS:,} tiny chunks")
            return None
    return Header(big_endian(data, 16, 4), big_endian(data, 20, 4)) if data[12:16] == b"IHDR" else None


def webp_header(data: Buffer) -> Header | None:
    """The larger of the canvas and the frame on it."""
    at, sizes = 12, [(0, 0)]
    for _ in range(MAX_SEGMENTS):
        kind, body = data[at : at + 4], at + 8
        if kind == b"VP8 ":
            sizes.append((little_endian(data, body + 6, 2) & 0x3FFF, little_endian(data, body + 8, 2) & 0x3FFF))
        elif kind == b"VP8L":
            bits = little_endian(data, body + 1, 4)
            sizes.append(((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1))
        elif kind == b"VP8X":
            sizes.append((little_endian(data, body + 4, 3) + 1, little_endian(data, body + 7, 3) + 1))
        elif kind in (b"ANIM", b"ANMF"):
            return None
        if kind in (b"VP8 ", b"VP8L") or not kind:
            break
        at = body + little_endian(data, at + 4, 4) + 1 & ~1
    width, height = max(w for w, _ in sizes), max(h for _, h in sizes)
    return Header(width, height) if len(sizes) > 1 else None


def big_endian(data: Buffer, at: int, length: int) -> int:
    return int.from_bytes(data[at : at + length], "big")


def little_endian(data: Buffer, at: int, length: int) -> int:
    return int.from_bytes(data[at : at + length], "little")
