"""What is worth a look in a data set, from features and logits that are computed anyway: labels that are probably
wrong, one photo under two labels, copies within a split and across splits, and images unlike all others.

**Labels.** The logits must come from models that have not seen the image: by cross-validation, or from a model of the
training images for all others. The doubt about a label is how far another class's logit is above its own, which is the
log of their odds. A wrong label usually has next to no probability, while a mistake of the model leaves the true class
some, so odds rank better than the probability itself, than its distance to thresholds by class (confident learning)
and than votes of neighbors: `benchmarks/review.py` compares them.

**Copies.** Features alone do not decide: strong compression changes them as much as another photo of the same animal
does. So they only propose pairs, by cosine, and small gray versions of both images decide, by their correlation over
slight crops and reflections.

**Outliers** are unlike their own class and all others: the cosine to the nearest mean of a class, all relative to the
mean of the set, is far below that of other images. (Distances to neighbors would miss outliers that resemble each
other.)

Nothing here holds n x n numbers: neighbors are found block by block.

Shapes: n images, D width of the features, K classes, k neighbors, v views of an image.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlab.data.images import BrokenImage
from vitlab.data.review_file import Finding
from vitlab.data.rng import Floats, Ints
from vitlab.data.source import ImageSource, Subset
from vitlab.evaluation.extract import Features
from vitlab.evaluation.neighbors import nearest
from vitlab.evaluation.piece_cache import Values
from vitlab.terminal import progress

LABEL, TWO_LABELS, TWO_SPLITS, COPY, OUTLIER = "label", "two labels", "two splits", "copy", "outlier"
PROBLEMS = (LABEL, TWO_LABELS, TWO_SPLITS, COPY, OUTLIER)
LISTED = 0.1  # share of the images whose labels are listed, at most
NEIGHBORS, CHUNK = 5, 4096
FEW = 20  # images, of which none is called an outlier
UNUSUAL = 3.0  # deviations of a robust kind from the median, at which an image is an outlier

PROPOSED = 0.75  # cosine at which two images may be copies
CHECKED = 4_000  # images that are read again to compare them, at most; the most similar first
COMPARED = 1_000  # pairs that are compared crop by crop, at most; where images are as alike as digits, most would be
ROUGH, SAME = 0.6, 0.97  # correlation of gray versions: below the first no view is tried, from the second on, copies
SIDE, CANVAS = 24, 96  # pixels of a view, and of the version that it is cut from
SCALES, PLACES = (0.95, 0.9), (0.0, 0.25, 0.5, 0.75, 1.0)  # of the crops that are tried

Views = NDArray[np.float32]
Pixels = NDArray[np.uint8]  # (CANVAS, CANVAS)
Pair = tuple[int, int, float]  # two images and how much they are alike


@dataclass(frozen=True)
class Part:
    """The images of one split that are reviewed."""

    split: str
    source: ImageSource  # of n images: those that have a row in `values`
    values: Values  # (n, D) features
    logits: Values | None  # (n, K) of models that have not seen the image; None: labels are not judged


def make_part(split: str, source: ImageSource, found: Features, logits: Values | None) -> Part:
    """A split as `extract` has its features; images without a row, which cannot be read, are left out."""
    images = source if found.index is None else Subset(source, found.index)
    return Part(split, images, found.values, logits)


def review(parts: Sequence[Part], classes: Sequence[str]) -> list[Finding]:
    """Everything worth a look, by problem and from the worst down; with a progress bar."""
    images = Reviewed(parts, classes)
    cosines, near = images.neighbors(NEIGHBORS)
    found = [images.finding(i, LABEL, score, int(guess)) for i, score, guess in doubtful_labels(images)]
    pairs = find_copies(images, cosines, near)
    found += [finding for pair in pairs for finding in images.copy_findings(*pair)]
    found += [images.finding(i, OUTLIER, score) for i, score in find_outliers(images.values, images.labels)]
    order = {problem: place for place, problem in enumerate(PROBLEMS)}
    return sorted(found, key=lambda finding: (order[finding.problem], -finding.score))


def review_test(parts: Sequence[Part], test: Part, classes: Sequence[str]) -> list[Finding]:
    """Copies of test images among those of other parts, from the most alike down; with a progress bar.

    Apart from `review`, so that the test images are not looked at before everything is chosen.
    """
    images = Reviewed([*parts, test], classes)
    n, start = len(images.values), int(images.starts[-2])
    k = min(NEIGHBORS, start)
    cosines, near = np.full((n, k), np.nan), np.full((n, k), -1)
    found = nearest(images.values[:start], images.values[start:], k)
    cosines[start:], near[start:] = (x.numpy() for x in found)
    pairs = sorted(find_copies(images, cosines, near), key=lambda pair: -pair[2])
    return [finding for pair in pairs for finding in images.copy_findings(*pair)]


class Reviewed:
    """The images of all parts, one after another."""

    def __init__(self, parts: Sequence[Part], classes: Sequence[str]) -> None:
        self.parts, self.classes = parts, classes
        self.starts = np.cumsum([0, *(len(part.values) for part in parts)])
        self.values = np.concatenate([part.values for part in parts])
        self.labels = np.concatenate([part.source.labels for part in parts])

    def find(self, index: int) -> tuple[Part, int]:
        """The part of an image and its index there."""
        number = int(np.searchsorted(self.starts, index, "right")) - 1
        return self.parts[number], index - int(self.starts[number])

    def name(self, index: int) -> str:
        part, place = self.find(index)
        return part.source.name(place)

    def neighbors(self, k: int) -> tuple[Floats, Ints]:
        """Cosines and indices of the k images most similar to each, highest first, (n, k); nan and -1 for none."""
        n = len(self.values)
        cosines, index = (x.numpy() for x in nearest(self.values, self.values, min(k + 1, n)))
        others = index != np.arange(n)[:, None]
        others[others.all(1), -1] = False  # of more than k equal images, each one's own place may be missing
        width = index.shape[1] - 1
        padding = ((0, 0), (0, k - width))
        cosines = np.pad(cosines[others].reshape(n, width), padding, constant_values=np.nan).astype(np.float64)
        return cosines, np.pad(index[others].reshape(n, width), padding, constant_values=-1)

    def finding(
        self, index: int, problem: str, score: float, suggested: int | None = None, other: int | None = None
    ) -> Finding:
        part, _ = self.find(index)
        return Finding(
            path=self.name(index),
            split=part.split,
            label=self.classes[self.labels[index]],
            suggested="" if suggested is None else self.classes[suggested],
            problem=problem,
            score=score,
            other="" if other is None else self.name(other),
        )

    def copy_findings(self, i: int, j: int, score: float) -> list[Finding]:
        """What a pair of copies means: with two labels both are listed, else the one in train, or the later one."""
        i, j = min(i, j), max(i, j)
        if self.labels[i] != self.labels[j]:
            return [self.finding(a, TWO_LABELS, score, int(self.labels[b]), b) for a, b in ((i, j), (j, i))]
        if self.find(i)[0].split != self.find(j)[0].split:
            return [self.finding(i, TWO_SPLITS, score, other=j)]
        return [self.finding(j, COPY, score, other=i)]


# ---- labels


def doubt(logits: Values, labels: Ints) -> tuple[Floats, Ints]:
    """How far the best other class is above an image's own, in logits, (n,), and which class that is, (n,)."""
    rows = np.arange(len(labels))
    others = logits.astype(np.float64)
    own = others[rows, labels]
    others[rows, labels] = -np.inf
    guess = others.argmax(1)
    return others[rows, guess] - own, guess


