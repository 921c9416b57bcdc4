"""What a run was trained on, image by image, so that a resumed run notices when the data has changed.

data.txt.gz in the run's folder has a line per image of every split: its name below the set's own folder, its size in
bytes, its label and, with hash_data=true, the start of its content's sha256. Names are relative, so a set that moved
is the same set. A million images are some ten megabytes and take seconds. Where changed data was accepted, lines that
begin with past/ are images that the run has learned from before and that its training images no longer are.
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
from vitlab.files import atomic_file, sha256
from vitlab.terminal import warn
from vitlab.text import brief, counted
from vitlab.training.checkpoint import disk_errors

NAME = "data.txt.gz"
SHOWN = 10  # changes named one by one
THREADS = 16  # that look at files: over a network each file takes time
CHUNK = 1_000
DIGITS = 32  # of a sha256, enough that no two contents share them
LEARNED = ("train/", "validation/")  # the splits that a run learns from: the latter chooses the best checkpoint
PAST = "past/"
SPARE = 64 << 20  # bytes that a stored manifest may be longer than ours; more is a decompression bomb

Entry = tuple[str, int, str]  # name, bytes, sha256 or ""


def list_images(data: Data, hashed: bool) -> str:
    """The manifest of all splits, in the order in which the run counts images."""
    lines = []
    for split, source in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if source is None:
            continue
        labels = (" ".join(map(str, source.labels_of(i))) for i in range(len(source)))
        named = zip(entries(source, np.arange(len(source)), hashed), labels, strict=True)
        lines += [f"{split}/{escape_name(name)}\t{size}\t{label}\t{digest}\n" for (name, size, digest), label in named]
        lines += [f"{split}/{escape_name(name)}\t{size}\t\t\n" for name, size in containers(source)]
    return "".join(lines)


def digest(data: Data) -> str:
    """The sha256 of the names, sizes and labels of all images, for what has no folder of a run."""
    return hashlib.sha256(list_images(data, hashed=False).encode()).hexdigest()


SEPARATORS = {ord(character): f"\\x{ord(character):02x}" for character in "\t\n\r\x1b"}


def escape_name(name: str) -> str:
    """A file's name without the characters that separate lines and columns."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").translate(SEPARATORS)


def entries(source: ImageSource, indices: Ints, hashed: bool) -> Iterator[Entry]:
    """Names and sizes by what is cheap for each kind of source: an image is opened only to hash its content."""
    if isinstance(source, Subset):
        yield from entries(source.source, source.indices[indices], hashed)
        return
    if isinstance(source, FileSource):
        yield from file_entries(source, indices, hashed)
        return
    shards: list[str] = []
    if isinstance(source, ShardSource):
        shards = [str(i) if url.startswith(PIPE) else os.path.basename(url) for i, url in enumerate(source.urls)]
    for i in indices.tolist():
        if isinstance(source, ShardSource):
            name, size = f"{shards[source.shard[i]]}: {os.fsdecode(source.keys[i])}", int(source.length[i])
        elif isinstance(source, ParquetSource):
            name, size = f"row {i}", 0
        else:
            name, size = source.name(i), source.pixels[i].nbytes if isinstance(source, ArraySource) else 0
        yield name, size, pixel_digest(source, i) if hashed else ""


