"""CIFAR-10 and CIFAR-100 from their archives: cifar-10-python.tar.gz, cifar-10-binary.tar.gz, or the folder in one.

Which of them a file or a folder is follows from the names inside. The pickles of the Python archives are read as data,
see plain_pickle.py; nothing is unpacked to disk. Of CIFAR-100's two labels it is the fine one.
"""

import gzip
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
from numpy.typing import NDArray

from vitlab.data.labels import MAX_LABEL_LENGTH, to_text
from vitlab.data.plain_pickle import Array, NotPlain, read_pickle
from vitlab.data.rng import Ints
from vitlab.data.source import ArraySource, ImageSource
from vitlab.errors import UserError
from vitlab.text import brief, listed

SIDE = 32
PIXELS = 3 * SIDE * SIDE  # bytes of an image: red, green and blue planes
MOST_BYTES = 250_000_000  # of a set, unpacked; CIFAR's have 186 million
MOST_MEMBERS = 100
SUFFIXES = (".tar.gz", ".tgz")

Images = tuple[NDArray[np.uint8], Ints]  # (n, PIXELS) and labels (n,)


@dataclass(frozen=True)
class Layout:
    """The files of one kind of archive; `folder` is the one they are in."""

    title: str
    archive: str
    folder: str
    train: tuple[str, ...]
    test: str
    names: str
    label: str = ""  # key of the labels in a pickle; empty: binary files
    before: int = 0  # bytes before each image in a binary file; the last one is its label

    @property
    def files(self) -> tuple[str, ...]:
        return (*self.train, self.test, self.names)


BATCHES = tuple(f"data_batch_{i}" for i in range(1, 6))
LAYOUTS = (
    Layout("cifar10", "cifar-10-python.tar.gz", "cifar-10-batches-py", BATCHES, "test_batch", "batches.meta", "labels"),
    Layout("cifar100", "cifar-100-python.tar.gz", "cifar-100-python", ("train",), "test", "meta", "fine_labels"),
    Layout(
        *("cifar10", "cifar-10-binary.tar.gz", "cifar-10-batches-bin"),
        *(tuple(f"{name}.bin" for name in BATCHES), "test_batch.bin", "batches.meta.txt"),
        before=1,
    ),
    Layout(
        *("cifar100", "cifar-100-binary.tar.gz", "cifar-100-binary"),
        *(("train.bin",), "test.bin", "fine_label_names.txt"),
        before=2,
    ),
)


def is_cifar(folder: Path) -> bool:
    """Whether a folder is the one in an archive of CIFAR."""
    return any((folder / layout.names).is_file() and (folder / layout.train[0]).is_file() for layout in LAYOUTS)


def find(title: str, root: Path) -> Path | None:
    """The set in a folder, unpacked or as an archive, under its usual name."""
    places = [root / name for layout in LAYOUTS if layout.title == title for name in (layout.folder, layout.archive)]
    return next((place for place in places if place.exists()), None)


def splits(path: Path) -> dict[str, ImageSource]:
    """Training and test images of an archive or folder; raises UserError where it is damaged or something else."""
    files = read_folder(path) if path.is_dir() else read_archive(path)
    layout = max(LAYOUTS, key=lambda layout: sum(name in files for name in layout.files))
    missing = [name for name in layout.files if name not in files]
    if len(missing) == len(layout.files):
        archives = listed(layout.archive for layout in LAYOUTS)
        raise UserError(f"'{path}' is not CIFAR: of .tar.gz files, {archives} are read; unpack any other")
    if missing:
        raise UserError(f"'{path}' is CIFAR without {listed(missing)}: it is incomplete; unpack or download it again")
    classes = read_names(layout, files[layout.names], f"'{layout.names}' in '{path}'")
    sources: dict[str, ImageSource] = {}
    for split, names in (("train", layout.train), ("test", (layout.test,))):
        parts = [read_batch(layout, files[name], f"'{name}' in '{path}'") for name in names]
        pixels = np.concatenate([images.reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1) for images, _ in parts])
        labels = np.concatenate([labels for _, labels in parts])
        sources[split] = ArraySource(layout.title, np.ascontiguousarray(pixels), labels, classes)
    return sources


# ---- files


def read_folder(folder: Path) -> dict[str, bytes]:
    """The files of CIFAR that a folder has, by name."""
    wanted = {name for layout in LAYOUTS for name in layout.files}
    found = [folder / name for name in sorted(wanted) if (folder / name).is_file()]
    if sum(path.stat().st_size for path in found) > MOST_BYTES:
        raise too_large(folder)
    return {path.name: path.read_bytes() for path in found}


