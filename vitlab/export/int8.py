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
from vitlab.export.quantize import calibrate, count_float_layers, dense_layers, margin_changes, rank_layers
from vitlab.inference.onnx_file import OnnxFile, to_proto
from vitlab.inference.traced import any_size, export_module, traceable
from vitlab.models.variants import Model
from vitlab.models.vit import ViT

CALIBRATION = 128  # images that ranges are taken from,
CHOICE = 64  # of these, those that layers are chosen on, and
MEASURED = 1024  # others that the agreement is measured on,
SEPARATE = 200  # if there are at least so many others
FEWEST = 16
SLACK = 0.8  # of the disagreement allowed, how much is aimed at first
TRIES, STEP = 4, 4  # how often, and at least how many layers more are left float each time


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
    model, dynamic_size = request.model, request.dynamic_size
    if not isinstance(model, ViT):
        raise UserError("int8 is for the dense layers of transformers, and this model is a ResNet; use --fp16")
    if model.card.thresholds is not None:
        raise UserError("int8 is chosen by the best class, and this model is multi-label; use --fp16")
    if model.config.classes < 2:
        raise UserError("int8 is chosen by the best class, and this model has fewer than two")
    calibration, measured, separate = split_images(request)
    preprocess, size = model.card.preprocess, model.config.image_size
    calibration_pixels, pixels = calibration.pixels(size, preprocess), measured.pixels(size, preprocess)
    with tempfile.TemporaryDirectory(prefix=".", dir=file.path.parent) as folder:
        base = OnnxFile(Path(folder) / "float.onnx", Path(folder) / "float.onnx.data")
        base.save(to_proto(export_module(model, dynamic_size), model, dynamic_size))
        run = base.runner()
        comparisons = compare(run, model, measured, dynamic_size)
        logits = compute_logits(run, pixels, preprocess, "running float")
        graph = traceable(model)
        assert isinstance(graph, ViT)
        scales = calibrate(graph, calibration_pixels, preprocess)
        chosen_on = calibration_pixels[:: max(1, len(calibration_pixels) // CHOICE)]
        sizes = {name: layer.weight.numel() for name, layer in dense_layers(graph).items()}
        variance = rank_layers(margin_changes(graph, scales, chosen_on, preprocess), sizes)
        proto = to_proto(any_size(graph) if dynamic_size else graph, model, dynamic_size)

        def measure(floats: tuple[str, ...]) -> tuple[float, float]:
            file.save(quantize_layers(proto, {name: scale for name, scale in scales.items() if name not in floats}))
            return agreement(file.runner(), logits, pixels, preprocess)

        floats, share, difference = search(measure, variance, logits, request.least)
        if share < request.least:
            raise UserError(
                f"nothing is written: int8 gives the best class of float on {share:.2%} of {len(pixels)} images of "
                f"{measured.title}, below {request.least:.2%}; calibrate on more images like those the model will see, "
                "or allow less with --least-agreement"
            )
        seconds = seconds_per_image([run, file.runner()], pixels, preprocess)
        where = len(pixels), measured.title, separate
        return Int8Result(len(scales), floats, share, difference, *where, base.bytes, seconds, comparisons)


def split_images(request: Int8Request) -> tuple[ImageSet, ImageSet, bool]:
    """Images to calibrate on and to measure on, and whether the two are separate."""
    images = request.calibration
    if len(images) < FEWEST:
        raise UserError(f"{images.title} has {len(images)} images; int8 is calibrated on at least {FEWEST}")
    calibration = images.sample(CALIBRATION)
    if request.check is not None:
        return calibration, request.check.sample(MEASURED), True
    others = images.without(calibration)
    separate = len(others) >= SEPARATE
    return calibration, (others if separate else images).sample(MEASURED), separate


def search(
    measure: Callable[[tuple[str, ...]], tuple[float, float]], variance: dict[str, float], logits: Tensor, least: float
) -> tuple[tuple[str, ...], float, float]:
    """Leave as many layers float as should suffice, measure, and leave more float if it did not.

    `measure` writes a file in which the given layers are float, and returns its agreement and the largest difference
    of a logit. Returns the layers left float and these two.
    """
    best, second = logits.topk(2).values.unbind(1)
    order, share, difference = list(variance), 0.0, 0.0
    floats: tuple[str, ...] = ()
    for attempt in range(TRIES):
        aim = 1 - (1 - min(least, 0.999)) * SLACK * 0.5**attempt
        count = max(count_float_layers(variance, best - second, aim), len(floats) + STEP if attempt else 0)
        if attempt and count >= len(order):
            break
        floats = tuple(order[: min(count, len(order) - 1)])  # at least one is int8, so that an error has its agreement
        share, difference = measure(floats)
        if share >= least:
            break
    return floats, share, difference
