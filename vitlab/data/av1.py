"""The size of the frames inside an AVIF, which need not be the size that the file gives for the picture.

Its decoder unpacks whole frames and then cuts out what the container asks for, so it is the frames that cost. An AV1
stream begins with a sequence header (AV1 specification, 5.5), which holds the largest size of its frames.
"""

import re

START = re.compile(rb"\x12\x00\x0a")  # an empty temporal delimiter, then the sequence header with its length
MOST = 10_000  # sequence headers looked at


def largest_frame(data: bytes | bytearray) -> tuple[int, int]:
    """(width, height) of the largest frame that any stream in the file announces; (0, 0) if none is found."""
    sizes = [(0, 0)]
    for found, _ in zip(START.finditer(data), range(MOST), strict=False):
        sizes.append(frame_size(bytes(data[found.end() + 1 : found.end() + 65])))
    return max(sizes, key=lambda size: size[0] * size[1])


def frame_size(header: bytes) -> tuple[int, int]:
    bits = Bits(header)
    bits.take(4)  # profile, still picture
    if bits.take(1):  # the short header of a still picture
        bits.take(5)  # level
    else:
        if bits.take(1):  # timing, which no still picture has
            return 0, 0
        delays = bits.take(1)
        for _ in range(bits.take(5) + 1):  # operating points
            bits.take(12)
            if bits.take(5) > 7:
                bits.take(1)
            if delays and bits.take(1):
                bits.take(4)
    wide, high = bits.take(4) + 1, bits.take(4) + 1
    return bits.take(wide) + 1, bits.take(high) + 1


class Bits:
    """Bits from the highest of the first byte on; zeros beyond the end."""

    def __init__(self, data: bytes) -> None:
        self.value, self.left = int.from_bytes(data, "big") << 1024, 8 * len(data) + 1024

    def take(self, count: int) -> int:
        self.left = max(0, self.left - count)
        return self.value >> self.left & ((1 << count) - 1)
