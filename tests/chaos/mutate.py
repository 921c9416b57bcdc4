"""Damaged and hostile variants of a file: of its bytes, and of what they mean, so that the outer checks still pass."""

import hashlib
import io
import json
import random
import zipfile
import zlib
from typing import Any

Random = random.Random

NUMBERS = (
    0,
    1,
    -1,
    2,
    127,
    128,
    255,
    256,
    32767,
    65535,
    10**6,
    2**31 - 1,
    2**31,
    2**32,
    2**53,
    2**63 - 1,
    2**64,
    10**30,
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, [], {}, "", "x", [[]], [None], {"": None}, float("nan"), float("inf"), 1e308, -0.5, 0.1),
    *("../../outside", "/tmp/outside", "pipe:touch outside", "a\0b", "\ud800", "é" * 50, "9" * 5000),
    *NUMBERS,
)


def scramble(data: bytes, draw: Random) -> bytes:
    """A few bytes flipped, set, cut out, doubled or put in."""
    out = bytearray(data or b"\0")
    for _ in range(draw.choice((1, 1, 2, 4, 8))):
        at = draw.randrange(len(out) + 1)
        end = min(len(out), at + draw.choice((1, 1, 2, 4, 8, 64, 512)))
        what = draw.randrange(6)
        if what == 0 and at < len(out):
            out[at] ^= 1 << draw.randrange(8)
        elif what == 1:
            out[at:end] = draw.randbytes(end - at)
        elif what == 2:
            del out[at:end]
        elif what == 3:
            out[at:at] = out[at:end]
        elif what == 4:
            width = draw.choice((1, 2, 4, 8))
            number = draw.choice(NUMBERS) % 256**width
            out[at : at + width] = number.to_bytes(width, draw.choice(("little", "big")))
        else:
            del out[at:]
        out = out or bytearray(b"\0")
    return bytes(out)


def picture(data: bytes, draw: Random) -> bytes:
    """The bytes; of a PNG, with valid checksums, or nothing behind them would be reached."""
    changed = bytearray(scramble(data, draw))
    at = 8
    while changed[:4] == b"\x89PNG" and at + 12 <= len(changed):
        end = at + 8 + int.from_bytes(changed[at : at + 4], "big")
        if end + 4 > len(changed):
            break
        changed[end : end + 4] = zlib.crc32(changed[at + 4 : end]).to_bytes(4, "big")
        at = end + 4
    return bytes(changed)


# ---- JSON


def json_text(data: bytes, draw: Random) -> bytes:
    """JSON with some of its values replaced, removed, moved or nested; a line of JSON lines, if it is such."""
    lines = data.split(b"\n")
    at = draw.randrange(len(lines))
    try:
        value = json.loads(data if (alone := _is_json(data)) else lines[at])
    except (ValueError, RecursionError):
        return scramble(data, draw)
    for _ in range(draw.choice((1, 1, 2, 4))):
        value = change(value, draw)
    text = json.dumps(value).encode()
    return text if alone else b"\n".join([*lines[:at], text, *lines[at + 1 :]])


def sealed(data: bytes, draw: Random) -> bytes:
    """JSON with its own digest, which is recomputed: an attacker can do that too."""
    text = json_text(data, draw)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(value, dict) or "digest" not in value:
        return text
    del value["digest"]
    digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return json.dumps(value | {"digest": digest}).encode()


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except (ValueError, RecursionError):
        return False
    return True


def change(value: Any, draw: Random) -> Any:
    """One node of it changed, at random."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        key = draw.choice(list(value))
        if draw.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: change(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        if draw.random() < 0.15:
            return value * 2 if draw.random() < 0.5 else value[:at]
        return [*value[:at], change(value[at], draw), *value[at + 1 :]]
    if type(value) is int and draw.random() < 0.5:
        return draw.choice((value + 1, value - 1, -value, value * 2, value * 1000, value + 0.5, str(value)))
    if draw.random() < 0.03:
        return json.loads("[" * 500 + "]" * 500)
    return draw.choice(VALUES)


# ---- containers


def safetensors(data: bytes, draw: Random) -> bytes:
    """The header as JSON, with its length recomputed."""
    length = int.from_bytes(data[:8], "little")
    if draw.random() < 0.2 or length > len(data) - 8:
        return scramble(data, draw)
    header = json_text(data[8 : 8 + length], draw)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def zipped(data: bytes, draw: Random) -> bytes:
    """A member's content or name, with checksums recomputed; sometimes compressed."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = [(info.filename, archive.read(info)) for info in archive.infolist()]
    except Exception:  # zipfile raises a dozen kinds
        return scramble(data, draw)
    if draw.random() < 0.2 or not members:
        return scramble(data, draw)
    # an array's header and a pickle come first: most changes go there
    at = draw.randrange(len(members))
    name, content = members[at]
    front = min(len(content), draw.choice((128, len(content))))
    content = scramble(content[:front], draw) + content[front:]
    if draw.random() < 0.1:
        name = draw.choice(("../../outside", "x.npy", name + "/", draw.choice(members)[0], ""))
    members[at] = name, content
    target = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if draw.random() < 0.1 else zipfile.ZIP_STORED
    with zipfile.ZipFile(target, "w", kind) as archive:
        for name, content in members:
            archive.writestr(zipfile.ZipInfo(name), content)
    return target.getvalue()


FIELDS = ((0, 100), (100, 8), (124, 12), (136, 12), (156, 1), (157, 100), (257, 8), (345, 155))  # of a tar's header


def tarred(data: bytes, draw: Random) -> bytes:
    """A field of a member's header, with the checksum recomputed; or a label."""
    out = bytearray(data)
    if draw.random() < 0.2 or len(out) < 1024:
        return scramble(data, draw)
    heads, at = [], 0
    while at + 512 <= len(out) and out[at]:
        heads.append(at)
        size = bytes(out[at + 124 : at + 136]).strip(b"\0 ")
        at += 512 + (-(-int(size, 8) // 512) * 512 if size.isdigit() and b"8" not in size and b"9" not in size else 0)
    head = draw.choice(heads or [0])
    if draw.random() < 0.3:
        out[head + 512 : head + 520] = draw.choice((b"-1", b"9" * 8, b"\xff\0", b"", b"10000000", b"1 ", b"a/b")).ljust(
            8
        )
    else:
        start, width = draw.choice(FIELDS)
        words = (
            b"77777777777",
            b"-1",
            b"\x80" + b"\xff" * 11,
            b"../../outside",
            b"x.cls",
            b"x.jpg",
            b"\xff\xfe.png",
            b"12345",
        )
        kinds = (b"0", b"1", b"2", b"5", b"L", b"x", b"g", b"S", b"\0")
        word = draw.choice(kinds if width == 1 else words)[:width]
        out[head + start : head + start + width] = word.ljust(width, b"\0")
    out[head + 148 : head + 156] = b"        "
    out[head + 148 : head + 156] = b"%06o\0 " % sum(out[head : head + 512])
    return bytes(out)


def parquet(data: bytes, draw: Random) -> bytes:
    """The footer, with its length recomputed."""
    length = int.from_bytes(data[-8:-4], "little")
    if draw.random() < 0.3 or not 0 < length < len(data) - 12:
        return scramble(data, draw)
    footer = scramble(data[-8 - length : -8], draw)
    return data[: -8 - length] + footer + len(footer).to_bytes(4, "little") + data[-4:]
