"""A look at a set before training on it: what it holds, what is wrong with it, and a picture of samples."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.utils.data import Dataset

from vitlab.data.images import BrokenImage
from vitlab.data.rng import SAMPLES, Ints, keys
from vitlab.data.source import Data, ImageSource
from vitlab.data.workers import CHUNK, Broken, Chunk, Order, read_chunks
from vitlab.terminal import printable

TINY = 5  # training images below which a class is hardly learnable
LONGEST = 60  # letters of a class name in a table
IMBALANCE = 10  # times as many images in the largest class as in the smallest
CELL, GAP, NAMES, ROWS, COLUMNS = 96, 4, 160, 12, 8  # the contact sheet, in pixels and pictures


@dataclass(frozen=True)
class Split:
    """What one split holds."""

    counts: Ints  # (K,) images per class
    sizes: Ints = field(default_factory=lambda: np.zeros((0, 2), np.int64))  # (n, 2) heights and widths
    hashes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # (n,) of the pixels; 0 for broken images
    broken: tuple[Broken, ...] = ()


@dataclass(frozen=True)
class Summary:
    name: str
    note: str
    classes: tuple[str, ...]
    splits: dict[str, Split]
    duplicates: list[tuple[str, str]]  # (in train, in another split) with the same pixels


def summarize(data: Data, workers: int = 0) -> Summary:
    """Every image decoded once."""
    sources = splits_of(data)
    splits = {name: inspect(source, workers) for name, source in sources.items()}
    train = splits["train"].hashes
    first = {int(value): i for i, value in reversed(list(enumerate(train))) if value}
    duplicates = [
        (data.train.name(first[int(value)]), source.name(i))
        for name, source in sources.items()
        if name != "train"
        for i, value in enumerate(splits[name].hashes)
        if int(value) in first
    ]
    return Summary(data.name, data.note, data.classes, splits, duplicates)


def splits_of(data: Data) -> dict[str, ImageSource]:
    found = {"train": data.train, "validation": data.validation, "test": data.test}
    return {name: source for name, source in found.items() if source is not None}


def count(source: ImageSource) -> Ints:
    return np.bincount(source.labels, minlength=len(source.classes))


def inspect(source: ImageSource, workers: int) -> Split:
    """Sizes, hashes and broken files of one split."""
    n = len(source)
    orders: list[Order] = [[(i, 0) for i in range(s, min(s + CHUNK, n))] for s in range(0, n, CHUNK)]
    console = Console(stderr=True)
    chunks = track(
        read_chunks(Inspector(source), orders, workers, 4, False),
        "decoding",
        len(orders),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    taken = list(chunks)
    facts = torch.cat([chunk.pixels for chunk in taken]).numpy()  # (n, 3)
    good = facts[:, 0] > 0
    broken = tuple(bad for chunk in taken for bad in chunk.broken)
    return Split(count(source), facts[good, :2], facts[:, 2], broken)


@dataclass
class Inspector(Dataset[Chunk]):
    """Runs in the workers; in place of pixels it sends height, width and hash of each image."""

    source: ImageSource

    def __getitems__(self, order: Order) -> Chunk:
        facts, broken = torch.zeros(len(order), 3, dtype=torch.int64), []
        for place, (index, _) in enumerate(order):
            try:
                image = self.source.image(index)
            except BrokenImage as bad:
                broken.append((index, bad.name, bad.why))
                continue
            digest = hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=8).digest()
            facts[place] = torch.tensor([image.height, image.width, int.from_bytes(digest, "big", signed=True)])
        return Chunk(facts, torch.tensor([index for index, _ in order]), tuple(broken))


# ---- what to say of it


def class_warnings(data: Data) -> list[str]:
    """What the labels alone tell: imbalance, tiny classes, classes without images."""
    train, test = count(data.train), count(data.test)
    said = []
    for split, counts in (("training", train), ("test", test)):
        lacking = [data.classes[i] for i in np.flatnonzero(counts == 0)]
        if lacking:
            said.append(f"{len(lacking)} of {len(data.classes)} classes have no {split} images: {named(lacking)}")
    tiny = [data.classes[i] for i in np.flatnonzero((train > 0) & (train < TINY))]
    if tiny:
        said.append(f"{len(tiny)} classes have fewer than {TINY} training images: {named(tiny)}")
    present = train[train > 0]
    if present.max() >= IMBALANCE * present.min():
        large, small = (
            data.classes[int(i)] for i in (train.argmax(), np.where(train > 0, train, train.max()).argmin())
        )
        said.append(
            f"the classes are uneven: {present.max()} training images of '{large}', {present.min()} of '{small}'"
        )
    return said


def image_warnings(summary: Summary) -> list[str]:
    """What the images tell: broken ones, and those that lie in two splits."""
    said = []
    for name, split in summary.splits.items():
        if split.broken:
            said.append(f"{len(split.broken)} broken in {name}: {named([b[1] for b in split.broken])}")
    if summary.duplicates:
        one, other = summary.duplicates[0]
        said.append(f"{len(summary.duplicates)} images outside train are also in train, such as {other} = {one}")
    return said


def named(names: list[str], most: int = 3) -> str:
    return ", ".join(names[:most]) + (" …" if len(names) > most else "")


def tables(summary: Summary) -> Iterator[Table]:
    """The summary for a terminal."""
    table = Table("split", title=f"{printable(summary.name)}: {len(summary.classes)} classes", caption=summary.note)
    for heading in ("images", "per class", "height", "width", "broken"):
        table.add_column(heading, justify="right")
    for name, split in summary.splits.items():
        sides = [spread(split.sizes[:, axis]) for axis in (0, 1)]
        table.add_row(name, f"{split.counts.sum():,}", spread(split.counts), *sides, str(len(split.broken)))
    yield table
    counts = Table("class", *summary.splits, title="images per class")
    shown = sorted(range(len(summary.classes)), key=lambda i: -summary.splits["train"].counts[i])
    if len(shown) > 2 * ROWS:
        shown = [*shown[:ROWS], -1, *shown[-ROWS:]]
    for i in shown:
        row = ["…" if i < 0 else str(split.counts[i]) for split in summary.splits.values()]
        counts.add_row("…" if i < 0 else printable(summary.classes[i])[:LONGEST], *row)
    yield counts


def spread(values: Ints) -> str:
    """Least, median and largest; one number where they agree."""
    if not len(values):
        return "-"
    low, middle, high = (int(v) for v in (values.min(), np.median(values), values.max()))
    return f"{low}" if low == high else f"{low} / {middle} / {high}"


# ---- a picture of samples


def contact_sheet(source: ImageSource, seed: int = 0) -> Image.Image:
    """A row of random pictures for each class, or for a dozen classes where there are more."""
    present = np.unique(source.labels)
    shown = present[np.unique(np.linspace(0, len(present) - 1, min(ROWS, len(present))).round().astype(int))]
    order = keys(seed, SAMPLES, np.arange(len(source))).argsort()
    step = CELL + GAP
    sheet = Image.new("RGB", (NAMES + COLUMNS * step, len(shown) * step + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    for row, label in enumerate(shown.tolist()):
        top = GAP + row * step
        pen.text((GAP, top + CELL // 2), printable(source.classes[label])[:26], "black", font, "lm")
        for column, index in enumerate(order[source.labels[order] == label][:COLUMNS].tolist()):
            try:
                image = fitted(source.image(index))
            except BrokenImage:
                image = Image.new("RGB", (CELL, CELL), "red")
            place = NAMES + column * step + (CELL - image.width) // 2, top + (CELL - image.height) // 2
            sheet.paste(image, place)
    return sheet


def fitted(image: Image.Image) -> Image.Image:
    """A picture scaled into a cell; small ones show their pixels."""
    scale = CELL / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC)
