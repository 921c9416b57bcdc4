"""Which Host headers are accepted."""

import pytest

from vitlab.errors import UserError
from vitlab.serving.hosts import AllowedHosts

OURS = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1", "127.0.0.1:80", "127.9.9.9", "[::1]", "[::1]:8000"]
NAMES = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "2130706433",
    "0x7f.1",
]
BROKEN = ["", " ", "::1", "[::1", "localhost:x", "localhost@evil", "a/b", "[evil]", "localhost,evil", "127.1"]


@pytest.mark.parametrize("bound", ["127.0.0.1", "::1", "0.0.0.0", "::", "192.168.1.5"])
def test_this_machine_is_accepted_and_other_names_are_not(bound: str) -> None:
    hosts = AllowedHosts(bound)
    assert [name for name in OURS if not hosts.allows(name)] == []
    assert [name for name in NAMES + BROKEN if hosts.allows(name)] == []


@pytest.mark.parametrize(
    ("bound", "expected"), [("127.0.0.1", False), ("192.168.1.5", True), ("192.168.1.6", False), ("0.0.0.0", True)]
)
def test_the_address_it_listens_on(bound: str, expected: bool) -> None:
    assert AllowedHosts(bound).allows("192.168.1.5:8000") is expected


def test_names_of_the_option() -> None:
    hosts = AllowedHosts("0.0.0.0", ["Lab.Example.", "gpu-1", "[fe80::1]"])
    assert all(map(hosts.allows, ["lab.example:80", "LAB.EXAMPLE", "gpu-1", "[fe80::1]:9"]))
    assert not hosts.allows("gpu-2")
    for wrong in ("http://lab", "lab:80", "", "a b", "*"):
        with pytest.raises(UserError, match="--host-name"):
            AllowedHosts("0.0.0.0", [wrong])
