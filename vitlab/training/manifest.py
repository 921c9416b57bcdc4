"""What a run was trained on, image by image, so that a continuation notices when the data has changed.

data.txt.gz in the run's folder has a line per image of every split: its name below the set's own folder, its size in
bytes, its label and, with hash_data=true, the start of its content's sha256. Names are relative, so a set that moved
is the same set. A million images are some ten megabytes and take seconds.
"""

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from vitlab.data.folder import FileSource
from vitlab.data.images import BrokenImage
from vitlab.data.parquet import ParquetSource
from vitlab.data.rng import Ints
from vitlab.data.shards import PIPE, ShardSource
from vitlab.data.source import ArraySource, Data, ImageSource, Subset
from vitlab.errors import UserError
from vitlab.files import cache_folder, fsync, sha256
from vitlab.terminal import warn
from vitlab.text import brief
from vitlab.training.checkpoint import disk_errors

NAME = "data.txt.gz"
SHOWN = 10  # differences named one by one
AT_ONCE = 16  # files looked at: over a network each takes its time
CHUNK = 1_000
DIGITS = 32  # of a sha256, enough that no two contents share them
SPARE = 64 << 20  # bytes that a stored list may be longer than ours; more is a bomb, not a list

Entry = tuple[str, int, str]  # name, bytes, sha256 or nothing


def listing(data: Data, hashed: bool) -> str:
    """The lines of all splits, in the order in which the run counts images."""
    lines = []
    for split, source in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if source is None:
            continue
        labels = source.labels.tolist()
        for (name, size, digest), label in zip(entries(source, np.arange(len(source)), hashed), labels, strict=True):
            lines.append(f"{split}/{printable(name)}\t{size}\t{label}\t{digest}\n")
        lines += [f"{split}/{printable(name)}\t{size}\t\t\n" for name, size in containers(source)]
    return "".join(lines)


def printable(name: str) -> str:
    """A name without the signs that part lines and columns, whatever the file system lets in."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").translate(SIGNS)


SIGNS = {ord(sign): f"\\x{ord(sign):02x}" for sign in "\t\n\r\x1b"}


def entries(source: ImageSource, indices: Ints, hashed: bool) -> Iterator[Entry]:
    """Names and sizes by what is cheap for each kind: no image is opened unless its content is asked for."""
    if isinstance(source, Subset):
        yield from entries(source.source, source.indices[indices], hashed)
    elif isinstance(source, FileSource):
        yield from files(source, indices, hashed)
    elif isinstance(source, ShardSource):
        short = [str(i) if url.startswith(PIPE) else os.path.basename(url) for i, url in enumerate(source.urls)]
        for i in indices.tolist():
            name = f"{short[source.shard[i]]}: {os.fsdecode(source.keys[i])}"
            yield name, int(source.length[i]), pixels(source, i) if hashed else ""
    elif isinstance(source, ParquetSource):
        for i in indices.tolist():
            yield f"row {i}", 0, pixels(source, i) if hashed else ""
    else:
        for i in indices.tolist():
            size = source.pixels[i].nbytes if isinstance(source, ArraySource) else 0
            yield source.name(i), size, pixels(source, i) if hashed else ""


def files(source: FileSource, indices: Ints, hashed: bool) -> Iterator[Entry]:
    root = str(source.root if source.root != Path("/") else cache_folder().absolute())  # the latter: known sets

    def look(some: Ints) -> list[Entry]:
        paths = [source.name(index) for index in some.tolist()]
        return [(path.removeprefix(root).lstrip("/"), *content(path, hashed)) for path in paths]

    with ThreadPoolExecutor(AT_ONCE) as pool:
        try:
            for found in pool.map(look, np.array_split(indices, len(indices) // CHUNK + 1)):
                yield from found
        except BaseException:  # a signal does not wait for a million files
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def content(path: str, hashed: bool) -> tuple[int, str]:
    """A file's size and, if asked for, its digest; one that cannot be read is the loader's to report."""
    try:
        return os.stat(path).st_size, sha256(Path(path))[:DIGITS] if hashed else ""
    except OSError:
        return 0, ""


def pixels(source: ImageSource, index: int) -> str:
    """The content of an image that is no file: what it looks like."""
    try:
        image = source.image(index)
    except BrokenImage:
        return "broken"
    return hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:DIGITS]


def containers(source: ImageSource) -> list[tuple[str, int]]:
    """The files that images lie in, with their sizes."""
    if isinstance(source, Subset):
        return containers(source.source)
    paths = (
        source.files if isinstance(source, ParquetSource) else source.urls if isinstance(source, ShardSource) else []
    )
    return [(os.path.basename(path), os.path.getsize(path)) for path in paths if not path.startswith(PIPE)]


# ---- the file


def write(out: Path, text: str) -> None:
    """Complete or not at all."""
    with disk_errors(out / NAME):
        new = out / f"{NAME}.new"
        new.write_bytes(gzip.compress(text.encode(), 1, mtime=0))
        fsync(new)
        new.rename(out / NAME)


def differences(out: Path, text: str) -> list[str] | None:
    """How the data, `text`, differs from what the run in `out` began with, in words; None where nothing was kept."""
    path = out / NAME
    if not path.exists():
        return None
    try:
        with gzip.open(path, "rb") as file:
            kept = file.read(len(text.encode()) * 4 + SPARE)
    except (OSError, EOFError, zlib.error) as error:
        return [f"{path} cannot be read ({brief(error)})"]
    before = kept.decode("utf-8", "backslashreplace")
    return [] if before == text else list(compare(table(before), table(text))) or ["the order of the images"]


def table(text: str) -> dict[str, list[str]]:
    """Size, label and content by name."""
    lines = (line.split("\t") for line in text.split("\n") if line)
    return {name: [*rest, "", "", ""][:3] for name, *rest in lines}


def compare(before: dict[str, list[str]], now: dict[str, list[str]]) -> Iterator[str]:
    for name in before.keys() - now.keys():
        yield f"{name[:200]!r} is gone"
    for name, facts in now.items():
        if name not in before:
            yield f"{name!r} is new"
        elif facts != (was := before[name]):
            kind = next(i for i in range(3) if facts[i] != was[i])
            what = (f"has {facts[0]} bytes, not {was[0][:20]}", f"has the label {facts[1]}, not {was[1][:20]}")
            yield f"{name!r} {(*what, 'has other content')[kind]}"


def check_data(out: Path, data: Data, *, hashed: bool, accept: bool) -> None:
    """Keep what a new run begins with; a continuation must have the same, unless the change is accepted."""
    text = listing(data, hashed)
    changes = differences(out, text)
    if changes:
        some = "; ".join(sorted(changes)[:SHOWN]) + (f"; and {len(changes) - SHOWN} more" * (len(changes) > SHOWN))
        if not accept:
            raise UserError(
                f"the data of the run in {out} has changed: {some}; put it back, or go on all the same with "
                "--accept-data-changes"
            )
        warn(f"going on with changed data: {some}")
    if changes is None or changes:
        write(out, text)
