"""What a request may cost (bytes, parts, pixels, time), and the error that refuses one that would cost more."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from vitlab.settings import POSITIVE, check_types

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "AVIF")  # others on request: their headers do not show what they cost
MIN_RATE = 1000  # bytes a second, in either direction; a client that stays slower is disconnected
MIN_PIECE = 64  # bytes, on average, of a chunk or a segment
SMALL_PIECES = 64  # pieces of a request that may be smaller
CLOSE = {"Connection": "close"}


class RequestError(Exception):
    """A request that is not served: the HTTP status, a message for the client, and headers of the answer."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers or {})

    @property
    def body(self) -> bytes:
        return json.dumps({"error": self.message}).encode()


def try_again(message: str, status: int = 503) -> RequestError:
    """The error of a server that is busy for a moment."""
    return RequestError(status, message, {"Retry-After": "1"})


@dataclass(frozen=True)
class Limits:
    """What one request may take, and all of them together."""

    max_bytes: Annotated[int, POSITIVE, "of a request's body"] = 20_000_000
    max_pixels: Annotated[int, POSITIVE, "of an image"] = 50_000_000
    max_images: Annotated[int, POSITIVE, "of a request"] = 16
    formats: tuple[str, ...] = FORMATS
    decode_seconds: Annotated[int, POSITIVE, "CPU time for one image; three times as much wall-clock time"] = 5
    body_seconds: Annotated[float, POSITIVE, "for a body to arrive; a third of it without a byte is too long"] = 30.0
    header_seconds: Annotated[float, POSITIVE, "for a request's headers"] = 10.0
    answer_seconds: Annotated[float, POSITIVE, "in which the client reads none of its answer"] = 5.0
    connections: Annotated[int, POSITIVE, "at one time"] = 1024

    def __post_init__(self) -> None:
        check_types(self)


class MemoryBudget:
    """Counts the bytes of uploads in memory and refuses those beyond the total; for the event loop's thread alone."""

    def __init__(self, total: int) -> None:
        self.total, self.used = total, 0

    def acquire(self, number: int) -> None:
        if self.used + number > self.total:
            raise try_again("too many uploads are in progress; try again in a moment")
        self.used += number

    def release(self, number: int) -> None:
        self.used -= number


def short_number(number: float) -> str:
    """A limit with a unit prefix: 20 M, 1.5 k."""
    for factor, letter in ((1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.3g}{letter}"
    return f"{number:.3g} "