def doubtful_labels(images: Reviewed) -> Iterable[tuple[int, float, int]]:
    """Images whose label is less likely than another class: index, odds of the other as a share, and that class."""
    for part, start in zip(images.parts, images.starts.tolist(), strict=False):
        if part.logits is not None and len(images.classes) > 1:
            above, guess = doubt(part.logits, part.source.labels)
            order = np.argsort(-above, kind="stable")[: max(1, round(LISTED * len(above)))]
            for i in order[above[order] > 0].tolist():
                yield start + i, float(1 / (1 + np.exp(-above[i]))), int(guess[i])


# ---- outliers


def find_outliers(values: Values, labels: Ints) -> list[tuple[int, float]]:
    """Images unlike every class, of features (n, D): index, and one minus the cosine to the nearest class."""
    classes, own = np.unique(labels, return_inverse=True)
    if len(classes) < 2 or len(values) <= FEW:
        return []
    nearest_class = class_cosines(values, own, len(classes))
    middle = np.median(nearest_class)
    deviation = 1.4826 * np.median(np.abs(nearest_class - middle))  # that of a normal distribution
    far = np.flatnonzero(nearest_class < middle - UNUSUAL * max(deviation, 1e-6))
    return [(i, float(np.clip(1 - nearest_class[i], 0, 1))) for i in far.tolist()]


def class_cosines(values: Values, labels: Ints, classes: int) -> Floats:
    """The cosine of each image to the mean of its nearest class, (n,), relative to the mean of all; not to itself."""
    center = values.mean(0, dtype=np.float64)
    counts, sums = np.bincount(labels, minlength=classes), np.zeros((classes, values.shape[1]))
    parts = range(0, len(values), CHUNK)
    for start in parts:
        np.add.at(sums, labels[start : start + CHUNK], values[start : start + CHUNK] - center)
    means, best = unit(sums), np.empty(len(values))
    for start in parts:
        rows, own = values[start : start + CHUNK] - center, labels[start : start + CHUNK]
        cosines = unit(rows) @ means.T
        left_out = unit(sums[own] - rows)  # its class without the image itself
        cosines[np.arange(len(own)), own] = np.where(counts[own] > 1, (unit(rows) * left_out).sum(1), -1)
        best[start : start + CHUNK] = cosines.max(1)
    return best


