"""ImageNet ReaL: for each validation image, the list of all classes that annotators saw in it, as class numbers.

A prediction is correct if it is in its image's list. Images with an empty list are skipped. An image is identified by
the number in its file name: ILSVRC2012_val_00000001.JPEG has the first list.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

from vitlab.data.imagenet import CLASSES
from vitlab.data.images import EXTENSIONS
from vitlab.data.rng import Ints
from vitlab.errors import UserError
from vitlab.evaluation.scores import Rate, rate

# ILSVRC2012_val_00000001, the same with a synset after it, or a bare number; a training image is called n01440764_10026
NUMBER = re.compile(r"(?:^|.*_)val_(\d+)(?:_n\d{8})?|(\d+)")

Lists = Sequence[Sequence[int]]


@dataclass(frozen=True)
class RealScore:
    """How many images have a list with entries, and of how many of these the prediction is in the list."""

    images: int
    correct: int
    skipped: int  # images with an empty list
    own: int  # images whose label in the data set is in the list

    @property
    def accuracy(self) -> Rate:
        return rate(self.correct, self.images)


def score_real(guesses: Ints, labels: Ints, lists: Lists, numbers: Ints) -> RealScore:
    """Compare predictions and labels (n,) to the lists of the images' `numbers` (n,); all empty is a UserError."""
    rows = zip(guesses.tolist(), labels.tolist(), [lists[i] for i in numbers.tolist()], strict=True)
    judged = [(guess in seen, label in seen) for guess, label, seen in rows if seen]
    if not judged:
        raise UserError(f"the ReaL lists of all {len(numbers)} images are empty, so there is nothing to count")
    correct, own = (sum(hits) for hits in zip(*judged, strict=True))
    return RealScore(len(judged), correct, len(numbers) - len(judged), own)


def image_numbers(names: Sequence[str], count: int) -> Ints:
    """Return the index (n,) of each image in a file of `count` lists; two images of one number are a UserError."""
    numbers: dict[int, str] = {}
    for name in names:
        number = image_number(name, count)
        if other := numbers.get(number):
            raise UserError(
                f"{other} and {name} have the same number; ReaL is about ImageNet's validation images, where each has "
                "its own"
            )
        numbers[number] = name
    return np.array(list(numbers), np.int64)


def image_number(name: str, count: int) -> int:
    """Return the index of an image among `count` lists, by the number in its file name."""
    file = PurePath(name.removesuffix(")"))  # rows of parquet files end in "(path)"
    stem = re.split(r"[\\/ (]", file.stem)[-1]
    match = NUMBER.fullmatch(stem) if file.suffix.lower() in EXTENSIONS else None
    if match is None:
        raise UserError(
            f"the name of {name} has no number of an ImageNet validation image; ReaL needs names such as "
            "ILSVRC2012_val_00000001.JPEG"
        )
    number = int(match[1] or match[2])
    if not 1 <= number <= count:
        raise UserError(f"{name} has the number {number}, and the file of ReaL labels has {count:,} lists, from 1 on")
    return number - 1


def read_real(path: Path) -> list[list[int]]:
    """Read and check the lists of a real.json."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON ({error}); it should be the real.json of ImageNet ReaL") from None
    if not isinstance(data, list) or not data:
        raise UserError(f"{path} should be a list of lists of class numbers, one for each validation image")
    for place, entry in enumerate(data):
        if not isinstance(entry, list) or not all(type(number) is int and 0 <= number < CLASSES for number in entry):
            raise UserError(
                f"entry {place} of {path} should be a list of class numbers from 0 to {CLASSES - 1}, not "
                f"{json.dumps(entry)[:60]}"
            )
    return data
