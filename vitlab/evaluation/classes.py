"""Match the classes of a data set to a model's: by name, by ImageNet's synsets, by number; by position or a mapping."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitlab.data import imagenet
from vitlab.data.labels import are_numbers
from vitlab.data.rng import Ints
from vitlab.errors import UserError
from vitlab.files import read_text

Names = tuple[str, ...]

NAMED = 3  # classes that an error names


@dataclass(frozen=True)
class Match:
    """Names of the model's classes, and the index among them of each of the data set's classes."""

    names: Names  # (K,) in the model's order
    place: Ints  # (classes of the data set,); -1: a mapping leaves the class out
    note: str  # how they were matched, for the reader
    several: Mapping[int, Ints] = field(default_factory=dict)  # all the indices of a class that has more than one


def match_classes(labels: Names | None, count: int, classes: Names, *, by_position: bool = False) -> Match:
    """Match the `classes` of a data set to a model of `count` classes called `labels` (None: it has no names).

    Names that are the same match, then synsets and names of ImageNet's classes, then numbers, where the model's classes
    have only these. Where nothing matches, `by_position` takes the set's classes for the model's in order; without it
    that is a UserError, as is a class that could be several of the model's.
    """
    if labels == classes:
        return Match(labels, np.arange(count), "by name, all of them")
    if labels is not None and set(classes) <= set(labels):
        return match_by_name(labels, classes)
    found = match_imagenet(labels, count, classes) or match_numbers(labels, count, classes)
    if found is not None:
        return found
    if by_position and count == len(classes):
        ends = f"the model's first is taken for '{classes[0]}', its last for '{classes[-1]}'"
        return Match(labels or classes, np.arange(count), f"by position, as asked: {ends}")
    raise UserError(describe_mismatch(labels, count, classes))


def match_by_name(labels: Names, classes: Names) -> Match:
    twice = [name for name, times in Counter(labels).items() if times > 1 and name in classes]
    if twice:
        raise UserError(
            f"the model has several classes called {quote_names(twice)}, so it is unclear which of them the set's is; "
            "give them other names with --labels FILE, and the set's folders too"
        )
    number = {name: i for i, name in enumerate(labels)}
    return Match(labels, np.array([number[name] for name in classes], np.int64), "by name" + share(labels, classes))


def match_imagenet(labels: Names | None, count: int, classes: Names) -> Match | None:
    """Match by ImageNet's class, which two names may mean; None where a side has other classes than ImageNet's."""
    model, data = imagenet_order(labels, count), imagenet.class_numbers(classes)
    if model is None or data is None:
        return None
    place = {number: i for i, number in enumerate(model.tolist())}
    if any(number not in place for number in data.tolist()):
        return None
    names = labels or imagenet.class_names()
    found = np.array([place[number] for number in data.tolist()], np.int64)
    return Match(names, found, "by ImageNet's classes" + share(names, classes))


def imagenet_order(labels: Names | None, count: int) -> Ints | None:
    """The place in ImageNet's order of each of a model's classes; 1,000 without names are in that order."""
    if has_names(labels, count):
        return imagenet.class_numbers(labels or ())
    return np.arange(count) if count == imagenet.CLASSES else None


def has_names(labels: Names | None, count: int) -> bool:
    """Whether a model's classes are called anything but their numbers."""
    return labels is not None and labels != tuple(map(str, range(count)))


def match_numbers(labels: Names | None, count: int, classes: Names) -> Match | None:
    """Match classes called by numbers to those of a model without names, or of ImageNet's; None for any others."""
    order = imagenet_order(labels, count)
    is_imagenet = order is not None and np.array_equal(order, np.arange(imagenet.CLASSES))
    if not are_numbers(classes) or (has_names(labels, count) and not is_imagenet):
        return None
    place = [int(name) for name in classes]
    if max(place) >= count or len(set(place)) < len(place):
        return None
    names = labels or tuple(map(str, range(count)))
    return Match(names, np.array(place, np.int64), "by number, the first class being 0" + share(names, classes))


def share(labels: Names, classes: Names) -> str:
    few = len(classes) < len(labels)
    return f"; the set has {len(classes)} of the model's {len(labels)}" if few else ""


def describe_mismatch(labels: Names | None, count: int, classes: Names) -> str:
    strange = imagenet.unknown_names(classes)
    if strange and imagenet_order(labels, count) is not None and len(strange) < len(classes) / 2:
        what = f"{len(strange)} of the set's {len(classes)} classes are none of ImageNet's, or may be two of them: "
        return what + f"{quote_names(strange)}; call them by their synsets, as in n01440764"
    if labels is None:
        what = f"the model has {count} classes without names and the set has {len(classes)}, {quote_names(classes)}, "
        what += "so it is unclear which is which; name the model's with --labels FILE"
    else:
        known = set(labels)
        unknown = [name for name in classes if name not in known]
        what = f"the model lacks {len(unknown)} of the set's {len(classes)} classes: {quote_names(unknown)}; its own "
        what += f"are {quote_names(labels)}; if they are the same by other names, give these with --labels FILE"
    return what + (", or add --by-position if the order is the same" if count == len(classes) else "")


def read_names(path: Path, count: int) -> Names:
    """Read the names of a model's `count` classes from a file: one a line, in the model's order."""
    names = tuple(line.strip() for line in read_text(path).splitlines() if line.strip())
    if len(names) != count:
        raise UserError(f"{path} has {len(names)} names, one a line, and the model has {count} classes")
    return names


def quote_names(names: Sequence[str]) -> str:
    return first_few([f"'{name}'" for name in names])


def first_few(words: Sequence[str]) -> str:
    """The first three words, and how many more there are."""
    few = ", ".join(words[:NAMED])
    return few if len(words) <= NAMED else f"{few} and {len(words) - NAMED} more"
