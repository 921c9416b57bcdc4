"""How fast images are read: python benchmarks/loader.py

Each row is one file format in one kind of source, on one core: vitlab's loader, and beside it a plain loop of Pillow
and torchvision's RandomResizedCrop over the same files, and one of torchvision's own decoder and tensors, measured
alternately in the same run. A second table has the ways to read shards of photos, by the processor time of one core.

python benchmarks/loader.py --workers 16 has those ways by that many processes, as in training. They take turns: as at
commit 06b0ecc; now; with crops scaled by the GPU (resize=device); and both from copies of the shards by
`vitlab data shrink`. With a GPU, batches arrive there and are normalized; without one, neither is done, and of
resize=device only the workers' part is measured. A last line has the part of the device: its time, and how far its
crops are from the workers'.
"""

import argparse
import io
import itertools
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))

from vitlab.data import workers as workers_module
from vitlab.data.folder import FileSource
from vitlab.data.images import decode
from vitlab.data.open import find_splits
from vitlab.data.parquet import splits
from vitlab.data.regions import RegionReader, scale_regions
from vitlab.data.rng import LAYERS, keys, uniforms
from vitlab.data.shards import ShardSource, scan
from vitlab.data.shrink import Shrinking, shrink_set
from vitlab.data.source import ArraySource, ImageSource
from vitlab.data.transforms import Augment, crop_and_resize, crop_boxes, draw_flips, normalize
from vitlab.data.workers import Chunk, ImageReader, Samples, TrainReader, chunk_size, read_batches
from vitlab.device import cpu_threads, synchronize
from vitlab.models.config import Preprocess, Size

FORMATS = {"JPEG": ".jpg", "WEBP": ".webp", "PNG": ".png"}
TURN = 16  # photos
PHOTO, LARGE, SMALL = (375, 500), (3000, 4000), (64, 64)  # as in ImageNet; from a camera; as in Tiny-ImageNet


@dataclass(frozen=True)
class Speed:
    """Images per second on one core, of vitlab's loader, of the plain loop and, for JPEG files, of torchvision's."""

    source: str
    kind: str
    size: Size
    vitlab: float
    plain: float
    torchvision: float | None = None


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
            loops = [vitlab_loop(source, size), plain_loop(source if where == "memory" else files, size)]
            if kind == "JPEG":
                loops.append(torchvision_loop(files, size))
            results.append(Speed(where, kind, shape, *fastest(loops, len(source), rounds)))
    return results


def fastest(loops: list[Callable[[], None]], images: int, rounds: int) -> list[float]:
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


def torchvision_loop(source: FileSource, size: Size) -> Callable[[], None]:
    """torchvision's decoder, and its transforms on tensors."""
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms import v2

    change = v2.Compose(
        [
            v2.RandomResizedCrop(size, (0.05, 1.0), antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.5] * 3, [0.5] * 3),
        ]
    )

    def loop() -> None:
        for i in range(len(source)):
            change(decode_jpeg(read_file(source.name(i)), mode=ImageReadMode.RGB))

    return loop


# ---- many processes


@dataclass
class EarlierReader(TrainReader):
    """What workers did at commit 06b0ecc: random numbers are drawn image by image, and tensors sent as torch does.

    (Headers are read faster now.)
    """

    def read_chunk(self, samples: Samples) -> Chunk:
        return ImageReader.read_chunk(self, samples)

    def convert(self, image: Image.Image, key: int) -> Tensor:
        each, ratio = np.array([key], np.uint64), np.array([image.width / image.height])
        box = crop_boxes(each, ratio, self.size, self.augment, self.preprocess)[0]
        flip = bool(draw_flips(each, self.augment)[0])
        uniforms(each, LAYERS, 0)  # those of RandAugment without operations
        return crop_and_resize(image, box, self.size, self.preprocess, flip)


