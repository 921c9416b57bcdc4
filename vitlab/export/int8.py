"""An ONNX file with int8 layers that agrees with float, or none: calibrate, choose, write, measure."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.errors import UserError
from vitlab.export import onnx
from vitlab.export.compare import (
    BATCHES,
    LIMITS,
    Check,
    Runner,
    agreement,
    compare,
    logits_of,
    onnx_runner,
    seconds_per_image,
    status,
)
from vitlab.export.graph import any_size, plain
from vitlab.export.images import Pictures
from vitlab.export.qdq import quantized
from vitlab.export.quantize import Scale, calibrate, dense_layers, enough, margin_changes, ranked
from vitlab.models.variants import Model
from vitlab.models.vit import ViT

CALIBRATED = 128  # pictures that ranges are taken from,
WATCHED = 64  # of these, those on which layers are chosen, and
MEASURED = 1024  # others on which the agreement is measured,
APART = 200  # if there are so many others
FEWEST = 16
SLACK = 0.8  # of the disagreement allowed, how much is aimed at first
TRIES, STEP = 4, 4  # how often, and at least how many layers more are left float each time


@dataclass(frozen=True)
class Wanted:
    """What is asked for."""

    model: Model
    dynamic_size: bool
    calibration: Pictures
    check: Pictures | None  # pictures to measure on; None: those of calibration, others where there are enough
    least: float


@dataclass(frozen=True)
class Outcome:
    """How the file compares with the float one."""

    layers: int
    floats: tuple[str, ...]  # dense layers of the blocks that stayed float
    agreement: float
    difference: float  # the largest, of a logit, to float
    images: int
    title: str
    apart: bool  # whether it was measured on other pictures than it was calibrated on
    float_bytes: int
    seconds: tuple[float, float]  # an image takes in the float file, and in this one
    checks: tuple[Check, ...]  # of the float file


@dataclass(frozen=True)
class Baseline:
    """The float file and what it says of the pictures."""

    run: Runner
    bytes: int
    logits: Tensor  # (n, K)
    checks: tuple[Check, ...]


def write_int8(wanted: Wanted, place: Path, other: Path) -> Outcome:
    """Write the file to `place`; a UserError if it does not agree well enough."""
    model = wanted.model
    if not isinstance(model, ViT):
        raise UserError("int8 is for the dense layers of transformers, and this model is a ResNet; use --fp16")
    if model.config.classes < 2:
        raise UserError("int8 is chosen by the best class, and this model has fewer than two")
    calibration, measured, apart = shares(wanted)
    how, size = model.card.preprocess, model.config.image_size
    seen, pixels = calibration.pixels(size, how), measured.pixels(size, how)
    with tempfile.TemporaryDirectory(prefix=".", dir=place.parent) as folder:
        base = baseline(wanted, measured, pixels, Path(folder))
        graph = plain(model)
        assert isinstance(graph, ViT)
        scales = calibrate(graph, seen, how)
        weights = {name: layer.weight.numel() for name, layer in dense_layers(graph).items()}
        variance = ranked(margin_changes(graph, scales, seen[:: max(1, len(seen) // WATCHED)], how), weights)
        with status("exporting"):
            proto = onnx.to_proto(any_size(graph) if wanted.dynamic_size else graph, model, wanted.dynamic_size)
        floats, share, difference = search(wanted, proto, scales, variance, base.logits, pixels, place, other)
        if share < wanted.least:
            raise UserError(
                f"nothing is written: int8 gives the best class of float on {share:.2%} of {len(pixels)} images of "
                f"{measured.title}, below {wanted.least:.2%}; calibrate on more images like those the model will see, "
                "or allow less with --least-agreement"
            )
        seconds = seconds_per_image([base.run, onnx_runner(place)], pixels, how)
    return Outcome(
        len(scales),
        floats,
        share,
        difference,
        len(pixels),
        measured.title,
        apart,
        base.bytes,
        (seconds[0], seconds[1]),
        base.checks,
    )


def shares(wanted: Wanted) -> tuple[Pictures, Pictures, bool]:
    """Pictures to calibrate on and to measure on, and whether the two are apart."""
    whole = wanted.calibration
    if len(whole) < FEWEST:
        raise UserError(f"{whole.title} has {len(whole)} images; int8 is calibrated on at least {FEWEST}")
    seen = whole.some(CALIBRATED)
    if wanted.check is not None:
        return seen, wanted.check.some(MEASURED), True
    others = whole.without(seen)
    apart = len(others) >= APART
    return seen, (others if apart else whole).some(MEASURED), apart


def baseline(wanted: Wanted, measured: Pictures, pixels: Tensor, folder: Path) -> Baseline:
    """The file that would be written without int8, checked as it would be."""
    path, other = folder / "float.onnx", folder / "float.onnx.data"
    simple = plain(wanted.model)
    with status("exporting in float"):
        module = any_size(simple) if wanted.dynamic_size else simple
        onnx.save(onnx.to_proto(module, wanted.model, wanted.dynamic_size), path, other)
        run = onnx_runner(path)
    checks = compare(run, wanted.model, measured, wanted.dynamic_size, LIMITS["fp32"])
    logits = logits_of(run, pixels, wanted.model.card.preprocess, BATCHES[-1], "running float")
    return Baseline(run, onnx.size_of(path, other), logits, checks)


def search(
    wanted: Wanted,
    proto: Any,
    scales: dict[str, Scale],
    variance: dict[str, float],
    logits: Tensor,
    pixels: Tensor,
    place: Path,
    other: Path,
) -> tuple[tuple[str, ...], float, float]:
    """Leave float what is expected to be enough, measure, and leave more if it was not.

    Gives the layers left float, the agreement, and the largest difference of a logit.
    """
    best, second = logits.topk(2).values.unbind(1)
    order, share, difference = list(variance), 0.0, 0.0
    floats: tuple[str, ...] = ()
    for attempt in range(TRIES):
        aim = 1 - (1 - min(wanted.least, 0.999)) * SLACK * 0.5**attempt
        count = max(enough(variance, best - second, aim), len(floats) + STEP if attempt else 0)
        if attempt and count >= len(order):
            break
        floats = tuple(order[: min(count, len(order) - 1)])  # at least one is tried, so that a refusal has its number
        chosen = {name: scale for name, scale in scales.items() if name not in floats}
        other.unlink(missing_ok=True)
        onnx.save(quantized(proto, chosen), place, other)
        share, difference = agreement(onnx_runner(place), logits, pixels, wanted.model.card.preprocess)
        if share >= wanted.least:
            break
    return floats, share, difference
