"""Pictures of two handwritten digits with both as labels, as arrays and as files of every kind."""

import csv
import functools
import io
import tarfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlab.data.label_sets import sets_of
from vitlab.data.source import ArraySource, Data

NAMES = tuple("0123456789")
Pictures = tuple[NDArray[np.uint8], list[list[int]]]


@functools.cache
def draw(count: int, part: str, seed: int = 0) -> Pictures:
    """Pictures (count, 8, 16, 3) of two different digits side by side; each part has handwriting of its own."""
    from sklearn.datasets import load_digits

    digits, random = load_digits(), np.random.default_rng([seed, len(part)])
    own = {"train": slice(0, 1300), "test": slice(1300, 1797)}[part]
    images, labels = np.round(digits.images[own] * (255 / 16)).astype(np.uint8), digits.target[own]
    pixels, rows = np.zeros((count, 8, 16), np.uint8), []
    for i in range(count):
        row: list[int] = []
        while len(row) < 2:
            chosen = int(random.integers(len(labels)))
            if labels[chosen] not in row:
                pixels[i, :, 8 * len(row) : 8 * len(row) + 8] = images[chosen]
                row.append(int(labels[chosen]))
        rows.append(row)
    return np.repeat(pixels[..., None], 3, 3), rows


def source(count: int, part: str, seed: int = 0) -> ArraySource:
    pixels, rows = draw(count, part, seed)
    return ArraySource(f"two digits, {part}", pixels, sets_of(rows), NAMES)


def few(train: int = 193, test: int = 59) -> Data:
    """A small set whose numbers no batch divides."""
    return Data("two digits", source(train, "train"), source(test, "test"), source(37, "train", seed=1))


def png(pixels: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write_csv(root: Path, parts: dict[str, Pictures]) -> str:
    with (root / "set.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["file", "labels", "split"])
        for part, (pixels, rows) in parts.items():
            for i, row in enumerate(rows):
                (root / f"{part}{i}.png").write_bytes(png(pixels[i]))
                lines.writerow([f"{part}{i}.png", ";".join(map(str, row)), part])
    return str(root / "set.csv")


def write_shards(root: Path, parts: dict[str, Pictures]) -> str:
    for part, (pixels, rows) in parts.items():
        with tarfile.open(root / f"{part}-000.tar", "w") as tar:
            for i, row in enumerate(rows):
                for name, data in (
                    (f"{i:05d}.png", png(pixels[i])),
                    (f"{i:05d}.cls", " ".join(map(str, row)).encode()),
                ):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return str(root / "*.tar")


def write_parquet(root: Path, parts: dict[str, Pictures]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    for part, (pixels, rows) in parts.items():
        pq.write_table(pa.table({"image": [png(each) for each in pixels], "labels": rows}), root / f"{part}.parquet")
    return str(root)
