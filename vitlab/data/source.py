"""Where images come from: one way to open any set, its splits, hold-outs and subsets.

A source is a list of images with labels and random access. `open_data` finds the right kind by its name:

    digits                                scikit-learn's digits, built in
    cifar10, cifar100, oxford-pets, flowers102, imagenet:FOLDER      torchvision's sets
    FOLDER                                class folders; or parquet files; or tar shards
    FILE.parquet, "train-{000..009}.tar", "pipe:COMMAND"             the same by file
    OWNER/NAME, OWNER/NAME@REVISION       a set on the Hugging Face hub
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlab.data.images import BrokenImage, Shrink
from vitlab.data.rng import HOLDOUT, SUBSET, Ints, Keys, keys
from vitlab.errors import UserError

__all__ = ["ArraySource", "BrokenImage", "Data", "ImageSource", "Subset", "open_data"]

log = logging.getLogger("vitlab")


class ImageSource(Protocol):
    """Labelled images with random access; pickled to the loader's workers."""

    classes: tuple[str, ...]
    labels: Ints  # (n,)

    def __len__(self) -> int: ...

    @property
    def groups(self) -> Ints | None:
        """(n,) the shard of each image, where shards are best read one after another."""
        ...

    def name(self, index: int) -> str:
        """The file or row, for logs."""
        ...

    def image(self, index: int, shrink: Shrink | None = None) -> Image.Image:
        """The upright RGB picture, or BrokenImage; `shrink` says how much smaller it may come."""
        ...


@dataclass(frozen=True)
class Data:
    """A set with its splits; `note` says how they came about."""

    name: str
    train: ImageSource
    test: ImageSource
    validation: ImageSource | None = None
    note: str = ""

    @property
    def classes(self) -> tuple[str, ...]:
        return self.train.classes


class ArraySource:
    """Images held as one array (n, height, width, 3) of bytes."""

    groups = None

    def __init__(self, title: str, pixels: NDArray[np.uint8], labels: Ints, classes: tuple[str, ...]) -> None:
        self.title, self.pixels, self.labels, self.classes = title, pixels, labels, classes

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return f"{self.title} {index}"

    def image(self, index: int, shrink: Shrink | None = None) -> Image.Image:
        return Image.fromarray(self.pixels[index])


class Subset:
    """Some images of a source, by index."""

    def __init__(self, whole: ImageSource, indices: Ints) -> None:
        self.whole, self.indices = whole, indices
        self.classes, self.labels = whole.classes, whole.labels[indices]
        self.groups = None if whole.groups is None else whole.groups[indices]

    def __len__(self) -> int:
        return len(self.indices)

    def name(self, index: int) -> str:
        return self.whole.name(int(self.indices[index]))

    def image(self, index: int, shrink: Shrink | None = None) -> Image.Image:
        return self.whole.image(int(self.indices[index]), shrink)


# ---- opening


def open_data(
    spec: str,
    *,
    seed: int = 0,
    subset: float | None = None,
    per_class: int | None = None,
    holdout: float = 0.2,
) -> Data:
    """The set that `spec` names; `subset` (a share) or `per_class` (a number) thins its training images.

    A set without a test split gives up a stratified `holdout` of its images. Which ones does not depend on the seed,
    so that a model is never tested on what it was trained on. The seed chooses the subset; smaller subsets are
    part of larger ones.
    """
    from vitlab.data.hub import commit_of

    if not 0 < holdout < 1:
        raise UserError(f"holdout must be above 0 and below 1, not {holdout}")
    title = Path(spec).name.removesuffix(".parquet").removesuffix(".tar")
    splits, preferred = find_splits(spec)
    data = settle(title, splits, preferred, holdout=holdout)
    commit = commit_of(next(iter(splits.values())))
    data = replace(data, note=f"{data.note}; the hub's commit {commit}") if commit else data
    for split, source in (("train", data.train), ("validation", data.validation), ("test", data.test)):
        if source is not None:
            check(source, spec, split)
    chosen = thin(data.train, seed, subset, per_class)
    return data if chosen is None else replace(data, train=Subset(data.train, chosen))


