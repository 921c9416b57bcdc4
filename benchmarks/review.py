"""How well the review of a data set finds what is wrong with it: python -m benchmarks.review DATA WEIGHTS --keep FOLDER

DATA is a folder with the sets pets, flowers and tiny-imagenet. Labels: 5 % of them are flipped, to any other class or
to the class whose mean is nearest, and the share of the flipped ones in the first 10 % of each ranking is counted, over
three seeds. Copies: some photos are recompressed, resized, cropped or reflected, and the share that is found counts.
Outliers: 20 photos of another set are put among those of a set under labels drawn at random.
"""

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from PIL import Image
from rich.console import Console
from rich.table import Table

from vitlab.data.open import open_data
from vitlab.data.rng import Floats, Ints
from vitlab.data.source import ImageSource, Subset
from vitlab.evaluation.extract import Features, extract
from vitlab.evaluation.neighbors import nearest
from vitlab.evaluation.piece_cache import Values
from vitlab.evaluation.probe import logistic
from vitlab.evaluation.review import Part, Reviewed, class_cosines, doubt, find_copies, find_outliers
from vitlab.evaluation.scores import softmax
from vitlab.models.variants import Model
from vitlab.weights import load

SEEDS, FOLDS, SHARE, FIRST = 3, 5, 0.05, 0.1
PENALTIES = (1e-2, 1e-1, 1.0)
STRANGE = 20  # photos of another set
COPIES = 40  # photos of which copies are made

Change = Callable[[Image.Image], Image.Image]


def open_sets(folder: Path) -> dict[str, ImageSource]:
    """Pets, 40 a class; flowers, the official 10 a class; 20 classes of Tiny-ImageNet, 40 a class."""
    tiny = open_data(str(folder / "tiny-imagenet"), per_class=40).train
    return {
        "pets": open_data(str(folder / "pets"), per_class=40).train,
        "flowers": open_data(str(folder / "flowers")).train,
        "tiny-imagenet": Subset(tiny, np.flatnonzero(tiny.labels % 10 == 0)),
    }


# ---- labels


def held_out_logits(values: Values, labels: Ints, classes: int, l2: float) -> Values:
    """Logits of each image by a probe of the other folds, (n, K)."""
    fold = np.empty(len(labels), np.int64)
    for k in range(classes):
        own = np.flatnonzero(labels == k)
        fold[np.random.default_rng(k).permutation(own)] = np.arange(len(own)) % FOLDS
    logits = np.empty((len(labels), classes), np.float32)
    for i in range(FOLDS):
        seen = fold != i
        logits[~seen] = logistic(values[seen], labels[seen], classes, l2).scores(values[~seen]).numpy()
    return logits


def best_penalty(values: Values, labels: Ints, classes: int) -> float:
    """The penalty whose guesses agree most often with the labels."""
    tried = {l2: held_out_logits(values, labels, classes, l2).argmax(1) == labels for l2 in PENALTIES}
    return max(PENALTIES, key=lambda l2: float(tried[l2].mean()))


def flip_labels(found: Features, classes: int, near: bool, seed: int) -> tuple[Ints, Ints]:
    """Labels of which 5 % are wrong, and which those are."""
    rng, labels = np.random.default_rng(seed), found.labels.copy()
    wrong = rng.choice(len(labels), round(SHARE * len(labels)), replace=False)
    if near:
        means = np.stack([found.values[labels == k].mean(0) for k in range(classes)])
        labels[wrong] = nearest(means, means, 2)[1].numpy()[:, 1][labels[wrong]]
    else:
        labels[wrong] = (labels[wrong] + rng.integers(1, classes, len(wrong))) % classes
    return labels, wrong


def rankings(values: Values, logits: Values, labels: Ints) -> dict[str, Floats]:
    """Scores that are higher the more a label is doubted, (n,), of several methods."""
    rows, likely = np.arange(len(labels)), softmax(logits.astype(np.float64).astype(np.float32)).astype(np.float64)
    own = likely[rows, labels]
    usual = np.array([likely[labels == k, k].mean() for k in range(likely.shape[1])])
    others = likely.copy()
    others[rows, labels] = -1
    above = likely - usual  # confident learning: relative to what is usual for the class
    beyond = above.copy()
    beyond[rows, labels] = -np.inf
    near = nearest(values, values, 11)[1].numpy()[:, 1:]
    return {
        "log-odds (vitlab)": doubt(logits, labels)[0],
        "low probability": -own,
        "margin of probability": others.max(1) - own,
        "margin beyond usual": beyond.max(1) - above[rows, labels],
        "10 neighbors": (labels[near] != labels[:, None]).mean(1) - 1e-3 * own,
    }


