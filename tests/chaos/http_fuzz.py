"""Raw HTTP, valid and invalid, sent to a real server: generated requests, then cut, damaged, split and abandoned.

The server may refuse anything with a status of 4xx. It may not answer 5xx, stop answering, log a traceback, grow, or
send what is not HTTP.
"""

import asyncio
import contextlib
import random
import re
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from chaos.clients import HOST, SMALL, health
from chaos.rows import Row
from chaos.watch import held  # also makes `servers` importable

if TYPE_CHECKING:
    from servers import Running

REQUESTS = 100_000
WORKERS = 48
HEALTH = 2.0  # seconds for a health check
SLOW = "a health check took"
PAUSE = 0.1  # seconds for an answer to a damaged request: the server may be waiting for the rest of it
GROWTH = 64.0  # megabytes from a quarter of the way to the end
ANSWER = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n((?:[A-Za-z0-9-]+: [^\r\n]*\r\n)+)\r\n")
FORM = b'--x\r\nContent-Disposition: form-data; name="image"; filename="%s"\r\n\r\n%s\r\n'
GETS = ["/", "/docs", "/openapi.json", "/healthz", "/metrics", "/v1/model", "/page/app.js", "/page/style.css"]
ODD = [
    "/nowhere",
    "/page/../app.py",
    "/page/%2e%2e%2fx",
    "/%00",
    "//",
    "/v1/predict?top_k=x",
    "*",
    "http://a/",
    "/" * 900,
]
METHODS = ["GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "PATCH", "get", "X" * 50, "PRI"]
HEADERS = [
    b"Content-Length: 0", b"Content-Length: 10", b"Content-Length: 99999999999999999999", b"Content-Length: -1",
    b"Content-Length: 1, 2", b"Content-Length: 0x10", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip",
    b"Transfer-Encoding: chunked, chunked", b"Transfer-Encoding:\tchunked", b"Host: evil.example", b"Host:",
    b"Host: localhost", b"Connection: close", b"Connection: upgrade", b"Upgrade: websocket", b"Expect: 100-continue",
    b"Expect: nothing", b"Content-Type: multipart/form-data; boundary=", b"Content-Type: text/plain",
    b"X: " + b"y" * 9000, b" folded", b"Bad Name: x", b": x", b"Authorization: Bearer \xff", b"Accept: */*;q=\x00",
]  # fmt: skip
BYTES = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"0\r\n\r\n",
    b"ffffffff\r\n",
    b"--x--\r\n",
    b"HTTP/1.1",
    b"\xff" * 9,
]

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


@dataclass
class Found:
    sent: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def fail(self, message: str) -> None:
        if len(self.failures) < 20:
            self.failures.append(message)


# ---- the grammar


def good(rng: random.Random) -> tuple[bytes, int]:
    """A valid request, and the status it must get."""
    if rng.random() < 0.9:
        return b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % rng.choice(GETS).encode(), 200
    path, count = rng.choice([("/v1/predict?top_k=2", rng.randint(1, 3))] * 9 + [("/v1/explain", 1)])
    kind, body = b"image/png", SMALL
    if count > 1 or rng.random() < 0.5:
        kind = b"multipart/form-data; boundary=x"
        body = b"".join(FORM % (b"%d.png" % i, SMALL) for i in range(count)) + b"--x--\r\n"
    head = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1:80\r\nContent-Type: %s\r\n" % (path.encode(), kind)
    if rng.random() < 0.3:
        return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(rng, body), 200
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body, 200


def chunked(rng: random.Random, body: bytes) -> bytes:
    out = []
    while body:
        size = rng.randint(20, 200)
        piece, body = body[:size], body[size:]
        out.append(b"%x%s\r\n%s\r\n" % (len(piece), rng.choice([b"", b"", b";a=b"]), piece))
    return b"".join(out) + b"0\r\n" + rng.choice([b"", b"", b"Trailer: x\r\n"]) + b"\r\n"


def odd(rng: random.Random) -> bytes:
    """An unusual request, valid HTTP or nearly."""
    version = rng.choice(["1.1", "1.1", "1.1", "1.0", "2.0", "9"])
    lines = [f"{rng.choice(METHODS)} {rng.choice(GETS + ODD)} HTTP/{version}".encode()]
    lines += [b"Host: localhost"] * rng.choice([1, 1, 1, 0, 2])
    lines += rng.sample(HEADERS, rng.randint(0, 4))
    return b"\r\n".join([*lines, b"", b""]) + rng.choice([b"", b"0\r\n\r\n", b"x" * 10, SMALL])


def damage(rng: random.Random, data: bytes) -> bytes:
    """Bytes changed, cut, doubled, inserted, or a header more."""
    for _ in range(rng.choice([1, 1, 2, 4])):
        start = rng.randrange(len(data) + 1)
        stop = min(len(data), start + rng.choice([0, 1, 1, 4, 50]))
        middle = rng.choice([b"", rng.randbytes(rng.randint(1, 8)), data[start:stop] * 2, rng.choice(BYTES)])
        if rng.random() < 0.3:
            start = stop = data.find(b"\r\n") + 2
            middle = rng.choice(HEADERS) + b"\r\n"
        data = data[:start] + middle + data[stop:]
    return data


# ---- a client


