"""A request's body as it arrives: counted, timed, and split into its images; never more than allowed is in memory."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from vitlab.serving.limits import CLOSE, MIN_RATE, Limits, MemoryBudget, RequestError, short_number

FIELD = "image"
MAX_NAME = 200  # characters of a file's name that are kept
HOW = "send images as multipart/form-data in fields called 'image', or one image as the body with Content-Type image/*"


@dataclass
class Upload:
    """One image as it was sent."""

    name: str
    data: bytearray = field(default_factory=bytearray)


class ClientDisconnected(Exception):
    """The client closed the connection before its answer."""


@contextlib.asynccontextmanager
async def receive_uploads(request: Request, limits: Limits, budget: MemoryBudget) -> AsyncIterator[list[Upload]]:
    """Read the images of a request; their bytes count against the budget until the block ends."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    is_form = kind == b"multipart/form-data"
    if not (is_form or kind.startswith(b"image/") or kind == b"application/octet-stream"):
        sent = kind.decode("latin-1") or "none"
        raise RequestError(415, f"Content-Type '{sent[:80]}' holds no image; {HOW}")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.max_bytes:  # before a byte of it is read
        raise too_large(limits)
    body = MultipartBody(options.get(b"boundary", b""), limits.max_images) if is_form else SingleBody(FIELD)
    received = 0
    try:
        async for chunk in receive_chunks(request, limits):
            budget.acquire(len(chunk))
            received += len(chunk)
            if received > limits.max_bytes:
                raise too_large(limits)
            body.write(chunk)
        uploads = body.finish()
        for upload in uploads:
            if not upload.data:
                raise RequestError(422, f"'{upload.name}' is empty: 0 bytes")
        yield uploads
    finally:
        budget.release(received)


def too_large(limits: Limits) -> RequestError:
    allowed = short_number(limits.max_bytes)
    return RequestError(413, f"the request is larger than the {allowed}B that are allowed; send less at a time")


async def receive_chunks(request: Request, limits: Limits) -> AsyncIterator[bytes]:
    """The body piece by piece; 408 where it does not arrive in time, stops, or arrives too slowly."""
    start, received, more = time.monotonic(), 0, True
    # time for the body to begin to flow, from when on its average must be MIN_RATE; clients that came together are not
    # refused together
    grace = limits.body_seconds / 6 * random.uniform(1, 1.5)
    while more:
        idle, late = time.monotonic() + limits.body_seconds / 3, start + limits.body_seconds
        slow = start + max(grace, received / MIN_RATE)
        try:
            async with asyncio.timeout(max(0.0, min(idle, late, slow) - time.monotonic())):
                message = await request.receive()
        except TimeoutError:
            reason = f"the body did not arrive within {limits.body_seconds:g} s, or stopped for a third of that"
            if slow < min(idle, late):
                reason = f"the body arrives too slowly; send at least {short_number(MIN_RATE)}B a second"
            raise RequestError(408, reason, CLOSE) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        more = message.get("more_body", False)
        if body := message.get("body", b""):
            received += len(body)
            yield body


class SingleBody(Upload):
    """A body that is one image."""

    def write(self, chunk: bytes) -> None:
        self.data += chunk

    def finish(self) -> list[Upload]:
        return [self]


class MultipartBody:
    """A multipart body: every part must be an image, and there is a limit on how many."""

    def __init__(self, boundary: bytes, max_images: int) -> None:
        if not boundary:
            raise RequestError(422, "multipart/form-data without a boundary in its Content-Type")
        self.max_images, self.uploads = max_images, list[Upload]()
        self.header = self.value = self.disposition = b""
        self.ended = False
        callbacks: Any = {name: getattr(self, name) for name in dir(self) if name.startswith("on_")}
        with multipart_errors():
            self.parser = MultipartParser(boundary, callbacks)

    def write(self, chunk: bytes) -> None:
        with multipart_errors():
            self.parser.write(chunk)

    def finish(self) -> list[Upload]:
        if not self.ended:
            raise RequestError(422, "the multipart body ends before its last boundary")
        if not self.uploads:
            raise RequestError(422, f"the request holds no image; {HOW}")
        return self.uploads

    # ---- callbacks of the parser, which has a callback of each name here

    def on_part_begin(self) -> None:
        if len(self.uploads) == self.max_images:
            raise RequestError(413, f"more than {self.max_images} parts in a request; send fewer images at a time")
        self.disposition = b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self.header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]

    def on_header_end(self) -> None:
        if self.header.lower() == b"content-disposition":
            self.disposition = self.value
        self.header = self.value = b""

    def on_headers_finished(self) -> None:
        options = parse_options_header(self.disposition)[1]
        name, filename = (options.get(key, b"").decode("utf-8", "replace") for key in (b"name", b"filename"))
        if name != FIELD:
            raise RequestError(422, f"the form has a field '{name[:80]}'; images go into fields called '{FIELD}'")
        self.uploads.append(Upload(filename[:MAX_NAME] or f"{FIELD} {len(self.uploads) + 1}"))

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        self.uploads[-1].data += data[start:end]

    def on_end(self) -> None:
        self.ended = True


@contextlib.contextmanager
def multipart_errors() -> Iterator[None]:
    try:
        yield
    except FormParserError as error:
        raise RequestError(422, f"the multipart body cannot be read: {error}") from None
