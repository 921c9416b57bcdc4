"""Addresses: a server may redirect, drip, stay silent or flood; it never leads elsewhere and never holds anybody up."""

import io
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from PIL import Image
from timing import assert_below, seconds

from vitlab.data.images import BrokenImage
from vitlab.errors import UserError
from vitlab.predict import web

Talk = Callable[[bytes], Iterator[bytes]]


def picture() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (9, 7), "red").save(data, "PNG")
    return data.getvalue()


def answer(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.fixture
def serve() -> Iterator[Callable[[Talk], str]]:
    """Servers on this machine; each sends what a function makes of the request, piece by piece."""
    servers = []

    def start(talk: Talk) -> str:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    for piece in talk(self.request.recv(1 << 16)):
                        self.request.sendall(piece)
                except OSError:
                    pass  # who asked has gone

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def why(address: str) -> str:
    with pytest.raises(BrokenImage) as caught:
        web.fetch(address)
    assert "\n" not in str(caught.value)
    return caught.value.why


def test_a_picture_and_its_request(serve: Callable[[Talk], str]) -> None:
    asked = []

    def talk(request: bytes) -> Iterator[bytes]:
        asked.append(request)
        yield answer("200 OK", picture())

    host = serve(talk)
    assert web.fetch(f"http://{host}/a b/고양이.png?q=é&r=1#part") == picture()
    first, *headers = asked[0].decode().split("\r\n")
    assert first == "GET /a%20b/%EA%B3%A0%EC%96%91%EC%9D%B4.png?q=%C3%A9&r=1 HTTP/1.1"
    assert f"Host: {host}" in headers
    assert sum(line.startswith("Host:") for line in headers) == 1


@pytest.mark.parametrize(
    "location",
    [
        "http://127.0.0.1:{port}/secret",
        "http://localhost:{port}/secret",
        "http://[::ffff:127.0.0.1]:{port}/",
        "//127.1:{port}/",
        "http://2130706433:{port}/",
    ],
)
def test_a_redirection_into_this_machine_is_refused(serve: Callable[[Talk], str], location: str) -> None:
    met: list[bytes] = []

    def secret(request: bytes) -> Iterator[bytes]:
        met.append(request)
        yield answer("200 OK", picture())

    port = serve(secret).rpartition(":")[2]
    host = serve(lambda _: iter([answer("302 Found", b"", "Location: " + location.format(port=port))]))
    assert "no public address" in why(f"http://{host}/")
    assert not met


def test_a_typed_server_may_redirect_to_itself_a_few_times(serve: Callable[[Talk], str]) -> None:
    def talk(request: bytes) -> Iterator[bytes]:
        step = int(request.split()[1].strip(b"/"))
        yield answer("200 OK", picture()) if step == 0 else answer("301 Moved", b"", f"Location: /{step - 1}")

    host = serve(talk)
    assert web.fetch(f"http://{host}/5") == picture()
    assert "redirected more than 5 times" in why(f"http://{host}/6")


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://[::1", "https:///", "gopher:x"]
)
def test_a_redirection_to_what_is_no_address(serve: Callable[[Talk], str], location: str) -> None:
    host = serve(lambda _: iter([answer("302 Found", b"", f"Location: {location}")]))
    assert why(f"http://{host}/") == f"it is redirected to '{location}', which is no http or https address"


def test_a_name_that_stands_for_this_machine_is_refused() -> None:
    assert "no public address; type that address itself" in why("http://2130706433:9/")  # a number, to a resolver


def test_a_name_is_asked_for_once(serve: Callable[[Talk], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was checked is what is connected to; a second answer of the name service could be another."""
    port = int(serve(lambda _: iter([answer("200 OK", picture())])).rpartition(":")[2])
    real, asked = socket.getaddrinfo, []

    def resolver(host: str, *others: object, **more: object) -> object:
        asked.append(host)
        return real("127.0.0.1", port, type=socket.SOCK_STREAM)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    assert web.fetch(f"http://localhost:{port}/") == picture()
    assert asked == ["localhost"]


def drip_headers(_: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    for i in range(100):
        time.sleep(0.05)
        yield f"X-{i}: drip\r\n".encode()


def drip_status(_: bytes) -> Iterator[bytes]:
    for _ in range(200):
        time.sleep(0.05)
        yield b"H"


def drip_body(_: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n\r\n"  # until the connection ends
    for _ in range(200):
        time.sleep(0.05)
        yield b"x"


def silence(_: bytes) -> Iterator[bytes]:
    time.sleep(5)
    yield b""


@pytest.mark.parametrize("talk", [drip_headers, drip_status, drip_body, silence])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_one_deadline_for_everything(
    serve: Callable[[Talk], str], monkeypatch: pytest.MonkeyPatch, talk: Talk, scheme: str
) -> None:
    monkeypatch.setattr(web, "PATIENCE", 0.4)
    host = serve(talk)
    found = ""

    def attempt() -> None:
        nonlocal found
        found = why(f"{scheme}://{host}/")

    assert_below(1.5, lambda: seconds(attempt))
    if scheme == "http" or talk is silence:
        assert "did not come complete within" in found


def test_a_flood(serve: Callable[[Talk], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "LARGEST", 1 << 20)
    host = serve(lambda _: iter([b"HTTP/1.1 200 OK\r\n\r\n", *[bytes(1 << 16)] * 64]))
    assert "larger than 1 MB" in why(f"http://{host}/")


@pytest.mark.parametrize(
    "talk",
    [
        lambda _: iter([b"nonsense\r\n\r\n"]),
        lambda _: iter([b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"]),
        lambda _: iter([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"]),
        lambda _: iter([b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n"]),
        lambda _: iter([answer("404 No\x1b[2J Such", b"")]),
        lambda _: iter([]),
    ],
)
def test_answers_that_are_none(serve: Callable[[Talk], str], talk: Talk) -> None:
    assert why(f"http://{serve(talk)}/")


@pytest.mark.parametrize("address", ["http://[::1", "http://host:port/", "http://host:999999/", "http://", "http:///x"])
def test_addresses_that_are_none(address: str) -> None:
    with pytest.raises(UserError, match=r"is no valid address|names no host"):
        web.check_address(address, True)


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700:4700::1111", True),
        ("64:ff9b::808:808", True),
        ("127.0.0.1", False),
        ("0.0.0.0", False),
        ("10.1.2.3", False),
        ("172.20.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::1", False),
        ("::", False),
        ("fe80::1%lo", False),
        ("fc00::1", False),
        ("ff02::1", False),
        ("::ffff:127.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("2002:7f00:1::", False),
        ("64:ff9b::7f00:1", False),
    ],
)
def test_public_addresses(address: str, public: bool) -> None:
    assert web.is_public(address) == public
