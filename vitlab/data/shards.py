"""Tar shards in the WebDataset layout: for each image KEY.jpg (or .png, .webp …) and KEY.cls with its class.

Shards are indexed once: where each image lies, and its label. After that any image is one read, in any order.

Piped shards ("pipe:COMMAND", for sets that fit no disk) are fetched whole into a small store as training comes to
them. An epoch takes shard after shard and mixes a few at a time, and resuming fetches the shards it stopped in anew.
The index of a piped set takes one pass through all of it.
"""

import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track

from vitlab.data.images import EXTENSIONS, Shrink, decode
from vitlab.data.pieces import KEEP, Pieces
from vitlab.data.rng import Ints
from vitlab.data.storage import ALL_LABELS, LONGEST_LABEL, by_split, numbered
from vitlab.errors import UserError
from vitlab.files import cache_folder, file_lock
from vitlab.models.config import MOST_CLASSES

PIPE = "pipe:"
NUMBER = re.compile(r"-?[0-9]{1,18}")
MOST_SHARDS, MOST_MEMBERS = 1_000_000, 2_000_000  # that braces may stand for; files in a shard
LONGEST_KEY, LONGEST_HEADER = 512, 4096  # bytes


def is_shards(spec: str) -> bool:
    return spec.startswith(PIPE) or spec.endswith(".tar")


class ShardSource:
    """Images inside tar files, by file, offset and length."""

    def __init__(self, urls: list[str], index: dict[str, NDArray[Any]], labels: Ints, classes: tuple[str, ...]) -> None:
        self.urls, self.labels, self.classes = urls, labels, classes
        self.shard, self.offset, self.length = index["shard"], index["offset"], index["length"]
        self.keys = index["key"]
        self.pieces = Pieces(urls, open_shard)

    @property
    def groups(self) -> Ints | None:
        return self.shard if self.urls[0].startswith(PIPE) else None

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.urls[self.shard[index]]}: {self.keys[index].decode('utf-8', 'replace')}"

    def image(self, index: int, shrink: Shrink | None = None) -> Image.Image:
        name = self.name(index)
        place = int(self.shard[index]), int(self.offset[index]), int(self.length[index])
        return decode(self.pieces.picture(*place, name), name, shrink)


def splits(spec: str) -> dict[str, ShardSource]:
    """The splits that the shards' names tell apart; class names from a classes.txt beside local ones."""
    urls = expand(spec)
    root = "" if spec.startswith(PIPE) else os.path.commonpath([os.path.dirname(url) for url in urls])
    grouped = by_split(urls, root)
    tables = {split: index_of(parts) for split, parts in grouped.items()}
    words = {text(word) for table in tables.values() for word in np.unique(table["label"])}
    if len(words) > MOST_CLASSES or sum(map(len, words)) > ALL_LABELS:
        raise UserError(f"'{spec}' has more than {MOST_CLASSES:,} different labels, or very long ones")
    numeric = all(NUMBER.fullmatch(word) for word in words)
    classes = read_classes(Path(spec).parent / "classes.txt")
    if classes is None and numeric:
        images = sum(len(table["label"]) for table in tables.values())
        classes = numbered(max(map(int, words), default=-1), images, spec)
    classes = tuple(sorted(words)) if classes is None else classes
    number = {name: i for i, name in enumerate(classes)}
    found = {}
    for split, parts in grouped.items():
        labels = map(text, tables[split]["label"])
        numbers = [int(word) if numeric else number.get(word, -1) for word in labels]
        found[split] = ShardSource(parts, tables[split], np.array(numbers, np.int64), classes)
    return found


def text(word: bytes) -> str:
    return word.decode("utf-8", "backslashreplace")


def read_classes(path: Path) -> tuple[str, ...] | None:
    """Names of classes, a line each, where there is such a file."""
    if not path.is_file():
        return None
    if path.stat().st_size > ALL_LABELS:
        raise UserError(f"'{path}' is larger than {ALL_LABELS >> 20} MB, and no list of class names")
    names = tuple(line[:LONGEST_LABEL] for line in text(path.read_bytes()).splitlines())
    if len(names) > MOST_CLASSES:
        raise UserError(f"'{path}' has {len(names):,} lines; a set has at most {MOST_CLASSES:,} classes")
    return names


