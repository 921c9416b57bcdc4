"""Compute a model's features or logits of every image of a source, in pieces that can be kept in a cache folder.

Shapes: n images, D the width of the features, or the number of classes, b images of a batch.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from torch import Tensor

from vitlab.data.images import BrokenImage
from vitlab.data.loader import BROKEN_LIMIT, EvalLoader, describe_broken
from vitlab.data.resident import fits_on_device
from vitlab.data.rng import Ints
from vitlab.data.sharing import is_shared
from vitlab.data.source import ImageSource, Subset
from vitlab.device import has_bf16, pick_device, pick_workers
from vitlab.errors import UserError
from vitlab.evaluation.corrupted import Corrupted, Corrupting
from vitlab.evaluation.piece_cache import PieceCache, Values, What, model_key
from vitlab.evaluation.stretched import Stretched
from vitlab.inference.engine import Engine
from vitlab.inference.int8 import EightBits
from vitlab.inference.payback import Payback
from vitlab.models.config import LARGEST_SIDE, Preprocess, ResNetConfig
from vitlab.models.guest import Measured
from vitlab.models.resnet import fixed_kernels
from vitlab.terminal import progress

log = logging.getLogger("vitlab")

# Images of a batch and, at most, of a piece: what an interruption may lose, some seconds of work.
GPU_SIZES, CPU_SIZES = (256, 1024), (64, 256)

Device = str | torch.device
Framed = tuple[ImageSource, Preprocess]  # images, and how they become the model's input


class ExtractOptions(TypedDict, total=False):
    """Options of `extract` that its callers pass on."""

    batch: int | None
    workers: int | None
    device: str
    resize: int | None
    corruption: Corrupting | None
    broken_limit: float
    scales: EightBits | None


@dataclass(frozen=True)
class Features:
    """One row of values for each image of a source, in its order; images that cannot be read have none."""

    values: Values  # (n, D)
    labels: Ints  # (n,)
    index: Ints | None = None  # (n,) of each row's image in its source, as `extract` fills it in


@dataclass(frozen=True)
class Extracted:
    """Values of the m images that can be read, of the n in a source."""

    values: Values  # (m, D)
    index: Ints  # (m,) in the source, ascending
    broken: tuple[str, ...]  # (n - m,) names of the others


def extract(
    model: Measured,
    source: ImageSource,
    *,
    what: What = "features",
    batch: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    resize: int | None = None,
    corruption: Corrupting | None = None,
    broken_limit: float = BROKEN_LIMIT,
    scales: EightBits | None = None,
    keep: Path | None = None,
    title: str = "features",
) -> Features:
    """Compute the features of every image, see `extract_values`; the source must have one label for each."""
    labels = source.labels
    options: ExtractOptions = {"batch": batch, "workers": workers, "device": device}
    options |= {"resize": resize, "corruption": corruption, "broken_limit": broken_limit, "scales": scales}
    found = extract_values(model, source, what=what, keep=keep, title=title, **options)
    return Features(found.values, labels[found.index], found.index)


def extract_values(
    model: Measured,
    source: ImageSource,
    *,
    what: What = "features",
    batch: int | None = None,
    workers: int | None = None,
    device: str = "auto",
    resize: int | None = None,
    corruption: Corrupting | None = None,
    broken_limit: float = BROKEN_LIMIT,
    scales: EightBits | None = None,
    keep: Path | None = None,
    title: str = "features",
) -> Extracted:
    """Compute the features or logits of every image once, in the source's order, with a progress bar.

    Images that cannot be read are left out, with a warning that names some; more than the fraction `broken_limit` of
    them, and more than one, are a UserError.

    `keep` is a folder for finished pieces, from which an interrupted extraction resumes; None keeps nothing. The
    result takes n·D·4 bytes of memory (3.9 GB for ImageNet's 1.28 million images at D = 768), the computation no more
    than a few batches beside it; the folder takes as much again.

    The model's own preprocessing and image size are used; with `resize`, its normalization alone: images are stretched
    to a square of that side, and the model's size is cropped from its center, as in the authors' evaluator. With
    `corruption`, images are corrupted after they have been framed. A GPU that has bf16 computes in it, others and CPUs
    in the weights' own precision; with `scales` dense layers are in 8 bits. The model is put in eval mode and on the
    device meanwhile, and restored afterwards. A value that is not finite and a batch too large for the device are
    UserErrors.
    """
    target = pick_device(device)
    usual, most = sizes(target)
    size = usual if batch is None else batch
    check_extract(model, source, what, size)
    framed = frame_images(model, source, resize, corruption)
    n, length = len(source), size * max(1, most // size)  # full batches, so that every piece is cut the same way
    spans = [range(start, min(start + length, n)) for start in range(0, n, length)]
    half = has_bf16(target) and next(model.parameters()).dtype == torch.float32
    cache = None if keep is None else PieceCache(keep, model_key(model, what, half, resize, corruption, scales), source)
    values = np.full((n, value_width(model, what)), np.nan, np.float32)  # those of broken images stay so
    with progress(title, n) as advance:
        missing = [span for span in spans if cache is None or not read_piece(cache, span, values, advance)]
        left = sum(map(len, missing))
        if left < n:
            log.debug("%s: %d of %d images are in %s already", title, n - left, n, keep)
        if missing:
            with eval_mode(model, target):
                run = BatchRunner(Engine(model, what, target, scales=scales), size, left)
                number = pick_workers(target) if workers is None else workers
                batches = compute_batches(run, model, framed, missing, size, number)
                with closing(run.engine):
                    for span in missing:
                        for start in range(span.start, span.stop, size):
                            place, rows = next(batches)
                            values[start + place] = rows
                            advance(min(size, span.stop - start))
                        if cache is not None:
                            cache.write(span, values)
    return leave_out_broken(values, source, broken_limit)


def sizes(device: torch.device) -> tuple[int, int]:
    """Images of a batch and of a piece, by default."""
    return GPU_SIZES if device.type == "cuda" else CPU_SIZES


def read_piece(cache: PieceCache, span: range, values: Values, advance: Callable[[int], None]) -> bool:
    """Copy a piece from the cache; False if it is not there, or an image can be read that could not be read then."""
    if not cache.read(span, values):
        return False
    piece = values[span.start : span.stop]
    if any(can_read(cache.source, span.start + i) for i in np.flatnonzero(np.isnan(piece[:, 0])).tolist()):
        piece[:] = np.nan
        return False
    advance(len(span))
    return True


def can_read(source: ImageSource, index: int) -> bool:
    try:
        source.image(index)
    except BrokenImage:
        return False
    return True


def leave_out_broken(values: Values, source: ImageSource, limit: float) -> Extracted:
    """The rows of images that could be read; raises UserError where too few could."""
    bad = np.isnan(values[:, 0])
    if not bad.any():
        return Extracted(values, np.arange(len(values)), ())
    index, names = np.flatnonzero(~bad), tuple(source.name(i) for i in np.flatnonzero(bad).tolist())
    line = describe_broken(names, len(values))
    if not len(index) or len(names) > max(1, limit * len(values)):
        raise UserError(f"{line}; fix or remove them")
    log.warning("%s; they are left out", line)
    return Extracted(values[index], index, names)


def check_extract(model: Measured, source: ImageSource, what: What, batch: int) -> None:
    if batch < 1:
        raise UserError(f"a batch needs at least one image, not {batch}")
    if len(source) == 0:
        raise UserError("there are no images to extract from")
    if what == "logits" and model.config.classes == 0:
        raise UserError("this model has no head and so no class scores; use one with a head, or its features")


def frame_images(model: Measured, source: ImageSource, resize: int | None, corruption: Corrupting | None) -> Framed:
    """The source and the preprocessing, as the options have them."""
    framed = (source, model.card.preprocess) if resize is None else stretch_images(model, source, resize)
    if corruption is None:
        return framed
    images, preprocess = framed
    corrupted = Corrupted(images, corruption, model.config.image_size, preprocess)
    return corrupted, replace(preprocess, fit="stretch")  # they have the model's size already


def stretch_images(model: Measured, source: ImageSource, side: int) -> Framed:
    """The source and the preprocessing with the authors' framing from a square of this side."""
    size = model.config.image_size
    if not max(size) <= side <= LARGEST_SIDE:
        least = f"at least the model's size, {size[0]}x{size[1]}"
        raise UserError(f"images cannot be resized to {side} pixels: it must be {least}, and at most {LARGEST_SIDE}")
    return Stretched(source, side, size), replace(model.card.preprocess, fit="stretch")


def value_width(model: Measured, what: What) -> int:
    c = model.config
    if what == "logits":
        return c.classes
    return c.channels if isinstance(c, ResNetConfig) else c.features


@contextmanager
def eval_mode(model: Measured, device: torch.device) -> Iterator[None]:
    """Put the model in eval mode on the device, and restore modes and device afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    home = next(model.parameters()).device
    model.eval().to(device)
    try:
        with fixed_kernels(model):
            yield
    except torch.OutOfMemoryError:
        message = f"a batch does not fit in the memory of {device}; use a smaller one, as with batch=16"
        raise UserError(message) from None
    finally:
        model.to(home)
        for module, mode in modes:
            module.training = mode


class BatchRunner:
    """Compute values (b, D) of normalized images (b, 3, h, w), of which so many are left in batches of one size."""

    def __init__(self, engine: Engine, batch: int, images: int) -> None:
        self.engine, self.payback = engine, Payback(engine, batch, images)

    def __call__(self, images: Tensor) -> Values:
        began = time.monotonic()
        found: Values = self.engine(images).float().cpu().numpy()  # waits for the device
        self.payback.count(len(found), time.monotonic() - began)
        return found


def compute_batches(
    run: BatchRunner, model: Measured, images: Framed, spans: list[range], batch: int, workers: int
) -> Iterator[tuple[Ints, Values]]:
    """Yield places within the batch, and values, of the spans' images that can be read, batch by batch.

    No batch crosses from one span into the next.
    """
    (source, preprocess), size = images, model.config.image_size
    part = Subset(source, np.concatenate([np.arange(span.start, span.stop) for span in spans]))
    device = run.engine.device
    keep = is_shared() and fits_on_device(part, size, device)  # else they are needed once
    loader = EvalLoader(part, size, preprocess, batch=batch, workers=workers, device=device, resident=keep)
    for start, loaded in zip(range(0, len(part), batch), loader.batches(empty=True), strict=True):
        place = loaded.index.cpu().numpy() - start
        if not len(place):
            yield place, np.empty((0, value_width(model, run.engine.what)), np.float32)
            continue
        values = run(loaded.images)
        bad = ~np.isfinite(values).all(1)
        if bad.any():
            name = part.name(int(loaded.index[int(bad.argmax())]))
            raise UserError(f"the model gives no finite numbers for {name}; its weights may be damaged")
        yield place, values