async def worker(port: int, rng: random.Random, total: int, found: Found) -> None:
    while found.sent < total:
        try:
            reader, writer = await asyncio.open_connection(HOST, port)
        except OSError as error:
            found.fail(f"no connection: {error!r}")
            return
        with contextlib.suppress(OSError):  # the server may disconnect after a damaged request
            await (send_valid if rng.random() < 0.4 else send_damaged)(reader, writer, rng, found)
        writer.transport.abort()


async def send_valid(reader: Reader, writer: Writer, rng: random.Random, found: Found) -> None:
    """Valid requests on one connection, one by one or two at once; each must get its status."""
    for _ in range(rng.randint(1, 5)):
        asked = [good(rng) for _ in range(2 if rng.random() < 0.05 else 1)]
        found.sent += len(asked)
        await write(writer, b"".join(data for data, _ in asked), rng)
        for data, expected in asked:
            try:
                status = await asyncio.wait_for(answer(reader), 30)
            except (OSError, EOFError, TimeoutError, ValueError) as error:
                found.fail(f"{data[:80]!r} was not answered: {error!r}")
                return
            found.statuses[status] += 1
            if status != expected:
                found.fail(f"{data[:80]!r}... got {status}")
                return


async def answer(reader: Reader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    parsed = ANSWER.fullmatch(head)
    if parsed is None:
        raise ValueError(f"not an answer: {head[:200]!r}")
    length = re.search(rb"(?i)content-length: (\d+)\r\n", parsed[2])
    if length is None:
        raise ValueError(f"no length: {head[:200]!r}")
    await reader.readexactly(int(length[1]))
    return int(parsed[1])


async def send_damaged(reader: Reader, writer: Writer, rng: random.Random, found: Found) -> None:
    """An unusual or damaged request, perhaps with a valid one after it; sometimes the answer is not awaited."""
    data = odd(rng) if rng.random() < 0.4 else damage(rng, good(rng)[0] if rng.random() < 0.8 else odd(rng))
    found.sent += 1
    if rng.random() < 0.1:
        data, found.sent = data + good(rng)[0], found.sent + 1
    if rng.random() < 0.1:
        data = data[: rng.randrange(len(data) + 1)]
    await write(writer, data, rng)
    if rng.random() < 0.15:
        return
    try:
        first = await asyncio.wait_for(reader.read(65536), PAUSE)
    except TimeoutError:
        return
    if not first:
        return
    with contextlib.suppress(TimeoutError):
        while not ANSWER.match(first) and (more := await asyncio.wait_for(reader.read(65536), PAUSE)):
            first += more
    parsed = re.match(rb"HTTP/1\.1 (\d{3}) ", first)
    status = int(parsed[1]) if parsed else 0
    found.statuses[status] += 1
    if status >= 500 or not (ANSWER.match(first) or first.startswith(b"HTTP/1.1 100 ")):
        found.fail(f"{data[:300]!r} got {first[:200]!r}")


async def write(writer: Writer, data: bytes, rng: random.Random) -> None:
    """At once, or in a few pieces."""
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice([0, 0, 0, 1, 3])))
    for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True):
        writer.write(data[start:stop])
        if stop < len(data):
            await asyncio.sleep(0.001)


# ---- the run


async def fuzz(port: int, pid: int, total: int, seed: int, found: Found) -> tuple[float, float, float]:
    """Megabytes of the server a quarter of the way and at the end; the slowest health check."""
    tasks = [asyncio.create_task(worker(port, random.Random(f"{seed} {i}"), total, found)) for i in range(WORKERS)]
    early, slowest = held(pid).megabytes, 0.0
    while not all(task.done() for task in tasks):
        if found.sent < total / 4:
            early = held(pid).megabytes
        try:
            slowest = max(slowest, *await health(port, time.monotonic() + 0.2))
        except (OSError, EOFError, TimeoutError, AssertionError) as error:
            found.fail(f"a health check failed: {error!r}")
            break
    await asyncio.gather(*tasks)
    return early, held(pid).megabytes, slowest


def run(scale: float = 1.0, seed: int = 0, running: "Running | None" = None) -> Row:
    """Send the requests to a server of its own, or to one that runs already."""
    from servers import small_server

    total, found = max(200, int(scale * REQUESTS)), Found()
    with nullcontext(running) if running else small_server() as live:
        start = time.monotonic()
        early, late, slowest = asyncio.run(fuzz(live.port, live.process.pid, total, seed, found))
        seconds = time.monotonic() - start
        log, code = "".join(live.lines), live.process.poll()
    if "Traceback" in log:
        found.fail("a traceback in the log: " + log[log.index("Traceback") :][:1500])
    if code is not None:
        found.fail(f"the server ended with {code}")
    if slowest > HEALTH:
        found.fail(f"{SLOW} {slowest:.1f} s")
    if late - early > GROWTH:
        found.fail(f"the server grew from {early:.0f} to {late:.0f} MB")
    statuses = ", ".join(f"{status or 'none'}: {number}" for status, number in sorted(found.statuses.items()))
    notes = (
        f"{found.sent / seconds:.0f} requests/s; answers {statuses}; memory {early:.0f} to {late:.0f} MB; "
        f"slowest health check {slowest * 1000:.0f} ms"
    )
    return Row("HTTP fuzz", found.sent, "requests", seconds, found.failures, notes)
