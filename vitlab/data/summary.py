"""A summary of a data set before training on it: its contents, its problems, and a contact sheet of samples."""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from PIL.PngImagePlugin import PngInfo
from rich.table import Table
from torch import Tensor

from vitlab.data.images import BrokenImage
from vitlab.data.rng import SAMPLES, Ints, keys
from vitlab.data.source import Data, ImageSource
from vitlab.data.workers import BrokenEntry, ImageReader, read_all
from vitlab.errors import UserError
from vitlab.terminal import printable
from vitlab.text import counted

FEW_IMAGES = 5  # training images below which a class is hardly learnable
NAME_LENGTH = 60  # characters of a class name in a table
IMBALANCE = 10  # times as many images in the largest class as in the smallest
CELL, GAP, NAME_WIDTH, ROWS, COLUMNS = 96, 4, 160, 12, 8  # the contact sheet, in pixels and images
LEGEND = 20  # pixels, above the rows
SOFTWARE = "vitlab data"  # in a PNG's metadata


@dataclass(frozen=True)
class SplitSummary:
    """The contents of one split of n images in K classes."""

    counts: Ints  # (K,) images per class
    sizes: Ints  # (n, 2) heights and widths, without broken images
    hashes: Ints  # (n,) of the pixels; 0 for broken images
    broken: tuple[BrokenEntry, ...]


@dataclass(frozen=True)
class Summary:
    """The contents of a data set."""

    data: Data
    splits: dict[str, SplitSummary]
    duplicates: list[tuple[str, str]]  # (in train, in another split) with the same pixels
    two_labels: list[tuple[str, str]]  # the same pixels under different labels, anywhere


def summarize(data: Data, workers: int = 0) -> Summary:
    """Decode every image once and collect sizes, broken files and images that are in two splits."""
    splits = {name: inspect_split(source, workers) for name, source in data.splits.items()}
    first = {value: i for i, value in reversed(list(enumerate(splits["train"].hashes.tolist()))) if value}
    duplicates = []
    for split in [name for name in splits if name != "train"]:
        source, hashes = data.splits[split], enumerate(splits[split].hashes.tolist())
        duplicates += [(data.train.name(first[value]), source.name(i)) for i, value in hashes if value in first]
    return Summary(data, splits, duplicates, find_two_labels(data, splits))


def find_two_labels(data: Data, splits: dict[str, SplitSummary]) -> list[tuple[str, str]]:
    """Images that have other labels than an earlier one with the same pixels, which is named first."""
    first: dict[int, tuple[ImageSource, int]] = {}
    found = []
    for split, summary in splits.items():
        source = data.splits[split]
        for i, value in enumerate(summary.hashes.tolist()):
            one, place = first.setdefault(value, (source, i)) if value else (source, i)
            if one.labels_of(place) != source.labels_of(i):
                found.append((describe_image(one, place), describe_image(source, i)))
    return found


def describe_image(source: ImageSource, index: int) -> str:
    """An image with its labels: photos/1.jpg (cat)."""
    return f"{source.name(index)} ({', '.join(source.classes[k] for k in source.labels_of(index))})"


def inspect_split(source: ImageSource, workers: int) -> SplitSummary:
    """Sizes, hashes and broken files of one split."""
    chunks = list(read_all(InspectReader(source), len(source), workers, "decoding"))
    rows = torch.cat([chunk.pixels for chunk in chunks]).numpy()  # (n, 3)
    broken = tuple(entry for chunk in chunks for entry in chunk.broken)
    return SplitSummary(source.class_counts(), rows[rows[:, 0] > 0, :2], rows[:, 2], broken)


@dataclass
class InspectReader(ImageReader):
    """In place of pixels: height, width and hash of each image, (3,) int64; zeros for broken ones."""

    def convert(self, image: Image.Image, key: int) -> Tensor:
        digest = hashlib.blake2b(repr(image.size).encode() + image.tobytes(), digest_size=8).digest()
        return torch.tensor([image.height, image.width, int.from_bytes(digest, "big", signed=True)])

    def blank(self, broken: list[BrokenEntry]) -> Tensor:
        return torch.zeros(3, dtype=torch.int64)


# ---- warnings and tables


def class_warnings(data: Data) -> list[str]:
    """Problems that the labels alone show: imbalance, small classes, classes without images."""
    train, test = data.train.class_counts(), data.test.class_counts()
    warnings = []
    for split, counts in (("training", train), ("test", test)):
        missing = [data.classes[i] for i in np.flatnonzero(counts == 0)]
        if missing:
            warnings.append(
                f"{len(missing)} of {len(data.classes)} classes have no {split} images: {name_some(missing)}"
            )
    tiny = [data.classes[i] for i in np.flatnonzero((train > 0) & (train < FEW_IMAGES))]
    if tiny:
        have = "1 class has" if len(tiny) == 1 else f"{len(tiny)} classes have"
        warnings.append(f"{have} fewer than {FEW_IMAGES} training images: {name_some(tiny)}")
    present = np.flatnonzero(train)
    most, least = present[train[present].argmax()], present[train[present].argmin()]
    if train[most] >= IMBALANCE * train[least]:
        large, small = f"{train[most]} training images of '{data.classes[most]}'", f"'{data.classes[least]}'"
        warnings.append(f"the classes are uneven: {large}, {train[least]} of {small}")
    return warnings


