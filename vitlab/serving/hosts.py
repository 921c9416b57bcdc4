"""The Host header: whether a request is addressed to this server.

Any web page can point its own name at this machine (DNS rebinding), and the browser would then let it read our answers.
Its requests carry its name; the names of this server are known.
"""

import ipaddress
import re
from collections.abc import Iterable

from vitlab.errors import UserError

HEADER = re.compile(r"(?:\[(?P<ipv6>[0-9a-f:.%]+)\]|(?P<name>[^:\[\]/@]+))(?::\d*)?")
NAME = re.compile(r"(?!-)[a-z0-9_.-]{1,253}")


class AllowedHosts:
    """The names that a server without a token answers to; a page cannot have the token, so with one any name will do.

    `bound` is the address the server listens on, `names` those of --host-name.
    """

    def __init__(self, bound: str, names: Iterable[str] = ()) -> None:
        self.bound = parse_address(bound)
        self.names = {"localhost", *(check_name(name) for name in names)}

    def allows(self, header: str) -> bool:
        if (match := HEADER.fullmatch(header.strip().lower())) is None:
            return False
        host = match["ipv6"] or match["name"]
        address, bound = parse_address(host), self.bound
        # bound to every address of this machine, however it is reached; a number cannot be pointed elsewhere
        is_any = bound is not None and bound.is_unspecified
        is_ours = address is not None and (is_any or address.is_loopback or address == bound)
        return is_ours or host.rstrip(".") in self.names


def check_name(name: str) -> str:
    """Return a --host-name as it will be compared; addresses may be given too."""
    plain = name.strip().lower().strip("[]").rstrip(".")
    if parse_address(plain) is None and not NAME.fullmatch(plain):
        raise UserError(f"--host-name '{name}' is not a host name; give it without http:// and without a port")
    return plain


def parse_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address, without its zone; None for a name."""
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