def shards_benchmark(
    workers: int, seconds: float, rounds: int, batch: int, count: int, sides: list[int]
) -> tuple[Table, str]:
    """Photos per second from shards, each way in turn: the median of the rounds, and of the ratios within them."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VITLAB_DATA"] = f"{folder}/cache"
        sources = {"photos": photo_shards(Path(folder) / "photos", count)}
        for side in sides:
            copy = shrink_set(f"{folder}/photos", Path(folder) / str(side), Shrinking(side), workers).path
            sources[f"shrunk to {side}"] = find_splits(str(copy))[0]["train"]
        earlier = EarlierReader(sources["photos"], (224, 224), Preprocess(), Augment())
        ways: dict[tuple[str, str], TrainReader] = {("photos", "workers, 06b0ecc"): earlier}
        for name, source in sources.items():
            ways[name, "workers"] = TrainReader(source, (224, 224), Preprocess(), Augment())
            ways[name, "device"] = RegionReader(source, (224, 224), Preprocess(), Augment())
        measured: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
        for number in range(rounds):
            for way, reader in ways.items():
                if workers:
                    measured[way].append(photos_per_second(reader, workers, seconds, batch, device))
                else:
                    measured[way].append(one_core(reader, number))
        return shards_table(measured, workers, sources, device), device_part(sources["photos"], device)


def one_core(reader: TrainReader, number: int) -> float:
    """By processor time, in this process; turns are short, so that a busy moment of the machine meets all ways."""
    order = list(enumerate(keys(0, 0, np.arange(len(reader.source))).tolist()))
    part = order[TURN * number % len(order) :][:TURN]
    start = time.process_time()
    reader.read_chunk(part)
    return len(part) / (time.process_time() - start)


def device_part(source: ImageSource, device: torch.device) -> str:
    """What `resize=device` leaves to the device: its time, and the difference from the workers' crops."""
    size, drawn = (224, 224), keys(0, 0, np.arange(min(64, len(source))))
    readers = (kind(source, size, Preprocess(), Augment()) for kind in (TrainReader, RegionReader))
    scaled, chunk = (reader.read_chunk(list(enumerate(drawn.tolist()))) for reader in readers)
    chunk = replace(chunk, pixels=chunk.pixels.to(device))
    times = []
    for _ in range(5 if device.type == "cuda" else 1):
        synchronize(device)
        start = time.perf_counter()
        found = scale_regions(chunk, draw_flips(drawn, Augment()), size, Preprocess())
        synchronize(device)
        times.append((time.perf_counter() - start) / len(drawn))
    apart = (found.cpu().int() - scaled.pixels.int()).abs()
    share = (apart > 0).double().mean()
    size_kb = chunk.pixels.numel() / len(drawn) / 1e3
    return (
        f"resize=device: {min(times) * 1e6:.0f} microseconds a photo on {device}, {size_kb:.0f} kB sent; "
        f"crops are at most {apart.max()} of 255 from the workers', {share:.2%} of the values differ"
    )


