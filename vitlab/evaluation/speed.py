"""How fast a model classifies on this machine: images per second, at the batch where it is fastest."""

import statistics
import time
from collections.abc import Callable
from typing import TypedDict

import torch

from vitlab.device import has_bf16, out_of_memory, synchronize
from vitlab.errors import UserError
from vitlab.evaluation.extract import eval_mode
from vitlab.models.variants import Model

WARM_UP = 2  # calls before the clock starts
GLANCE = 0.1  # of the time of the best batch, for which others are timed
LEAST = 3  # calls that are timed, however long they take
FASTER = 1.05  # a larger batch counts as faster from here on
PATIENCE = 2  # sizes in a row that are not faster end the search: one may be timed while the machine is busy

MOST_GPU, MOST_CPU = 1024, 32  # images of a batch; a CPU is as fast with few


class Clock(TypedDict, total=False):
    """How long a batch is timed, and how large it becomes."""

    seconds: float
    most: int | None


QUICK: Clock = {"seconds": 0.02, "most": 4}


def peak_speed(
    model: Model, device: torch.device, *, seconds: float = 1.0, most: int | None = None
) -> tuple[float, int]:
    """Images per second in inference, and the batch at which that is reached.

    Batches double up to `most` while they fit, until two in a row are not faster by 5 % than the fastest, which is then
    timed for about `seconds`. A GPU that has bf16 computes in it, with the weights in float32. The images are random:
    reading and decoding are not part of it.
    """
    most = most or (MOST_GPU if device.type == "cuda" else MOST_CPU)
    with eval_mode(model, device):
        batch = fastest_batch(model, device, GLANCE * seconds, most)
        return batch / call_seconds(make_call(model, device, batch), device, seconds), batch


def fastest_batch(model: Model, device: torch.device, seconds: float, most: int) -> int:
    best, at, batch, misses = 0.0, 0, 1, 0
    while batch <= most and misses < PATIENCE:
        try:
            speed = batch / call_seconds(make_call(model, device, batch), device, seconds)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            break
        if speed >= FASTER * best:
            best, at, misses = speed, batch, 0
        else:
            misses += 1
        batch *= 2
    if not at:
        raise UserError(f"one image of this model does not fit in the memory of {device}")
    return at


def make_call(model: Model, device: torch.device, batch: int) -> Callable[[], object]:
    """What classifies a batch of random images."""
    dtype = next(model.parameters()).dtype
    half = has_bf16(device) and dtype == torch.float32
    images = torch.rand(batch, 3, *model.config.image_size, device=device, dtype=dtype) * 2 - 1

    @torch.inference_mode()
    def call() -> object:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return model(images)

    return call


def call_seconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The median time of a call, the work on the device included."""
    for _ in range(WARM_UP):
        call()
    synchronize(device)
    times: list[float] = []
    while len(times) < LEAST or sum(times) < seconds:
        began = time.perf_counter()
        call()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times)
