"""Which layers of a ViT can be int8, and how each is rounded, from calibration images.

Only the dense layers of the blocks are quantized: inputs as bytes with one scale per layer, fixed by calibration, so
that a prediction does not depend on its batch; weights as int8 with a scale per output. Everything between them (norms,
softmax, GELU, the residual stream), the patches and the head stay float.

1. Balance. A few channels are far larger than the others, and with one scale for all they leave the others few steps.
   Dividing channel c of a layer's input by s(c) and multiplying column c of its weights by s(c) changes nothing but the
   ranges. The division is free after a norm or the values of attention: it is folded into their weights.
2. Cut. With a range smaller than the recorded one the steps are finer, and the few values beyond it are cut.
3. Choose. Let e be the error of a layer's output if only this layer is quantized, and g the gradient there of the
   margin, the best logit minus the next. To first order the margin changes by d = <g, e>. Of several ways to balance
   and cut a layer, the one with the least variance v(l) = mean d(l)^2 is taken. Errors of different layers are nearly
   independent, so an image with margin m keeps its class with probability Phi(m / sqrt(sum of v)). Layers are left
   float, the one with the most variance per weight first, until the expected agreement over all images is high enough.

Shapes: B batch, N tokens, D width of a layer's input, n images.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.data.transforms import normalize
from vitlab.models.config import Preprocess
from vitlab.models.vit import MLP, Attention, Block, ViT
from vitlab.terminal import track

UNEVEN = (0.9, 0.7, 0.5)  # ways to balance: how much of the unevenness goes from the inputs to the weights
REACH = (1.0, 0.9, 0.8, 0.7)  # ways to cut: the share of the recorded range that bytes cover
CHOICE = 64  # of the images for ranges, those that ways and layers are chosen on
MAX_FACTOR = 100.0  # no channel is scaled by more: one that was zero during calibration may not be zero later
BATCH = 16
TINY = 1e-6


@dataclass(frozen=True)
class Scale:
    """A layer's input x as bytes: round(x / step) + zero."""

    step: float
    zero: int

    def fake_quantize(self, x: Tensor) -> Tensor:
        """x rounded to the values that bytes can hold."""
        return ((x / self.step).round() + self.zero).clamp(0, 255).sub(self.zero) * self.step


def dense_layers(model: ViT) -> dict[str, nn.Linear]:
    """The layers that can be quantized, by name."""
    layers: dict[str, nn.Linear] = {}
    for name, block in model.blocks.named_modules(prefix="blocks"):
        if isinstance(block, Block):
            layers |= {f"{name}.attention.qkv": block.attention.qkv, f"{name}.attention.out": block.attention.out}
            layers |= {f"{name}.mlp.up": block.mlp.up, f"{name}.mlp.down": block.mlp.down}
    return layers


