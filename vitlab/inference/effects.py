"""What a layer in 8 bits does to the best class, for each layer by itself, and how many of them are harmless.

Let e be the error of a layer's output if only this layer is in 8 bits, and g the gradient there of the margin, the
best logit minus the next. To first order the margin changes by <g, e>. Errors of different layers are nearly
independent, so their variances add up, also with that of 16 bits, in which everything else is. An image with margin m
keeps its class with probability Phi(m / deviation).

Shapes: B batch, n images, h and w the model's height and width.
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn

from vitlab.data.transforms import normalize
from vitlab.inference.fp8 import in_8_bits
from vitlab.models.variants import Model

BATCH = 16
TINY = 1e-12  # variance


def margin_changes(
    model: Model, maxima: dict[str, float], dtype: torch.dtype, pixels: Tensor, device: torch.device
) -> dict[str, Tensor]:
    """How one layer in 8 bits changes the margin of each image, (n,) by layer, from bytes (n, 3, h, w)."""
    changes: dict[str, list[Tensor]] = {name: [] for name in maxima}
    copied = copy.deepcopy(model).requires_grad_(False)
    rounded = in_8_bits(copied, maxima, dtype)

    def record(name: str, _: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        with torch.no_grad():
            error = rounded[name](inputs[0]) - out
        out.register_hook(lambda gradient: changes[name].append((gradient * error).flatten(1).sum(1).cpu()))

    with ExitStack() as hooks:
        for name in maxima:
            hooks.enter_context(copied.get_submodule(name).register_forward_hook(partial(record, name)))
        for part in pixels.split(BATCH):
            images = normalize(part.to(device), model.card.preprocess)
            margins(copied(images.requires_grad_())).sum().backward()
    return {name: torch.cat(parts) for name, parts in changes.items()}


def margins(logits: Tensor) -> Tensor:
    """How far the best logit is above the next, (B,)."""
    best, second = logits.topk(2).values.unbind(1)
    return best - second


def harmless_first(changes: dict[str, Tensor], work: dict[str, int]) -> dict[str, float]:
    """The variance of each layer, the layer with the least for its work first."""
    variance = {name: float(change.double().square().mean()) for name, change in changes.items()}
    return dict(sorted(variance.items(), key=lambda item: item[1] / work[item[0]]))


def count_harmless(variances: Sequence[float], before: float, margins: Tensor, aim: float) -> int:
    """How many of the first layers should leave a share `aim` of images their class; `before` is of 16 bits."""
    for count in range(len(variances), 0, -1):
        deviation = max(before + sum(variances[:count]), TINY) ** 0.5
        if float(torch.special.ndtr(margins.double() / deviation).mean()) >= aim:
            return count
    return 0