def expand(spec: str) -> list[str]:
    """`train-{000..009}.tar` and `*.tar` as a list of files; of a command, only the braces are ours."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", spec)
    if found:
        first, last = found[1], found[2]
        if max(len(first), len(last)) > 18 or int(last) - int(first) >= MOST_SHARDS:
            raise UserError(f"'{spec[:80]}' stands for more than {MOST_SHARDS:,} shards")
        numbers = (f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1))
        return [url for n in numbers for url in expand(spec[: found.start()] + n + spec[found.end() :])]
    if spec.startswith(PIPE):
        return [spec]
    files = sorted(glob(os.path.expanduser(spec))) if re.search(r"[*?\[]", spec) else [os.path.expanduser(spec)]
    missing = next((file for file in files if not os.path.isfile(file)), spec if not files else None)
    if missing is not None:
        raise UserError(f"'{missing}' is no file" if os.path.exists(missing) else f"there is no shard '{missing}'")
    return files


# ---- the index


def index_of(urls: list[str]) -> dict[str, NDArray[Any]]:
    """Of every image of the shards: its shard, place, key and label; kept for the next time."""
    tables = []
    console = Console(stderr=True)
    for url in track(urls, "indexing shards", console=console, transient=True, disable=not console.is_terminal):
        cache = cache_folder() / "shards" / f"{tag(url)}.npz"
        if not cache.exists():
            table = scan(url)
            cache.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=cache.parent, suffix=".npz", delete=False) as part:
                np.savez(part, **table)  # type: ignore[arg-type]
            os.replace(part.name, cache)
        with np.load(cache, allow_pickle=False) as kept:
            tables.append(dict(kept))
    merged = {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}
    merged["shard"] = np.repeat(np.arange(len(urls)), [len(table["key"]) for table in tables])
    return merged


def tag(url: str) -> str:
    """A name for the index of a shard, new when the file changes."""
    about = None if url.startswith(PIPE) else os.stat(url)
    state = f"{url}" if about is None else f"{os.path.realpath(url)} {about.st_size} {about.st_mtime_ns}"
    return hashlib.sha256(os.fsencode(state)).hexdigest()[:20]


def scan(url: str) -> dict[str, NDArray[Any]]:
    """One pass through a shard. An image's key is its path up to the first dot of its name."""
    try:
        with open_shard(url) as file, tarfile.open(fileobj=Headers(file), mode="r:") as tar:  # type: ignore[call-overload]
            places, labels = members(tar)
    except UserError:
        raise
    except Exception as error:  # on a shard made to harm, tarfile raises nearly anything
        raise UserError(f"'{url}' cannot be read as a tar shard: {error or type(error).__name__}") from None
    unlabelled = next((key for key in places if key not in labels), None)
    if unlabelled is not None:
        name = text(unlabelled)
        raise UserError(f"'{url}' has an image '{name}' without a label file '{name}.cls'")
    return {
        "key": np.array(list(places), np.bytes_),
        "label": np.array([labels[key] for key in places], np.bytes_),
        "offset": np.array([offset for offset, _ in places.values()], np.int64),
        "length": np.array([length for _, length in places.values()], np.int64),
    }


class Headers:
    """A shard for tarfile, which reads headers into memory whatever length they claim."""

    def __init__(self, file: io.FileIO) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def read(self, size: int) -> bytes:
        if not 0 <= size <= LONGEST_HEADER:
            raise tarfile.ReadError(f"a header claims to be {size:,} bytes long")
        return self.file.read(size)


def members(tar: tarfile.TarFile) -> tuple[dict[bytes, tuple[int, int]], dict[bytes, bytes]]:
    """Where each image lies, and its label, by key."""
    places: dict[bytes, tuple[int, int]] = {}
    labels: dict[bytes, bytes] = {}
    count = 0
    while (member := tar.next()) is not None:
        tar.members.clear()  # type: ignore[attr-defined]  # which would keep them all
        count += 1
        if count > MOST_MEMBERS:
            raise tarfile.ReadError(f"it has more than {MOST_MEMBERS:,} members; make smaller shards")
        if member.size < 0:  # would lead back to where it is
            raise tarfile.ReadError(f"a member claims a size of {member.size}")
        folder, name = os.path.split(member.name)
        stem, _, extension = name.partition(".")
        if not member.isfile() or member.issparse() or name.startswith("."):
            continue
        key = os.path.join(folder, stem).encode("utf-8", "surrogateescape")
        if len(key) > LONGEST_KEY:
            raise tarfile.ReadError(f"a member's name is {len(key):,} bytes long; {LONGEST_KEY} are the most")
        if extension == "cls":
            labels[key] = label_in(tar, member)
        elif f".{extension.lower()}" in EXTENSIONS:
            places[key] = member.offset_data, member.size
    return places, labels


def label_in(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.size > LONGEST_LABEL:
        raise tarfile.ReadError(
            f"the label '{member.name}' is {member.size:,} bytes long; {LONGEST_LABEL} are the most"
        )
    return (tar.extractfile(member) or io.BytesIO()).read().strip()


# ---- opening


def open_shard(url: str) -> io.FileIO:
    """A shard as a file; a piped one is fetched first."""
    if url.startswith(PIPE):
        return fetch(url)
    try:
        return open(url, "rb", buffering=0)
    except OSError as error:
        raise UserError(f"the shard '{url}' cannot be opened: {error.strerror}") from None


def fetch(url: str) -> io.FileIO:
    """A piped shard from the store, run through its command unless it is there; the oldest make room for it."""
    store = cache_folder() / "pipes"
    store.mkdir(parents=True, exist_ok=True)
    path = store / f"{tag(url)}.tar"
    with file_lock(str(path.with_suffix(".lock"))):  # workers that want the same shard wait for one
        try:
            return open(path, "rb", buffering=0)
        except FileNotFoundError:
            pass
        for old in sorted(store.glob("*.tar"), key=_age)[: -(KEEP - 1)]:
            old.unlink(missing_ok=True)
        part = path.with_suffix(".part")
        with open(part, "wb") as sink:
            code = subprocess.run(["sh", "-c", url.removeprefix(PIPE)], stdout=sink, check=False).returncode
        if code:
            part.unlink()
            raise UserError(f"the command '{url.removeprefix(PIPE)}' failed with exit code {code}")
        file = open(part, "rb", buffering=0)  # noqa: SIM115  # stays readable even if it is evicted at once
        os.replace(part, path)
        return file


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
