"""Which of a model's classes each class of a set is: by name, and by position only where nothing else can be meant."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitlab.data.rng import Ints
from vitlab.errors import UserError

NAMED = 3  # classes that an error names


@dataclass(frozen=True)
class Match:
    """Names of the model's classes, and the place of each of the set's classes among them."""

    names: tuple[str, ...]  # (K,) in the model's order
    place: Ints  # (classes of the set,)
    note: str  # how they were matched, in words


def match_classes(labels: tuple[str, ...] | None, count: int, classes: tuple[str, ...]) -> Match:
    """Match the `classes` of a set to a model of `count` classes called `labels` (None: the model has no names)."""
    if labels is None:
        return in_order(count, classes)
    if labels == classes:
        return Match(labels, np.arange(count), "by name, all of them")
    unknown = [name for name in classes if name not in labels]
    if unknown:
        raise UserError(
            f"the model does not know {len(unknown)} of the set's {len(classes)} classes: {quoted(unknown)}; its own "
            f"are {quoted(labels)}; if they are the same by other names, say so with --labels FILE"
        )
    twice = [name for name, times in Counter(labels).items() if times > 1 and name in classes]
    if twice:
        raise UserError(
            f"the model has several classes called {quoted(twice)}, so there is no telling which the set's is; give "
            "them other names with --labels FILE, and the set's folders too"
        )
    number = {name: i for i, name in enumerate(labels)}
    place = np.array([number[name] for name in classes], np.int64)
    note = "by name" + (f"; the set has {len(classes)} of the model's {count}" if len(classes) < count else "")
    return Match(labels, place, note)


def in_order(count: int, classes: tuple[str, ...]) -> Match:
    if count != len(classes):
        raise UserError(
            f"the model has {count} classes without names and the set has {len(classes)}, so there is no telling which "
            "is which; name the model's with --labels FILE"
        )
    ends = f"its first is taken for '{classes[0]}', its last for '{classes[-1]}'"
    return Match(classes, np.arange(count), f"by position, as the model has no class names: {ends}")


def read_names(path: Path, count: int) -> tuple[str, ...]:
    """Names for a model's classes: one a line, in the model's order."""
    try:
        names = tuple(line.strip() for line in path.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(names) != count:
        raise UserError(f"{path} has {len(names)} names, one a line, and the model has {count} classes")
    return names


def quoted(names: list[str] | tuple[str, ...]) -> str:
    """The first few, and how many more."""
    said = ", ".join(f"'{name}'" for name in names[:NAMED])
    return said if len(names) <= NAMED else f"{said} and {len(names) - NAMED} more"
