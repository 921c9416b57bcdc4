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

from vitlab.config import UserError
from vitlab.data.draws import Ints
from vitlab.data.images import EXTENSIONS, BrokenImage, Shrink, decode
from vitlab.data.splits import by_split, cache_folder

PIPE = "pipe:"
KEEP = 16  # files open at a time, and piped shards in the store


def is_shards(spec: str) -> bool:
    return spec.startswith(PIPE) or spec.endswith(".tar")


class Shards:
    """Images inside tar files, by file, offset and length."""

    def __init__(self, urls: list[str], index: dict[str, NDArray[Any]], labels: Ints, classes: tuple[str, ...]) -> None:
        self.urls, self.labels, self.classes = urls, labels, classes
        self.shard, self.offset, self.length = index["shard"], index["offset"], index["length"]
        self.keys = index["key"]
        self.files: dict[int, io.FileIO] = {}

    @property
    def groups(self) -> Ints | None:
        return self.shard if self.urls[0].startswith(PIPE) else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "files": {}}

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.urls[self.shard[index]]}: {os.fsdecode(self.keys[index])}"

    def image(self, index: int, shrink: Shrink | None = None) -> Image.Image:
        file = self._file(int(self.shard[index]))
        data = os.pread(file.fileno(), int(self.length[index]), int(self.offset[index]))
        if len(data) < self.length[index]:
            raise BrokenImage(self.name(index), "the shard ends before the image does")
        return decode(io.BytesIO(data), self.name(index), shrink)

    def _file(self, shard: int) -> io.FileIO:
        if shard not in self.files:
            if len(self.files) >= KEEP:
                self.files.pop(next(iter(self.files))).close()
            self.files[shard] = open_shard(self.urls[shard])
        return self.files[shard]


def splits(spec: str) -> dict[str, Shards]:
    """The splits that the shards' names tell apart; class names from a classes.txt beside local ones."""
    urls = expand(spec)
    root = "" if spec.startswith(PIPE) else os.path.commonpath([os.path.dirname(url) for url in urls])
    grouped = by_split(urls, root)
    tables = {split: index_of(parts) for split, parts in grouped.items()}
    words = {os.fsdecode(word) for table in tables.values() for word in np.unique(table["label"])}
    numeric = all(word.lstrip("-").isdigit() for word in words)
    classes = class_names(words, numeric, Path(spec).parent / "classes.txt")
    number = {name: i for i, name in enumerate(classes)}
    found = {}
    for split, parts in grouped.items():
        labels = [os.fsdecode(word) for word in tables[split]["label"]]
        numbers = [int(word) if numeric else number.get(word, -1) for word in labels]
        found[split] = Shards(parts, tables[split], np.array(numbers, np.int64), classes)
    return found


def class_names(words: set[str], numeric: bool, beside: Path) -> tuple[str, ...]:
    if beside.is_file():
        return tuple(beside.read_text().splitlines())
    if numeric:
        return tuple(str(i) for i in range(max(map(int, words), default=-1) + 1))
    return tuple(sorted(words))


def expand(spec: str) -> list[str]:
    """`train-{000..009}.tar` and `*.tar` as a list of files; of a command, only the braces are ours."""
    found = re.search(r"\{(\d+)\.\.(\d+)\}", spec)
    if found:
        first, last = found[1], found[2]
        numbers = (f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1))
        return [url for n in numbers for url in expand(spec[: found.start()] + n + spec[found.end() :])]
    if spec.startswith(PIPE):
        return [spec]
    files = sorted(glob(os.path.expanduser(spec))) if re.search(r"[*?\[]", spec) else [os.path.expanduser(spec)]
    missing = next((file for file in files if not os.path.isfile(file)), spec if not files else None)
    if missing is not None:
        raise UserError(f"there is no shard '{missing}'")
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
    return hashlib.sha256(state.encode()).hexdigest()[:20]


def scan(url: str) -> dict[str, NDArray[Any]]:
    """One pass through a shard. An image's key is its path up to the first dot of its name."""
    places: dict[str, tuple[int, int]] = {}
    labels: dict[str, bytes] = {}
    try:
        with open_shard(url) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                folder, name = os.path.split(member.name)
                key, _, extension = name.partition(".")
                key = os.path.join(folder, key)
                if not member.isfile() or name.startswith("."):
                    continue
                if extension == "cls":
                    labels[key] = (tar.extractfile(member) or io.BytesIO()).read().strip()
                elif f".{extension.lower()}" in EXTENSIONS:
                    places[key] = member.offset_data, member.size
    except (tarfile.TarError, EOFError) as error:
        raise UserError(f"'{url}' cannot be read as a tar shard: {error}") from None
    unlabelled = next((key for key in places if key not in labels), None)
    if unlabelled is not None:
        raise UserError(f"'{url}' has an image '{unlabelled}' without a label file '{unlabelled}.cls'")
    return {
        "key": np.array([os.fsencode(key) for key in places], np.bytes_),
        "label": np.array([labels[key] for key in places], np.bytes_),
        "offset": np.array([offset for offset, _ in places.values()], np.int64),
        "length": np.array([length for _, length in places.values()], np.int64),
    }


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
    import fcntl  # not on every system

    store = cache_folder() / "pipes"
    store.mkdir(parents=True, exist_ok=True)
    path = store / f"{tag(url)}.tar"
    with open(path.with_suffix(".lock"), "w") as lock:  # workers that want the same shard wait for one
        fcntl.flock(lock, fcntl.LOCK_EX)
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
