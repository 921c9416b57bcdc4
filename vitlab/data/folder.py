"""A folder of class folders: root/CLASS/any/depth/image.jpg, or root/train/CLASS/… and root/test/CLASS/…"""

import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.data.images import EXTENSIONS, Shrink, decode
from vitlab.data.rng import Ints
from vitlab.data.storage import WORDS
from vitlab.errors import UserError
from vitlab.text import valid_text

log = logging.getLogger("vitlab")


class FileSource:
    """Image files by path; paths are kept as one array of bytes, which workers share without copying."""

    groups = None

    def __init__(self, root: Path, paths: list[str], labels: list[int], classes: tuple[str, ...]) -> None:
        self.root = root
        self.paths = np.array([os.fsencode(path) for path in paths], np.bytes_)
        self.labels: Ints = np.array(labels, np.int64)
        self.classes = classes

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return str(self.root / os.fsdecode(self.paths[index]))

    def image(self, index: int, shrink: Shrink | None = None) -> Image.Image:
        name = self.name(index)
        return decode(name, name, shrink)


def splits(root: Path) -> dict[str, FileSource]:
    """The splits of a folder: train and test (or validation) folders where it has them, else one."""
    if not root.is_dir():
        raise UserError(f"there is no folder '{root}'")
    named = {WORDS[e.name.lower()]: Path(e) for e in subfolders(root) if e.name.lower() in WORDS}
    if "train" not in named:
        named = {"train": root}
    found = {split: scan(path) for split, path in named.items()}
    for split in [split for split, images in found.items() if split != "train" and not images]:
        log.warning("'%s' has no class folders with images and is not used", named[split])
        del found[split]
    if not found["train"]:
        raise UserError(_nothing(named["train"]))
    classes = tuple(sorted({label for images in found.values() for label, _ in images}))
    number = {label: i for i, label in enumerate(classes)}
    return {
        split: FileSource(named[split], [path for _, path in images], [number[label] for label, _ in images], classes)
        for split, images in found.items()
    }


def scan(root: Path) -> list[tuple[str, str]]:
    """(class, path) of every image, sorted; hidden files and what is no image by its name are passed over."""
    images = []
    for entry in subfolders(root):
        label = valid_text(entry.name)
        found = [(label, os.path.relpath(path, root)) for path in walk(Path(entry))]
        if not found:
            log.warning("the class folder '%s' has no images and is not used", entry.path)
        images += found
    return sorted(images)


def subfolders(root: Path) -> list[os.DirEntry[str]]:
    with os.scandir(root) as entries:
        folders = [e for e in entries if e.is_dir() and not e.name.startswith((".", "__"))]
    return sorted(folders, key=lambda e: e.name)


def walk(folder: Path) -> Iterator[str]:
    """Image files at any depth; links are followed, each folder once. Pipes and devices may have such names too."""
    seen = set()
    for path, folders, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(path)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = [name for name in folders if not name.startswith((".", "__"))]
        for name in files:
            if name.startswith(".") or os.path.splitext(name)[1].lower() not in EXTENSIONS:
                continue
            found = os.path.join(path, name)
            if is_special(found):
                log.warning("'%s' is no regular file and is passed over", found)
            else:
                yield found


def is_special(path: str) -> bool:
    """A pipe, a socket or a device: opening it may wait for ever. What is missing is not: a link that leads nowhere."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except OSError:
        return False


def _nothing(root: Path) -> str:
    loose = any(Path(name).suffix.lower() in EXTENSIONS for name in os.listdir(root))
    if loose:
        return f"the images in '{root}' lie in no class folder; make one folder per class there and sort them in"
    return f"'{root}' holds no images; it should hold one folder per class, each with images such as .jpg or .png"
