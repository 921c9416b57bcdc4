"""The 19 tasks of VTAB-1k, and their data in the layout of the public mirrors for PyTorch: images and lists.

ROOT/dtd/train800val200.txt      lines such as "images/banded_0002.jpg 0": a path below ROOT/dtd, and a class
ROOT/dtd/test.txt
ROOT/dtd/train800.txt            only for choosing a learning rate: train on these,
ROOT/dtd/val200.txt              test on these
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vitlab.data.folder import FileSource
from vitlab.data.rng import SUBSET, keys
from vitlab.data.source import Data
from vitlab.errors import UserError
from vitlab.files import read_text, write_text
from vitlab.text import listed

Group = Literal["natural", "specialized", "structured"]
GROUPS: tuple[Group, ...] = ("natural", "specialized", "structured")
Labeled = tuple[Sequence[str], Sequence[int]]  # paths and their labels
TRAIN, VALIDATION, BOTH, TEST = "train800", "val200", "train800val200", "test"
SIZES = {TRAIN: 800, VALIDATION: 200, BOTH: 1000}  # images of the benchmark's lists


@dataclass(frozen=True)
class Task:
    """A task: its folder's name, how many classes and test images it has, and which augmentations keep its labels."""

    name: str
    group: Group
    about: str
    classes: int
    tests: int  # images of the benchmark's test list
    origin: str  # where the images come from
    crop: bool = True  # whether a part of the image has the same label
    flip: bool = True  # and its mirror image


VGG, CLEVR = "robots.ox.ac.uk/~vgg/data", "cs.stanford.edu/people/jcjohns/clevr"
SPRITES, NORB = "github.com/google-deepmind/dsprites-dataset", "cs.nyu.edu/~ylclab/data/norb-v1.0-small"
EYES, MAZES = "kaggle.com/c/diabetic-retinopathy-detection", "github.com/google-research/task_adaptation"

TASKS = (
    Task("caltech101", "natural", "objects (and clutter)", 102, 6_084, "data.caltech.edu, Caltech 101"),
    Task("cifar", "natural", "CIFAR-100", 100, 10_000, "cs.toronto.edu/~kriz, CIFAR-100"),
    Task("dtd", "natural", "textures", 47, 1_880, f"{VGG}/dtd"),
    Task("oxford_flowers102", "natural", "flowers", 102, 6_149, f"{VGG}/flowers/102"),
    Task("oxford_iiit_pet", "natural", "breeds of cats and dogs", 37, 3_669, f"{VGG}/pets"),
    Task("sun397", "natural", "scenes", 397, 21_750, "vision.princeton.edu/projects/2010/SUN"),
    Task("svhn", "natural", "digits of house numbers", 10, 26_032, "ufldl.stanford.edu/housenumbers", flip=False),
    Task("patch_camelyon", "specialized", "tumor in tissue", 2, 32_768, "github.com/basveeling/pcam"),
    Task("eurosat", "specialized", "use of land, from a satellite", 10, 5_400, "github.com/phelber/EuroSAT"),
    Task("resisc45", "specialized", "scenes from the air", 45, 6_300, "gcheng-nwpu.github.io, NWPU-RESISC45"),
    Task("diabetic_retinopathy", "specialized", "grades of a disease of the eye", 5, 42_670, EYES),
    Task("clevr_count", "structured", "number of objects, 3 to 10", 8, 15_000, CLEVR, crop=False),
    Task("clevr_dist", "structured", "depth of the closest object", 6, 15_000, CLEVR, crop=False),
    Task("dmlab", "structured", "distance to an object, good or bad, in a maze", 6, 22_735, MAZES, crop=False),
    Task("kitti", "structured", "distance to the closest vehicle", 4, 711, "cvlibs.net/datasets/kitti", crop=False),
    Task("dsprites_loc", "structured", "where a shape is, left to right", 16, 73_728, SPRITES, crop=False, flip=False),
    Task("dsprites_ori", "structured", "how a shape is turned", 16, 73_728, SPRITES, crop=False, flip=False),
    Task("smallnorb_azi", "structured", "how a toy is turned", 18, 12_150, NORB, crop=False, flip=False),
    Task("smallnorb_ele", "structured", "from how high it is seen", 9, 12_150, NORB, crop=False),
)


