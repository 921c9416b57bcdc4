"""Open any data set by its name: find its splits, hold out a test split where it has none, choose a subset.

digits                                scikit-learn's digits, built in
cifar10, cifar100, oxford-pets, flowers102, imagenet:FOLDER      torchvision's sets
cifar-10-python.tar.gz, cifar-10-batches-bin                     CIFAR's archives and their folders, see cifar.py
FOLDER                                class folders; or parquet files; or tar shards
FILE.parquet, "train-{000..009}.tar", "pipe:COMMAND"             the same by file
FILE.csv                              paths, labels and splits, see csv_file.py
OWNER/NAME, OWNER/NAME@REVISION       a set on the Hugging Face hub
"""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from glob import glob
from pathlib import Path

import numpy as np

from vitlab.data import builtin, cifar, csv_file, folder, hub, parquet, shards
from vitlab.data.label_sets import LabelSets
from vitlab.data.rng import HOLDOUT, SUBSET, VALIDATION, Ints, Keys, keys
from vitlab.data.source import Data, ImageSource, Subset
from vitlab.errors import UserError
from vitlab.text import listed

log = logging.getLogger("vitlab")

ARCHIVES = (".zip", ".7z", ".rar", ".gz", ".bz2", ".tbz2", ".xz", ".txz", ".zst", ".tzst")  # what is not read
THRESHOLD_SHARE = 0.1  # of a multi-label set's training images, held out to choose thresholds


def open_data(
    spec: str, *, seed: int = 0, subset: float | None = None, per_class: int | None = None, holdout: float = 0.2
) -> Data:
    """Open the data set named `spec`, see the list above; raises UserError where there is none or it is unusable.

    `subset` (a fraction) or `per_class` (a number) keeps only some training images, the same share of every class.
    The seed chooses them; smaller subsets are part of larger ones. Of a set without a test split, the fraction
    `holdout` of each class becomes one. Which images those are does not depend on the seed, so that a model is never
    tested on what it was trained on.
    """
    if not 0 < holdout < 1:
        raise UserError(f"holdout must be above 0 and below 1, not {holdout}")
    splits, preferred = find_splits(spec)
    data = make_data(spec, splits, preferred or holdout)
    check_classes(data.train, spec)
    chosen = subset_indices(data.train, seed, subset, per_class)
    return data if chosen is None else replace(data, train=Subset(data.train, chosen))


def make_data(spec: str, splits: Mapping[str, ImageSource], holdout: float) -> Data:
    """A data set from the splits that `find_splits` found."""
    title = os.path.basename(os.path.abspath(os.path.expanduser(spec)))  # of "." the folder's own name
    for suffix in (*cifar.SUFFIXES, ".parquet", ".tar", ".csv"):
        title = title[: -len(suffix)] if title.lower().endswith(suffix) else title
    if "train" not in splits and isinstance(next(iter(splits.values())), folder.FileSource):
        raise UserError(
            f"'{spec}' has no train folder, only {listed(splits)}: enough to evaluate on, not to learn from"
        )
    data = assign_splits(title, splits, holdout)
    commit = hub.commit_of(next(iter(splits.values())))
    data = replace(data, note=f"{data.note}; the hub's commit {commit}") if commit else data
    for split, source in data.splits.items():
        check_split(source, spec, split)
    return data


def find_splits(spec: str) -> tuple[Mapping[str, ImageSource], float | None]:
    """The splits of the set `spec` by name, and the fraction to hold out for testing that it comes with, if any."""
    path, name = Path(spec).expanduser(), spec.lower()
    if spec == "digits":
        return {"train": builtin.digits()}, 1 / 3
    if spec in builtin.SETS:
        return builtin.splits(spec), None
    if spec.startswith("imagenet:"):
        return folder.splits(Path(spec.removeprefix("imagenet:")).expanduser(), others=True), None
    if spec.startswith(shards.PIPE):
        return shards.splits(spec), None
    if path.is_dir():  # whatever its name ends in
        if cifar.is_cifar(path):
            return cifar.splits(path), None
        if files := parquet.files_in(path):
            return parquet.splits(files, path), None
        return (shards.splits(f"{path}/*.tar") if next(path.glob("*.tar"), None) else folder.splits(path)), None
    if name.endswith(".tar"):
        return shards.splits(spec), None
    if name.endswith(cifar.SUFFIXES):
        return cifar.splits(path), None
    if name.endswith(".csv"):
        return csv_file.splits(path), None
    if name.endswith(".parquet"):
        return parquet.splits([Path(file) for file in sorted(glob(str(path)))] or [path], path.parent), None
    if path.is_file():
        raise UserError(
            f"'{spec}' is an archive; unpack it and name the folder that is in it"
            if path.suffix.lower() in ARCHIVES
            else f"'{spec}' is no data set; name a folder with a folder per class, or a .csv, .parquet or .tar file"
        )
    if path.suffix.lower() in ARCHIVES:  # no name of a set on the hub
        raise UserError(f"there is no file '{spec}'")
    if hub.is_id(spec):
        return hub.splits(spec), None
    names = ", ".join(["digits", *builtin.SETS])
    raise UserError(
        f"there is no data set '{spec}': it is neither a folder or file here nor one of {names}, "
        "nor the id of a set on the hub (owner/name)"
    )


