"""Match the classes of a data set to a model's: by name, and by position only where the model has no names."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitlab.data.rng import Ints
from vitlab.errors import UserError
from vitlab.files import read_text

Names = tuple[str, ...]

NAMED = 3  # classes that an error names


@dataclass(frozen=True)
class Match:
    """Names of the model's classes, and the index among them of each of the data set's classes."""

    names: Names  # (K,) in the model's order
    place: Ints  # (classes of the data set,)
    note: str  # how they were matched, for the reader


def match_classes(labels: Names | None, count: int, classes: Names) -> Match:
    """Match the `classes` of a data set to a model of `count` classes called `labels` (None: it has no names).

    Raises a UserError where a class is missing from the model or could be several of its classes.
    """
    if labels is None:
        return match_by_position(count, classes)
    if labels == classes:
        return Match(labels, np.arange(count), "by name, all of them")
    unknown = [name for name in classes if name not in labels]
    if unknown:
        raise UserError(
            f"the model lacks {len(unknown)} of the set's {len(classes)} classes: {quote_names(unknown)}; its own "
            f"are {quote_names(labels)}; if they are the same by other names, give these with --labels FILE"
        )
    twice = [name for name, times in Counter(labels).items() if times > 1 and name in classes]
    if twice:
        raise UserError(
            f"the model has several classes called {quote_names(twice)}, so it is unclear which of them the set's is; "
            "give them other names with --labels FILE, and the set's folders too"
        )
    number = {name: i for i, name in enumerate(labels)}
    place = np.array([number[name] for name in classes], np.int64)
    note = "by name" + (f"; the set has {len(classes)} of the model's {count}" if len(classes) < count else "")
    return Match(labels, place, note)


def match_by_position(count: int, classes: Names) -> Match:
    if count != len(classes):
        raise UserError(
            f"the model has {count} classes without names and the set has {len(classes)}, so it is unclear which is "
            "which; name the model's with --labels FILE"
        )
    ends = f"its first is taken for '{classes[0]}', its last for '{classes[-1]}'"
    return Match(classes, np.arange(count), f"by position, as the model has no class names: {ends}")


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