@dataclass(frozen=True)
class Way:
    """How a layer may be quantized: its input's channels are divided, its weights multiplied, then both are rounded."""

    divisor: Tensor  # (D,)
    scale: Scale

    def output(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """What the layer computes so."""
        x = self.scale.fake_quantize(x / self.divisor)
        return F.linear(x, fake_quantize_weight(layer.weight * self.divisor), layer.bias)


def calibrate(model: ViT, pixels: Tensor, preprocess: Preprocess) -> tuple[dict[str, Scale], dict[str, Tensor]]:
    """Balance the model, in place and without changing what it computes, in the way that changes margins least.

    Returns each layer's scale, and the changes of the margins of some of the images, (n,).
    """
    fill_biases(model)
    ways = find_ways(model, record_ranges(model, pixels, preprocess))
    changes = margin_changes(model, ways, pixels[:: max(1, len(pixels) // CHOICE)], preprocess)
    best = {name: int(change.double().square().mean(1).argmin()) for name, change in changes.items()}
    balance(model, {name: ways[name][i].divisor for name, i in best.items()})
    return {name: ways[name][i].scale for name, i in best.items()}, {name: changes[name][i] for name, i in best.items()}


@torch.no_grad()
def find_ways(model: ViT, ranges: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, list[Way]]:
    """The ways that each layer may be quantized in, from the minimum and maximum (D,) of its input's channels."""
    ways: dict[str, list[Way]] = {}
    for name, layer in dense_layers(model).items():
        low, high = ranges[name]
        inputs, weights = torch.maximum(low.abs(), high.abs()), layer.weight.abs().amax(0)
        divisors = [channel_divisors(inputs, weights, share) for share in UNEVEN]
        ways[name] = [
            Way(by, make_scale(low / by, high / by, reach)) for by, reach in itertools.product(divisors, REACH)
        ]
    return ways


@torch.no_grad()
def fill_biases(model: ViT) -> None:
    """Give every q/k/v layer a bias, with zeros for what it lacks: by its bias a layer is found in the graph.

    Exporters store equal constants once, and new or filled biases are equal: the first number of each is moved by a
    few of its last bits.
    """
    for layer in model.modules():
        if isinstance(layer, Attention) and layer.qkv.bias is None:
            zeros = torch.zeros_like(layer.qkv.weight[:, 0])
            layer.qkv.bias = nn.Parameter(zeros if layer.qv_bias is None else layer.padded_bias())
            layer.qv_bias = None
    for number, dense in enumerate(dense_layers(model).values()):
        dense.bias[0] += number * max(2**-22 * abs(float(dense.bias[0])), 1e-20)


def make_scale(low: Tensor, high: Tensor, reach: float = 1.0) -> Scale:
    """A scale whose bytes cover a share of the recorded range of all channels and can hold zero exactly."""
    least, most = reach * min(0.0, float(low.min())), reach * max(TINY, float(high.max()))
    step = (most - least) / 255
    return Scale(step, round(-least / step))


Record = Callable[[str, nn.Linear, tuple[Tensor], Tensor], None]  # of a layer: name, module, inputs, output


def watch_batches(model: ViT, pixels: Tensor, preprocess: Preprocess, title: str, record: Record) -> Iterator[Tensor]:
    """Normalized images, with a progress bar; meanwhile every forward of a dense layer calls `record`."""
    with ExitStack() as hooks:
        for name, layer in dense_layers(model).items():
            hooks.enter_context(layer.register_forward_hook(partial(record, name)))
        for at in track(range(0, len(pixels), BATCH), title):
            yield normalize(pixels[at : at + BATCH], preprocess)


@torch.no_grad()
def record_ranges(model: ViT, pixels: Tensor, preprocess: Preprocess) -> dict[str, tuple[Tensor, Tensor]]:
    """The minimum and the maximum of each channel of each layer's input, (D,) each."""
    ranges: dict[str, tuple[Tensor, Tensor]] = {}

    def update(name: str, _: nn.Linear, inputs: tuple[Tensor], out: Tensor) -> None:
        low, high = inputs[0].flatten(0, -2).aminmax(dim=0)
        before = ranges.get(name, (low, high))
        ranges[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)

    for images in watch_batches(model, pixels, preprocess, "calibrating", update):
        model(images)
    return ranges


# ---- balance


class ScaledOutput(nn.Module):
    """A module's output times a factor per channel."""

    def __init__(self, inner: nn.Module, factor: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.factor: Tensor
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


@torch.no_grad()
def balance(model: ViT, divisors: Mapping[str, Tensor]) -> None:
    """Divide each layer's input channels by its divisors (D,), and multiply its weights' columns by them."""
    for name, layer in dense_layers(model).items():
        layer.weight *= divisors[name]
    for name, block in model.blocks.named_modules(prefix="blocks"):
        if isinstance(block, Block):
            for norm, layer_name in ((block.norm1, f"{name}.attention.qkv"), (block.norm2, f"{name}.mlp.up")):
                divide(divisors[layer_name], norm.weight, norm.bias)
            divide_values(block.attention, divisors[f"{name}.attention.out"])
            divide_hidden(block.mlp, divisors[f"{name}.mlp.down"])


def divide_values(attention: Attention, divisor: Tensor) -> None:
    """Divide what enters `out`: in the norm before it, or in the layer that makes the values."""
    if isinstance(attention.norm, nn.LayerNorm):
        divide(divisor, attention.norm.weight, attention.norm.bias)
        return
    width = attention.out.in_features
    divide(divisor[:, None], attention.qkv.weight[2 * width :])
    divide(divisor, attention.qkv.bias[2 * width :])


def divide_hidden(mlp: MLP, divisor: Tensor) -> None:
    """Divide what enters `down`: in the norm before it, or after the GELU."""
    if isinstance(mlp.norm, nn.LayerNorm):
        divide(divisor, mlp.norm.weight, mlp.norm.bias)
    else:
        mlp.gelu = ScaledOutput(mlp.gelu, 1 / divisor)  # type: ignore[assignment]


def divide(divisor: Tensor, *tensors: Tensor) -> None:
    for tensor in tensors:
        tensor /= divisor


def channel_divisors(inputs: Tensor, weights: Tensor, share: float) -> Tensor:
    """From the largest value of each channel and of each column of weights; their geometric mean is one.

    `share` of a channel's unevenness goes to the weights.
    """
    log = share * inputs.clamp(min=TINY).log() - (1 - share) * weights.clamp(min=TINY).log()
    return (log - log.mean()).exp().clamp(1 / MAX_FACTOR, MAX_FACTOR)


# ---- choose


def fake_quantize_weight(weight: Tensor) -> Tensor:
    """Weights (out, in) rounded to 255 steps per output."""
    step = weight.abs().amax(1, keepdim=True).clamp(min=TINY) / 127
    return (weight / step).round() * step


def margin_changes(
    model: ViT, ways: Mapping[str, Sequence[Way]], pixels: Tensor, preprocess: Preprocess
) -> dict[str, Tensor]:
    """To first order, how quantizing only one layer, in one of its ways, changes the margin of each image.

    (ways, n) per layer.
    """
    changes: dict[str, list[Tensor]] = {name: [] for name in ways}

    def record_change(name: str, layer: nn.Linear, inputs: tuple[Tensor], out: Tensor) -> None:
        x, exact = inputs[0].detach(), out.detach()

        def at_gradient(gradient: Tensor) -> None:  # errors one by one, as all of them would fill the memory
            found = [(gradient * (way.output(layer, x) - exact)).flatten(1).sum(1) for way in ways[name]]
            changes[name].append(torch.stack(found))

        out.register_hook(at_gradient)

    model.requires_grad_(False)
    for images in watch_batches(model, pixels, preprocess, "choosing layers", record_change):
        best, second = model(images.requires_grad_()).topk(2).values.unbind(1)
        (best - second).sum().backward()
    return {name: torch.cat(parts, 1) for name, parts in changes.items()}


def rank_layers(changes: dict[str, Tensor], weights: dict[str, int]) -> dict[str, float]:
    """The variance of each layer, by variance per weight, highest first."""
    variance = {name: float(change.double().square().mean()) for name, change in changes.items()}
    return dict(sorted(variance.items(), key=lambda item: item[1] / weights[item[0]], reverse=True))


def count_float_layers(variance: dict[str, float], margins: Tensor, aim: float) -> int:
    """How many of the first layers to leave float, so that a share `aim` of images is expected to keep its class."""
    return next(
        (count for count in range(len(variance)) if expected_agreement(variance, margins, count) >= aim), len(variance)
    )


def expected_agreement(variance: dict[str, float], margins: Tensor, count: int) -> float:
    """The share of images that should keep their class, with the first `count` layers left float."""
    deviation = max(sum(list(variance.values())[count:]), TINY**2) ** 0.5
    return float(torch.special.ndtr(margins.double() / deviation).mean())
