"""What a layer in 8 bits does to the best class, for each layer by itself, and which choice of layers is the fastest.

Let e be the error of a layer's output if only this layer is in 8 bits, and g the gradient there of the margin, the
best logit minus the next. To first order the margin changes by <g, e>. Errors of different layers are nearly
independent, so their variances add up to s^2, also with that of 16 bits, in which everything else is.

An image with margin m is seen with m + s z, z normal. Where that is nearer to 0 than t it is computed again in 16 bits,
whose deviation is d. With P the normal distribution function

    looked at again: L = P((t - m) / s) - P((-t - m) / s),  same class: P((m - t) / s) + L P(m / d).

Shapes: B batch, n images, T thresholds, h and w the model's height and width.
"""

import copy
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from vitlab.data.transforms import normalize
from vitlab.inference.fp8 import in_8_bits
from vitlab.inference.values import margins
from vitlab.models.variants import Model

BATCH = 16
TINY = 1e-12  # variance
# times of B/16 at 224 pixels on an H200, whose products in 8 bits take half as long
SAVED = 0.3  # share of the time of 16 bits that all layers in 8 bits save
AGAIN = 1.3  # what an image takes among few others in 16 bits, compared with one of a full batch
FARTHEST, STEPS = 4.0, 160  # thresholds that are tried, in deviations


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


def harmless_first(changes: dict[str, Tensor], work: dict[str, int]) -> dict[str, float]:
    """The variance of each layer, the layer with the least for its work first."""
    variance = {name: float(change.double().square().mean()) for name, change in changes.items()}
    return dict(sorted(variance.items(), key=lambda item: item[1] / work[item[0]]))


@dataclass(frozen=True)
class Plan:
    """Which layers are in 8 bits, and which images are looked at again: where classes are closer, a share of them."""

    layers: tuple[str, ...]
    closer: float
    again: float
    time: float  # beside that of 16 bits, estimated


def fastest_plan(
    variances: dict[str, float], work: dict[str, int], before: float, margins: Tensor, aim: float
) -> Plan | None:
    """The plan that should leave a share `aim` of images their class in the least time; None if 16 bits are as fast.

    Variances and work are of the layers, the most harmless first; `before` is the variance of 16 bits, margins (n,).
    """
    best, variance, done, names = Plan((), 0.0, 0.0, 1.0), before, 0, list(variances)
    for count, name in enumerate(names, 1):
        variance, done = variance + variances[name], done + work[name]
        look = second_look(margins, variance, before, aim)
        if look is not None:
            time = 1 - SAVED * done / sum(work.values()) + AGAIN * look[1]
            best = min(best, Plan(tuple(names[:count]), *look, time), key=lambda plan: plan.time)
    return best if best.layers else None


def second_look(margins: Tensor, variance: float, before: float, aim: float) -> tuple[float, float] | None:
    """The threshold t that reaches the aim, and the share of the images below it; None if none does."""
    m, (s, d) = margins.double(), (max(value, TINY) ** 0.5 for value in (variance, before))
    t = s * torch.linspace(0, FARTHEST, STEPS + 1, dtype=torch.float64)[:, None]
    phi = torch.special.ndtr
    looked = phi((t - m) / s) - phi((-t - m) / s)  # (T, n)
    kept = (phi((m - t) / s) + looked * phi(m / d)).mean(1)
    enough = (kept >= aim).nonzero()
    return (float(t[enough[0, 0]]), float(looked.mean(1)[enough[0, 0]])) if len(enough) else None
