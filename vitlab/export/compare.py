"""Whether a written file computes what the model does, and how fast: on pictures, by the runtime that will run it."""

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from vitlab.data.transforms import normalize
from vitlab.errors import UserError
from vitlab.export.images import Pictures
from vitlab.export.onnx import stride_of
from vitlab.models.config import Preprocess, Size
from vitlab.models.variants import Model

Runner = Callable[[Tensor], Tensor]  # images (b, 3, height, width) to logits (b, K)
BATCHES = (1, 16)
CHECKED = 64  # pictures that logits are compared on
LIMITS = {"fp32": 1e-4, "fp16": 0.05}  # how far a logit may be off; more where logits grow beyond
USUAL = 10.0
AT_ONCE = 8  # images in a batch whose speed is measured
ROUNDS = 5


@dataclass(frozen=True)
class Check:
    """How far the file's logits are from the model's on pictures of one size."""

    size: Size
    images: int
    title: str
    difference: float


def torch_runner(module: nn.Module) -> Runner:
    @torch.inference_mode()
    def run(images: Tensor) -> Tensor:
        return module(images)

    return run


def onnx_runner(path: Path) -> Runner:
    """The file in ONNX Runtime on the CPU, on as many threads as torch takes."""
    session = onnx_session(path)
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {name: images.numpy()})[0])

    return run


def onnx_session(path: Path) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def logits_of(run: Runner, pixels: Tensor, preprocess: Preprocess, batch: int, title: str) -> Tensor:
    """(n, 3, h, w) bytes to (n, K), with a bar."""
    console = Console(stderr=True)
    starts = range(0, len(pixels), batch)
    shown = track(starts, title, console=console, transient=True, disable=not console.is_terminal)
    return torch.cat([run(normalize(pixels[at : at + batch], preprocess)) for at in shown])


def largest_difference(exported: Runner, model: Runner, pixels: Tensor, preprocess: Preprocess) -> tuple[float, float]:
    """The largest difference of a logit over the pictures, in batches of one and of more, and the largest logit."""
    wanted = logits_of(model, pixels, preprocess, BATCHES[-1], "running the model").double()
    worst = 0.0
    for batch in BATCHES:
        got = logits_of(exported, pixels, preprocess, batch, f"running the file in batches of {batch}").double()
        difference = (got - wanted).abs().max()
        worst = max(worst, float(difference.nan_to_num(nan=torch.inf)))
    return worst, float(wanted.abs().max())


def compare(exported: Runner, model: Model, pictures: Pictures, dynamic_size: bool, limit: float) -> tuple[Check, ...]:
    """The checks at the model's own size and, where any will do, at another; a bad one is an error."""
    pictures = pictures.some(CHECKED)
    sizes = [model.config.image_size, *([another_size(model)] if dynamic_size else [])]
    checks = []
    for size in sizes:
        reference = torch_runner(copy.deepcopy(model).resize(size))
        pixels = pictures.pixels(size, model.card.preprocess)
        difference, largest = largest_difference(exported, reference, pixels, model.card.preprocess)
        allowed = limit * max(1, largest / USUAL)
        if not difference <= allowed:
            raise UserError(
                f"nothing is written: on {pictures.title} at {size[0]}x{size[1]} the exported logits differ from the "
                f"model's by up to {difference:.2g}, more than {allowed:.2g}"
            )
        checks.append(Check(size, len(pixels), pictures.title, difference))
    return tuple(checks)


def another_size(model: Model) -> Size:
    """Larger, and of another shape."""
    stride = stride_of(model)
    height, width = model.config.image_size
    return stride * math.ceil(1.5 * height / stride), width + stride


def agreement(exported: Runner, wanted: Tensor, pixels: Tensor, preprocess: Preprocess) -> tuple[float, float]:
    """The share of pictures whose best class is the same, and the largest difference of a logit."""
    got = logits_of(exported, pixels, preprocess, BATCHES[-1], "measuring agreement")
    return float((got.argmax(1) == wanted.argmax(1)).double().mean()), float((got - wanted).abs().max())


def seconds_per_image(runners: list[Runner], pixels: Tensor, preprocess: Preprocess) -> list[float]:
    """The best of a few rounds each, taken in turns, so that whatever else the machine does meets all alike."""
    images = normalize(pixels[:AT_ONCE], preprocess)
    best = [float("inf")] * len(runners)
    for _ in range(ROUNDS):
        for number, run in enumerate(runners):
            start = time.perf_counter()
            run(images)
            best[number] = min(best[number], (time.perf_counter() - start) / len(images))
    return best


@contextmanager
def status(words: str) -> Iterator[None]:
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(f"{words} ..."):
            yield
    else:
        yield