def photos_per_second(reader: TrainReader, workers: int, seconds: float, batch: int, device: torch.device) -> float:
    each = chunk_size(batch, workers)
    order = zip(itertools.cycle(range(len(reader.source))), keys(0, 0, np.arange(1 << 18)).tolist(), strict=False)
    samples: Iterator[Samples] = iter(lambda: list(itertools.islice(order, batch)), [])
    ahead = max(2, -(-2 * batch // (each * workers)))
    as_torch = patch.object(workers_module, "make_places", lambda *_: None)
    with (
        as_torch if isinstance(reader, EarlierReader) else nullcontext(),
        closing(read_batches(reader, samples, each, workers, ahead, device)) as batches,  # type: ignore[type-var]
    ):
        for _ in range(3):  # the processes start, and fill what is kept ready
            finish(next(batches), reader, device)
        synchronize(device)
        began, done = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            finish(next(batches), reader, device)
            done += batch
        synchronize(device)
        return done / (time.perf_counter() - began)


def finish(chunk: Chunk, reader: TrainReader, device: torch.device) -> None:
    """What the loader does with a batch on a GPU."""
    if device.type != "cuda":
        return
    pixels = chunk.pixels
    if isinstance(reader, RegionReader):
        pixels = scale_regions(chunk, np.zeros(len(chunk.index), bool), reader.size, reader.preprocess)
    normalize(pixels, reader.preprocess)


def shards_table(
    measured: dict[tuple[str, str], list[float]], workers: int, sources: dict[str, ImageSource], device: torch.device
) -> Table:
    first = next(iter(measured.values()))
    where = f"{workers} workers, {device}" if workers else "one core, by processor time"
    table = Table("shards", "kB a photo", "resize", title=f"photos per second at 224x224, {where}")
    for heading in ("median", "lowest", "highest", "per worker", "ratio"):
        table.add_column(heading, justify="right")
    for (name, way), speeds in measured.items():
        middle, ratio = statistics.median(speeds), statistics.median(a / b for a, b in zip(speeds, first, strict=True))
        size = float(np.mean(getattr(sources[name], "length"))) / 1e3  # noqa: B009
        numbers = (
            f"{middle:,.0f}",
            f"{min(speeds):,.0f}",
            f"{max(speeds):,.0f}",
            f"{middle / max(1, workers):.0f}",
            f"{ratio:.2f}",
        )
        table.add_row(name, f"{size:.0f}", way, *numbers)
    return table


# ---- photos to read


def photo_shards(folder: Path, count: int) -> ImageSource:
    """Shards of `count` photos of 500x375 pixels and about 90 kB; 128 different ones, since drawing them takes long."""
    folder.mkdir()
    files = [io.BytesIO() for _ in range(min(128, count))]
    for i, file in enumerate(files):
        photo(i, PHOTO).save(file, "JPEG", quality=95)
    for shard, first in enumerate(range(0, count, 1024)):
        data = [files[i % len(files)].getvalue() for i in range(first, min(first + 1024, count))]
        write_shard(folder / f"train-{shard:03d}.tar", data)
    return find_splits(str(folder))[0]["train"]


def write_shard(path: Path, data: list[bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for i, content in enumerate(data):
            for name, part in ((f"{i:04d}.jpg", content), (f"{i:04d}.cls", str(i % 2).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(part)
                tar.addfile(member, io.BytesIO(part))


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
        write_shard(path, data)
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
    for heading in ("vitlab", "plain loop", "ratio", "torchvision.io"):
        table.add_column(heading, justify="right")
    for r in results:
        shape = f"{r.size[1]}x{r.size[0]}"
        other = "" if r.torchvision is None else f"{r.torchvision:.0f}"
        table.add_row(r.source, r.kind, shape, f"{r.vitlab:.0f}", f"{r.plain:.0f}", f"{r.vitlab / r.plain:.2f}", other)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description="How fast images are read.")
    parser.add_argument("--workers", type=int, default=0, help="processes that read shards; 0: the tables of one core")
    parser.add_argument("--seconds", type=float, default=4, help="of each way in each round")
    parser.add_argument("--rounds", type=int, default=5, help="with workers; one core has 40 short ones")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--count", type=int, default=6400, help="photos in the shards")
    parser.add_argument("--sides", type=int, nargs="*", default=[320, 256], help="of copies that were shrunk")
    args = parser.parse_args()
    if not args.workers:
        Console(width=120).print(speed_table(loader_benchmark(), (224, 224)))
    with cpu_threads(None if args.workers else 1):
        rounds, count = (args.rounds, args.count) if args.workers else (40, 64)
        table, line = shards_benchmark(args.workers, args.seconds, rounds, args.batch, count, args.sides)
        Console(width=120).print(table, line, sep="\n", soft_wrap=True)


if __name__ == "__main__":
    main()
