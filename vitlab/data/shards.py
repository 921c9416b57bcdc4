"""Tar shards in the WebDataset layout: for each image KEY.jpg (or .png, .webp …) and KEY.cls with its class.

In a multi-label set KEY.cls holds any number of class numbers, "3 7" or "3,7"; one such file makes the set one.

Shards are indexed once: the position and the label of each image. After that any image is one read, in any order.

Piped shards ("pipe:COMMAND", for sets larger than the disk) are fetched completely into a small cache when training
reaches them. An epoch reads shard after shard and shuffles a few at a time; resuming fetches its current shards again.
Indexing a piped set takes one pass through all of it.
"""

import io
import os
import re
import subprocess
from glob import glob
from pathlib import Path
from tarfile import ReadError, TarFile, TarInfo

import numpy as np

from vitlab.data.images import EXTENSIONS
from vitlab.data.label_sets import Truth, sets_of
from vitlab.data.labels import MAX_LABEL_LENGTH, number_words, to_text
from vitlab.data.packed_files import (
    MAX_OPEN,
    Index,
    PackedSource,
    file_state,
    join_indexes,
    open_unbuffered,
    short_digest,
)
from vitlab.data.rng import Keys
from vitlab.data.split_names import group_by_split
from vitlab.errors import UserError
from vitlab.files import atomic_file, cache_folder, file_lock
from vitlab.terminal import track

PIPE = "pipe:"
SEVERAL = re.compile(
    rb"(-?[0-9]{1,18}([\s,;]+-?[0-9]{1,18})*)?"
)  # the label file of a multi-label set: "3 7", or empty
SEPARATOR = re.compile(rb"[\s,;]+")
MAX_SHARDS, MAX_MEMBERS = 1_000_000, 2_000_000  # that braces may expand to; files in a shard
MAX_KEY_BYTES, MAX_HEADER_BYTES = 512, 4096
MARK = re.compile(rb"-([0-9a-f]{16})$")


class ShardSource(PackedSource):
    """Images inside tar files, by file, offset and length; `index` is that of `index_shards`."""

    def __init__(self, urls: list[str], index: Index, truth: Truth, classes: tuple[str, ...]) -> None:
        super().__init__(urls, index, truth, classes)
        self.urls, self.keys = urls, index["key"]
        self.groups = self.shard if urls[0].startswith(PIPE) else None

    def name(self, index: int) -> str:
        return f"{self.urls[self.shard[index]]}: {self.keys[index].decode('utf-8', 'replace')}"

    def marks(self) -> Keys:
        """Those that the images had in the set of which this is a copy, see shrink.py, where their keys have them."""
        found = [MARK.search(key) for key in self.keys.tolist()]
        if all(found):
            return np.array([int(each[1], 16) for each in found if each], np.uint64)
        return super().marks()

    @staticmethod
    def open_file(url: str) -> io.FileIO:
        """Open a shard; a piped one is fetched first."""
        return fetch(url) if url.startswith(PIPE) else open_unbuffered(url)


def splits(spec: str) -> dict[str, ShardSource]:
    """The splits of shards, by their names; class names are read from a classes.txt beside local shards."""
    urls = expand(spec)
    root = "" if spec.startswith(PIPE) else os.path.commonpath([os.path.dirname(url) for url in urls])
    grouped = group_by_split(urls, root)
    tables = {split: index_shards(parts) for split, parts in grouped.items()}
    given = {word for table in tables.values() for word in np.unique(table["label"]).tolist()}
    is_multi = all(map(SEVERAL.fullmatch, given)) and any(map(SEPARATOR.search, given))
    parts = {word: split_label(word) if is_multi else [to_text(word)] for word in given}
    images = sum(len(table["label"]) for table in tables.values())
    beside = Path(spec).expanduser().parent / "classes.txt"
    classes, number = number_words({part for each in parts.values() for part in each}, images, beside, spec)
    sources = {}
    for split, table in tables.items():
        rows = [[number.get(part, -1) for part in parts[word]] for word in table["label"].tolist()]
        truth = sets_of(rows) if is_multi else np.array([row[0] for row in rows], np.int64)
        sources[split] = ShardSource(grouped[split], table, truth, classes)
    return sources


def split_label(word: bytes) -> list[str]:
    """The class numbers in a label file of a multi-label set."""
    return [to_text(part) for part in SEPARATOR.split(word)] if word else []


