"""Class mappings: each class of a data set stands for one or several of the model's, as ObjectNet's for ImageNet's.

A mapping is a JSON object from the data set's classes to the model's, by anything that names these: a name, a synset, a
number, a list of them, or one text with semicolons between them, as in ObjectNet's own file. Images of other classes
are left out. An image's true class is then the one of its classes that the model scores highest: so the first guess is
right exactly where it is one of them, and so are the first five.

Shapes: n images, K classes of the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.rng import Ints
from vitlab.data.source import ImageSource, Subset
from vitlab.errors import UserError
from vitlab.evaluation.classes import Match, Names, match_classes, quote_names
from vitlab.evaluation.piece_cache import Values
from vitlab.files import read_json
from vitlab.text import brief


@dataclass(frozen=True)
class ClassMapping:
    """Words for the model's classes, by the data set's class."""

    source: str  # its file, for messages
    words: Mapping[str, Names]


def read_mapping(path: Path) -> ClassMapping:
    """Read a mapping from a file; UserError where it is not one."""
    try:
        stored = read_json(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {brief(error)}") from None
    words = {name: tuple(dict.fromkeys(read_words(path, name, value))) for name, value in stored.items()}
    if not words:
        raise UserError(
            f'{path} maps no class; write the set\'s classes and the model\'s, {{"cat": ["tabby", "lynx"]}}'
        )
    return ClassMapping(str(path), words)


def read_words(path: Path, name: str, value: Any) -> list[str]:
    """The words for the model's classes in one entry."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(type(each) in (str, int) for each in values):
        raise UserError(f"{path} maps '{name}' to {value!r}; write a class of the model, or a list of them")
    found = [word.strip() for each in values for word in str(each).split(";")]
    if "" in found:
        raise UserError(f"{path} maps '{name}' to a class without a name; write a class of the model")
    return found


def match_mapping(mapping: ClassMapping, labels: Names | None, count: int, classes: Names) -> Match:
    """Match classes by a mapping; UserError where it names none of the set's, or one that the model does not have."""
    known = [name for name in classes if name in mapping.words]
    if not known:
        theirs = f"its classes are {quote_names(list(mapping.words))}, and the set's {quote_names(classes)}"
        raise UserError(f"{mapping.source} maps no class of the set: {theirs}")
    place = {}
    for word in dict.fromkeys(word for name in known for word in mapping.words[name]):
        try:  # each by itself, as two words may mean one class
            match = match_classes(labels, count, (word,))
        except UserError:
            own = f"whose classes are {quote_names(labels)}" if labels else f"whose {count:,} classes have no names"
            fix = "write names, synsets or numbers of its own"
            raise UserError(
                f"{mapping.source} names '{word}', which is not one class of the model, {own}; {fix}"
            ) from None
        place[word] = int(match.place[0])
    found = [[place[word] for word in mapping.words.get(name, ())] for name in classes]
    several = {i: np.unique(places) for i, places in enumerate(found) if len(places) > 1}
    note = f"by {mapping.source}: {len(known):,} of the set's {len(classes):,} are {len(set(place.values())):,} of the"
    note += f" model's {count:,}" + ("; images of others are left out" if len(known) < len(classes) else "")
    first = np.array([places[0] if places else -1 for places in found], np.int64)
    return Match(match.names, first, note, several)


def mapped_images(source: ImageSource, match: Match) -> ImageSource:
    """The images whose classes are matched."""
    kept = match.place[source.labels] >= 0
    if kept.all():
        return source
    if not kept.any():
        raise UserError("the mapping leaves out every image; map a class that has some")
    return Subset(source, np.flatnonzero(kept))


def true_classes(logits: Values, labels: Ints, match: Match) -> Ints:
    """The model's class of each image (n,), from the data set's; of several, the one with the highest logit."""
    found = match.place[labels]
    for label, places in match.several.items():
        rows = np.flatnonzero(labels == label)
        found[rows] = places[logits[np.ix_(rows, places)].argmax(1)]
    return found


def matched_places(match: Match) -> Ints:
    """All the model's classes that a match has, ascending."""
    return np.unique(np.concatenate([match.place[match.place >= 0], *match.several.values()]))


def restrict(logits: Values, labels: Ints, match: Match) -> tuple[Values, Ints, Match]:
    """Logits, labels and match with those of the model's classes alone that are matched, as if it had no others."""
    places = matched_places(match)
    note = f"{match.note}; all guesses are among these {len(places):,} classes"
    fewer = replace(match, names=tuple(match.names[i] for i in places.tolist()), note=note)
    return logits[:, places], np.searchsorted(places, labels), fewer