def choose(words: str) -> tuple[Task, ...]:
    """Select tasks by name or group, comma-separated, in the benchmark's order; "all" is all of them."""
    chosen = [word.strip() for word in words.split(",")]
    known = ["all", *GROUPS, *(task.name for task in TASKS)]
    for word in chosen:
        if word not in known:
            near = difflib.get_close_matches(word, known, 1, 0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"there are {listed(known)}"
            raise UserError(f"there is no task '{word}'; {hint}")
    return tuple(task for task in TASKS if {"all", task.group, task.name}.intersection(chosen))


# ---- lists


class GoneError(UserError):
    """Images that a list names are not there."""


def missing_lists(root: Path, task: Task, *, tuning: bool = False) -> list[str]:
    """Return the names of the lists that a task lacks."""
    names = [TEST, *([TRAIN, VALIDATION] if tuning or not (root / task.name / f"{BOTH}.txt").is_file() else [])]
    lacking = [name for name in names if not (root / task.name / f"{name}.txt").is_file()]
    return [BOTH, TEST] if not (root / task.name).is_dir() else lacking


def open_task(root: Path, task: Task, *, tuning: bool = False) -> Data:
    """Open a task's data: 1,000 images to train on and the test set; for tuning, 800 and 200 of the 1,000."""
    folder = root / task.name
    if tuning:
        return Data(f"{task.name}, tuning", read_lists(folder, task, TRAIN), read_lists(folder, task, VALIDATION))
    names = (BOTH,) if (folder / f"{BOTH}.txt").is_file() else (TRAIN, VALIDATION)
    return Data(task.name, read_lists(folder, task, *names), read_lists(folder, task, TEST))


def read_lists(folder: Path, task: Task, *names: str) -> FileSource:
    """Open the images of one or more lists; a missing file is a GoneError."""
    pairs = [pair for name in names for pair in read_list(folder / f"{name}.txt", task.classes)]
    gone = [path for path, _ in pairs if not (folder / path).is_file()]
    if gone:
        raise GoneError(
            f"{len(gone)} of the {len(pairs)} images that {folder / names[0]}.txt lists are not there, such as "
            f"{folder / gone[0]}"
        )
    classes = tuple(str(i) for i in range(task.classes))
    return FileSource(folder, [path for path, _ in pairs], [label for _, label in pairs], classes)


def read_list(path: Path, classes: int) -> list[tuple[str, int]]:
    """Read (path, label) of every line; paths may contain spaces."""
    pairs = []
    for number, line in enumerate(read_text(path).splitlines(), 1):
        words = line.rsplit(maxsplit=1)
        if not words:
            continue
        if len(words) < 2 or not re.fullmatch("[0-9]{1,9}", words[1]):
            raise UserError(f"line {number} of {path} should be a path and a class number, not '{line[:80]}'")
        if int(words[1]) >= classes:
            raise UserError(f"line {number} of {path} has the class {words[1]}; there are 0 to {classes - 1}")
        pairs.append((words[0].strip(), int(words[1])))
    if not pairs:
        raise UserError(f"{path} lists no images")
    return pairs


def write_lists(
    folder: Path, paths: Sequence[str], labels: Sequence[int], seed: int = 0, *, test: Labeled | None = None
) -> None:
    """Write a task's four lists from images (paths below `folder`) and their labels.

    1,000 images are drawn by a hash of the seed and of their place in the sorted paths, so the order of `paths` does
    not matter. The rest is the test list, unless the data set has its own test split, to be given as `test`.
    """
    if len(paths) != len(labels) or len(set(paths)) != len(paths):
        raise UserError(f"write_lists needs a label for every path and every path once; {len(paths)} and {len(labels)}")
    if len(paths) < SIZES[BOTH] + (test is None):
        raise UserError(f"VTAB-1k takes {SIZES[BOTH]} images and something to test on; there are {len(paths)}")
    order = np.argsort(np.array(paths), kind="stable")
    drawn = order[np.argsort(keys(seed, SUBSET, np.arange(len(paths))), kind="stable")]
    cuts = {TRAIN: slice(0, 800), VALIDATION: slice(800, 1000), BOTH: slice(0, 1000)}
    pairs = [(paths[i], labels[i]) for i in drawn.tolist()]
    lists = {name: pairs[cut] for name, cut in cuts.items()}
    lists[TEST] = pairs[1000:] if test is None else list(zip(*test, strict=True))
    for name, some in lists.items():
        write_text(folder / f"{name}.txt", "".join(f"{path} {int(label)}\n" for path, label in sorted(some)))
