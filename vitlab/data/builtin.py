"""Data sets by name: scikit-learn's digits, and those that torchvision downloads."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data import cifar
from vitlab.data.folder import FileSource
from vitlab.data.source import ArraySource, ImageSource
from vitlab.errors import UserError
from vitlab.files import cache_folder

CIFAR = {"cifar10": "CIFAR10", "cifar100": "CIFAR100"}  # torchvision's classes
# and of the others the argument that chooses a split too, and the value of that for each split
PHOTOS: dict[str, tuple[str, str, dict[str, str]]] = {
    "oxford-pets": ("OxfordIIITPet", "split", {"train": "trainval", "test": "test"}),
    "flowers102": ("Flowers102", "split", {"train": "train", "validation": "val", "test": "test"}),
}
SETS = (*CIFAR, *PHOTOS)


def digits() -> ArraySource:
    """1,797 handwritten digits of 8x8 pixels.

    They are read from scikit-learn's file, since importing scikit-learn takes longer than a short training run.
    """
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError("the built-in digits come with scikit-learn: pip install 'vitlab[demo]'")
    rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    gray = np.round(rows[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)  # from 0..16
    pixels = np.repeat(gray[..., None], 3, axis=3)
    return ArraySource("digits", pixels, rows[:, -1].astype(np.int64), tuple("0123456789"))


def splits(name: str) -> dict[str, ImageSource]:
    """The splits of a set that torchvision downloads, once, to the cache folder."""
    import torchvision.datasets

    root = cache_folder() / name
    try:
        root.mkdir(parents=True, exist_ok=True)
        if name in CIFAR:
            return cifar.splits(cifar.find(name, root) or download_cifar(name, root))
        kind, argument, values = PHOTOS[name]
        make = getattr(torchvision.datasets, kind)
        made = {split: make(str(root), download=True, **{argument: value}) for split, value in values.items()}
        return {split: convert(data, root) for split, data in made.items()}
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"{name} could not be downloaded to '{root}' ({error}); check the network, or put the files there "
            "as torchvision does (VITLAB_DATA names another place)"
        ) from None


def download_cifar(name: str, root: Path) -> Path:
    """The Python archive, under its name once its digest is right."""
    import torchvision.datasets
    from torchvision.datasets.utils import download_url

    kind = getattr(torchvision.datasets, CIFAR[name])
    part, archive = root / f"{kind.filename}.part", root / str(kind.filename)
    download_url(kind.url, str(root), part.name, kind.tgz_md5)
    return part.replace(archive)


def convert(data: Any, root: Path) -> FileSource:
    """A set of torchvision's by the files' paths below its folder."""
    paths = data._images if hasattr(data, "_images") else data._image_files
    return FileSource(root, [os.path.relpath(path, root) for path in paths], list(data._labels), tuple(data.classes))
