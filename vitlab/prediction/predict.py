"""`vitlab.predict`: images of any kind in, predictions out."""

import copy
import glob
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypedDict, Unpack, overload, runtime_checkable

import torch
from PIL import Image
from torch import nn

from vitlab.data.decoder import DecodeHint
from vitlab.data.folder import warn_skipped
from vitlab.data.images import decode
from vitlab.data.python_images import ACCEPTED, is_one, is_path, list_images, name_of, to_image
from vitlab.data.thumbnails import thumbnail
from vitlab.data.workers import BrokenEntry
from vitlab.device import pick_device, pick_workers
from vitlab.errors import UserError
from vitlab.evaluation.extract import eval_mode
from vitlab.models.variants import Model
from vitlab.prediction.classifier import Classifier, Prediction, Predictions, check_top
from vitlab.prediction.inputs import expand
from vitlab.prediction.stream import predict_stream
from vitlab.prediction.web import fetch, is_url
from vitlab.terminal import progress

log = logging.getLogger("vitlab")

MANY = 64  # images from which a progress bar is shown and, if they are files, other processes decode them


@runtime_checkable
class HasClassifier(Protocol):
    """What holds a classifier, as a run does."""

    @property
    def classifier(self) -> Classifier: ...


Predictor = Model | Classifier | HasClassifier | str | os.PathLike[str]


class PredictOptions(TypedDict, total=False):
    """The options of `predict`."""

    top: int | None
    device: str | None
    batch: int | None
    workers: int | None
    allow_url: bool
    refuse: float | None


@overload
def predict(model: Predictor, images: Image.Image, **options: Unpack[PredictOptions]) -> Prediction: ...
@overload
def predict(model: Predictor, images: list[Any], **options: Unpack[PredictOptions]) -> Predictions: ...
@overload  # a path may be a file or a folder, an array one image or a batch
def predict(model: Predictor, images: object, **options: Unpack[PredictOptions]) -> Any: ...
def predict(
    model: Predictor,
    images: object,
    *,
    top: int | None = None,
    device: str | None = None,
    batch: int | None = None,
    workers: int | None = None,
    allow_url: bool = False,
    refuse: float | None = None,
) -> Prediction | Predictions:
    """Classify an image, or many.

    Args:
        model: a model, a run, a classifier, or what `vitlab.load` takes: a run's folder, a file of weights or a hub id.
            Something that is loaded is loaded in every call; keep a `vitlab.Run` or a `vitlab.Classifier` for many.
        images: the path of a file, a folder with everything below it or a pattern such as "scans/*.png"; a PIL image;
            an array (height, width, 3) or (height, width); a tensor (3, height, width); a list of these; or a batch
            of arrays or tensors, with one more axis in front. Arrays and tensors hold bytes, or floats from 0 to 1.
        top: how many classes; by default five, and of a multi-label model those that reach their thresholds.
        device: "cpu", "cuda" or "mps"; by default a model's own, and the best there is for one that is loaded.
        batch: images at a time; by default fits the device.
        workers: processes that decode files; by default fits the machine, and none for a few files.
        allow_url: fetch http:// and https:// addresses, too.
        refuse: the share of false refusals, as `vitlab.Classifier` has it.

    Returns:
        One prediction for one image; for a folder, a pattern, a batch or a list, a list of them in the same order. Both
        show themselves in a notebook.

    Raises:
        UserError: the model cannot be loaded, there is no such file, or something is not an image. Broken files in a
            folder are left out with a warning; one that was named is an error.

    >>> vitlab.predict("runs/pets", "cat.jpg").label
    >>> [one.label for one in vitlab.predict("runs/pets", ["cat.jpg", image], top=1)]
    """
    check_top(top)
    given = find_images(images, allow_url)
    with open_classifier(model, device, refuse) as classifier:
        found = predict_given(classifier, given, top, batch, workers) if given.items else Predictions()
    return found if given.is_many else found[0]