def find_splits(spec: str) -> tuple[Mapping[str, ImageSource], float | None]:
    """The splits of a set by name, and the hold-out it prefers where it has only one."""
    from vitlab.data import builtin, folder, hub, parquet, shards

    path = Path(spec).expanduser()
    if spec == "digits":
        return {"train": builtin.digits()}, 1 / 3
    if spec in builtin.SETS:
        return builtin.splits(spec), None
    if spec.startswith("imagenet:"):
        return folder.splits(Path(spec.removeprefix("imagenet:")).expanduser()), None
    if shards.is_shards(spec):
        return shards.splits(spec), None
    if path.is_dir():
        if any(next(path.glob(pattern), None) for pattern in ("*.parquet", "data/*.parquet", "train*/*.parquet")):
            return parquet.splits(sorted(path.rglob("*.parquet")), path), None
        return (shards.splits(f"{path}/*.tar") if next(path.glob("*.tar"), None) else folder.splits(path)), None
    if spec.endswith(".parquet"):
        return parquet.splits([Path(file) for file in sorted(glob(str(path)))] or [path], path.parent), None
    if hub.is_id(spec):
        return hub.splits(spec), None
    names = ", ".join(["digits", *builtin.SETS])
    raise UserError(
        f"there is no data set '{spec}': it is neither a folder or file here nor one of {names}, "
        "nor the id of a set on the hub (owner/name)"
    )


def settle(title: str, splits: Mapping[str, ImageSource], preferred: float | None, *, holdout: float) -> Data:
    """Train and test from what there is."""
    labelled = {k: s for k, s in splits.items() if len(s) == 0 or (s.labels >= 0).any()}
    note = "".join(f"the {k} split has no labels and was left out; " for k in splits if k not in labelled)
    if not labelled:
        raise UserError(f"no split of {title} has labels")
    train = labelled.pop("train" if "train" in labelled else next(iter(labelled)))
    test, validation = labelled.get("test"), labelled.get("validation")
    if test is not None:
        note += "train and test are the set's own" + ("" if validation is None else "; validation is kept aside")
        return Data(title, train, test, validation, note)
    if validation is not None:
        return Data(title, train, validation, None, note + "test is the set's validation split")
    share = preferred or holdout
    held = np.zeros(len(train), bool)
    held[pick(train.labels, lambda count: held_out(count, share), keys(0, HOLDOUT, np.arange(len(train))))] = True
    note += f"test is {share:.0%} of the images, held out class by class"
    return Data(title, Subset(train, np.flatnonzero(~held)), Subset(train, np.flatnonzero(held)), None, note)


def held_out(count: int, share: float) -> int:
    """How many of a class are held out: at least one and not all; a class of one stays in training."""
    return min(max(1, round(count * share)), count - 1)


def thin(source: ImageSource, seed: int, subset: float | None, per_class: int | None) -> Ints | None:
    """The indices of a stratified subset; None for all."""
    if subset is not None and per_class is not None:
        raise UserError("give subset or per_class, not both")
    hashed = keys(seed, SUBSET, np.arange(len(source)))
    if subset is not None:
        if not 0 < subset <= 1:
            raise UserError(f"subset must be above 0 and at most 1, not {subset}")
        return pick(source.labels, lambda count: max(1, round(count * subset)), hashed)
    if per_class is None:
        return None
    if per_class < 1:
        raise UserError(f"per_class must be at least 1, not {per_class}")
    short = int((np.bincount(source.labels) < per_class).sum())
    if short:
        log.warning("%d classes have fewer than %d training images; all of theirs are taken", short, per_class)
    return pick(source.labels, lambda count: min(per_class, count), hashed)


def pick(labels: Ints, quota: Callable[[int], int], hashed: Keys) -> Ints:
    """Of each class the `quota(count)` images with the lowest hashes, as ascending indices."""
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((hashed, inverse))
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    quotas = np.array([quota(int(count)) for count in counts], np.int64)
    return np.sort(order[rank < np.repeat(quotas, counts)])


def check(source: ImageSource, spec: str, split: str) -> None:
    """What no training or test can do without."""
    if len(source) == 0:
        raise UserError(f"'{spec}' has no images in its {split} split; put some there or name another set")
    count = len(source.classes)
    if count < 2:
        raise UserError(
            f"'{spec}' has only the class '{''.join(source.classes)}'; a classifier needs two or more, "
            "each in a folder of its own"
        )
    wrong = np.flatnonzero((source.labels < 0) | (source.labels >= count))
    if len(wrong):
        first = int(wrong[0])
        raise UserError(
            f"{source.name(first)} has the label {source.labels[first]}, outside 0 to {count - 1} (in '{spec}'); "
            "fix the label or the list of classes"
        )
