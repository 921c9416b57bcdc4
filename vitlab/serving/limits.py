"""What a request may cost: bytes, parts, pixels, time; and how one that would cost more is refused."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from vitlab.errors import UserError
from vitlab.settings import check_positive

RETRY = {"Retry-After": "1"}
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "AVIF")  # others by choice: their headers say little of what they cost
LEAST_RATE = 1000  # bytes a second, either way; who is slower for long holds a place for nothing
LEAST_PIECE = 64  # bytes, on average, of a chunk or a segment
SPARE_PIECES = 64  # that may be smaller


class Refused(Exception):
    """A request that is not served: the status, and a sentence for whoever sent it."""

    def __init__(self, status: int, sentence: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.headers = status, sentence, dict(headers or {})


@dataclass(frozen=True)
class Limits:
    """What one request may take, and all of them together."""

    max_bytes: int = 20_000_000  # of a request's body
    max_pixels: int = 50_000_000  # of a picture
    max_images: int = 16  # of a request
    formats: tuple[str, ...] = FORMATS
    decode_seconds: int = 5  # of a core, for a picture; three times that with waiting
    body_seconds: float = 30.0  # for a body to arrive; a third of it without a byte is too long as well
    header_seconds: float = 10.0
    answer_seconds: float = 5.0  # without an answer being read
    connections: int = 1024

    def __post_init__(self) -> None:
        check_positive(self, "max_bytes", "max_pixels", "max_images", "decode_seconds")
        check_positive(self, "body_seconds", "header_seconds", "answer_seconds", "connections")

    @property
    def idle_seconds(self) -> float:
        return self.body_seconds / 3

    @property
    def grace_seconds(self) -> float:
        """For a body to begin to flow; from then on its average must be LEAST_RATE."""
        return self.body_seconds / 6

    @property
    def held_bytes(self) -> int:
        """Bytes of all bodies that are here at one time: 25 of the largest, half a gigabyte unless told otherwise."""
        return 25 * self.max_bytes


class Ledger:
    """Counts the bytes of uploads that are in memory, and refuses those beyond the total."""

    def __init__(self, total: int) -> None:
        self.total, self.held = total, 0
        self.lock = threading.Lock()

    def take(self, number: int) -> None:
        with self.lock:
            if self.held + number > self.total:
                raise Refused(503, "too many uploads are in progress; try again in a moment", RETRY)
            self.held += number

    def give(self, number: int) -> None:
        with self.lock:
            self.held -= number


def short(number: float) -> str:
    """A limit as people write it: 20 M, 1.5 k."""
    for factor, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.3g}{letter}"
    return f"{number:.3g} "


def check_queue(limits: Limits, queue: int) -> None:
    if limits.max_images > queue:
        raise UserError(
            f"a request of {limits.max_images} images can never fit a queue of {queue}; make --queue larger"
        )