@contextmanager
def open_classifier(model: Predictor, device: str | None, refuse: float | None) -> Iterator[Classifier]:
    """A classifier; a model that was given is left as it was, afterwards."""
    if isinstance(model, HasClassifier):
        model = model.classifier
    if isinstance(model, Classifier):
        if device is not None or refuse is not None:
            raise UserError("device and refuse are chosen when a classifier or a run is opened; leave them out here")
        yield model
    elif isinstance(model, nn.Module):
        weight = next(model.parameters())
        target = weight.device if device is None else pick_device(device)
        model = model if weight.dtype == torch.float32 else copy.deepcopy(model)
        with eval_mode(model, target):
            yield Classifier(model, str(target), refuse=refuse)
    elif is_path(model):
        yield Classifier(model, device or "auto", refuse=refuse)
    else:
        kind = type(model).__name__
        raise UserError(f"an object of type {kind} is not a model; give a model, a run, or the folder of one")


# ---- which images


@dataclass(frozen=True)
class Item:
    """One image: a file or an address, or an image in memory."""

    name: str
    image: object  # None: the file of that name
    was_named: bool = True  # rather than found in a folder


class GivenImages:
    """The images that a caller gave, each converted when it is asked for; pickled to worker processes."""

    def __init__(self, items: list[Item], is_many: bool) -> None:
        self.items, self.is_many = items, is_many

    def __len__(self) -> int:
        return len(self.items)

    def name(self, index: int) -> str:
        return self.items[index].name

    def image(self, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        """The upright RGB image; BrokenImage for a file, and UserError for anything else that is none."""
        item = self.items[index]
        if item.image is not None:
            return to_image(item.image, item.name)
        return decode(fetch(item.name) if is_url(item.name) else item.name, item.name, shrink)


def find_images(images: object, allow_url: bool) -> GivenImages:
    """Every image that was given, in order; the files of a folder or a pattern sorted by name."""
    alone, skipped = is_one(images), list[str]()
    items = []
    for i, one in enumerate(list_images(images)):
        name = "image" if alone else f"image {i}"
        if not is_path(one):
            if not is_one(one):
                raise UserError(f"{name} of the list is a list itself, or a batch; {ACCEPTED}")
            items.append(Item(name_of(one, name), one))
            continue
        was_named = not is_many_files(os.fspath(one))
        found = [Item(file, None, was_named) for file in expand(os.fspath(one), allow_url, skipped)]
        warn_skipped(os.fspath(one), len(skipped))
        if not found:
            raise UserError(f"'{one}' holds no images, such as .jpg or .png files")
        items += found
    return GivenImages(items, not alone or (is_path(images) and is_many_files(os.fspath(images))))


def is_many_files(path: str) -> bool:
    """Whether a path is a folder or a pattern."""
    here = os.path.expanduser(path)
    return os.path.isdir(here) or (not os.path.exists(here) and "://" not in path and glob.has_magic(here))


# ---- predictions


def predict_given(
    classifier: Classifier, given: GivenImages, top: int | None, batch: int | None, workers: int | None
) -> Predictions:
    found, lost = Predictions(), set[int]()
    if workers is None:
        files = sum(item.image is None for item in given.items)
        workers = pick_workers(classifier.device) if files >= MANY and files == len(given) else 0
    stream = predict_stream(classifier, given, range(len(given)), top=top, batch=batch, workers=workers)
    with progress("images", len(given), shown=len(given) >= MANY) as advance:
        for chunk in stream:
            leave_out(chunk.broken, given)
            lost |= {index for index, _, _ in chunk.broken}
            found += chunk.good
            advance(len(chunk.good) + len(chunk.broken))
    kept = (index for index in range(len(given)) if index not in lost)
    for place, index in enumerate(kept):
        if given.items[index].image is not None:
            found[place] = replace(found[place], thumbnail=thumbnail(given.image(index)))
    return found


def leave_out(broken: Iterable[BrokenEntry], given: GivenImages) -> None:
    """Warn of broken files in folders; raise UserError for one that was named."""
    for index, name, why in broken:
        if given.items[index].was_named:
            raise UserError(f"{name} cannot be read: {why}")
        log.warning("%s cannot be read and is left out: %s", name, why)
