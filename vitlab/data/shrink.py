"""`vitlab data shrink`: a copy of a data set with photos no larger than training needs, as tar shards.

Decoding takes most of the time that a photo costs, and it grows with the file. The copy has the splits, the classes,
the order and the labels of the set, and keys with the marks by which images are drawn, so that the same images are held
out of it. A JPEG that would not become smaller stays byte for byte; an image that cannot be read stays in its place as
an empty file.

Shards are written one after another to a hidden folder beside the result, which gets its name when all are there. After
an interruption the same call continues with the first shard that is missing.
"""

import hashlib
import io
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tarfile import TarFile, TarInfo

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

from vitlab.data.decoder import DecodeError
from vitlab.data.headers import read_header
from vitlab.data.images import BrokenImage
from vitlab.data.label_sets import LabelSets
from vitlab.data.labels import read_classes
from vitlab.data.open import find_splits, has_labels
from vitlab.data.rng import Keys
from vitlab.data.source import ArraySource, ImageSource
from vitlab.data.workers import AHEAD, CHUNK, BrokenEntry, Chunk, Samples, read_chunks
from vitlab.errors import UserError
from vitlab.files import atomic_file, check_folder, fsync, read_json, write_errors, write_text
from vitlab.terminal import progress

ABOUT, CLASSES = "shrunk.json", "classes.txt"
SHARD = 4_096  # images; what an interruption repeats
SAMPLES = 16  # images from which the size of the copy is estimated
MEMBERS_BYTES = 2_560  # of a tar for each image, besides its bytes: two headers, the label, and padding
JPEG = b"\xff\xd8\xff"


@dataclass(frozen=True)
class Shrinking:
    """What photos are shrunk to: the pixels of the shorter side, at most, and JPEG's quality."""

    side: int = 320
    quality: int = 90

    def __post_init__(self) -> None:
        if not 16 <= self.side <= 4096:
            raise UserError(f"the shorter side must have 16 to 4096 pixels, not {self.side}")
        if not 50 <= self.quality <= 100:
            raise UserError(f"the quality must be 50 to 100, not {self.quality}")


@dataclass(frozen=True)
class Shrunk:
    """A copy that was written; `broken` are names and reasons of the images that this call could not read."""

    path: Path
    images: int
    bytes: int
    broken: tuple[str, ...]


def shrink_set(spec: str, out: Path, how: Shrinking, workers: int = 0) -> Shrunk:
    """Write the copy of a data set to the new folder `out`, complete or not at all; raises UserError."""
    out = out.expanduser().absolute()
    if os.path.lexists(out):
        raise UserError(f"{out} exists; remove it or name another place")
    check_folder(out, "the folder")
    sources = labeled_splits(spec)
    part = out.with_name(f".{out.name}.partial")
    with write_errors(part):
        part.mkdir(parents=True, exist_ok=True)
    begin(part, sources, how)
    missing = [(split, first) for split, source in sources.items() for first in range(0, len(source), SHARD)]
    missing = [each for each in missing if not shard_path(part, *each).exists()]
    check_space(out, sources, missing, how)
    broken = list(write_shards(part, sources, missing, how, workers))
    with write_errors(out):
        for left in part.glob(".*.new"):  # of calls that were killed
            left.unlink()
        fsync(part)
        part.rename(out)
        fsync(out.parent)
    size = sum(file.stat().st_size for file in out.glob("*.tar"))
    return Shrunk(out, sum(map(len, sources.values())), size, tuple(f"{name} ({why})" for _, name, why in broken))


def labeled_splits(spec: str) -> dict[str, ImageSource]:
    """The splits of a set that have labels; raises UserError where shards could not hold the set, or gain nothing."""
    found, _ = find_splits(spec)
    sources = {split: source for split, source in found.items() if len(source) and has_labels(source)}
    if not sources:
        raise UserError(f"'{spec}' has no labeled images")
    if any(isinstance(source, ArraySource) for source in sources.values()):
        raise UserError(f"the images of '{spec}' are small and held in memory; there is nothing to shrink")
    sets = [source.truth for source in sources.values() if isinstance(source.truth, LabelSets)]
    if sets and not any((np.diff(each.offsets) > 1).any() for each in sets):
        raise UserError(f"'{spec}' is multi-label and no image has two labels, which shards cannot express")
    return sources


def begin(part: Path, sources: Mapping[str, ImageSource], how: Shrinking) -> None:
    """Write what the copy is made of, or check that the one begun before is made of the same."""
    digest = hashlib.sha256()
    for split, source in sources.items():
        digest.update(f"{split} {len(source)}\n".encode())
        digest.update(source.truth.tobytes())
        for index in range(len(source)):
            digest.update(source.name(index).encode("utf-8", "surrogateescape") + b"\n")
    about = {"format": "vitlab/2", **asdict(how), "shard": SHARD, "source": digest.hexdigest()}
    if (part / ABOUT).exists():
        if read_json(part / ABOUT) != about:
            raise UserError(f"{part} was begun with other images or settings; use those, or remove that folder")
        return
    classes = next(iter(sources.values())).classes
    write_text(part / CLASSES, "".join(f"{name}\n" for name in classes))
    if read_classes(part / CLASSES) != classes:
        raise UserError("a class has a name that no list of names, one a line, can hold; rename it")
    write_text(part / ABOUT, json.dumps(about, indent=1) + "\n")


