"""Compare an exported file with its model, on images and in the runtime that will run it; and measure its speed."""

import copy
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.data.transforms import normalize
from vitlab.errors import UserError
from vitlab.export.images import ImageSet
from vitlab.inference.onnx_file import Runner, stride_of
from vitlab.models.config import Preprocess, Size
from vitlab.models.variants import Model
from vitlab.terminal import track

BATCHES = (1, 16)
COMPARED = 64  # images that logits are compared on
LIMITS = {"fp32": 1e-4, "fp16": 0.05}  # how far a logit may be off; in proportion where logits exceed
USUAL_LOGIT = 10.0
SPEED_BATCH = 8
ROUNDS = 5


@dataclass(frozen=True)
class Comparison:
    """The largest difference between the file's logits and the model's, on images of one size."""

    size: Size
    images: int
    title: str
    difference: float

    def line(self, file: str) -> str:
        """The result as a line to print."""
        return (
            f"largest difference between {file}'s logits and the model's: {self.difference:.2g} ({self.images} images "
            f"of {self.title} at {self.size[0]}x{self.size[1]}, in batches of {' and '.join(map(str, BATCHES))})"
        )


@torch.inference_mode()
def compute_logits(run: Runner, pixels: Tensor, how: Preprocess, title: str, batch: int = BATCHES[-1]) -> Tensor:
    """Logits (n, K) of bytes (n, 3, h, w), with a progress bar."""
    starts = track(range(0, len(pixels), batch), title)
    return torch.cat([run(normalize(pixels[at : at + batch], how)) for at in starts])


def largest_difference(exported: Runner, model: Runner, pixels: Tensor, preprocess: Preprocess) -> tuple[float, float]:
    """The largest difference of a logit over the images, in batches of each size, and the largest logit."""
    expected = compute_logits(model, pixels, preprocess, "running the model").double()
    worst = 0.0
    for batch in BATCHES:
        logits = compute_logits(exported, pixels, preprocess, f"running the file in batches of {batch}", batch).double()
        worst = max(worst, float((logits - expected).abs().max().nan_to_num(nan=torch.inf)))
    return worst, float(expected.abs().max())


def compare(
    exported: Runner, model: Model, images: ImageSet, dynamic_size: bool, precision: str = "fp32"
) -> tuple[Comparison, ...]:
    """Compare at the model's own size and, with `dynamic_size`, at another; UserError if a logit is too far off."""
    images = images.sample(COMPARED)
    comparisons = []
    for size in [model.config.image_size, another_size(model)] if dynamic_size else [model.config.image_size]:
        reference = copy.deepcopy(model).resize(size)
        pixels = images.pixels(size, model.card.preprocess)
        difference, largest = largest_difference(exported, reference, pixels, model.card.preprocess)
        allowed = LIMITS[precision] * max(1, largest / USUAL_LOGIT)
        if not difference <= allowed:
            raise UserError(
                f"nothing is written: on {images.title} at {size[0]}x{size[1]} the exported logits differ from the "
                f"model's by up to {difference:.2g}, more than {allowed:.2g}"
            )
        comparisons.append(Comparison(size, len(pixels), images.title, difference))
    return tuple(comparisons)


def another_size(model: Model) -> Size:
    """A larger image size of another shape."""
    stride = stride_of(model)
    height, width = model.config.image_size
    return stride * math.ceil(1.5 * height / stride), width + stride


def agreement(exported: Runner, expected: Tensor, pixels: Tensor, preprocess: Preprocess) -> tuple[float, float]:
    """The share of images with the same best class as in `expected` (n, K), and the largest difference of a logit."""
    logits = compute_logits(exported, pixels, preprocess, "measuring agreement")
    return float((logits.argmax(1) == expected.argmax(1)).double().mean()), float((logits - expected).abs().max())


def seconds_per_image(runners: list[Runner], pixels: Tensor, preprocess: Preprocess) -> list[float]:
    """The best of a few rounds of each, interleaved, so that other load on the machine affects all alike."""
    images = normalize(pixels[:SPEED_BATCH], preprocess)
    best = [float("inf")] * len(runners)
    for _ in range(ROUNDS):
        for number, run in enumerate(runners):
            start = time.perf_counter()
            run(images)
            best[number] = min(best[number], (time.perf_counter() - start) / len(images))
    return best
