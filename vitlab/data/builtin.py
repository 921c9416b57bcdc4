"""Data sets by name: scikit-learn's digits, and those that torchvision downloads."""

from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.folder import FileSource
from vitlab.data.source import ArraySource, ImageSource
from vitlab.errors import UserError
from vitlab.files import cache_folder

# torchvision's class, its argument that chooses a split, and the value of that for each split
SETS: dict[str, tuple[str, str, dict[str, str | bool]]] = {
    "cifar10": ("CIFAR10", "train", {"train": True, "test": False}),
    "cifar100": ("CIFAR100", "train", {"train": True, "test": False}),
    "oxford-pets": ("OxfordIIITPet", "split", {"train": "trainval", "test": "test"}),
    "flowers102": ("Flowers102", "split", {"train": "train", "validation": "val", "test": "test"}),
}


def digits() -> ArraySource:
    """1,797 handwritten digits of 8x8 pixels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the built-in digits come with scikit-learn: pip install 'vitlab[demo]'") from None
    bunch = load_digits()
    gray = np.round(bunch.images * (255 / 16)).astype(np.uint8)  # from 0..16
    pixels = np.repeat(gray[..., None], 3, axis=3)
    return ArraySource("digits", pixels, bunch.target.astype(np.int64), tuple(map(str, bunch.target_names)))


def splits(name: str) -> dict[str, ImageSource]:
    """The splits of a torchvision data set, downloaded once to the cache folder."""
    import torchvision.datasets

    kind, argument, values = SETS[name]
    root = cache_folder() / name
    sources: dict[str, ImageSource] = {}
    for split, value in values.items():
        try:
            root.mkdir(parents=True, exist_ok=True)
            data = getattr(torchvision.datasets, kind)(str(root), download=True, **{argument: value})
        except (OSError, RuntimeError) as error:
            raise UserError(
                f"{name} could not be downloaded to '{root}' ({error}); check the network, or put the files there "
                "as torchvision does (VITLAB_DATA names another place)"
            ) from None
        sources[split] = _convert(name, data)
    return sources


def _convert(name: str, data: Any) -> ImageSource:
    classes = tuple(data.classes)
    if hasattr(data, "targets"):  # the CIFARs: one array
        return ArraySource(name, data.data, np.array(data.targets, np.int64), classes)
    paths = data._images if hasattr(data, "_images") else data._image_files
    return FileSource(Path("/"), [str(Path(path).absolute()) for path in paths], list(data._labels), classes)
