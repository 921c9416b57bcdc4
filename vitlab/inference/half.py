"""Predictions in bf16 by choice: on CPUs that are faster in it, as those with AMX."""

import time

import torch

from vitlab.device import has_bf16
from vitlab.errors import UserError
from vitlab.inference.scales import Scales, weights_key
from vitlab.models.guest import Guest, Measured

SIDE, ROUNDS = 256, 5  # of the products that are timed: a millisecond, or a second where bf16 is emulated


def find_half(model: Measured, device: torch.device) -> Scales | None:
    """What computes a model in bf16: on a GPU that has it the engine does so anyway, which is None.

    Raises UserError where bf16 is not faster than float32, or the model is not in float32.
    """
    if isinstance(model, Guest):
        raise UserError("bf16 is for vitlab's own models, and this one is a guest; leave --precision out")
    if next(model.parameters()).dtype != torch.float32:
        raise UserError("bf16 is for weights in float32, and these are in float64; leave --precision out")
    if has_bf16(device):
        return None
    if device.type != "cpu" or not multiplies_bf16():
        raise UserError(f"the device {device} is not faster in bf16 than in float32; leave --precision out")
    return Scales(weights_key(model), {}, 1.0, 0, True, 0, 0.0, closer=0.0, again=0.0, rest="bfloat16")


def multiplies_bf16() -> bool:
    """Whether this CPU is faster in it: measured, as torch computes in bf16 on any CPU, on most of them slowly."""
    seconds = {dtype: seconds_of_product(dtype) for dtype in (torch.float32, torch.bfloat16)}
    return seconds[torch.bfloat16] < seconds[torch.float32]


@torch.inference_mode()
def seconds_of_product(dtype: torch.dtype) -> float:
    """The least of a few rounds, as other work on the machine only ever adds."""
    matrix, took = torch.ones(SIDE, SIDE, dtype=dtype), []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        matrix @ matrix
        took.append(time.perf_counter() - began)
    return min(took)
