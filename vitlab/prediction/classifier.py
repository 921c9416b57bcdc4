"""A model with its preprocessing and class names, and what it predicts.

Shapes: b images, h and w the model's height and width, K classes.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from PIL import Image
from torch import Tensor, nn

from vitlab.data.python_images import is_path, name_of, to_image
from vitlab.data.thumbnails import file_thumbnail, thumbnail
from vitlab.data.transforms import eval_pixels
from vitlab.device import cpu_threads, pick_device
from vitlab.errors import UserError
from vitlab.html import bar_table, data_url, picture_card
from vitlab.inference.engine import Engine
from vitlab.inference.int8 import EightBits
from vitlab.models.config import Preprocess
from vitlab.models.guest import Measured
from vitlab.models.unknown import Unknown
from vitlab.models.variants import Model
from vitlab.weights import load

TOP = 5  # classes of an image by default
REFUSED = "none of these"  # the label of an image that is refused
SHOWN = 24  # predictions of a list that a notebook shows


@dataclass(frozen=True)
class Scores:
    """What a model computes of b images: probabilities (b, K) and, where it can refuse, distances (b,).

    A distance is relative to the one from where images are refused: above 1 it is none of the classes.
    """

    probabilities: Tensor
    distances: Tensor | None = None

    def __getitem__(self, rows: list[int] | slice) -> "Scores":
        return Scores(self.probabilities[rows], None if self.distances is None else self.distances[rows])

    def __len__(self) -> int:
        return len(self.probabilities)

    def each(self) -> "list[Scores]":
        """Those of one image each."""
        distances = [None] * len(self) if self.distances is None else self.distances.split(1)
        return [Scores(row, one) for row, one in zip(self.probabilities.split(1), distances, strict=True)]


@dataclass(frozen=True)
class Prediction:
    """The most probable classes of one image, best first; of a multi-label model, those that it finds in the image.

    A model that can refuse has the `distance` of the image from its training images. Above 1 the image is `refused`,
    the label is "none of these", and the classes are only those that it resembles most.

    >>> Prediction("cat.jpg", ("cat", "dog"), (0.75, 0.25)).label
    'cat'
    """

    file: str
    labels: tuple[str, ...]
    probabilities: tuple[float, ...]
    thresholds: tuple[float, ...] | None = None  # of these classes, where the model is multi-label
    distance: float | None = None  # relative to the one from where images are refused
    # a small JPEG of an image that is not a file, for notebooks
    thumbnail: bytes | None = field(default=None, compare=False, repr=False)

    @property
    def refused(self) -> bool:
        return self.distance is not None and self.distance > 1

    @property
    def label(self) -> str:
        """The most probable class, or "none of these"; "" where a multi-label model finds none."""
        return REFUSED if self.refused else self.labels[0] if self.labels else ""

    @property
    def probability(self) -> float:
        """The probability of that class; 0 where it is refused, or a multi-label model finds none."""
        return self.probabilities[0] if self.labels and not self.refused else 0.0

    @property
    def top(self) -> list[tuple[str, float]]:
        """(label, probability) of each class, best first."""
        return list(zip(self.labels, self.probabilities, strict=True))

    def __repr__(self) -> str:
        classes = ", ".join(f"{label!r} {value:.1%}" for label, value in self.top)
        return f"Prediction({self.file!r}: {f'{REFUSED}; nearest ' if self.refused else ''}{classes})"

    def _repr_html_(self) -> str:
        """The image beside a table with a bar for each class, for notebooks."""
        small = self.thumbnail or file_thumbnail(self.file)
        nothing = "" if self.labels else ": none of the classes reaches its threshold"
        caption = f"{self.file}: {REFUSED}; nearest:" if self.refused else f"{self.file}{nothing}"
        image = None if small is None else data_url(small, "jpeg")
        return picture_card(image, self.file, bar_table(caption, self.top))


class Predictions(list[Prediction]):
    """The predictions of several images, in their order: a list, which a notebook shows with its images."""

    def _repr_html_(self) -> str:
        more = f"<p>and {len(self) - SHOWN} more</p>" if len(self) > SHOWN else ""
        return "".join(prediction._repr_html_() for prediction in self[:SHOWN]) + more


class Classifier:
    """A model with its preprocessing and class names.

    Args:
        model: a model, or what `vitlab.load` takes: a run's folder, a file of weights or a hub id.
        device: "auto" (the best there is), "cpu", "cuda", "cuda:1" or "mps".
        refuse: the share of images of its own classes that a model may answer "none of these" to, in order to refuse
            others; by default that of the model. 0 never refuses, as does a model that was not fitted for it.
        scales: those of the model's dense layers, with which they are in 8 bits, or its int8 model on a CPU.

    Raises:
        UserError: the model cannot be loaded or has no head, `refuse` is not a share or the model cannot refuse, or
            there is no such device.

    >>> classifier = Classifier("runs/pets")
    >>> classifier.predict("cat.jpg").label
    """

    model: Model
    engine: Engine
    preprocess: Preprocess
    device: torch.device
    labels: tuple[str, ...]
    thresholds: Tensor | None  # (K,) of a multi-label model
    temperature: float
    unknown: Unknown | None  # what refuses

    def __init__(
        self,
        model: Model | str | os.PathLike[str],
        device: str = "auto",
        *,
        refuse: float | None = None,
        scales: EightBits | None = None,
    ) -> None:
        loaded = model if isinstance(model, nn.Module) else load(model)
        classes = loaded.config.classes
        if classes == 0:
            name = "the model" if isinstance(model, nn.Module) else model
            raise UserError(
                f"{name} has no head, so it has no classes; fine-tune it first: vitlab finetune PHOTOS --weights {name}"
            )
        self.device = pick_device(device)
        self.model = loaded.float().eval().to(self.device)
        self.preprocess = loaded.card.preprocess
        self.labels = loaded.labels
        limits = loaded.card.thresholds
        self.thresholds = None if limits is None else torch.tensor(limits)
        self.temperature = loaded.card.temperature
        self.unknown = pick_unknown(loaded.card.unknown, refuse, self.device)
        place, before = self.device, self.preprocess
        self.engine = Engine(self.model, "features", place, preprocess=before, tail=self.classify, scales=scales)

    def predict(self, image: object, top: int | None = None) -> Prediction:
        """The `top` most probable classes of one image, or all where there are fewer.

        Args:
            image: the path of a file, a PIL image, an array (height, width, 3) or a tensor (3, height, width), of bytes
                or of floats from 0 to 1. Files and PIL images are rotated by their EXIF orientation.
            top: how many classes; by default five, and of a multi-label model those that reach their thresholds.

        Raises:
            UserError: the image cannot be read, or `top` is less than 1.
        """
        check_top(top)
        file, upright = name_of(image, "image"), to_image(image)
        found = self.best(self.scores(self.pixels(upright)[None]), top, [file])[0]
        return found if is_path(image) else replace(found, thumbnail=thumbnail(upright))

    def pixels(self, image: Image.Image) -> Tensor:
        """An upright RGB image as bytes (3, h, w), resized and cropped as in evaluation."""
        return eval_pixels(image, self.model.config.image_size, self.preprocess)

    def logits(self, pixels: Tensor) -> Tensor:
        """Logits (b, K) in float32 on the CPU, of bytes (b, 3, h, w)."""
        return self.forward(pixels)[0]

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits (b, K) and, where the model can refuse, distances (b,), from one pass of bytes (b, 3, h, w)."""
        return self.take_apart(self.engine(pixels.to(self.device, non_blocking=True)).float().cpu())

    def classify(self, model: Measured, features: Tensor) -> Tensor:
        """The engine's values: logits and, where the model can refuse, distances beside them, (b, K) or (b, K + 1)."""
        assert model.head is not None  # checked at the start
        logits: Tensor = model.head(features)
        if self.unknown is None:
            return logits
        with torch.autocast(self.device.type, enabled=False):
            return torch.cat([logits.float(), self.unknown.distances(features)[:, None]], 1)

    def take_apart(self, values: Tensor) -> tuple[Tensor, Tensor | None]:
        classes = self.model.config.classes
        return values[:, :classes], None if self.unknown is None else values[:, classes]

    def scores(self, pixels: Tensor) -> Scores:
        """Probabilities (b, K), of bytes (b, 3, h, w), and the distances by which images are refused."""
        return self.to_scores(*self.forward(pixels))

    def start(self, pixels: Sequence[Tensor]) -> Callable[[], Scores]:
        """Begin with images (3, h, w) of bytes in the host's memory; what is returned waits for their scores."""
        values = self.engine.start(pixels)

        def finish() -> Scores:
            found = values()
            with cpu_threads(1) if self.device.type == "cuda" else nullcontext():  # as in Graphs.start
                return self.to_scores(*self.take_apart(found))

        return finish

    def to_scores(self, logits: Tensor, distances: Tensor | None) -> Scores:
        if self.thresholds is not None:
            return Scores(logits.sigmoid())
        return Scores((logits / self.temperature).softmax(-1), distances)

    def probabilities(self, pixels: Tensor) -> Tensor:
        """Probabilities (b, K), of bytes (b, 3, h, w); each row sums to one, unless the model is multi-label."""
        return self.scores(pixels).probabilities

    def best(self, scores: Scores, top: int | None, files: Sequence[str]) -> list[Prediction]:
        """The classes of each of b images, as `top_classes` has them; `files` name the images."""
        found = []
        distances = [None] * len(scores) if scores.distances is None else scores.distances.tolist()
        rows = zip(files, self.top_classes(scores.probabilities, top), distances, strict=True)
        for file, (best, values), distance in rows:
            limits = None if self.thresholds is None else tuple(self.thresholds[best].tolist())
            found.append(Prediction(file, tuple(self.labels[i] for i in best), tuple(values), limits, distance))
        return found

    def top_classes(self, probabilities: Tensor, top: int | None) -> list[tuple[list[int], list[float]]]:
        """The `top` classes of each row of probabilities (b, K) with these, of equal ones the first.

        None: the first five, and of a multi-label model all that reach their thresholds.
        """
        values, order = probabilities.sort(stable=True, dim=1, descending=True)
        if self.thresholds is not None and top is None:
            chosen = values >= self.thresholds[order]
            return [(o[c].tolist(), v[c].tolist()) for o, v, c in zip(order, values, chosen, strict=True)]
        count = top or TOP
        return list(zip(order[:, :count].tolist(), values[:, :count].tolist(), strict=True))


def check_top(top: int | None) -> None:
    if top is not None and top < 1:
        raise UserError(f"top must be at least 1, not {top}")


def pick_unknown(own: Unknown | None, rate: float | None, device: torch.device) -> Unknown | None:
    """A model's own way to refuse, at its own rate of false refusals or another; None where nothing is refused."""
    if rate is not None and not 0 <= rate < 1:
        raise UserError(f"the share of false refusals must be at least 0 and below 1, not {rate:g}; 0 never refuses")
    if rate == 0 or (own is None and rate is None):
        return None
    if own is None:
        raise UserError(
            "this model cannot refuse: it was saved without the features of its training images; leave the share of "
            "false refusals out, or fine-tune again"
        )
    return (own if rate is None else replace(own, rate=rate)).to(device)
