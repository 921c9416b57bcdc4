"""Checks before a body is read, on the real server: the token, the Host header, and the end of a message."""

import asyncio
import json
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from chaos.clients import besieged, health
from prometheus_client.parser import text_string_to_metric_families
from servers import SHORT, TIMEOUT, Running, answer, encoded, photo, shared_server, small_server
from test_dockerfile import arguments
from timing import assert_below, seconds

pytestmark = pytest.mark.slow
PNG = encoded(photo())
PAGE = "/page/style.css"


@pytest.fixture(scope="module")
def live() -> Iterator[Running]:
    live = shared_server(*SHORT)
    yield live
    assert "Traceback" not in "".join(live.lines)


@pytest.fixture(scope="module")
def with_token() -> Iterator[Running]:
    with small_server("--timeout", str(TIMEOUT), "--token", "secret") as live:
        yield live
        assert "Traceback" not in "".join(live.lines)


def connect(live: Running) -> socket.socket:
    return socket.create_connection(("127.0.0.1", live.port), timeout=20)


def ask(live: Running, *lines: str, body: bytes = b"", start: str = "GET /healthz") -> tuple[int, str]:
    with connect(live) as wire:
        wire.sendall("\r\n".join([f"{start} HTTP/1.1", *lines, "", ""]).encode() + body)
        status, found = answer(wire)
    return status, str(found.get("error", ""))


# ---- the Host


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8000", "[::1]", "lab.example", "LAB.example:99"])
def test_names_of_this_server(live: Running, host: str) -> None:
    assert ask(live, f"Host: {host}")[0] == 200


@pytest.mark.parametrize("start", ["GET /healthz", "GET /", "GET /metrics", "POST /v1/predict"])
@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", ""])
def test_a_page_that_rebinds_its_name_reads_nothing(live: Running, host: str, start: str) -> None:
    status, message = ask(live, f"Host: {host}", start=start)
    assert status == 421
    assert "--host-name" in message


def test_with_the_token_any_host_name_will_do(with_token: Running) -> None:
    assert ask(with_token, "Host: any.example", "Authorization: Bearer secret", start="GET /v1/model")[0] == 200
    assert ask(with_token, "Host: any.example", start="GET /v1/model")[0] == 401


# ---- where a message ends


@pytest.mark.parametrize(
    "lines",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding: chunked", "Content-Length: 5"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: 5, 6",),
        ("Content-Length: -5",),
        ("Content-Length: +5",),
        ("Transfer-Encoding: gzip, chunked",),
        ("Transfer-Encoding: chunked", "Transfer-Encoding: chunked"),
        ("Transfer-Encoding : chunked",),
    ],
)
def test_an_ambiguous_end_of_a_message_is_refused(live: Running, lines: tuple[str, ...]) -> None:
    body = b"0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connect(live) as wire:
        head = ["POST /v1/predict HTTP/1.1", "Host: localhost", "Content-Type: image/png", *lines, "", ""]
        wire.sendall("\r\n".join(head).encode() + body)
        assert answer(wire)[0] == 400
        assert wire.recv(1000) == b""  # what follows is not read as a request


def test_chunks_need_http_1_1(live: Running) -> None:
    with connect(live) as wire:
        wire.sendall(b"POST /v1/predict HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n")
        assert answer(wire)[0] == 400


# ---- bodies that are not read, and bodies in tiny chunks


def send_tiny_chunks(live: Running) -> tuple[int, str]:
    """The answer to a body in chunks of one byte."""
    lines = ("Host: localhost", "Content-Type: image/png", "Transfer-Encoding: chunked")
    return ask(live, *lines, body=b"1\r\nx\r\n" * 5000, start="POST /v1/predict")


def slowest_health_check(live: Running) -> float:
    """In seconds, while four clients send one-byte chunks as fast as they can."""
    with besieged(live.port, 10, tiny=4):
        return max(asyncio.run(health(live.port, time.monotonic() + 1.5, every=0.01)))


def test_one_byte_chunks_are_refused_and_do_not_delay_others(live: Running) -> None:
    status, message = send_tiny_chunks(live)
    assert status == 400
    assert "too many tiny pieces" in message
    assert_below(0.5, lambda: slowest_health_check(live))