def unit(rows: Floats) -> Floats:
    return rows / np.maximum(1e-12, np.linalg.norm(rows, axis=1, keepdims=True))


# ---- copies


@dataclass(frozen=True)
class Canvas:
    """A small gray version of an image."""

    pixels: Pixels
    full: Views  # (2, SIDE²): all of it, and its reflection


def find_copies(images: Reviewed, cosines: Floats, near: Ints) -> list[Pair]:
    """Pairs among neighbors (n, k) that are the same but for compression, size, a slight crop or a reflection."""
    rows, places = np.nonzero(cosines >= PROPOSED)
    order = np.argsort(-cosines[rows, places], kind="stable")
    proposed = dict.fromkeys(
        (min(i, j), max(i, j)) for i, j in zip(rows[order].tolist(), near[rows, places][order].tolist(), strict=True)
    )
    canvases: dict[int, Canvas | None] = {}  # with what every comparison needs, so that it is computed once
    pairs, left = [], COMPARED
    with progress("copies", len(proposed)) as advance:
        for i, j in proposed:
            new = [index for index in (i, j) if index not in canvases]
            if len(canvases) + len(new) <= CHECKED:
                canvases |= {index: canvas(images, index) for index in new}
            one, other = canvases.get(i), canvases.get(j)
            if one is not None and other is not None:
                score = alike(one, other)
                if ROUGH <= score < SAME and left:
                    score, left = alike_in_crops(one, other), left - 1
                if score >= SAME:
                    pairs.append((i, j, score))
            advance(1)
    return pairs


def canvas(images: Reviewed, index: int) -> Canvas | None:
    """A small gray version of an image, stretched to a square; None where it cannot be read any more."""
    part, place = images.find(index)
    try:
        image = part.source.image(place, lambda size: min(size) / CANVAS)
    except BrokenImage:
        return None
    return make_canvas(np.asarray(image.convert("L").resize((CANVAS, CANVAS), Image.Resampling.BOX)))


def make_canvas(pixels: Pixels) -> Canvas:
    return Canvas(pixels, np.concatenate([views(turned, FULL) for turned in (pixels, pixels[:, ::-1])]))


def alike(one: Canvas, other: Canvas) -> float:
    """The higher correlation of one image with the other and with its reflection."""
    return float((one.full[0] @ other.full.T).max())


def alike_in_crops(one: Canvas, other: Canvas) -> float:
    """The highest correlation of one image with a slight crop of the other or its reflection, or the reverse.

    The crops lie symmetrically, so those of the reflection are the reflections of the crops.
    """
    return max(float((views(a.pixels, CROPS) @ b.full.T).max()) for a, b in ((one, other), (other, one)))


def views(image: Pixels, strips: Sequence[Views]) -> Views:
    """Crops of a canvas, (v, SIDE²), of mean zero and length one, so that products are correlations.

    `strips` are matrices (p, SIDE, CANVAS), one for each size of a crop, that take means over p places along a side.
    """
    pixels, found = image.astype(np.float32), []
    for strip in strips:
        sides = strip.reshape(-1, CANVAS)  # all places at once: one large product is faster than many small ones
        grid = (sides @ pixels @ sides.T).reshape(len(strip), SIDE, len(strip), SIDE)
        found.append(grid.swapaxes(1, 2).reshape(-1, SIDE * SIDE))
    rows = np.concatenate(found)
    rows -= rows.mean(1, keepdims=True)
    return np.asarray(rows / np.maximum(1e-3, np.linalg.norm(rows, axis=1, keepdims=True)), np.float32)


def strip(scale: float, places: Sequence[float]) -> Views:
    """Means over SIDE equal lengths of a part of CANVAS pixels, as matrices (p, SIDE, CANVAS) for p places of it."""
    length = CANVAS * scale / SIDE
    pixels = np.arange(CANVAS)
    starts = (CANVAS * (1 - scale) * np.array(places))[:, None] + length * np.arange(SIDE)  # (p, SIDE)
    low, high = np.maximum(starts[..., None], pixels), np.minimum(starts[..., None] + length, pixels + 1)
    return (np.maximum(0, high - low) / length).astype(np.float32)


FULL = [strip(1, [0])]
CROPS = [strip(scale, PLACES) for scale in SCALES]
