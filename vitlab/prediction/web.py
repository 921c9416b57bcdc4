"""Images from http and https URLs: one deadline for everything, and no access to private networks.

Redirections and DNS answers are under the control of others. So a host name is resolved once, every IP address it
resolves to must be public, and the connection is made to that very address. Private addresses are allowed only where
the user typed them as such (http://192.168.1.5/, http://localhost/). Proxies are not used: they would resolve names
again.
"""

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from queue import Empty, SimpleQueue
from typing import IO
from urllib.parse import SplitResult, quote, urljoin, urlsplit

from vitlab import __version__
from vitlab.data.images import BrokenImage
from vitlab.errors import UserError

LARGEST = 64 << 20  # bytes that one URL or standard input may send
TIMEOUT = 20.0  # seconds for all of it: DNS, connection, redirections, headers and image
REDIRECTS = 5
SAFE = "/%:@!$&'()*+,;=~?"  # characters that are not escaped in a path and its query
REDIRECTED = (301, 302, 303, 307, 308)


class Refused(Exception):
    """Why a URL is not fetched."""


def is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def check_url(url: str, allowed: bool) -> None:
    """Raise UserError unless this is a valid http or https URL and fetching is allowed."""
    if not is_url(url):
        raise UserError(f"'{url}' cannot be fetched; only http:// and https:// URLs can")
    if not allowed:
        raise UserError(
            f"'{url}' is a URL, and nothing is fetched by default: add --allow-url, or in Python allow_url=True"
        )
    try:
        parse_url(url)
    except Refused as error:
        raise UserError(f"'{url}' {error}") from None


def parse_url(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        raise Refused("is not a valid URL") from None
    if parts.scheme not in ("http", "https"):
        raise Refused("is neither http nor https")
    if not host:
        raise Refused("names no host")
    return parts


def fetch(url: str) -> bytes:
    """The bytes behind a URL, after a few redirections at most; BrokenImage if it fails."""
    deadline = time.monotonic() + TIMEOUT
    try:
        first = parts = parse_url(url)
        for _ in range(REDIRECTS + 1):
            trusted = origin(parts) == origin(first) and is_literal(first.hostname or "")
            with request(parts, trusted, deadline) as response:
                if response.status not in REDIRECTED:
                    data = read_body(response, url)
                    seconds_left(deadline)  # a stream that was cut off looks as if it had ended
                    return data
                parts = redirect(parts, response.headers.get("Location", ""))
        raise Refused(f"it is redirected more than {REDIRECTS} times")
    except Refused as error:
        raise BrokenImage(url, str(error)) from None
    except (OSError, HTTPException, ValueError) as error:
        late = time.monotonic() >= deadline - 0.01
        why = f"it did not arrive completely within {TIMEOUT:.0f} seconds" if late else str(error).strip()
        raise BrokenImage(url, why or type(error).__name__) from None


def redirect(parts: SplitResult, location: str) -> SplitResult:
    try:
        return parse_url(urljoin(parts.geturl(), location))
    except (Refused, ValueError):
        raise Refused(f"it is redirected to '{location[:100]}', which is not an http or https URL") from None


def origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port


def read_body(response: HTTPResponse, name: str) -> bytes:
    if response.status != 200:
        raise Refused(f"HTTP Error {response.status}: {response.reason}")
    data = read_limited(response, name)
    if response.length:
        raise Refused(f"the server stopped {response.length:,} bytes before its end")
    return data


def read_limited(file: IO[bytes] | HTTPResponse, name: str) -> bytes:
    """All bytes of a stream; BrokenImage if it sends more than LARGEST."""
    data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise BrokenImage(name, f"it is larger than {LARGEST >> 20} MB")
    return data


# ---- one connection


@contextmanager
def request(parts: SplitResult, trusted: bool, deadline: float) -> Iterator[HTTPResponse]:
    """The response to one GET; the connection is shut down at the deadline, even while data still arrives."""
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    sock = connect(resolve(host, port, trusted, deadline), deadline)
    if parts.scheme == "https":
        sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    timer = threading.Timer(seconds_left(deadline), shut_down, [sock])  # a timeout alone starts anew with every byte
    timer.start()
    try:
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        connection = HTTPConnection(host, port)
        connection.sock = sock
        path = quote(parts._replace(scheme="", netloc="", fragment="").geturl() or "/", safe=SAFE)
        host_header = parts.netloc.rpartition("@")[2].encode("ascii" if host.isascii() else "idna").decode()
        headers = {"Host": host_header, "User-Agent": f"vitlab/{__version__}", "Accept": "image/*"}
        connection.request("GET", path, headers=headers | {"Connection": "close"})
        with connection.getresponse() as response:
            yield response
    finally:
        timer.cancel()
        sock.close()


def seconds_left(deadline: float) -> float:
    """Seconds until the deadline; TimeoutError if it has passed."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def shut_down(sock: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # the plain one: another thread may be reading through TLS


SocketAddress = tuple[socket.AddressFamily, tuple[object, ...]]  # what socket.connect takes, with its family


def connect(addresses: list[SocketAddress], deadline: float) -> socket.socket:
    """A connection to the first address that accepts one."""
    for i, (family, address) in enumerate(addresses):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(seconds_left(deadline) / (len(addresses) - i))
            sock.connect(address)
            sock.settimeout(seconds_left(deadline))
            return sock
        except OSError:
            sock.close()
            if i == len(addresses) - 1:
                raise
    raise Refused("its host has no address")


def resolve(host: str, port: int, trusted: bool, deadline: float) -> list[SocketAddress]:
    """The addresses of a host; Refused if one is not public, unless the user typed it (`trusted`)."""
    answers: SimpleQueue[list[SocketAddress] | OSError] = SimpleQueue()

    def look_up() -> None:  # in a thread, since the system's resolver has no timeout
        try:
            rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put([(family, address) for family, _, _, _, address in rows])
        except (OSError, UnicodeError) as error:
            answers.put(OSError(f"there is no host '{host}': {error}"))

    threading.Thread(target=look_up, daemon=True).start()
    try:
        addresses = answers.get(timeout=seconds_left(deadline))
    except Empty:
        raise TimeoutError from None
    if isinstance(addresses, OSError):
        raise addresses
    private = next((str(address[0]) for _, address in addresses if not is_public(str(address[0]))), None)
    if private is not None and not trusted:
        raise Refused(f"it leads to {private}, which is not a public address; type that address itself if you mean it")
    return addresses[:4]


# ---- addresses


def is_literal(host: str) -> bool:
    """Whether a host is written as an IP address or localhost, so that the user meant exactly this machine."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def is_public(address: str) -> bool:
    """Whether an IP address is on the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None or ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip.sixtofour is not None or ip.teredo is not None:  # obsolete tunnels to any IPv4 address
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # counts as public, but reaches any IPv4 address