def check_space(out: Path, sources: Mapping[str, ImageSource], missing: list[tuple[str, int]], how: Shrinking) -> None:
    """Raise UserError if the disk has no room for the missing shards, by the size of a few images of them."""
    if not missing:
        return
    found = 0
    for sample, shard in enumerate(np.linspace(0, len(missing) - 1, SAMPLES).astype(int).tolist()):
        source = sources[missing[shard][0]]
        images = shard_range(source, missing[shard][1])
        found += len(shrink_photo(source, images[len(images) * sample // SAMPLES], how)[0])
    need = sum(len(shard_range(sources[split], first)) for split, first in missing) * (MEMBERS_BYTES + found / SAMPLES)
    free = shutil.disk_usage(out.parent).free
    if need > free:
        needs = f"the copy needs about {need / 1e9:.2f} GB, and {out.parent} has {free / 1e9:.2f} GB left"
        raise UserError(f"{needs}; use another place, or a smaller --size or --quality")


def shard_range(source: ImageSource, first: int) -> range:
    return range(first, min(first + SHARD, len(source)))


def shard_path(part: Path, split: str, first: int) -> Path:
    return part / f"{split}-{first // SHARD:06d}.tar"


# ---- one photo


@dataclass(frozen=True)
class EncodedChunk(Chunk):
    """The files of a chunk's images, empty ones for those that cannot be read."""

    files: tuple[bytes, ...] = ()


@dataclass
class ShrinkReader(Dataset[Chunk]):
    """What runs in the worker processes."""

    source: ImageSource
    how: Shrinking

    def __getitems__(self, samples: Samples) -> Chunk:
        try:
            done = [shrink_photo(self.source, index, self.how) for index, _ in samples]
        except UserError as error:
            return EncodedChunk(torch.empty(0), torch.empty(0), error=str(error))
        broken = tuple(
            (index, self.source.name(index), why) for (index, _), (_, why) in zip(samples, done, strict=True) if why
        )
        return EncodedChunk(torch.empty(0), torch.empty(0), broken, files=tuple(file for file, _ in done))


def shrink_photo(source: ImageSource, index: int, how: Shrinking) -> tuple[bytes, str]:
    """The JPEG of an image and an empty text; or nothing, and why it cannot be read."""
    try:
        data = source.encoded(index) or b""
        header = read_header(data) if data.startswith(JPEG) else None
        if header is not None and min(header.width, header.height) <= how.side:
            return data, ""
        image = source.image(index, lambda size: min(size) / (2 * how.side))  # twice the side: the filter needs some
    except (BrokenImage, DecodeError) as error:
        return b"", error.why
    small = encode(image, how)
    return (data if data.startswith(JPEG) and len(data) <= len(small) else small), ""


def encode(image: Image.Image, how: Shrinking) -> bytes:
    factor = how.side / min(image.size)
    if factor < 1:
        width, height = (max(1, round(side * factor)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=how.quality, optimize=True)
    return file.getvalue()


# ---- shards


def write_shards(
    part: Path, sources: Mapping[str, ImageSource], missing: list[tuple[str, int]], how: Shrinking, workers: int
) -> Iterator[BrokenEntry]:
    """Write each missing shard, complete or not at all; yields the images that cannot be read."""
    total = sum(len(shard_range(sources[split], first)) for split, first in missing)
    with progress("shrinking", total) as advance:
        for split, source in sources.items():
            ranges = [shard_range(source, first) for name, first in missing if name == split]
            requests = (
                [(i, 0) for i in images[start : start + CHUNK]]
                for images in ranges
                for start in range(0, len(images), CHUNK)
            )
            chunks, marks = read_chunks(ShrinkReader(source, how), requests, workers, AHEAD), source.marks()
            for images in ranges:
                with atomic_file(shard_path(part, split, images.start)) as file:
                    tar = TarFile(fileobj=file, mode="w")
                    for start in range(0, len(images), CHUNK):
                        chunk = next(chunks)
                        assert isinstance(chunk, EncodedChunk)
                        write_members(tar, source, marks, images[start : start + CHUNK], chunk.files)
                        yield from chunk.broken
                        advance(len(chunk.files))
                    tar.close()


def write_members(tar: TarFile, source: ImageSource, marks: Keys, images: range, files: tuple[bytes, ...]) -> None:
    for index, content in zip(images, files, strict=True):
        label = " ".join(map(str, source.labels_of(index))).encode()
        for extension, data in (("jpg", content), ("cls", label)):
            member = TarInfo(f"{index:09d}-{marks[index]:016x}.{extension}")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
