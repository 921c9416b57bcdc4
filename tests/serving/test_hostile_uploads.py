"""Hostile uploads to the real server: each gets an error with a message, and the next client is served."""

import socket
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from servers import SHORT, TIMEOUT, Running, answer, encoded, photo, shared_server
from timing import assert_below, measure_until, seconds

MEGABYTE = 1_000_000
PNG = encoded(photo())
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    live = shared_server(*SHORT)
    assert is_serving(live)
    yield live
    assert live.process.poll() is None, "".join(live.lines)


# ---- a client made of a socket, which can send anything


def connect(live: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=20)


def request(length: int | None, kind: str = "image/png") -> bytes:
    size = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    return f"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n{size}\r\n\r\n".encode()


def post(live: Running, body: bytes, kind: str = "image/png") -> tuple[int, dict[str, object]]:
    with connect(live) as wire:
        wire.sendall(request(len(body), kind) + body)
        return answer(wire)


def is_serving(live: Running) -> bool:
    """Whether an honest client gets its answer, within ten seconds; it usually takes hundredths of one."""
    start = time.monotonic()
    status, body = post(live, PNG)
    return status == 200 and len(body["images"]) == 1 and time.monotonic() - start < 10  # type: ignore[arg-type]


def refused(answered: tuple[int, dict[str, object]], status: int, words: str) -> None:
    assert answered[0] == status, answered
    assert list(answered[1]) == ["error"]
    assert words in str(answered[1]["error"])


def peak(live: Running) -> int:
    """The most memory the server has ever had, in bytes."""
    status = Path(f"/proc/{live.process.pid}/status")
    if not status.exists():
        pytest.skip("memory is read from /proc, which is not here")
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM"))