def file_entries(source: FileSource, indices: Ints, hashed: bool) -> Iterator[Entry]:
    """Entries of image files, looked at by several threads."""

    def look(some: Ints) -> list[Entry]:
        looked = (size_and_digest(source.name(index), hashed) for index in some.tolist())
        return [(os.fsdecode(name), *found) for name, found in zip(source.below(some), looked, strict=True)]

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for chunk in pool.map(look, np.array_split(indices, len(indices) // CHUNK + 1)):
                yield from chunk
        except BaseException:  # a signal does not wait for a million files
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def size_and_digest(path: str, hashed: bool) -> tuple[int, str]:
    """A file's size and, if `hashed`, its digest; a file that cannot be read is left to the loader to report."""
    try:
        return os.stat(path).st_size, sha256(Path(path))[:DIGITS] if hashed else ""
    except OSError:
        return 0, ""


def pixel_digest(source: ImageSource, index: int) -> str:
    """The digest of the pixels of an image that is no file of its own."""
    try:
        image = source.image(index)
    except BrokenImage:
        return "broken"
    return hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()[:DIGITS]


def containers(source: ImageSource) -> list[tuple[str, int]]:
    """The files that contain a source's images, with their sizes."""
    if isinstance(source, Subset):
        return containers(source.source)
    files = source.files if isinstance(source, ParquetSource) else []
    paths = source.urls if isinstance(source, ShardSource) else files
    return [(os.path.basename(path), os.path.getsize(path)) for path in paths if not path.startswith(PIPE)]


# ---- the file


def write_manifest(out: Path, text: str) -> None:
    """Write a run's manifest; "" leaves the one that is there."""
    if not text:
        return
    with atomic_file(out / NAME, errors=disk_errors) as file:
        file.write(gzip.compress(text.encode(), 1, mtime=0))


def read_manifest(out: Path, most: int) -> str:
    """The text of a run's manifest, at most so many bytes of it and some more; UserError where it cannot be read."""
    try:
        with gzip.open(out / NAME, "rb") as file:
            return file.read(most + SPARE).decode("utf-8", "backslashreplace")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{out / NAME} cannot be read ({brief(error)})") from None


def find_changes(before: str, text: str) -> list[str]:
    """How the manifest `text` differs from the one `before`, a line per change."""
    if PAST in before:
        before = "".join(f"{line}\n" for line in before.split("\n") if line and not line.startswith(PAST))
    return [] if before == text else list(describe_changes(parse(before), parse(text))) or ["the order of the images"]


def past_lines(before: str, text: str) -> str:
    """Lines for the files that the manifest `before` has as learned from, and `text` has not."""
    now = {line.removeprefix(split) for line in parse(text) for split in LEARNED if line.startswith(split)}
    learned = {
        (line.removeprefix(split), size)
        for line, (size, *_) in parse(before).items()
        for split in (*LEARNED, PAST)
        if line.startswith(split)
    }
    gone = sorted((name, size) for name, size in learned if name not in now and size != "0")  # rows, of another file
    return "".join(f"{PAST}{name}\t{size}\t\t\n" for name, size in gone)


def parse(text: str) -> dict[str, list[str]]:
    """Size, label and digest by name."""
    lines = (line.split("\t") for line in text.split("\n") if line)
    return {name: [*rest, "", "", ""][:3] for name, *rest in lines}


def describe_changes(before: dict[str, list[str]], now: dict[str, list[str]]) -> Iterator[str]:
    gone, new = before.keys() - now.keys(), now.keys() - before.keys()
    earlier = {name: name for name in before}  # by its name now
    if gone and sorted(map(without_split, gone)) == sorted(map(without_split, new)):
        sides = f"{counted(len(gone), 'image')} of it changed sides, {min(gone)[:200]!r} for one"
        yield f"{sides}, as where photos were moved, or where an earlier version of vitlab held out others"
        earlier |= dict(zip(sorted(new, key=without_split), sorted(gone, key=without_split), strict=True))
        gone = set()
    for name in gone:
        yield f"{name[:200]!r} is gone"
    for name, (size, label, digest) in now.items():
        if name not in earlier:
            yield f"{name!r} is new"
            continue
        old_size, old_label, old_digest = before[earlier[name]]
        if size != old_size:
            yield f"{name!r} has {size} bytes, not {old_size[:20]}"
        elif label != old_label:
            yield f"{name!r} has the label {label}, not {old_label[:20]}"
        elif digest != old_digest:
            yield f"{name!r} has other content"


def without_split(name: str) -> str:
    return name.partition("/")[2]


def check_data(out: Path, data: Data, *, hashed: bool, accept: bool) -> str:
    """Raise UserError if the data differs from the manifest of the run in `out`; with `accept`, warn.

    Returns the manifest to write once nothing else stands against going on; "" where the one that is there stays.
    """
    text = list_images(data, hashed)
    if not (out / NAME).exists():
        return text
    try:
        before = read_manifest(out, len(text.encode()) * 4)
        changes = find_changes(before, text)
    except UserError as error:
        before, changes = "", [str(error)]
    if not changes:
        return ""
    some = "; ".join(sorted(changes)[:SHOWN]) + (f"; and {len(changes) - SHOWN} more" * (len(changes) > SHOWN))
    if not accept:
        fix = "put it back, or continue all the same with --accept-data-changes"
        raise UserError(f"the data of the run in {out} has changed: {some}; {fix}")
    warn(f"continuing with changed data: {some}")
    return text + past_lines(before, text)
