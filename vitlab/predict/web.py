"""Pictures from http and https addresses: one deadline for everything, and no way into private networks.

What an address leads to is somebody else's choice, in redirections and in the name service. So a name is resolved once,
every address it stands for must be a public one, and that very address is connected to. Only what the user typed as an
address of their own network (http://192.168.1.5/, http://localhost/) is taken at its word. Proxies are not used: they
would resolve names again.
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

LARGEST = 64 << 20  # bytes that one address or standard input may send
PATIENCE = 20.0  # seconds for all of it: names, connection, redirections, headers and picture
REDIRECTS = 5
SAFE = "/%:@!$&'()*+,;=~?"  # what stays as it is in a path and its query
MOVED = (301, 302, 303, 307, 308)


class Refused(Exception):
    """Why an address is not fetched."""


def is_address(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def check_address(word: str, allowed: bool) -> None:
    if not is_address(word):
        raise UserError(f"'{word}' is no address that can be fetched; only http:// and https:// are")
    if not allowed:
        raise UserError(f"'{word}' is an address, and nothing is fetched unless asked to: add --allow-url")
    try:
        parsed(word)
    except Refused as error:
        raise UserError(f"'{word}' {error}") from None


def parsed(address: str) -> SplitResult:
    try:
        found = urlsplit(address)
        host, _ = found.hostname, found.port
    except ValueError:
        raise Refused("is no valid address") from None
    if found.scheme not in ("http", "https"):
        raise Refused("is neither http nor https")
    if not host:
        raise Refused("names no host")
    return found


def fetch(address: str) -> bytes:
    """The bytes behind an address, after a few redirections at most."""
    deadline = time.monotonic() + PATIENCE
    try:
        first = found = parsed(address)
        for _ in range(REDIRECTS + 1):
            trusted = origin(found) == origin(first) and is_own(first.hostname or "")
            with answering(found, trusted, deadline) as answer:
                if answer.status not in MOVED:
                    data = taken(answer, address)
                    left(deadline)  # a stream that was cut off looks as if it had ended
                    return data
                found = moved(found, answer.headers.get("Location", ""))
        raise Refused(f"it is redirected more than {REDIRECTS} times")
    except Refused as error:
        raise BrokenImage(address, str(error)) from None
    except (OSError, HTTPException, ValueError) as error:
        late = time.monotonic() >= deadline - 0.01
        why = f"it did not come complete within {PATIENCE:.0f} seconds" if late else str(error).strip()
        raise BrokenImage(address, why or type(error).__name__) from None


def moved(address: SplitResult, location: str) -> SplitResult:
    try:
        return parsed(urljoin(address.geturl(), location))
    except (Refused, ValueError):
        raise Refused(f"it is redirected to '{location[:100]}', which is no http or https address") from None


def origin(address: SplitResult) -> tuple[str, str | None, int | None]:
    return address.scheme, address.hostname, address.port


def taken(answer: HTTPResponse, name: str) -> bytes:
    if answer.status != 200:
        raise Refused(f"HTTP Error {answer.status}: {answer.reason}")
    data = read_limited(answer, name)
    if answer.length:
        raise Refused(f"the server stopped {answer.length:,} bytes before its end")
    return data


def read_limited(file: IO[bytes] | HTTPResponse, name: str) -> bytes:
    """All of a stream that may send no more than LARGEST."""
    parts, size = [], 0
    while part := file.read(1 << 16):
        parts.append(part)
        size += len(part)
        if size > LARGEST:
            raise BrokenImage(name, f"it is larger than {LARGEST >> 20} MB")
    return b"".join(parts)


# ---- one connection


@contextmanager
def answering(address: SplitResult, trusted: bool, deadline: float) -> Iterator[HTTPResponse]:
    """The answer to one request, of a server that is cut off at the deadline, whatever it is busy sending."""
    host = address.hostname or ""
    port = address.port or (443 if address.scheme == "https" else 80)
    sock = connected(resolved(host, port, trusted, deadline), deadline)
    if address.scheme == "https":
        sock = ssl.create_default_context().wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    cut = threading.Timer(left(deadline), shut, [sock])  # a timeout alone starts anew with every byte
    cut.start()
    try:
        if isinstance(sock, ssl.SSLSocket):
            sock.do_handshake()
        connection = HTTPConnection(host, port)
        connection.sock = sock
        path = quote(address._replace(scheme="", netloc="", fragment="").geturl() or "/", safe=SAFE)
        host_header = address.netloc.rpartition("@")[2].encode("ascii" if host.isascii() else "idna").decode()
        headers = {"Host": host_header, "User-Agent": f"vitlab/{__version__}", "Accept": "image/*"}
        connection.request("GET", path, headers=headers | {"Connection": "close"})
        with connection.getresponse() as answer:
            yield answer
    finally:
        cut.cancel()
        sock.close()


def left(deadline: float) -> float:
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def shut(sock: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # the plain one: another thread may be reading through TLS


Target = tuple[socket.AddressFamily, tuple[object, ...]]  # as the system names a place to connect to


def connected(targets: list[Target], deadline: float) -> socket.socket:
    """A connection to the first that takes one."""
    for at, (family, target) in enumerate(targets):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(left(deadline) / (len(targets) - at))
            sock.connect(target)
            sock.settimeout(left(deadline))
            return sock
        except OSError:
            sock.close()
            if at == len(targets) - 1:
                raise
    raise Refused("its host has no address")


def resolved(host: str, port: int, trusted: bool, deadline: float) -> list[Target]:
    """The places that a host's name stands for; all public, unless the user typed it."""
    answers: SimpleQueue[list[Target] | OSError] = SimpleQueue()

    def ask() -> None:  # the system's resolver knows no deadline
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            answers.put([(family, target) for family, _, _, _, target in found])
        except (OSError, UnicodeError) as error:
            answers.put(OSError(f"there is no host '{host}': {error}"))

    threading.Thread(target=ask, daemon=True).start()
    try:
        found = answers.get(timeout=left(deadline))
    except Empty:
        raise TimeoutError from None
    if isinstance(found, OSError):
        raise found
    private = next((str(target[0]) for _, target in found if not is_public(str(target[0]))), None)
    if private is not None and not trusted:
        raise Refused(f"it leads to {private}, which is no public address; type that address itself if you mean it")
    return found[:4]


# ---- addresses


def is_own(host: str) -> bool:
    """Whether the user can only have meant this very machine or address."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return True


def is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None or ip in NAT64:
            return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)))
        if ip.sixtofour is not None or ip.teredo is not None:  # tunnels to any IPv4 address, out of use
            return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # public by the register, and a way to any IPv4 address