# ---- pictures


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(side: int, channels: int = 0) -> bytes:
    """A complete PNG of side x side black pixels: a third of a megabyte that unpacks to gigabytes.

    Without channels a pixel is one bit, with four it has color and transparency.
    """
    packer, row = zlib.compressobj(1), bytes(1 + (side * channels if channels else (side + 7) // 8))
    data = b"".join(packer.compress(row * 1000) for _ in range(side // 1000)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, *((8, 6) if channels else (1, 0)), 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_a_bomb_of_fifty_thousand_by_fifty_thousand_pixels(live: Running) -> None:
    before = peak(live)
    data = bomb(50_000)
    for _ in range(3):
        refused(post(live, data), 413, "50000 x 50000 pixels, and 50 M are allowed")
    refused(post(live, bomb(8_000)), 413, "8000 x 8000 pixels, and 50 M are allowed")
    assert peak(live) - before < 50 * MEGABYTE
    assert is_serving(live)


def test_a_line_of_pixels_is_not_blown_up(live: Running) -> None:
    before = peak(live)
    status, _ = post(live, encoded(photo(1, 60_000, 1)))
    assert status == 200
    assert peak(live) - before < 100 * MEGABYTE


def test_the_largest_pictures_are_decoded_one_at_a_time(live: Running) -> None:
    """49 megapixels with transparency need some 750 MB; four of them together need no more, and others do not wait."""
    before, data = peak(live), bomb(7_000, 4)
    answered: list[int] = []
    senders = [threading.Thread(target=lambda: answered.append(post(live, data)[0])) for _ in range(4)]
    for sender in senders:
        sender.start()
    assert is_serving(live)
    for sender in senders:
        sender.join()
    assert answered == [200] * 4
    assert peak(live) - before < 1200 * MEGABYTE


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (encoded(photo(), "JPEG")[:-400], "is broken: "),
        (encoded(photo(), "JPEG")[:30], "image"),
        (b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg' width='9' height='9'/>", "text such as SVG"),
        (b"Dear server, this is a picture.\n" * 50, "not an image in a supported format"),
        (b"", "is empty"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(x) run\n", "not an image in a supported format"),
        (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 0, 0, 8, 2, 0, 0, 0)), "image"),
        (b"P6 100000 100000 255\n", "not an image in a supported format"),
    ],
    ids=["truncated JPEG", "JPEG header", "SVG", "text", "nothing", "PostScript", "no pixels", "PPM header"],
)
def test_what_is_not_an_image(live: Running, data: bytes, words: str) -> None:
    status, answered = post(live, data, "image/jpeg")
    assert 400 <= status < 500
    assert words in str(answered["error"])
    form = b'--x\r\nContent-Disposition: form-data; name="image"; filename="cat.jpg"\r\n\r\n' + data + b"\r\n--x--\r\n"
    assert 400 <= post(live, form, "multipart/form-data; boundary=x")[0] < 500
    assert is_serving(live)


# ---- bodies


def test_a_body_of_200_megabytes_by_its_content_length(live: Running) -> None:
    with connect(live) as wire:
        wire.sendall(request(200 * MEGABYTE))
        refused(answer(wire), 413, "larger than the 20 MB")
    assert is_serving(live)


@pytest.mark.parametrize("kind", ["image/png", "multipart/form-data; boundary=x"])
def test_a_body_of_200_megabytes_in_chunks(live: Running, kind: str) -> None:
    before, block = peak(live), bytes(MEGABYTE)
    with connect(live) as wire:
        wire.sendall(request(None, kind))
        if "form" in kind:
            start = b'--x\r\nContent-Disposition: form-data; name="image"\r\n\r\n'
            wire.sendall(b"%x\r\n%s\r\n" % (len(start), start))
        with pytest.raises(OSError):  # noqa: PT012 - the server disconnects long before the end
            for _ in range(200):
                wire.sendall(b"%x\r\n%s\r\n" % (len(block), block))
        refused(answer(wire), 413, "larger than the 20 MB")  # and still the answer can be read
    assert peak(live) - before < 120 * MEGABYTE
    assert is_serving(live)


def test_ten_thousand_parts(live: Running) -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="image"; filename="a.png"\r\n\r\n' + PNG[:100] + b"\r\n"
    body = part * 10_000 + b"--x--\r\n"
    kind = "multipart/form-data; boundary=x"
    assert_below(3, lambda: seconds(lambda: refused(post(live, body, kind), 413, "more than 16 parts")))
    assert is_serving(live)


def test_a_part_with_endless_headers(live: Running) -> None:
    for body in (b"--x\r\n" + b"A: b\r\n" * 100_000, b"--x\r\nA: " + b"b" * MEGABYTE):
        refused(post(live, body, "multipart/form-data; boundary=x"), 422, "cannot be read")
    assert is_serving(live)


# ---- time


def test_a_body_that_trickles(live: Running) -> None:
    """A byte at a time, never idle for long: the rate counts. Others are served meanwhile."""

    def attempt() -> tuple[float, float]:
        """Seconds until the other client is served, and until the slow one is refused."""
        with connect(live) as wire:
            wire.sendall(request(1000))
            start = time.monotonic()
            stop = threading.Event()
            drip = threading.Thread(target=lambda: [wire.send(b"x") for _ in iter(lambda: stop.wait(0.05), True)])
            drip.start()
            assert is_serving(live)
            other = time.monotonic() - start
            refused(answer(wire), 408, "arrives too slowly")
            stop.set()
            drip.join()
            return other, time.monotonic() - start

    measure_until(lambda took: took[0] < 0.8 * TIMEOUT and TIMEOUT / 6 - 0.1 < took[1] < TIMEOUT, attempt)
    assert is_serving(live)


def test_a_body_that_stops(live: Running) -> None:
    def attempt() -> float:
        with connect(live) as wire:
            wire.sendall(request(8000) + b"x" * 5000)
            return seconds(lambda: refused(answer(wire), 408, "did not arrive within 2 s, or stopped"))

    assert_below(TIMEOUT, attempt)
    assert is_serving(live)


def test_headers_that_never_end(live: Running) -> None:
    with connect(live) as wire, connect(live) as silent:
        wire.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\n")
        refused(answer(wire), 408, "headers did not arrive in time")
        assert wire.recv(10) == b""
        assert silent.recv(10) == b""  # a client that sends nothing is disconnected too
    assert is_serving(live)


def test_headers_that_trickle_on_a_used_connection(live: Running) -> None:
    def drip(wire: socket.socket) -> None:
        with pytest.raises(OSError):  # noqa: PT012 - the server disconnects while we drip
            for letter in b"GET / HTTP/1.1\r\nX: " + b"y" * 100:
                wire.sendall(bytes([letter]))
                time.sleep(0.1)

    def attempt() -> float:
        with connect(live) as wire:
            wire.sendall(request(len(PNG)) + PNG)
            assert answer(wire)[0] == 200
            return seconds(lambda: drip(wire))

    assert_below(TIMEOUT + 3, attempt)


def test_a_refused_body_that_never_ends(live: Running) -> None:
    def send_on(wire: socket.socket) -> None:
        start = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012 - cut off, though it never stops sending
            while time.monotonic() - start < 20:
                wire.sendall(b"x")
                time.sleep(0.05)

    def attempt() -> float:
        with connect(live) as wire:
            wire.sendall(request(200 * MEGABYTE))
            assert answer(wire)[0] == 413
            return seconds(lambda: send_on(wire))

    assert_below(TIMEOUT + 2, attempt)
    assert is_serving(live)


def test_slow_clients_in_numbers_do_not_hold_up_others(live: Running) -> None:
    def attempt() -> float:
        wires = [connect(live) for _ in range(100)]
        for wire in wires:
            wire.sendall(request(1000) + b"x")
        start = time.monotonic()
        assert is_serving(live)
        took = time.monotonic() - start
        for wire in wires:
            wire.close()
        return took

    assert_below(0.8 * TIMEOUT, attempt)
    assert is_serving(live)


def test_what_is_not_http(live: Running) -> None:
    for bytes_ in (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" * 5 + b"\r\n\r\n", b"HELO server\r\n\r\n"):
        with connect(live) as wire:
            wire.sendall(bytes_)
            refused(answer(wire), 400, "not valid HTTP")
    with connect(live) as wire:
        wire.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"y" * 200_000)
        assert answer(wire)[0] == 400
    assert is_serving(live)
