"""How fast images are read: python benchmarks/loader.py

Each row is one file format in one kind of source, on one core: vitlab's loader, and beside it a plain loop of Pillow
and torchvision's RandomResizedCrop over the same files, measured alternately in the same run.
"""

import io
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image
from rich.console import Console
from rich.table import Table

from vitlab.data.folder import FileSource
from vitlab.data.images import decode
from vitlab.data.parquet import splits
from vitlab.data.rng import keys
from vitlab.data.shards import ShardSource, scan
from vitlab.data.source import ArraySource, ImageSource
from vitlab.data.transforms import Augment, normalize
from vitlab.data.workers import TrainReader
from vitlab.device import cpu_threads
from vitlab.models.config import Preprocess, Size

FORMATS = {"JPEG": ".jpg", "WEBP": ".webp", "PNG": ".png"}
PHOTO, LARGE, SMALL = (375, 500), (3000, 4000), (64, 64)  # as in ImageNet; from a camera; as in Tiny-ImageNet


@dataclass(frozen=True)
class Speed:
    """Images per second on one core, of vitlab's loader and of the plain loop."""

    source: str
    kind: str
    size: Size
    vitlab: float
    plain: float


def loader_benchmark(size: Size = (224, 224), count: int = 48, rounds: int = 5) -> list[Speed]:
    """Inception crop, flip and normalization, from files, parquet, shards and memory."""
    results = []
    cases = [("folder", kind, PHOTO) for kind in FORMATS]
    cases += [("folder", "JPEG", LARGE), ("folder", "WEBP", SMALL), ("shards", "JPEG", PHOTO), ("memory", "-", PHOTO)]
    if find_spec("pyarrow"):
        cases += [("parquet", "JPEG", PHOTO), ("parquet", "WEBP", SMALL)]
    for where, kind, shape in cases:
        with cpu_threads(1), tempfile.TemporaryDirectory() as folder:
            files = write_photos(Path(folder), kind, shape, 4 if shape == LARGE else count)
            source = as_source(where, files, Path(folder))
            loops = vitlab_loop(source, size), plain_loop(source if where == "memory" else files, size)
            results.append(Speed(where, kind, shape, *fastest(loops, len(source), rounds)))
    return results


def fastest(loops: tuple[Callable[[], None], ...], images: int, rounds: int) -> list[float]:
    """Images per second in the best of some alternating rounds of each loop, by processor time."""
    best = [0.0] * len(loops)
    for _ in range(rounds):
        for i, loop in enumerate(loops):
            start = time.process_time()
            loop()
            best[i] = max(best[i], images / (time.process_time() - start))
    return best


def vitlab_loop(source: ImageSource, size: Size) -> Callable[[], None]:
    reader = TrainReader(source, size, Preprocess(), Augment())
    order = list(zip(range(len(source)), keys(0, 0, np.arange(len(source))).tolist(), strict=True))

    def loop() -> None:
        for start in range(0, len(order), 8):
            normalize(reader.read_chunk(order[start : start + 8]).pixels, Preprocess())

    return loop


def plain_loop(source: ImageSource, size: Size) -> Callable[[], None]:
    from torchvision import transforms as T

    change = T.Compose(
        [
            T.RandomResizedCrop(size, (0.05, 1.0)),
            T.RandomHorizontalFlip(),
            T.ToTensor(),
            T.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )

    def loop() -> None:
        for i in range(len(source)):
            image = source.image(i) if isinstance(source, ArraySource) else Image.open(source.name(i)).convert("RGB")
            change(image)

    return loop


# ---- photos to read


def write_photos(folder: Path, kind: str, shape: Size, count: int) -> FileSource:
    """Write images with the detail of photos, see `photo`."""
    paths = []
    for i in range(count):
        path = folder / f"{i:04d}{FORMATS.get(kind, '.png')}"
        photo(i, shape).save(path, None if kind == "-" else kind)
        paths.append(path.name)
    return FileSource(folder, paths, [i % 2 for i in range(count)], ("a", "b"))


def photo(seed: int, shape: Size) -> Image.Image:
    """Noise that is strong at coarse scales and weak at fine ones, as in photos."""
    rng, total = np.random.default_rng(seed), np.full((*shape, 3), 128.0)
    for level in range(2, 9):
        coarse = rng.normal(0, 1, (min(2**level, shape[0]), min(2**level, shape[1]), 3))
        fine = [
            np.asarray(Image.fromarray(coarse[..., c]).resize(shape[::-1], Image.Resampling.BICUBIC)) for c in range(3)
        ]
        total += 60 / 2 ** (level / 2 - 1) * np.stack(fine, -1)
    return Image.fromarray(total.clip(0, 255).astype(np.uint8))


def as_source(where: str, files: FileSource, folder: Path) -> ImageSource:
    """The same files in another kind of source."""
    if where == "folder":
        return files
    if where == "memory":
        pixels = np.stack([np.asarray(decode(files.name(i), "")) for i in range(len(files))])
        return ArraySource("memory", pixels, files.labels, files.classes)
    data = [Path(files.name(i)).read_bytes() for i in range(len(files))]
    if where == "shards":
        path = folder / "train.tar"
        with tarfile.open(path, "w") as tar:
            for i, content in enumerate(data):
                for name, part in ((f"{i:04d}.jpg", content), (f"{i:04d}.cls", str(i % 2).encode())):
                    member = tarfile.TarInfo(name)
                    member.size = len(part)
                    tar.addfile(member, io.BytesIO(part))
        index = scan(str(path)) | {"shard": np.zeros(len(data), np.int64)}
        return ShardSource([str(path)], index, files.labels, files.classes)
    return as_parquet(data, files, folder)


def as_parquet(data: list[bytes], files: FileSource, folder: Path) -> ImageSource:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.table({"image": [{"bytes": d, "path": ""} for d in data], "label": files.labels})
    pq.write_table(table, folder / "train.parquet")
    return splits([folder / "train.parquet"], folder)["train"]


def speed_table(results: list[Speed], size: Size) -> Table:
    table = Table("source", "format", "image", title=f"images per second on one core, at {size[0]}x{size[1]}")
    for heading in ("vitlab", "plain loop", "ratio"):
        table.add_column(heading, justify="right")
    for r in results:
        shape = f"{r.size[1]}x{r.size[0]}"
        table.add_row(r.source, r.kind, shape, f"{r.vitlab:.0f}", f"{r.plain:.0f}", f"{r.vitlab / r.plain:.2f}")
    return table


if __name__ == "__main__":
    Console().print(speed_table(loader_benchmark(), (224, 224)))