def test_the_token_comes_before_the_body(with_token: Running) -> None:
    with connect(with_token) as wire:
        wire.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n")
        wire.sendall(b"Content-Type: image/png\r\nExpect: 100-continue\r\n\r\n")
        assert answer(wire)[0] == 401  # and no 100 Continue
    assert send_tiny_chunks(with_token)[0] == 401  # not 400: none of it was parsed
    assert_below(0.5, lambda: slowest_health_check(with_token))


def test_a_body_after_100_continue(with_token: Running) -> None:
    with connect(with_token) as wire:
        wire.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n")
        wire.sendall(b"Authorization: Bearer secret\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(PNG))
        assert wire.recv(1000).startswith(b"HTTP/1.1 100")
        wire.sendall(PNG)
        assert answer(wire)[0] == 200


def test_chunks_of_a_normal_size(live: Running) -> None:
    data = encoded(photo(1, 600, 400))
    chunks = [data[i : i + 500] for i in range(0, len(data), 500)]
    assert len(chunks) > 200
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    lines = ("Host: localhost", "Content-Type: image/png", "Transfer-Encoding: chunked")
    assert ask(live, *lines, body=body, start="POST /v1/predict")[0] == 200


# ---- answers that the client does not read


def served(live: Running) -> float:
    """How often a file of the page has been sent."""
    with connect(live) as wire:
        wire.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        text = b"".join(iter(lambda: wire.recv(65536), b"")).decode().partition("\r\n\r\n")[2]
    labels = {"route": "/page/{name}", "status": "200"}
    requests = next(one for one in text_string_to_metric_families(text) if one.name == "vitlab_requests")
    return sum(one.value for one in requests.samples if one.labels == labels)


def test_a_client_that_does_not_read_is_disconnected(live: Running) -> None:
    def until_cut_off(wire: socket.socket) -> None:
        start = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT012 - it is cut off
            while time.monotonic() - start < 4 * TIMEOUT:
                time.sleep(0.1)
                wire.send(b"G")

    def attempt() -> float:
        before = served(live)
        with connect(live) as wire:
            wire.sendall(f"GET {PAGE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode() * 1000)
            took = seconds(lambda: until_cut_off(wire))
        assert served(live) - before < 200  # of the thousand it asked for: no more than fits some buffers
        return took

    assert_below(TIMEOUT + 2, attempt)


def test_pipelined_requests_are_answered_in_order(live: Running) -> None:
    with connect(live) as wire:
        wire.sendall(
            b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /nowhere HTTP/1.1\r\nHost: localhost\r\n\r\n"
        )
        wire.sendall(b"POST /v1/predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: image/png\r\n")
        wire.sendall(b"Content-Length: %d\r\n\r\n" % len(PNG) + PNG + b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
        data = b"".join(iter(lambda: wire.recv(65536), b""))
    assert [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", data)] == [200, 404, 200, 200]


def test_a_slow_reader_gets_all_of_it(live: Running) -> None:
    """20 kB at a time, with pauses, for longer than an answer may stay unread."""
    number = 60
    with connect(live) as wire:
        ask = f"GET {PAGE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        wire.sendall(ask * (number - 1) + ask.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        data = b""
        while more := wire.recv(20_000):
            data += more
            time.sleep(0.1)
    assert data.count(b"HTTP/1.1 200") == number


# ---- the Dockerfile's health check, here where a server is


def test_the_health_check_of_the_dockerfile(live: Running) -> None:
    words = json.loads(arguments("HEALTHCHECK")[0].partition("CMD")[2])
    check = [sys.executable, *(word.replace(":8000/", f":{live.port}/") for word in words[1:])]
    assert words[0] == "python"
    assert check != [sys.executable, *words[1:]], shlex.join(words)
    assert subprocess.run(check, timeout=20).returncode == 0
    check[-1] = check[-1].replace(f":{live.port}/", ":9/")  # nothing listens there
    assert subprocess.run(check, timeout=20, stderr=subprocess.DEVNULL).returncode != 0