def assign_splits(title: str, splits: Mapping[str, ImageSource], holdout: float) -> Data:
    """A training and a test split from those there are; where there is only one, part of it is held out.

    The thresholds of a multi-label model are chosen on validation images, so a multi-label set always has some.
    """
    labeled = {k: s for k, s in splits.items() if len(s) == 0 or has_labels(s)}
    note = "".join(f"the {k} split has no labels and was left out; " for k in splits if k not in labeled)
    if not labeled:
        raise UserError(f"no split of {title} has labels")
    train = labeled.pop("train" if "train" in labeled else next(iter(labeled)))
    test, validation = labeled.get("test"), labeled.get("validation")
    if test is not None:
        note += "train and test are the set's own" + ("" if validation is None else "; validation is kept aside")
    elif validation is not None:
        test, validation, note = validation, None, note + "test is the set's validation split"
    else:
        train, test = split_off(train, holdout, HOLDOUT)
        note += f"test is {holdout:.0%} of the images, held out class by class"
    return Data(title, train, test, validation, note)


def hold_out_validation(data: Data, share: float | None) -> Data:
    """The data with a validation split: its own, else the fraction `share` of each class of its training images.

    None stands for a share by the size of the set, and 0 for none, except that a multi-label set needs images to
    choose thresholds on. Which images those are depends on neither the seed nor anything else of a run.
    """
    part = share
    if not share and data.is_multi_label:
        part = THRESHOLD_SHARE
    elif share is None:
        part = usual_share(len(data.train))
    if data.validation is not None or not part:
        return data
    train, held = split_off(data.train, part, VALIDATION)
    if not len(held):
        if not share:
            return data  # every class has a single image
        raise UserError(f"no class of {data.name} has two training images, so none can be held out; set validation=0")
    note = f"{data.note}; validation is {part:.2g} of the training images, held out class by class"
    return replace(data, train=train, validation=held, note=note)


def usual_share(images: int) -> float:
    """The share of so many training images to hold out: the paper's for small sets, for CIFAR and for ImageNet."""
    return 0.1 if images < 10_000 else 0.02 if images < 500_000 else 0.01


def has_labels(source: ImageSource) -> bool:
    return bool(len(source.truth.numbers) if isinstance(source.truth, LabelSets) else (source.truth >= 0).any())


def split_off(source: ImageSource, share: float, purpose: int) -> tuple[Subset, Subset]:
    """The images that stay, and the fraction `share` of each class that is held out, chosen by hashes."""
    held, hashed = np.zeros(len(source), bool), keys(0, purpose, source.marks())
    held[pick_per_class(strata(source), lambda count: holdout_size(count, share), hashed)] = True
    return Subset(source, np.flatnonzero(~held)), Subset(source, np.flatnonzero(held))


def strata(source: ImageSource) -> Ints:
    """The class by which each image is drawn, (n,): its label, or the rarest of several."""
    return source.truth.rarest if isinstance(source.truth, LabelSets) else source.truth


def holdout_size(count: int, share: float) -> int:
    """How many images of a class are held out: at least one and not all; a single image stays in training."""
    return min(max(1, round(count * share)), count - 1)


def subset_indices(source: ImageSource, seed: int, subset: float | None, per_class: int | None) -> Ints | None:
    """The indices of a stratified subset, ascending; None where all images stay."""
    if subset is not None and per_class is not None:
        raise UserError("give subset or per_class, not both")
    quota: Callable[[int], int]
    if subset is not None:
        if not 0 < subset <= 1:
            raise UserError(f"subset must be above 0 and at most 1, not {subset}")
        labels, quota = strata(source), lambda count: max(1, round(count * subset))
    elif per_class is not None:
        if per_class < 1:
            raise UserError(f"per_class must be at least 1, not {per_class}")
        if source.label_sets is not None:
            raise UserError("per_class counts images of one label each, and this set is multi-label; use subset")
        short = int((np.bincount(source.labels) < per_class).sum())
        if short:
            log.warning("%d classes have fewer than %d training images; all of them are used", short, per_class)
        labels, quota = source.labels, lambda count: min(per_class, count)
    else:
        return None
    return pick_per_class(labels, quota, keys(seed, SUBSET, source.marks()))


def pick_per_class(labels: Ints, quota: Callable[[int], int], hashed: Keys) -> Ints:
    """Of each class the `quota(count)` images with the lowest hashes, as ascending indices."""
    _, inverse, counts = np.unique(labels, return_inverse=True, return_counts=True)
    order = np.lexsort((hashed, inverse))
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    quotas = np.array([quota(int(count)) for count in counts], np.int64)
    return np.sort(order[rank < np.repeat(quotas, counts)])


def check_classes(source: ImageSource, spec: str) -> None:
    """Raise UserError for a set of a single class: a finished model can be tested on it, and none can learn from it."""
    if len(source.classes) < 2:
        raise UserError(
            f"'{spec}' has only the class '{''.join(source.classes)}'; a classifier needs two or more, "
            "each in a folder of its own"
        )


def check_split(source: ImageSource, spec: str, split: str) -> None:
    """Raise UserError unless the split has images and valid labels."""
    if len(source) == 0:
        raise UserError(f"'{spec}' has no images in its {split} split; put some there or name another set")
    count, sets = len(source.classes), source.label_sets
    numbers = source.labels if sets is None else sets.numbers
    wrong = np.flatnonzero((numbers < 0) | (numbers >= count))
    if len(wrong):
        first = int(wrong[0])
        image = first if sets is None else int(sets.rows[first])
        raise UserError(
            f"{source.name(image)} has the label {numbers[first]}, outside 0 to "
            f"{count - 1} (in '{spec}'); fix the label or the list of classes"
        )
