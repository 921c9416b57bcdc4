"""URLs: servers that redirect, are slow, silent or send too much; none reaches a private network or blocks."""

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
from vitlab.prediction import web

Respond = Callable[[bytes], Iterator[bytes]]


def png_bytes() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (9, 7), "red").save(data, "PNG")
    return data.getvalue()


def http_response(status: str, body: bytes = b"", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", *headers, f"Content-Length: {len(body)}", "", ""]
    return "\r\n".join(lines).encode() + body


@pytest.fixture
def serve() -> Iterator[Callable[[Respond], str]]:
    """Start servers on this machine; each sends what a function of the request yields, piece by piece."""
    servers = []

    def start(respond: Respond) -> str:
        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                try:
                    for piece in respond(self.request.recv(1 << 16)):
                        self.request.sendall(piece)
                except OSError:
                    pass  # the client has disconnected

        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=[0.02], daemon=True).start()
        servers.append(server)
        return f"127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def reason(url: str) -> str:
    """Why a URL cannot be fetched."""
    with pytest.raises(BrokenImage) as caught:
        web.fetch(url)
    assert "\n" not in str(caught.value)
    return caught.value.why


def test_an_image_and_its_request(serve: Callable[[Respond], str]) -> None:
    requests: list[bytes] = []

    def respond(request: bytes) -> Iterator[bytes]:
        requests.append(request)
        yield http_response("200 OK", png_bytes())

    host = serve(respond)
    assert web.fetch(f"http://{host}/a b/고양이.png?q=é&r=1#part") == png_bytes()
    first, *headers = requests[0].decode().split("\r\n")
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
def test_a_redirection_to_this_machine_is_refused(serve: Callable[[Respond], str], location: str) -> None:
    reached: list[bytes] = []

    def secret(request: bytes) -> Iterator[bytes]:
        reached.append(request)
        yield http_response("200 OK", png_bytes())

    port = serve(secret).rpartition(":")[2]
    host = serve(lambda _: iter([http_response("302 Found", b"", "Location: " + location.format(port=port))]))
    assert "not a public address" in reason(f"http://{host}/")
    assert not reached


def test_a_typed_server_may_redirect_to_itself_a_few_times(serve: Callable[[Respond], str]) -> None:
    def respond(request: bytes) -> Iterator[bytes]:
        step = int(request.split()[1].strip(b"/"))
        yield (
            http_response("200 OK", png_bytes())
            if step == 0
            else http_response("301 Moved", b"", f"Location: /{step - 1}")
        )

    host = serve(respond)
    assert web.fetch(f"http://{host}/5") == png_bytes()
    assert "redirected more than 5 times" in reason(f"http://{host}/6")


@pytest.mark.parametrize(
    "location", ["file:///etc/passwd", "ftp://127.0.0.1/x", "http://[::1", "https:///", "gopher:x"]
)
def test_a_redirection_to_another_scheme_or_an_invalid_url(serve: Callable[[Respond], str], location: str) -> None:
    host = serve(lambda _: iter([http_response("302 Found", b"", f"Location: {location}")]))
    assert reason(f"http://{host}/") == f"it is redirected to '{location}', which is not an http or https URL"


def test_a_name_that_resolves_to_this_machine_is_refused() -> None:
    assert "not a public address; type that address itself" in reason(
        "http://2130706433:9/"
    )  # a resolver reads the number as 127.0.0.1


def test_a_name_is_resolved_once(serve: Callable[[Respond], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The address that was checked is the one connected to; a second DNS answer could differ."""
    port = int(serve(lambda _: iter([http_response("200 OK", png_bytes())])).rpartition(":")[2])
    real = socket.getaddrinfo
    names: list[str] = []

    def resolver(host: str, *_: object, **__: object) -> object:
        names.append(host)
        return real("127.0.0.1", port, type=socket.SOCK_STREAM)

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    assert web.fetch(f"http://localhost:{port}/") == png_bytes()
    assert names == ["localhost"]


def slow_headers(_: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n"
    for i in range(100):
        time.sleep(0.05)
        yield f"X-{i}: slow\r\n".encode()


def slow_status(_: bytes) -> Iterator[bytes]:
    for _i in range(200):
        time.sleep(0.05)
        yield b"H"


def slow_body(_: bytes) -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\n\r\n"  # until the connection ends
    for _i in range(200):
        time.sleep(0.05)
        yield b"x"


def silence(_: bytes) -> Iterator[bytes]:
    time.sleep(5)
    yield b""


@pytest.mark.parametrize("respond", [slow_headers, slow_status, slow_body, silence])
@pytest.mark.parametrize("scheme", ["http", "https"])
def test_one_timeout_for_everything(
    serve: Callable[[Respond], str], monkeypatch: pytest.MonkeyPatch, respond: Respond, scheme: str
) -> None:
    monkeypatch.setattr(web, "TIMEOUT", 0.2)
    host = serve(respond)
    message = ""

    def attempt() -> None:
        nonlocal message
        message = reason(f"{scheme}://{host}/")

    assert_below(1.5, lambda: seconds(attempt))
    if scheme == "http" or respond is silence:
        assert "did not arrive completely within" in message


def test_a_response_that_is_too_large(serve: Callable[[Respond], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "LARGEST", 1 << 20)
    host = serve(lambda _: iter([b"HTTP/1.1 200 OK\r\n\r\n", *[bytes(1 << 16)] * 64]))
    assert "larger than 1 MB" in reason(f"http://{host}/")


@pytest.mark.parametrize(
    "respond",
    [
        lambda _: iter([b"nonsense\r\n\r\n"]),
        lambda _: iter([b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort"]),
        lambda _: iter([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"]),
        lambda _: iter([b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n"]),
        lambda _: iter([http_response("404 No\x1b[2J Such", b"")]),
        lambda _: iter([]),
    ],
)
def test_invalid_responses(serve: Callable[[Respond], str], respond: Respond) -> None:
    assert reason(f"http://{serve(respond)}/")


@pytest.mark.parametrize("url", ["http://[::1", "http://host:port/", "http://host:999999/", "http://", "http:///x"])
def test_invalid_urls(url: str) -> None:
    with pytest.raises(UserError, match=r"is not a valid URL|names no host"):
        web.check_url(url, True)


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
