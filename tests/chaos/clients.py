"""Clients of a server: good ones that measure it, and hostile ones of every kind, all on loopback.

`python tests/chaos/clients.py PORT SECONDS KIND=NUMBER ...` is a process of hostile clients (`besieged` starts it): it
imports little and is idle most of the time, since it shares the processors with the server.
"""

import asyncio
import contextlib
import io
import json
import random
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field

HOST = "127.0.0.1"
PAGE = "/page/style.css"  # the largest file that needs no token
TINY = b"1\r\nx\r\n" * 10_000
Hostile = Callable[[int, float], Awaitable[None]]


# ---- good clients


@dataclass
class Load:
    """What good clients saw: (when it was answered, seconds it took) of each request, and the errors."""

    answers: list[tuple[float, float]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def percentile(self, share: float, start: float = 0.0, end: float = 1.0) -> float:
        """Of the latencies between two parts of the time, in seconds."""
        found = sorted(self.between(start, end))
        return found[min(len(found) - 1, int(share * len(found)))] if found else float("nan")

    def between(self, start: float, end: float) -> list[float]:
        first, last = min(self.answers)[0], max(self.answers)[0]
        low, high = (first + part * (last - first) for part in (start, end))
        return [took for when, took in self.answers if low <= when <= high]


async def press(port: int, pictures: Sequence[bytes], end: float, load: Load) -> None:
    """One good client for each picture until `end`, of time.monotonic()."""
    await asyncio.gather(*(good(port, picture, end, load) for picture in pictures))


async def good(port: int, picture: bytes, end: float, load: Load) -> None:
    """Posts its picture again and again; opens a new connection every ten requests, as a browser may."""
    question = post(len(picture), "image/jpeg") + picture
    while time.monotonic() < end:
        try:
            reader, writer = await asyncio.open_connection(HOST, port)
            with contextlib.closing(writer):
                for _ in range(10):
                    start = time.monotonic()
                    if start > end:
                        return
                    writer.write(question)
                    status, body = await asyncio.wait_for(answer(reader), 60)
                    load.answers.append((time.monotonic(), time.monotonic() - start))
                    if status != 200:
                        load.errors.append(f"{status}: {body[:200]!r}")
        except (OSError, EOFError, TimeoutError) as error:
            load.errors.append(repr(error))
            await asyncio.sleep(0.1)


async def answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


def post(length: int | None, kind: str = "image/png", path: str = "/v1/predict") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{size}\r\n\r\n".encode()


async def health(port: int, end: float, every: float = 0.1) -> list[float]:
    """Seconds that each health check took, on a connection of its own; an error raises."""
    seconds = []
    while time.monotonic() < end:
        start = time.monotonic()
        reader, writer = await asyncio.open_connection(HOST, port)
        with contextlib.closing(writer):
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            status, body = await asyncio.wait_for(answer(reader), 60)
        assert status == 200, body
        seconds.append(time.monotonic() - start)
        await asyncio.sleep(every)
    return seconds


# ---- hostile clients: each opens one connection, returns or raises OSError, and is called again


@contextlib.contextmanager
def plug() -> Iterator[socket.socket]:
    with socket.socket() as wire:
        wire.setblocking(False)
        yield wire


async def silent(port: int, end: float) -> None:
    """Requests a large file many times at once and never reads; sends more until it is disconnected."""
    loop = asyncio.get_running_loop()
    ask = f"GET {PAGE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 200
    with plug() as wire:
        await loop.sock_connect(wire, (HOST, port))
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                wire.send(ask)
            await asyncio.sleep(1)


async def drip(port: int, end: float, start: bytes, pause: float) -> None:
    loop = asyncio.get_running_loop()
    with plug() as wire:
        await loop.sock_connect(wire, (HOST, port))
        wire.send(start)
        while time.monotonic() < end:
            await asyncio.sleep(pause)
            wire.send(b"x")


async def slow(port: int, end: float) -> None:
    """A body at a byte a second."""
    await drip(port, end, post(100_000), 1.0)


async def dribble(port: int, end: float) -> None:
    """Headers that never end."""
    await drip(port, end, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", 0.5)


async def tiny(port: int, end: float) -> None:
    """A body in chunks of one byte, as fast as they go."""
    loop = asyncio.get_running_loop()
    with plug() as wire:
        await loop.sock_connect(wire, (HOST, port))
        await loop.sock_sendall(wire, post(None))
        while time.monotonic() < end:
            await loop.sock_sendall(wire, TINY)


async def upload(port: int, body: bytes, kind: str) -> None:
    reader, writer = await asyncio.open_connection(HOST, port)
    with contextlib.closing(writer):
        writer.write(post(len(body), kind) + body)
        await asyncio.wait_for(answer(reader), 60)
    await asyncio.sleep(0.2)


async def pixels(port: int, end: float) -> None:
    await upload(port, PIXELS, "image/png")


async def scans(port: int, end: float) -> None:
    await upload(port, SCANS, "image/jpeg")


async def noise(port: int, end: float) -> None:
    """Bytes that are not HTTP."""
    reader, writer = await asyncio.open_connection(HOST, port)
    with contextlib.closing(writer):
        writer.write(random.randbytes(random.randrange(1, 5000)) + b"\r\n\r\n")
        await asyncio.wait_for(reader.read(), 20)
    await asyncio.sleep(0.2)


async def leave(port: int, end: float) -> None:
    """Disconnects in the middle of a body, or right after it."""
    _, writer = await asyncio.open_connection(HOST, port)
    writer.write(post(len(SMALL)) + SMALL[: random.choice([10, len(SMALL)])])
    await asyncio.sleep(random.choice([0.0, 0.01, 0.1]))
    writer.transport.abort()
    await asyncio.sleep(0.2)


KINDS: dict[str, Hostile] = {kind.__name__: kind for kind in (silent, slow, dribble, tiny, pixels, scans, noise, leave)}


# ---- what hostile clients upload


def png(side: int, rows: int) -> bytes:
    """A black PNG whose header has side x side pixels and which holds some of its rows."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1 + 3 * side) * rows, 1)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def many_scans(number: int) -> bytes:
    """A progressive JPEG whose last scan comes `number` times."""
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, "JPEG", progressive=True)
    data = file.getvalue()
    last, stop = data.rindex(b"\xff\xda"), data.rindex(b"\xff\xd9")
    return data[:last] + data[last:stop] * number + data[stop:]


PIXELS, SMALL = png(6000, 200), png(40, 40)  # as many pixels as are allowed, nearly; and a picture
SCANS = b""  # made when first needed, since that takes Pillow


# ---- the process


async def again(kind: Hostile, port: int, end: float, made: Counter[str]) -> None:
    while time.monotonic() < end:
        made[kind.__name__] += 1
        with contextlib.suppress(OSError, EOFError, TimeoutError, IndexError):
            await asyncio.wait_for(kind(port, end), max(0.1, end - time.monotonic()))
        await asyncio.sleep(0.01)


async def siege(port: int, seconds: float, numbers: dict[str, int]) -> Counter[str]:
    """So many clients of each kind, each back as soon as it is disconnected; returns how often each kind connected."""
    made: Counter[str] = Counter()
    end = time.monotonic() + seconds
    print("besieging", flush=True)
    await asyncio.gather(*(again(KINDS[name], port, end, made) for name, n in numbers.items() for _ in range(n)))
    return made


@contextlib.contextmanager
def besieged(port: int, seconds: float, **numbers: int) -> Iterator[None]:
    """While the block runs, hostile clients in a process of their own, at most for so many seconds."""
    words = [f"{kind}={number}" for kind, number in numbers.items()]
    command = [sys.executable, __file__, str(port), str(seconds), *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "besieging\n"
        yield
    finally:
        process.kill()
        process.wait(10)


def main(words: list[str]) -> None:
    global SCANS
    import resource

    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    numbers = {name: int(number) for name, number in (word.split("=") for word in words[2:])}
    SCANS = many_scans(20_000) if "scans" in numbers else b""
    print(json.dumps(asyncio.run(siege(int(words[0]), float(words[1]), numbers))))


if __name__ == "__main__":
    main(sys.argv[1:])
