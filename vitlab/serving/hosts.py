"""The Host header: whether a request means this server.

A web page anywhere can point its own name at this machine (DNS rebinding) and would then be allowed by the browser to
read our answers. Its requests carry its name; the names of this server are known.
"""

import ipaddress
import re
from collections.abc import Iterable

from vitlab.errors import UserError

SHAPE = re.compile(r"(?:\[(?P<six>[0-9a-f:.%]+)\]|(?P<name>[^:\[\]/@]+))(?::\d*)?")
NAME = re.compile(r"(?!-)[a-z0-9_.-]{1,253}")


class Hosts:
    """The names that a server without a token answers to; a page cannot know a token, so with one any name will do."""

    def __init__(self, bound: str, names: Iterable[str] = ()) -> None:
        self.bound = parse_address(bound)
        self.names = {"localhost", *(check_name(name) for name in names)}

    def allows(self, header: str) -> bool:
        shape = SHAPE.fullmatch(header.strip().lower())
        if shape is None:
            return False
        host = shape["six"] or shape["name"]
        if host in self.names or host.rstrip(".") in self.names:
            return True
        address = parse_address(host)
        if address is None:
            return False
        if self.bound is not None and self.bound.is_unspecified:
            return True  # every address of this machine, however it is reached; a number cannot be pointed elsewhere
        return address.is_loopback or address == self.bound


def check_name(name: str) -> str:
    """A --host-name as it will be compared; addresses may be given too."""
    plain = name.strip().lower().strip("[]").rstrip(".")
    if parse_address(plain) is None and not NAME.fullmatch(plain):
        raise UserError(f"--host-name '{name}' is no host's name; give it without http:// and without a port")
    return plain


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