def image_warnings(summary: Summary) -> list[str]:
    """Problems of the images: broken ones, those that are in two splits, and those under two labels."""
    broken = {split: [name for _, name, _ in found.broken] for split, found in summary.splits.items()}
    warnings = [
        f"{counted(len(names), 'broken image')} in {split}: {name_some(names)}"
        for split, names in broken.items()
        if names
    ]
    if summary.duplicates:
        one, other = summary.duplicates[0]
        count = len(summary.duplicates)
        are = "1 image outside train is" if count == 1 else f"{count} images outside train are"
        warnings.append(f"{are} also in train, such as {other} = {one}")
    if summary.two_labels:
        one, other = summary.two_labels[0]
        count = len(summary.two_labels)
        warnings.append(
            f"{count} {'image is' if count == 1 else 'images are'} under two labels, such as {one} = {other}"
        )
    return warnings


def name_some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


def tables(summary: Summary) -> Iterator[Table]:
    """The summary as tables for a terminal: one of the splits, one of the classes."""
    data, classes = summary.data, summary.data.classes
    table = Table("split", title=f"{printable(data.name)}: {len(classes)} classes", caption=data.note)
    for heading in ("images", "per class", "height", "width", "broken"):
        table.add_column(heading, justify="right")
    for name, split in summary.splits.items():
        sides = [value_range(split.sizes[:, axis]) for axis in (0, 1)]
        table.add_row(name, f"{len(data.splits[name]):,}", value_range(split.counts), *sides, str(len(split.broken)))
    yield table
    counts = Table("class", *summary.splits, title="images per class")
    shown = sorted(range(len(classes)), key=lambda i: -summary.splits["train"].counts[i])
    if len(shown) > 2 * ROWS:
        shown = [*shown[:ROWS], -1, *shown[-ROWS:]]
    for i in shown:
        row = ["…" if i < 0 else str(split.counts[i]) for split in summary.splits.values()]
        counts.add_row("…" if i < 0 else printable(classes[i])[:NAME_LENGTH], *row)
    yield counts


def value_range(values: Ints) -> str:
    """Least, median and largest value as text; one number where they are equal."""
    if not len(values):
        return "-"
    low, middle, high = (int(v) for v in (values.min(), np.median(values), values.max()))
    return f"{low}" if low == high else f"{low} / {middle} / {high}"


# ---- the contact sheet


def check_picture(path: Path) -> None:
    """Raise UserError, before images are read, for a file that is no picture or that something else has written."""
    if path.suffix.lower() not in Image.registered_extensions():
        raise UserError(f"--picture {path} must end as a picture does, in .png or .jpg")
    if os.path.lexists(path) and not is_own_picture(path):
        raise UserError(f"{path} exists, and no `vitlab data` wrote it; name another file with --picture")


def is_own_picture(path: Path) -> bool:
    try:
        with Image.open(path, formats=("PNG",)) as image:
            return image.info.get("Software") == SOFTWARE
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return False


def save_picture(sheet: Image.Image, path: Path) -> None:
    """Write a contact sheet; a PNG names its program, so that the next one may replace it."""
    about = PngInfo()
    about.add_text("Software", SOFTWARE)
    check_picture(path)
    sheet.save(path, pnginfo=about)


def contact_sheet(source: ImageSource, name: str = "samples") -> Image.Image:
    """An image with a row of random samples for each class, or for a dozen classes where there are more.

    Its first line is a legend: what the rows are, and what red is; below a class is the number of its images.
    """
    present = np.flatnonzero(source.class_counts())
    shown = present[np.unique(np.linspace(0, len(present) - 1, min(ROWS, len(present))).round().astype(int))]
    order = keys(0, SAMPLES, np.arange(len(source))).argsort()
    step = CELL + GAP
    sheet = Image.new("RGB", (NAME_WIDTH + COLUMNS * step, LEGEND + len(shown) * step + GAP), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default()
    pen.text((GAP, LEGEND // 2), legend(printable(name), len(shown), len(source.classes)), "black", font, "lm")
    counts = source.class_counts()
    for row, label in enumerate(shown.tolist()):
        top = LEGEND + GAP + row * step
        pen.text((GAP, top + CELL // 2), printable(source.classes[label])[:26], "black", font, "ls")
        pen.text((GAP, top + CELL // 2 + 2), counted(int(counts[label]), "image"), "gray", font, "la")
        for column, index in enumerate(order[source.has_class(label)[order]][:COLUMNS].tolist()):
            try:
                image = fit_cell(source.image(index))
            except BrokenImage:
                image = Image.new("RGB", (CELL, CELL), "red")
            place = NAME_WIDTH + column * step + (CELL - image.width) // 2, top + (CELL - image.height) // 2
            sheet.paste(image, place)
    return sheet


def legend(name: str, shown: int, classes: int) -> str:
    """What a contact sheet shows, in a line."""
    rows = "its classes" if shown == classes else f"{shown} of its {classes:,} classes"
    return f"{name[:40]}: rows are {rows}, with up to {COLUMNS} training images at random; red: cannot be read"


def fit_cell(image: Image.Image, side: int = CELL) -> Image.Image:
    """An image resized to a cell; small ones show their pixels."""
    scale = side / max(image.size)
    size = max(1, round(image.width * scale)), max(1, round(image.height * scale))
    return image.resize(size, Image.Resampling.NEAREST if scale > 2 else Image.Resampling.BICUBIC)