def measure_labels(found: Features, near: bool) -> tuple[float, dict[str, float]]:
    """The accuracy of the held-out guesses, and the mean share of flipped labels that each ranking has first."""
    present, labels = np.unique(found.labels, return_inverse=True)
    found, classes = Features(found.values, labels), len(present)
    shares: dict[str, list[float]] = {}
    right = []
    l2 = best_penalty(found.values, flip_labels(found, classes, near, 0)[0], classes)
    for seed in range(SEEDS):
        given, wrong = flip_labels(found, classes, near, seed)
        logits = held_out_logits(found.values, given, classes, l2)
        right.append(float((logits.argmax(1) == labels).mean()))
        for name, scores in rankings(found.values, logits, given).items():
            first = np.argsort(-scores, kind="stable")[: int(FIRST * len(given))]
            shares.setdefault(name, []).append(len(np.intersect1d(first, wrong)) / len(wrong))
    return float(np.mean(right)), {name: float(np.mean(each)) for name, each in shares.items()}


# ---- copies


def jpeg(quality: int) -> Change:
    def change(image: Image.Image) -> Image.Image:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        return Image.open(file).convert("RGB")

    return change


def crop(share: float) -> Change:
    def change(image: Image.Image) -> Image.Image:
        wide, high = image.width * (1 - share), image.height * (1 - share)
        box = 0.3 * wide, 0.7 * high, image.width - 0.7 * wide, image.height - 0.3 * high
        return image.crop(tuple(round(side) for side in box))  # type: ignore[arg-type]

    return change


CHANGES: dict[str, Change] = {
    "equal": lambda image: image,
    "JPEG 75": jpeg(75),
    "JPEG 40": jpeg(40),
    "half size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS),
    "double size": lambda image: image.resize((2 * image.width, 2 * image.height), Image.Resampling.BICUBIC),
    "95 % of each side": crop(0.95),
    "90 % of each side": crop(0.9),
    "reflected": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


class Changed(ImageSource):
    """The images of a source, changed."""

    def __init__(self, source: ImageSource, change: Change) -> None:
        super().__init__(source.truth, source.classes)
        self.source, self.change = source, change

    def name(self, index: int) -> str:
        return f"changed {self.source.name(index)}"

    def image(self, index: int, shrink: object = None) -> Image.Image:
        return self.change(self.source.image(index))


def measure_copies(model: Model, source: ImageSource, values: Values) -> Iterator[tuple[str, float, int]]:
    """For each change, the share of copies found, and how many other pairs of the set are called copies."""
    chosen = np.arange(0, len(source), len(source) // COPIES)[:COPIES]
    for name, change in CHANGES.items():
        copies = Changed(Subset(source, chosen), change)
        features = extract(model, copies, device="cpu", title=name).values
        images = Reviewed([Part("train", source, values, None), Part("test", copies, features, None)], source.classes)
        pairs = {(i, j) for i, j, _ in find_copies(images, *images.neighbors(5))}
        hits = sum((int(i), len(source) + place) in pairs for place, i in enumerate(chosen))
        yield name, hits / len(chosen), sum(j < len(source) for _, j in pairs)


# ---- outliers


def measure_outliers(found: Features, other: Features, seed: int) -> tuple[int, int, int]:
    """Of the strange photos, those among as many first and those listed; and the length of the list."""
    rng = np.random.default_rng(seed)
    strange = rng.choice(len(other.values), STRANGE, replace=False)
    values = np.concatenate([found.values, other.values[strange]])
    labels = np.concatenate([found.labels, rng.choice(np.unique(found.labels), STRANGE)])
    classes, own = np.unique(labels, return_inverse=True)
    first = np.argsort(class_cosines(values, own, len(classes)))[:STRANGE]
    listed = np.array([i for i, _ in find_outliers(values, labels)], np.int64)
    n = len(found.values)
    return int((first >= n).sum()), int((listed >= n).sum()), len(listed)


def main(
    data: Path,
    weights: str,
    keep: Annotated[Path, typer.Option(help="A folder for features.")] = Path("features"),
    copies: Annotated[bool, typer.Option(help="Measure copies too, which computes more features.")] = True,
) -> None:
    console, model, sets = Console(width=120), load(weights), open_sets(data)
    found = {name: extract(model, source, device="cpu", keep=keep, title=name) for name, source in sets.items()}
    methods: dict[str, list[str]] = {}
    heads = []
    for name, features in found.items():
        for near in (False, True):
            accuracy, shares = measure_labels(features, near)
            heads.append(f"{name}, {'nearest class' if near else 'any class'}")
            for method, share in ({"held-out accuracy": accuracy} | shares).items():
                methods.setdefault(method, []).append(f"{share:.1%}")
    table = Table("flipped labels in the first 10 %", *heads)
    for method, cells in methods.items():
        table.add_row(method, *cells)
    console.print(table)
    for one, other in (("pets", "flowers"), ("flowers", "pets"), ("pets", "tiny-imagenet")):
        rows = [measure_outliers(found[one], found[other], seed) for seed in range(SEEDS)]
        console.print(f"{STRANGE} {other} among {one}: among the first {STRANGE}, listed, length of the list: {rows}")
    if copies:
        for change, share, others in measure_copies(model, sets["pets"], found["pets"].values):
            console.print(f"{change}: {share:.1%} of {COPIES} copies found, {others} other pairs in pets")


if __name__ == "__main__":
    typer.run(main)