def read_archive(path: Path) -> dict[str, bytes]:
    """The files of CIFAR in a compressed archive, by name, in one pass."""
    try:
        with gzip.open(path) as unpacked, tarfile.open(fileobj=bounded(unpacked, path), mode="r|") as archive:
            return read_members(archive, path)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"there is no file '{path}'") from None
    except Exception as error:  # on hostile headers tarfile raises more than its own errors
        raise UserError(f"'{path}' is damaged, or not a .tar.gz file: {brief(error)}; get it again") from None


def bounded(file: gzip.GzipFile, path: Path) -> IO[bytes]:
    return cast(IO[bytes], Bounded(file, path))  # tarfile only reads


class Bounded:
    """A file that ends with an error where it is longer than any CIFAR: a small archive can unpack to terabytes."""

    def __init__(self, file: gzip.GzipFile, path: Path) -> None:
        self.file, self.path, self.left = file, path, MOST_BYTES

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise too_large(self.path)
        return self.file.read(size)


def too_large(path: Path) -> UserError:
    return UserError(
        f"'{path}' holds more than {MOST_BYTES:,} bytes, and CIFAR does not; unpack it and name its folder"
    )


def read_members(archive: tarfile.TarFile, path: Path) -> dict[str, bytes]:
    wanted, files = {name for layout in LAYOUTS for name in layout.files}, {}
    for number, member in enumerate(archive):
        if number >= MOST_MEMBERS:
            raise UserError(
                f"'{path}' has more than {MOST_MEMBERS} members, and CIFAR has nine; unpack it and name its folder"
            )
        parts = member.name.split("/")
        is_plain = (
            member.isfile() or member.isdir()
        ) and not member.issparse()  # one with holes is as large as it says
        if not is_plain or ".." in parts or member.name.startswith("/"):
            name = member.name[:100]
            raise UserError(f"'{path}' has the member {name!r}, which is a link or leads out of it; get it again")
        if parts[-1] not in wanted or not member.isfile():
            continue
        if parts[-1] in files:
            raise UserError(f"'{path}' holds '{parts[-1]}' twice; get it again")
        content = archive.extractfile(member)
        files[parts[-1]] = content.read() if content is not None else b""
    return files


# ---- their content


def read_batch(layout: Layout, content: bytes, where: str) -> Images:
    return read_pickled(layout, content, where) if layout.label else read_binary(layout, content, where)


def read_binary(layout: Layout, content: bytes, where: str) -> Images:
    """Records of labels and pixels, one after another."""
    size = layout.before + PIXELS
    if not content or len(content) % size:
        raise UserError(f"{where} has {len(content):,} bytes, no multiple of an image's {size:,}: it is cut short")
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    return records[:, layout.before :], records[:, layout.before - 1].astype(np.int64)


def read_pickled(layout: Layout, content: bytes, where: str) -> Images:
    """A dict with an array of pixels and a list of labels."""
    with plain(where):
        data = read_dict(content)
        array, labels = data.get("data"), data.get(layout.label)
        if not isinstance(array, Array) or not isinstance(labels, list):
            raise NotPlain(f"it has no 'data' or no '{layout.label}'")
        raw = array.tobytes()
        if array.code != "u1" or array.shape != (len(labels), PIXELS) or len(raw) != len(labels) * PIXELS:
            raise NotPlain(f"it does not hold {PIXELS:,} bytes for each of its {len(labels):,} labels")
        if not labels or any(type(label) is not int for label in labels):
            raise NotPlain("its labels are not numbers")
    return np.frombuffer(raw, np.uint8).reshape(-1, PIXELS), np.array(labels, np.int64)


def read_names(layout: Layout, content: bytes, where: str) -> tuple[str, ...]:
    """The names of the classes: lines of text, or a list in a pickle."""
    if layout.label:
        with plain(where):
            listed_names = read_dict(content).get(layout.label.replace("labels", "label_names"))
            if not isinstance(listed_names, list) or not all(isinstance(name, str | bytes) for name in listed_names):
                raise NotPlain("it has no names of classes")
        names = [name if isinstance(name, str) else to_text(name) for name in listed_names]
    else:
        names = [line.strip() for line in to_text(content).splitlines() if line.strip()]
    if len(set(names)) != len(names) or max(map(len, names), default=0) > MAX_LABEL_LENGTH:
        raise UserError(f"{where} has a name twice, or one of more than {MAX_LABEL_LENGTH} characters; get it again")
    return tuple(names)


def read_dict(content: bytes) -> Mapping[str, object]:
    data = read_pickle(content)
    if not isinstance(data, dict):
        raise NotPlain("it is not a dict")
    return data


@contextmanager
def plain(where: str) -> Iterator[None]:
    try:
        yield
    except NotPlain as error:
        raise UserError(f"{where} is not a file of CIFAR: {error}; get the archive again") from None
