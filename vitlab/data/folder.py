"""A folder of class folders: root/CLASS/any/depth/image.jpg, or root/train/CLASS/… and root/test/CLASS/…"""

import functools
import logging
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.data.decoder import HEIC_FIX, DecodeError, DecodeHint
from vitlab.data.images import EXTENSIONS, HEIC, BrokenImage, decode, read_file
from vitlab.data.label_sets import Truth
from vitlab.data.labels import sort_classes
from vitlab.data.rng import Ints, Keys, text_keys
from vitlab.data.source import ImageSource
from vitlab.data.split_names import SPLIT_NAMES
from vitlab.errors import UserError
from vitlab.files import DRAWN
from vitlab.text import valid_text

SUFFIXES = frozenset(extension.encode() for extension in EXTENSIONS | HEIC)
log = logging.getLogger("vitlab")


class FileSource(ImageSource):
    """Image files by path; the paths are one array of bytes, which workers share without copying."""

    def __init__(self, root: Path, paths: list[str], truth: list[int] | Truth, classes: tuple[str, ...]) -> None:
        super().__init__(np.array(truth, np.int64) if isinstance(truth, list) else truth, classes)
        self.root, self.paths = root, np.array([os.fsencode(path) for path in paths], np.bytes_)

    def name(self, index: int) -> str:
        return str(self.root / os.fsdecode(self.paths[index]))

    def marks(self) -> Keys:
        """By the files' names without suffixes: a smaller copy may have another format."""
        return text_keys(np.array([plain_stem(path) for path in self.below(np.arange(len(self)))], np.bytes_))

    def below(self, indices: Ints) -> list[bytes]:
        """The files' names below the root, wherever that is, and however it and they are spelled."""
        root, real = os.fsencode(os.path.abspath(self.root)), functools.cache(os.path.realpath)
        return [below_root(path, root, real) for path in self.paths[indices].tolist()]

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        name = self.name(index)
        return decode(name, name, shrink)

    def encoded(self, index: int) -> bytes:
        try:
            return read_file(self.name(index))
        except DecodeError as error:
            raise BrokenImage(self.name(index), error.why, error.fault) from None


def plain_stem(name: bytes) -> bytes:
    stem, suffix = os.path.splitext(name)
    return stem if suffix.lower() in SUFFIXES else name


def below_root(path: bytes, root: bytes, real: Callable[[bytes], bytes]) -> bytes:
    """A path as it is below an absolute folder; with .. where it is elsewhere. `real` follows links of folders."""
    if not path.startswith((b".", b"/")) and b"//" not in path and b"/." not in path:
        return path  # as nearly all are
    if not os.path.isabs(path):
        inside = os.path.normpath(os.path.join(real(root), path)).removeprefix(os.path.join(real(root), b""))
        return os.path.normpath(path) if os.path.isabs(inside) else inside
    full = os.path.normpath(path)
    if full.startswith(os.path.join(root, b"")):
        return os.path.relpath(full, root)
    folder, name = os.path.split(full)
    return os.path.relpath(os.path.join(real(folder), name), real(root))


def splits(root: Path, *, others: bool = False) -> dict[str, FileSource]:
    """The splits of a folder: its train, test and validation folders, or the folder itself as train.

    Without a train folder, test and validation are splits if there are no folders but these, or if `others` are
    allowed beside them: else they are classes of these names.
    """
    if not root.is_dir():
        raise UserError(f"there is no folder '{root}'")
    folders = subfolders(root)
    named = {SPLIT_NAMES[e.name.lower()]: Path(e) for e in folders if e.name.lower() in SPLIT_NAMES}
    if "train" not in named and not others and any(e.name.lower() not in SPLIT_NAMES for e in folders):
        named = {}
    skipped: list[str] = []
    found = {split: scan(path, skipped) for split, path in named.items()}
    if "train" not in named and not any(found.values()):
        skipped.clear()
        named, found = {"train": root}, {"train": scan(root, skipped)}
    warn_skipped(str(root), len(skipped))
    for split in [split for split, images in found.items() if split != "train" and not images]:
        log.warning("'%s' has no class folders with images and is not used", named[split])
        del found[split]
    if not found.get("train", True):
        raise UserError(_no_images(named["train"], len(skipped)))
    classes = sort_classes(label for images in found.values() for label, _ in images)
    number = {label: i for i, label in enumerate(classes)}
    return {
        split: FileSource(named[split], [path for _, path in images], [number[label] for label, _ in images], classes)
        for split, images in found.items()
    }


def scan(root: Path, skipped: list[str]) -> list[tuple[str, str]]:
    """(class, path) of every image, sorted; hidden files and those without an image's extension are skipped.

    `skipped` gets the HEIC photos that cannot be read here.
    """
    images = []
    for entry in subfolders(root):
        label = valid_text(entry.name)
        found = [(label, os.path.relpath(path, root)) for path in walk_images(Path(entry), skipped)]
        if not found:
            log.warning("the class folder '%s' has no images and is not used", entry.path)
        images += found
    return sorted(images)


def subfolders(root: Path) -> list[os.DirEntry[str]]:
    """The folders in a folder that are not hidden, nor of pictures that were drawn, by name."""
    with os.scandir(root) as entries:
        folders = [e for e in entries if e.is_dir() and not e.name.startswith((".", "__")) and not is_drawn(e.path)]
    return sorted(folders, key=lambda e: e.name)


def is_drawn(folder: str) -> bool:
    """Whether vitlab drew the pictures in a folder, such as looked/ and inside/, so that they are no class."""
    if not os.path.lexists(os.path.join(folder, DRAWN)):
        return False
    warn_drawn(folder)
    return True


@functools.cache  # once, however often a command opens the folder
def warn_drawn(folder: str) -> None:
    log.warning("'%s' holds pictures that vitlab drew and is not used", folder)


def walk_images(folder: Path, skipped: list[str]) -> Iterator[str]:
    """Image files at any depth; links are followed, each folder once. Pipes and devices are skipped with a warning.

    `skipped` gets the HEIC photos that cannot be read here.
    """
    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(path)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [n for n in folders if not n.startswith((".", "__")) and not is_drawn(os.path.join(path, n))]
        for name in files:
            found, extension = os.path.join(path, name), os.path.splitext(name)[1].lower()
            if name.startswith(".") or extension not in EXTENSIONS:
                if extension in HEIC and not name.startswith("."):
                    skipped.append(found)
                continue
            if is_special(found):
                log.warning("'%s' is not a regular file and is skipped", found)
            else:
                yield found


def is_special(path: str) -> bool:
    """Whether a path is a pipe, a socket or a device, where opening may wait forever; a broken link is none."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


@functools.cache  # once, however often a command opens the folder
def warn_skipped(where: str, count: int) -> None:
    """Warn of HEIC photos that are skipped since the package that reads them is missing."""
    if count:
        log.warning("%d HEIC photos in '%s' are skipped; %s", count, where, HEIC_FIX)


def _no_images(root: Path, heic: int) -> str:
    if heic:
        return f"'{root}' holds no images but {heic} HEIC photos; {HEIC_FIX}"
    if any(Path(name).suffix.lower() in EXTENSIONS for name in os.listdir(root)):
        return f"the images in '{root}' are in no class folder; make one folder per class there and move them into it"
    return f"'{root}' holds no images; it should hold one folder per class, each with images such as .jpg or .png"
