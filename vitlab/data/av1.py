"""The size of the frames inside an AVIF, which need not be the size that the file states for the image.

The decoder decodes complete frames and then crops them as the container asks, so the cost is that of the frames. An
AV1 stream begins with a sequence header (AV1 specification, 5.5), which holds the largest size of its frames.
"""

import io
import re

SEQUENCE_START = re.compile(rb"\x12\x00\x0a")  # an empty temporal delimiter, then the sequence header with its length
MAX_HEADERS = 10_000  # sequence headers read


def largest_frame(data: bytes | bytearray) -> tuple[int, int]:
    """(width, height) of the largest frame that any stream in the file declares; (0, 0) if there is none."""
    sizes = [(0, 0)]
    for found, _ in zip(SEQUENCE_START.finditer(data), range(MAX_HEADERS), strict=False):
        sizes.append(frame_size(bytes(data[found.end() + 1 : found.end() + 65])))
    return max(sizes, key=lambda size: size[0] * size[1])


def frame_size(header: bytes) -> tuple[int, int]:
    """(width, height) in a sequence header; (0, 0) in one that no still image has."""
    bits = io.StringIO(f"{int.from_bytes(header, 'big'):0{8 * len(header)}b}" + "0" * 1024)  # zeros beyond the end

    def read(count: int) -> int:
        return int(bits.read(count), 2)

    read(4)  # profile, still picture
    if read(1):  # the short header of a still picture
        read(5)  # level
    else:
        if read(1):  # timing
            return 0, 0
        delays = read(1)
        for _ in range(read(5) + 1):  # operating points
            read(12)
            if read(5) > 7:
                read(1)
            if delays and read(1):
                read(4)
    wide, high = read(4) + 1, read(4) + 1
    return read(wide) + 1, read(high) + 1
