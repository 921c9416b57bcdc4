"""What a picture's bytes claim, read without decoding: its size, and how much work its decoder will have.

A few bytes can ask for minutes of work: a progressive JPEG of 20,000 scans passes over all pixels with each of them, a
PNG may consist of a million chunks. Such files are refused here. Of files whose decoder does no more than pass over
the claimed pixels a known number of times, the cost is known; of all others it is not, and they return None.
"""

from dataclasses import dataclass

MOST_SCANS = 500  # encoders write about ten, and never a hundred
MOST_SEGMENTS = 1_000  # of a JPEG before its first scan
MOST_CHUNKS = 20_000  # of a PNG; encoders write 8 kB or more in each
LEAST_CHUNK = 64  # bytes of a chunk on average, in a PNG of so many

Data = bytes | bytearray


class Absurd(ValueError):
    """A file that no encoder writes and that would cost far more than it shows."""


@dataclass(frozen=True)
class Header:
    """The claims of a file whose cost is known."""

    width: int
    height: int
    passes: int = 1  # over all pixels

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def work(self) -> int:
        return self.pixels * self.passes


def read_header(data: Data) -> Header | None:
    """The header of a still JPEG, PNG or WebP of an ordinary build; None for anything else."""
    if data[:3] == b"\xff\xd8\xff":
        return jpeg(data)
    if data[:8] == b"\x89PNG\r\n\x1a\n":
        return png(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return webp(data)
    return None


def jpeg(data: Data) -> Header | None:
    """Segments up to the first scan; scans are counted, since 0xFFDA cannot occur within one."""
    at, frame = 2, None
    for _ in range(MOST_SEGMENTS):
        if at + 4 > len(data) or data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xDA:
            break
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            frame = marker, number(data, at + 5, 2), number(data, at + 7, 2)
        at += 2 + max(2, number(data, at + 2, 2))
    else:
        return None
    scans = data.count(b"\xff\xda", at)
    if scans > MOST_SCANS:
        raise Absurd(f"it has {scans:,} scans, and a photo has about ten")
    if frame is None or frame[0] > 0xC2 or not frame[1] or not frame[2]:  # sequential and progressive are plain
        return None
    return Header(frame[2], frame[1], scans)


def png(data: Data) -> Header | None:
    at, count = 8, 0
    while at + 8 <= len(data) and data[at + 4 : at + 8] != b"IEND":
        if data[at + 4 : at + 8] == b"acTL":  # an animation
            return None
        at += 12 + number(data, at, 4)
        count += 1
        if count > MOST_CHUNKS:
            if at < LEAST_CHUNK * count:
                raise Absurd(f"it is cut into more than {MOST_CHUNKS:,} tiny chunks")
            return None
    return Header(number(data, 16, 4), number(data, 20, 4)) if data[12:16] == b"IHDR" else None


def webp(data: Data) -> Header | None:
    """The largest of the canvas and of what lies on it."""
    at, sizes = 12, [(0, 0)]
    for _ in range(MOST_SEGMENTS):
        kind, body = data[at : at + 4], at + 8
        if kind == b"VP8 ":
            sizes.append((little(data, body + 6, 2) & 0x3FFF, little(data, body + 8, 2) & 0x3FFF))
        elif kind == b"VP8L":
            bits = little(data, body + 1, 4)
            sizes.append(((bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1))
        elif kind == b"VP8X":
            sizes.append((little(data, body + 4, 3) + 1, little(data, body + 7, 3) + 1))
        elif kind in (b"ANIM", b"ANMF"):
            return None
        if kind in (b"VP8 ", b"VP8L") or not kind:
            break
        at = body + little(data, at + 4, 4) + 1 & ~1
    width, height = max(w for w, _ in sizes), max(h for _, h in sizes)
    return Header(width, height) if len(sizes) > 1 else None


def number(data: Data, at: int, length: int) -> int:
    return int.from_bytes(data[at : at + length], "big")


def little(data: Data, at: int, length: int) -> int:
    return int.from_bytes(data[at : at + length], "little")
