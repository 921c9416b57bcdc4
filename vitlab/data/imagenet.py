"""ImageNet's 1,000 classes in their order, by synset (n01440764) and by WordNet's names (tench, Tinca tinca).

The 21,843 classes of the authors' 21k weights have a synset and a first name each.
"""

import functools
import gzip
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitlab.data.rng import Ints

CLASSES, CLASSES_21K = 1000, 21_843
FILE = Path(__file__).with_name("imagenet.tsv")  # a synset and its names, a line for each class
FILE_21K = Path(__file__).with_name("imagenet21k.tsv.gz")  # written by benchmarks/imagenet21k_names.py
SECOND = {134: "crane bird", 639: "maillot tank suit"}  # whose first names are those of other classes


@functools.cache
def synsets() -> tuple[str, ...]:
    return tuple(line.partition("\t")[0] for line in FILE.read_text().splitlines())


@functools.cache
def class_names() -> tuple[str, ...]:
    """The names of each class, separated by commas; only the two cranes, 134 and 517, have the same."""
    return tuple(line.partition("\t")[2] for line in FILE.read_text().splitlines())


@functools.cache
def short_names() -> tuple[str, ...]:
    """One name for each class, as torchvision calls them; no two have the same."""
    return tuple(SECOND.get(i, names.partition(",")[0]) for i, names in enumerate(class_names()))


@functools.cache
def names_21k() -> tuple[str, ...]:
    """One name for each class of 21k; one that several have is followed by the synset."""
    pairs = [line.split("\t") for line in gzip.decompress(FILE_21K.read_bytes()).decode().splitlines()]
    times = Counter(name for _, name in pairs)
    return tuple(name if times[name] == 1 else f"{name} ({synset})" for synset, name in pairs)


@functools.cache
def _meanings() -> dict[str, list[int]]:
    """The classes that each word may mean: a class's synset, all its names, or the first of them."""
    found: dict[str, list[int]] = {}
    for i in range(CLASSES):
        for word in words_of(i):
            found.setdefault(word, []).append(i)
    return found


@functools.cache
def _known() -> dict[str, int]:
    """The class of each word that means one class alone."""
    return {word: meant[0] for word, meant in _meanings().items() if len(meant) == 1}


def words_of(number: int) -> set[str]:
    """What a class may be called."""
    names = class_names()[number]
    return {synsets()[number], names, names.partition(",")[0], short_names()[number]}


def unknown_names(names: Sequence[str]) -> list[str]:
    """The names that mean none of ImageNet's classes, or two of them."""
    return [name for name in names if name not in _known()]


def by_order(names: Sequence[str], numbers: list[int]) -> list[int]:
    """The numbers of names, those of ambiguous ones (-1) filled in: where the rest stands in ImageNet's order, as the
    classes of a subset do, the place of "crane" among them decides which of the two cranes it is."""
    certain = [number for number in numbers if number >= 0]
    if not certain or certain != sorted(certain):
        return numbers
    filled = list(numbers)
    for i, name in enumerate(names):
        if numbers[i] < 0:
            low = max((number for number in numbers[:i] if number >= 0), default=-1)
            high = min((number for number in numbers[i:] if number >= 0), default=CLASSES)
            fitting = [number for number in _meanings().get(name, []) if low < number < high]
            filled[i] = fitting[0] if len(fitting) == 1 else -1
    return filled


def class_numbers(names: Sequence[str]) -> Ints | None:
    """The place of each class in ImageNet's order; None unless each is one of ImageNet's, and no two are the same."""
    if len(names) == CLASSES and all(name in words_of(i) for i, name in enumerate(names)):
        return np.arange(CLASSES)  # the cranes, too, are known by their places
    numbers = by_order(names, [_known().get(name, -1) for name in names])
    return None if -1 in numbers or len(set(numbers)) < len(numbers) else np.array(numbers, np.int64)
