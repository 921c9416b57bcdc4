"""Small pictures and sets on disk for the tests."""

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.data.source import ArraySource


def picture(seed: int, height: int = 20, width: int = 24) -> Image.Image:
    """A smooth random picture, so that resampling it means something."""
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def arrays(n: int = 23, classes: int = 4, height: int = 20, width: int = 24) -> ArraySource:
    pixels = np.stack([np.asarray(picture(i, height, width)) for i in range(n)])
    names = tuple(f"class {i}" for i in range(classes))
    return ArraySource("pictures", pixels, np.arange(n, dtype=np.int64) % classes, names)


def write_folder(root: Path, counts: dict[str, int], extension: str = ".png") -> Path:
    for number, (name, count) in enumerate(counts.items()):
        (root / name).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            picture(100 * number + i).save(root / name / f"{i:03d}{extension}")
    return root


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def write_shard(path: Path, samples: Iterable[tuple[str, bytes, str]]) -> Path:
    """(key, PNG bytes, class) for each sample."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for key, image, label in samples:
            for name, data in ((f"{key}.png", image), (f"{key}.cls", label.encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    return path
