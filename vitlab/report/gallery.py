"""Answers photo by photo: all mistakes, as far as they fit into the page, and some right answers, as thumbnails.

Shapes: n images.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from vitlab.data.rng import Ints
from vitlab.data.source import ImageSource
from vitlab.evaluation.result import Evaluation
from vitlab.report.images import square

SIDE = 112  # pixels of a thumbnail
WRONG = 600  # mistakes at most
OF_PAIR = 12  # mistakes of a pair of classes before others are chosen
RIGHT = 12  # right answers from either end: the least and the most confident
OF_CLASS = 4  # right answers of every class, for the diagonal of the confusion matrix
EXTRA = 200  # of all classes together
BYTES = 5_000_000  # of all thumbnails


@dataclass(frozen=True)
class Photo:
    """An image, its class and the answer, as numbers of classes."""

    file: str
    truth: int
    guess: int
    confidence: float
    image: str | None  # data: URL; None where it cannot be read any more


@dataclass(frozen=True)
class Gallery:
    """The photos of a page, and how many mistakes there are."""

    wrong: list[Photo]  # the most confident first
    least: list[Photo]  # right answers, the least confident first
    most: list[Photo]  # right answers, the most confident first
    others: list[Photo]  # right answers of every class
    mistakes: int


def make_gallery(tested: Evaluation, source: ImageSource, done: Callable[[int], None], room: int = BYTES) -> Gallery:
    """Read the photos again, until they fill the room in the page; `done(1)` is called after each mistake."""
    wrong, (least, most, others) = choose_mistakes(tested), choose_right(tested)
    thumbnails = Thumbnails(tested, source, room)
    ends = thumbnails.take(least), thumbnails.take(most)
    shown = thumbnails.take(wrong, done)
    shown.sort(key=lambda photo: -photo.confidence)
    return Gallery(shown, *ends, thumbnails.take(others), int((tested.guesses != tested.labels).sum()))


@dataclass
class Thumbnails:
    """Reads photos as long as there is room for them in the page."""

    tested: Evaluation
    source: ImageSource
    left: int  # bytes of data: URLs

    def take(self, images: Iterable[int], done: Callable[[int], None] = lambda _: None) -> list[Photo]:
        """The photos of images, as far as they fit."""
        photos = []
        for i in images:
            if self.left <= 0:
                break
            photo = self.photo(i)
            self.left -= len(photo.image or "")
            photos.append(photo)
            done(1)
        return photos

    def photo(self, i: int) -> Photo:
        tested = self.tested
        place = i if tested.index is None else int(tested.index[i])
        labels = int(tested.labels[i]), int(tested.guesses[i])
        return Photo(tested.files[i], *labels, float(tested.confidence[i]), square(self.source, place, SIDE))


def choose_mistakes(tested: Evaluation) -> list[int]:
    """Mistakes: a dozen of every pair of classes, the most frequent pairs first, then the next dozen, and so on.

    Those of a pair are in the order of their confidence.
    """
    wrong = np.flatnonzero(tested.guesses != tested.labels)
    wrong = wrong[np.argsort(-tested.confidence[wrong], kind="stable")]
    pairs = tested.labels[wrong] * len(tested.names) + tested.guesses[wrong]
    _, pair, sizes = np.unique(pairs, return_inverse=True, return_counts=True)
    return wrong[np.lexsort([pair, -sizes[pair], place_in_group(pairs) // OF_PAIR])][:WRONG].tolist()


def choose_right(tested: Evaluation) -> tuple[list[int], list[int], list[int]]:
    """The least and the most confident right answers, and further ones of every class; none of them twice."""
    right = np.flatnonzero(tested.guesses == tested.labels)
    right = right[np.argsort(tested.confidence[right], kind="stable")]
    least = right[:RIGHT]
    most = right[len(least) :][::-1][:RIGHT]
    ends = np.concatenate([least, most])
    place = place_in_group(tested.labels[right])
    chosen = right[np.argsort(place, kind="stable")][: int((place < OF_CLASS).sum())]
    others = chosen[~np.isin(chosen, ends)][:EXTRA]
    return least.tolist(), most.tolist(), others.tolist()


def place_in_group(groups: Ints) -> Ints:
    """Of each element the number of equal ones before it."""
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], groups[order])
    places = np.empty(len(groups), np.int64)
    places[order] = np.arange(len(groups)) - starts
    return places
