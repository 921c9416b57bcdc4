"""A request's body as it arrives: counted, timed, and cut into its images; no more is ever held than allowed."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vitlab.serving.limits import LEAST_RATE, Ledger, Limits, Refused, short

FIELD = "image"
MOST_NAME = 200  # characters of a file's name that are kept
HOW = "send images as multipart/form-data in fields called 'image', or one image as the body with Content-Type image/*"


@dataclass
class Upload:
    """One image as it was sent."""

    name: str
    data: bytearray = field(default_factory=bytearray)


class Gone(Exception):
    """The client went away."""


@contextlib.asynccontextmanager
async def receiving(request: Request, limits: Limits, ledger: Ledger) -> AsyncIterator[list[Upload]]:
    """The images of a request; their bytes are on the ledger until the block ends."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    form = kind == b"multipart/form-data"
    if not (form or kind.startswith(b"image/") or kind == b"application/octet-stream"):
        said = kind.decode("latin-1") or "none"
        raise Refused(415, f"Content-Type '{said[:80]}' holds no image; {HOW}")
    check_length(request, limits)
    parts = Parts(options.get(b"boundary", b""), limits) if form else Whole()
    held = 0
    try:
        async for chunk in chunks(request, limits):
            ledger.take(len(chunk))
            held += len(chunk)
            if held > limits.max_bytes:
                raise too_large(limits)
            parts.write(chunk)
        uploads = parts.finish()
        for upload in uploads:
            if not upload.data:
                raise Refused(422, f"'{upload.name}' is empty: 0 bytes")
        yield uploads
    finally:
        ledger.give(held)


def check_length(request: Request, limits: Limits) -> None:
    """What says it is too large is refused before a byte of it is read."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.max_bytes:
        raise too_large(limits)


def too_large(limits: Limits) -> Refused:
    return Refused(
        413, f"the request is larger than the {short(limits.max_bytes)}B that are allowed; send less at a time"
    )


async def chunks(request: Request, limits: Limits) -> AsyncIterator[bytes]:
    """The body piece by piece; it has to arrive in time, to keep arriving, and not to dribble."""
    start, taken, more = time.monotonic(), 0, True
    grace = limits.grace_seconds * random.uniform(1, 1.5)  # clients that came together are not dismissed together
    while more:
        idle, late = time.monotonic() + limits.idle_seconds, start + limits.body_seconds
        slow = start + max(grace, taken / LEAST_RATE)
        try:
            async with asyncio.timeout(max(0.0, min(idle, late, slow) - time.monotonic())):
                message = await request.receive()
        except TimeoutError:
            sentence = f"the body did not arrive within {limits.body_seconds:g} s, or stood still for a third of that"
            if slow < min(idle, late):
                sentence = f"the body arrives too slowly; send at least {short(LEAST_RATE)}B a second"
            raise Refused(408, sentence, {"Connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise Gone
        more = message.get("more_body", False)
        if body := message.get("body", b""):
            taken += len(body)
            yield body


class Whole:
    """A body that is one image."""

    def __init__(self) -> None:
        self.upload = Upload(FIELD)

    def write(self, chunk: bytes) -> None:
        self.upload.data += chunk

    def finish(self) -> list[Upload]:
        return [self.upload]


class Parts:
    """A multipart body: every part must be an image, and there is a limit on how many."""

    def __init__(self, boundary: bytes, limits: Limits) -> None:
        if not boundary:
            raise Refused(422, "multipart/form-data without a boundary in its Content-Type")
        self.limits = limits
        self.uploads: list[Upload] = []
        self.header = self.value = self.disposition = b""
        self.ended = False
        with multipart_errors():
            self.parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self.part_begins,
                    "on_header_field": self.header_name,
                    "on_header_value": self.header_value,
                    "on_header_end": self.header_ends,
                    "on_headers_finished": self.headers_end,
                    "on_part_data": self.data,
                    "on_end": self.ends,
                },
            )

    def write(self, chunk: bytes) -> None:
        with multipart_errors():
            self.parser.write(chunk)

    def finish(self) -> list[Upload]:
        if not self.ended:
            raise Refused(422, "the multipart body ends before its last boundary")
        if not self.uploads:
            raise Refused(422, f"the request holds no image; {HOW}")
        return self.uploads

    # ---- what the parser calls

    def part_begins(self) -> None:
        if len(self.uploads) == self.limits.max_images:
            raise Refused(413, f"more than {self.limits.max_images} parts in a request; send fewer images at a time")
        self.disposition = b""

    def header_name(self, data: bytes, start: int, end: int) -> None:
        self.header += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]

    def header_ends(self) -> None:
        if self.header.lower() == b"content-disposition":
            self.disposition = self.value
        self.header = self.value = b""

    def headers_end(self) -> None:
        _, options = parse_options_header(self.disposition)
        name = text(options.get(b"name", b""))
        if name != FIELD:
            raise Refused(422, f"there is a field '{name[:80]}' in the form; images go into fields called '{FIELD}'")
        default = f"{FIELD} {len(self.uploads) + 1}"
        self.uploads.append(Upload(text(options.get(b"filename", b""))[:MOST_NAME] or default))

    def data(self, data: bytes, start: int, end: int) -> None:
        self.uploads[-1].data += data[start:end]

    def ends(self) -> None:
        self.ended = True


@contextlib.contextmanager
def multipart_errors() -> Iterator[None]:
    try:
        yield
    except FormParserError as error:
        raise Refused(422, f"the multipart body cannot be read: {error}") from None


def text(value: bytes) -> str:
    return value.decode("utf-8", "replace")
