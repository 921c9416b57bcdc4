"""`vitlab embed`: the features of every image of a folder or a data set, as one parquet file."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from PIL import Image
from torch import nn

from vitlab.data.decoder import DecodeHint
from vitlab.data.folder import FileSource, subfolders, walk_images
from vitlab.data.images import EXTENSIONS
from vitlab.data.open import find_splits
from vitlab.data.source import ImageSource, Subset
from vitlab.errors import UserError
from vitlab.evaluation.extract import ExtractOptions, extract_values, value_width
from vitlab.evaluation.feature_file import FeatureInfo, Row, check_replaceable, new_feature_file
from vitlab.evaluation.piece_cache import feature_key
from vitlab.html import value_table
from vitlab.inference.int8 import EightBits
from vitlab.models.guest import Guest, Measured
from vitlab.models.names import name_of
from vitlab.models.variants import Model
from vitlab.weights.guests import open_measured

ORDER = ("train", "validation", "test")
PART = 16_384  # images whose features are in memory at a time: 50 MB of a B/16


@runtime_checkable
class HasModel(Protocol):
    """A path that holds a model in memory, as a run does."""

    @property
    def model(self) -> Model: ...

    def __fspath__(self) -> str: ...


AnyModel = Measured | HasModel | str | os.PathLike[str]


def open_model(model: AnyModel) -> tuple[Measured, str]:
    """A model, and what to call it."""
    if isinstance(model, Guest):
        return model, f"torchvision:{model.config.name}"
    if isinstance(model, nn.Module):
        return model, name_of(model.config) or type(model).__name__
    if not isinstance(model, str | os.PathLike):
        kind = type(model).__name__
        raise UserError(f"an object of type {kind} is not a model; give a model, a run, or the folder of one")
    return (model.model if isinstance(model, HasModel) else open_measured(model)), os.fspath(model)


@dataclass(frozen=True)
class Embedded:
    """A feature file that was written: a path, with what is in it."""

    path: Path
    images: int
    width: int
    broken: tuple[str, ...]  # names of the images that could not be read and are left out

    def __fspath__(self) -> str:
        return str(self.path)

    def _repr_html_(self) -> str:
        rows = [("images", f"{self.images:,}"), ("features", f"{self.width}"), ("unreadable", f"{len(self.broken)}")]
        return value_table(str(self.path), rows)


def embed(
    model: AnyModel,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    batch: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    scales: EightBits | None = None,
) -> Embedded:
    """Write the features of every image of a set to a parquet file, with their paths, splits and labels.

    Args:
        model: a model, a run, or what `vitlab.load` takes.
        data: a folder of photos, with class folders or without, or any other data set.
        out: the file, FILE.parquet. It appears when it is complete, and may replace an older one of its kind. Finished
            parts are kept beside it until then, from which the same call continues after an interruption.
        batch: images at a time; by default fits the device.
        workers: processes that decode images; by default fits the machine.
        device: "auto" (the best there is), "cpu", "cuda" or "mps".
        scales: those of the model's dense layers, with which they are in 8 bits, or its int8 model on a CPU.

    Returns:
        The file: `vitlab.search` takes it, and any program that reads parquet. Images that cannot be read are left out.

    Raises:
        UserError: there are no images or no model, or `out` is a file of another kind.

    >>> features = vitlab.embed("runs/pets", "photos/", "photos.parquet")
    >>> features.images
    12
    """
    path, spec = Path(out).expanduser(), os.fspath(data)
    check_replaceable(path)
    loaded, name = open_model(model)
    parts = find_parts(spec)
    multi = any(part.source.label_sets is not None for part in parts)
    info = FeatureInfo(feature_key(loaded), name, spec, value_width(loaded, "features"), multi)
    how: ExtractOptions = {"batch": batch, "workers": workers, "device": device, "broken_limit": 1, "scales": scales}
    keep, broken = pieces_folder(path), list[str]()
    with new_feature_file(path, info) as file:
        for part, span in spans(parts):
            images = Subset(ImagesOnly(part.source), np.arange(span.start, span.stop))
            title = f"{part.split or 'image'} features"
            found = extract_values(loaded, images, keep=keep, title=title, **how)
            file.write([part.row(span[i]) for i in found.index.tolist()], found.values)
            broken += found.broken
    shutil.rmtree(keep, ignore_errors=True)
    return Embedded(path, file.images, info.width, tuple(broken))


def pieces_folder(out: Path) -> Path:
    """Where finished parts are kept until the file is complete."""
    return out.with_name(f".{out.name}.pieces")


# ---- which images


@dataclass(frozen=True)
class ImagePart:
    """The images of one split; None: the set has no others."""

    split: str | None
    source: ImageSource
    has_labels: bool = True

    def row(self, index: int) -> Row:
        numbers = self.source.labels_of(index) if self.has_labels else []
        labels = tuple(self.source.classes[i] for i in numbers if 0 <= i < len(self.source.classes))
        return Row(self.source.name(index), self.split, index, labels)


class ImagesOnly(ImageSource):
    """The images of a source, whose labels may be missing."""

    def __init__(self, source: ImageSource) -> None:
        super().__init__(np.zeros(len(source), np.int64), ("",))
        self.source, self.groups = source, source.groups

    def name(self, index: int) -> str:
        return self.source.name(index)

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        return self.source.image(index, shrink)


def find_parts(spec: str) -> list[ImagePart]:
    """Every image of a data set, split by split; also those of a folder that are in no class folder."""
    folder = Path(spec).expanduser()
    loose = loose_images(folder) if folder.is_dir() else []
    alone = ImagePart(None, FileSource(folder, loose, [0] * len(loose), ("",)), has_labels=False)
    if loose and not any(next(walk_images(Path(entry), []), None) for entry in subfolders(folder)):
        return [alone]
    splits, _ = find_splits(spec)
    order = sorted(splits, key=lambda split: (ORDER.index(split) if split in ORDER else len(ORDER), split))
    named = [ImagePart(split if len(splits) > 1 else None, splits[split]) for split in order]
    return [*named, *([alone] if loose else [])]


def loose_images(folder: Path) -> list[str]:
    """The names of the image files directly in a folder, sorted."""
    with os.scandir(folder) as entries:
        files = [entry.name for entry in entries if entry.is_file() and not entry.name.startswith(".")]
    return sorted(name for name in files if os.path.splitext(name)[1].lower() in EXTENSIONS)


def spans(parts: list[ImagePart]) -> Iterator[tuple[ImagePart, range]]:
    for part in parts:
        count = len(part.source)
        yield from ((part, range(start, min(start + PART, count))) for start in range(0, count, PART))