def expand(spec: str) -> list[str]:
    """`train-{000..009}.tar` and `*.tar` as a list of files; of a command, only the braces are expanded."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", spec)
    if found:
        first, last = found[1], found[2]
        if max(len(first), len(last)) > 18 or int(last) - int(first) >= MAX_SHARDS:
            raise UserError(f"'{spec[:80]}' expands to more than {MAX_SHARDS:,} shards")
        numbers = (f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1))
        return [url for n in numbers for url in expand(spec[: found.start()] + n + spec[found.end() :])]
    if spec.startswith(PIPE):
        return [spec]
    files = sorted(glob(os.path.expanduser(spec))) if re.search(r"[*?\[]", spec) else [os.path.expanduser(spec)]
    missing = next((file for file in files if not os.path.isfile(file)), spec if not files else None)
    if missing is not None:
        raise UserError(f"'{missing}' is not a file" if os.path.exists(missing) else f"there is no shard '{missing}'")
    return files


# ---- the index


def index_shards(urls: list[str]) -> Index:
    """The shard, offset, length, key and label of every image of the shards; cached."""
    tables = []
    for url in track(urls, "indexing shards"):
        cache = cache_folder() / "shards" / f"{cache_name(url)}.npz"
        if not cache.exists():
            table = scan(url)
            with atomic_file(cache) as file:
                np.savez(file, **table)  # type: ignore[arg-type]
        with np.load(cache, allow_pickle=False) as kept:
            tables.append(dict(kept))
    return join_indexes(tables)


def cache_name(url: str) -> str:
    """The name under which a shard is cached, another one when its file changes."""
    return short_digest(url) if url.startswith(PIPE) else file_state(url)


def scan(url: str) -> Index:
    """The index of one shard, in one pass. An image's key is its path up to the first dot of its name."""
    try:
        with ShardSource.open_file(url) as file, TarFile.open(fileobj=LimitedReads(file), mode="r:") as tar:  # type: ignore[call-overload]
            positions, labels = read_members(tar)
    except UserError:
        raise
    except Exception as error:  # tarfile raises nearly anything on malicious files
        raise UserError(f"'{url}' cannot be read as a tar shard: {error or type(error).__name__}") from None
    unlabeled = next((key for key in positions if key not in labels), None)
    if unlabeled is not None:
        name = to_text(unlabeled)
        raise UserError(f"'{url}' has an image '{name}' without a label file '{name}.cls'")
    return {
        "key": np.array(list(positions), np.bytes_),
        "label": np.array([labels[key] for key in positions], np.bytes_),
        "offset": np.array([offset for offset, _ in positions.values()], np.int64),
        "length": np.array([length for _, length in positions.values()], np.int64),
    }


class LimitedReads:
    """A file for tarfile, which would read headers into memory whatever length they claim."""

    def __init__(self, file: io.FileIO) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise ReadError(f"a header claims to be {size:,} bytes long")
        return self.file.read(size)


def read_members(tar: TarFile) -> tuple[dict[bytes, tuple[int, int]], dict[bytes, bytes]]:
    """Offset and length of each image, and its label, by key."""
    positions: dict[bytes, tuple[int, int]] = {}
    labels: dict[bytes, bytes] = {}
    for count, member in enumerate(iter(tar.next, None), 1):
        tar.members.clear()  # type: ignore[attr-defined]  # else it keeps them all
        if count > MAX_MEMBERS:
            raise ReadError(f"it has more than {MAX_MEMBERS:,} members; make smaller shards")
        if member.size < 0:  # would make tarfile read the same header forever
            raise ReadError(f"a member claims a size of {member.size}")
        folder, name = os.path.split(member.name)
        stem, _, extension = name.partition(".")
        if not member.isfile() or member.issparse() or name.startswith("."):
            continue
        key = os.path.join(folder, stem).encode("utf-8", "surrogateescape")
        if len(key) > MAX_KEY_BYTES:
            raise ReadError(f"a member's name is {len(key):,} bytes long; {MAX_KEY_BYTES} are the most")
        if extension == "cls":
            labels[key] = read_label(tar, member)
        elif f".{extension.lower()}" in EXTENSIONS:
            positions[key] = member.offset_data, member.size
    return positions, labels


def read_label(tar: TarFile, member: TarInfo) -> bytes:
    if member.size > MAX_LABEL_LENGTH:
        raise ReadError(f"the label '{member.name}' is {member.size:,} bytes long; {MAX_LABEL_LENGTH} are the most")
    return (tar.extractfile(member) or io.BytesIO()).read().strip()


# ---- piped shards


def fetch(url: str) -> io.FileIO:
    """Open a piped shard from the cache; where it is missing, run its command and remove the oldest shards."""
    folder = cache_folder() / "pipes"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{cache_name(url)}.tar"
    with file_lock(str(path.with_suffix(".lock"))):  # workers that need the same shard wait for one
        try:
            return open(path, "rb", buffering=0)
        except FileNotFoundError:
            pass
        for old in sorted(folder.glob("*.tar"), key=_modified)[: -(MAX_OPEN - 1)]:
            old.unlink(missing_ok=True)
        part = path.with_suffix(".part")
        with open(part, "wb") as sink:
            code = subprocess.run(["sh", "-c", url.removeprefix(PIPE)], stdout=sink, check=False).returncode
        if code:
            part.unlink()
            raise UserError(f"the command '{url.removeprefix(PIPE)}' failed with exit code {code}")
        file = open(part, "rb", buffering=0)  # noqa: SIM115  # readable even if another process removes it at once
        os.replace(part, path)
        return file


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
