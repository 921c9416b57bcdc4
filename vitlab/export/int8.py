"""An ONNX file with int8 layers that agrees with float, or an error: calibrate, choose layers, write, measure."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.export.compare import SPEED_BATCH, Comparison, agreement, compare, compute_logits, seconds_per_image
from vitlab.export.images import ImageSet
from vitlab.export.qdq import quantize_layers
from vitlab.export.quantize import (
    TINY,
    Scale,
    calibrate,
    count_float_layers,
    dense_layers,
    expected_agreement,
    rank_layers,
)
from vitlab.inference.onnx_file import OnnxFile, Runner, to_proto
from vitlab.inference.traced import any_size, export_module, traceable
from vitlab.models.guest import Measured
from vitlab.models.variants import Model
from vitlab.models.vit import ViT

CALIBRATION = 128  # images that ranges are taken from, and
MEASURED = 1024  # others that the agreement is measured on,
SEPARATE = 200  # if there are at least so many others
FEWEST = 16
SLACK = 0.8  # of the disagreement allowed, how much is aimed at first
TRIES = 5  # how often more layers are left float,
STEP, LEAP = 4, 6  # at least so many each time, at most one of so many of all
WANTED = 0.985  # agreement for which, where less is needed, still
CHEAP = 8  # one of so many layers may be left float


@dataclass(frozen=True)
class Int8Request:
    """What to export, and on which images."""

    model: Model
    dynamic_size: bool
    calibration: ImageSet
    check: ImageSet | None  # images to measure on; None: those of calibration, others where there are enough
    least: float  # agreement


@dataclass(frozen=True)
class Int8Result:
    """How the file compares with the float one."""

    layers: int
    floats: tuple[str, ...]  # dense layers of the blocks that stayed float
    agreement: float
    difference: float  # the largest of a logit, to float
    images: int
    title: str
    separate: bool  # whether it was measured on other images than it was calibrated on
    float_bytes: int
    seconds: list[float]  # per image, of the float file and of this one
    comparisons: tuple[Comparison, ...]  # of the float file

    def lines(self, size: int) -> list[str]:
        """The result as lines to print; `size` is the bytes of the file."""
        floats = ", ".join(self.floats) or "none"
        before, after = self.seconds
        where = "" if self.separate else ", including those it was calibrated on"
        return [
            f"int8: {self.layers - len(self.floats)} of {self.layers} dense layers; left float: {floats}",
            f"agreement with float: {self.agreement:.2%} of {self.images} images of {self.title}{where}; "
            f"largest difference of a logit {self.difference:.2g}",
            f"size: {megabytes(size)} against {megabytes(self.float_bytes)}, "
            f"{self.float_bytes / size:.1f} times smaller",
            f"speed: {1000 * after:.3g} ms an image against {1000 * before:.3g} ms, {before / after:.2f} times as fast "
            f"(this processor, threads: {torch.get_num_threads()}, batches of {SPEED_BATCH})",
        ]


def megabytes(size: int) -> str:
    return f"{size / 1e6:,.3g} MB" if size < 1e9 else f"{size / 1e9:,.3g} GB"


def write_int8(request: Int8Request, file: OnnxFile) -> Int8Result:
    """Write the file; UserError if the model cannot be quantized or does not agree well enough."""
    model, dynamic_size = check_model(request.model, "use --fp16"), request.dynamic_size
    calibration, measured, separate = split_images(request.calibration, request.check)
    preprocess, size = model.card.preprocess, model.config.image_size
    calibration_pixels, pixels = calibration.pixels(size, preprocess), measured.pixels(size, preprocess)
    with tempfile.TemporaryDirectory(prefix=".", dir=file.path.parent) as folder:
        base = OnnxFile(Path(folder) / "float.onnx", Path(folder) / "float.onnx.data")
        base.save(to_proto(export_module(model, dynamic_size), model, dynamic_size))
        exact = base.runner()
        comparisons = compare(exact, model, measured, dynamic_size)
        logits = compute_logits(exact, pixels, preprocess, "running float")
        graph = prepare(model, calibration_pixels)
        proto = to_proto(any_size(graph.model) if dynamic_size else graph.model, model, dynamic_size)

        def run(scales: dict[str, Scale]) -> Runner:
            file.save(quantize_layers(proto, scales))
            return file.runner()

        floats, share, difference = graph.choose(run, logits, pixels, request.least)
        if share < request.least:
            raise UserError(
                f"nothing is written: int8 gives the best class of float on {share:.2%} of {len(pixels)} images of "
                f"{measured.title}, below {request.least:.2%}; calibrate on more images like those the model will see, "
                "or allow less with --least-agreement"
            )
        seconds = seconds_per_image([exact, file.runner()], pixels, preprocess)
        where = len(pixels), measured.title, separate
        return Int8Result(len(graph.scales), floats, share, difference, *where, base.bytes, seconds, comparisons)


def check_model(model: Measured, otherwise: str) -> ViT:
    """The model, or a UserError where nothing can be int8 or it could not be checked."""
    if not isinstance(model, ViT):
        raise UserError(f"int8 is for the dense layers of transformers, and this model has none; {otherwise}")
    if model.card.thresholds is not None:
        raise UserError(f"int8 is chosen by the best class, and this model is multi-label; {otherwise}")
    if model.config.classes < 2:
        raise UserError(f"int8 is chosen by the best class, and this model has fewer than two; {otherwise}")
    return model


def split_images(images: ImageSet, check: ImageSet | None = None) -> tuple[ImageSet, ImageSet, bool]:
    """Images to calibrate on and to measure on, and whether the two are separate."""
    if len(images) < FEWEST:
        raise UserError(f"{images.title} has {len(images)} images; int8 is calibrated on at least {FEWEST}")
    calibration = images.sample(CALIBRATION)
    if check is not None:
        return calibration, check.sample(MEASURED), True
    others = images.without(calibration)
    separate = len(others) >= SEPARATE
    return calibration, (others if separate else images).sample(MEASURED), separate


@dataclass(frozen=True)
class Prepared:
    """A traceable model with balanced channels, the scales of its layers, and their variance, the worst first."""

    model: ViT
    scales: dict[str, Scale]
    variance: dict[str, float]

    def choose(
        self,
        run: Callable[[dict[str, Scale]], Runner],
        logits: Tensor,
        pixels: Tensor,
        least: float,
    ) -> tuple[tuple[str, ...], float, float]:
        """The layers left float, the agreement with logits (n, K) on bytes, and the largest difference of a logit.

        `run` writes a graph in which the layers of some scales are int8; the last one written is that of the result.
        """

        def measure(floats: tuple[str, ...]) -> tuple[float, float]:
            runner = run({name: scale for name, scale in self.scales.items() if name not in floats})
            return agreement(runner, logits, pixels, self.model.card.preprocess)

        return search(measure, self.variance, logits, least)


def prepare(model: ViT, pixels: Tensor) -> Prepared:
    """From bytes (n, 3, h, w) like those that the model will see."""
    graph = traceable(model)
    assert isinstance(graph, ViT)
    scales, changes = calibrate(graph, pixels, model.card.preprocess)
    sizes = {name: layer.weight.numel() for name, layer in dense_layers(graph).items()}
    return Prepared(graph, scales, rank_layers(changes, sizes))


def search(
    measure: Callable[[tuple[str, ...]], tuple[float, float]],
    variance: dict[str, float],
    logits: Tensor,
    least: float,
    wanted: float = WANTED,
) -> tuple[tuple[str, ...], float, float]:
    """Leave as many layers float as should suffice, measure, and leave more float if it did not: as many as should
    suffice if what is expected is off by as much again.

    `least` must be reached; a few layers more are left float for the agreement that is `wanted`.

    `measure` writes a file in which the given layers are float, and returns its agreement and the largest difference
    of a logit. Returns the layers left float and these two.
    """
    best, second = logits.topk(2).values.unbind(1)
    margins, order = best - second, list(variance)
    share, difference, allowed = 0.0, 0.0, (1 - min(least, 0.999)) * SLACK
    floats: tuple[str, ...] = ()
    most, cheap = len(order), len(order) // CHEAP
    count = min(count_float_layers(variance, margins, 1 - (1 - wanted) * SLACK), cheap)
    for attempt in range(TRIES):
        count = min(max(count_float_layers(variance, margins, 1 - allowed), count), most)
        if attempt and count >= len(order):
            break
        floats = tuple(order[: min(count, len(order) - 1)])  # at least one is int8, so that an error has its agreement
        share, difference = measure(floats)
        if share >= least and (share >= wanted or len(floats) >= cheap):
            break
        count = len(floats) + STEP
        if share >= least:
            most = min(count, cheap)
        else:
            most = max(count, len(floats) + len(order) // LEAP)
            expected = expected_agreement(variance, margins, len(floats))
            allowed = min(allowed, (1 - least) * SLACK * max(TINY, 1 - expected) / (1 - share))  # as far as it was off
    return floats, share, difference
