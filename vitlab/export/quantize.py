"""Which layers of a ViT may be int8, and on what scale: found on the user's pictures.

Only the dense layers of the blocks are quantized: inputs as bytes with one scale per layer, fixed by calibration, so
that a picture's answer does not hang on its batch; weights as int8 with a scale per output. Everything between them
(norms, softmax, GELU, the residual stream), the patches and the head stay float.

1. Balance. A few channels are far larger than the others, and with one scale for all they leave the others few steps.
   Dividing channel c of a layer's input by s(c) and multiplying column c of its weights by s(c) changes nothing but the
   ranges. The division costs nothing where a norm or the values of attention come before: it goes into their weights.
2. Choose. Let e be the error that quantizing a layer alone makes at its output, and g the gradient there of the
   margin, the best logit minus the next. To first order the margin changes by d = <g, e>. Errors of different layers
   are nearly independent, so with a variance v(l) = mean d(l)^2 per layer, a picture with margin m keeps its class
   with probability Phi(m / sqrt(sum of v)). Layers are left float, the one with the most variance per weight first,
   until the expected agreement over all pictures is enough.

Shapes: B batch, N tokens, D width of a layer's input, n pictures.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from vitlab.data.transforms import normalize
from vitlab.models.config import Preprocess
from vitlab.models.vit import Block, ViT

ALPHA = 0.9  # how much of the unevenness goes from the inputs to the weights
MOST = 100.0  # no channel is scaled by more, so that one which slept during calibration does not wake up huge
BATCH = 16
LEAST = 1e-6


@dataclass(frozen=True)
class Scale:
    """A layer's input x as bytes: round(x / step) + zero."""

    step: float
    zero: int

    def rounded(self, x: Tensor) -> Tensor:
        return ((x / self.step).round() + self.zero).clamp(0, 255).sub(self.zero) * self.step


def dense_layers(model: ViT) -> dict[str, nn.Linear]:
    """The layers that may be quantized, by name."""
    found: dict[str, nn.Linear] = {}
    for name, block in model.blocks.named_modules(prefix="blocks"):
        if isinstance(block, Block):
            found |= {f"{name}.attention.qkv": block.attention.qkv, f"{name}.attention.out": block.attention.out}
            found |= {f"{name}.mlp.up": block.mlp.up, f"{name}.mlp.down": block.mlp.down}
    return found


def calibrate(model: ViT, pixels: Tensor, preprocess: Preprocess) -> dict[str, Scale]:
    """Balance the model, in place and without changing what it computes, and find the scale of each layer's input."""
    ranges = record(model, pixels, preprocess)
    divided = balance(model, ranges)
    return {name: scale_of(low / divided[name], high / divided[name]) for name, (low, high) in ranges.items()}


def scale_of(low: Tensor, high: Tensor) -> Scale:
    """The bytes cover all that was seen, and zero is one of them."""
    least, most = min(0.0, float(low.min())), max(LEAST, float(high.max()))
    step = (most - least) / 255
    return Scale(step, round(-least / step))


def batches(pixels: Tensor, preprocess: Preprocess, title: str) -> Iterator[Tensor]:
    console = Console(stderr=True)
    starts = range(0, len(pixels), BATCH)
    for at in track(starts, title, console=console, transient=True, disable=not console.is_terminal):
        yield normalize(pixels[at : at + BATCH], preprocess)


@torch.no_grad()
def record(model: ViT, pixels: Tensor, preprocess: Preprocess) -> dict[str, tuple[Tensor, Tensor]]:
    """The least and the largest value of each channel of each layer's input, (D,) each."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def look(name: str, x: Tensor) -> None:
        low, high = x.flatten(0, -2).aminmax(dim=0)
        before = seen.get(name, (low, high))
        seen[name] = torch.minimum(before[0], low), torch.maximum(before[1], high)

    layers = dense_layers(model)
    hooks = [
        layer.register_forward_pre_hook(lambda _, args, name=name: look(name, args[0]))
        for name, layer in layers.items()
    ]
    for images in batches(pixels, preprocess, "calibrating"):
        model(images)
    for hook in hooks:
        hook.remove()
    return seen


# ---- balance


class Times(nn.Module):
    """A module's output times a factor per channel."""

    def __init__(self, inner: nn.Module, factor: Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.factor: Tensor
        self.register_buffer("factor", factor)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


@torch.no_grad()
def balance(model: ViT, ranges: dict[str, tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Divide the channels of every layer's input, (D,) each, and multiply its weights' columns by the same."""
    divided = {}
    for name, layer in dense_layers(model).items():
        low, high = ranges[name]
        by = divided[name] = divisors(torch.maximum(low.abs(), high.abs()), layer.weight.abs().amax(0))
        layer.weight *= by
    for name, block in model.blocks.named_modules(prefix="blocks"):
        if isinstance(block, Block):
            for norm, layer_name in ((block.norm1, f"{name}.attention.qkv"), (block.norm2, f"{name}.mlp.up")):
                norm.weight.div_(divided[layer_name])
                norm.bias.div_(divided[layer_name])
            values = block.attention.qkv
            width = values.out_features // 3
            values.weight[2 * width :] /= divided[f"{name}.attention.out"][:, None]
            values.bias[2 * width :] /= divided[f"{name}.attention.out"]
            block.mlp.gelu = Times(block.mlp.gelu, 1 / divided[f"{name}.mlp.down"])  # type: ignore[assignment]
    return divided


def divisors(inputs: Tensor, weights: Tensor) -> Tensor:
    """From the largest value of each channel and of each column of weights; their geometric mean is one."""
    log = ALPHA * inputs.clamp(min=LEAST).log() - (1 - ALPHA) * weights.clamp(min=LEAST).log()
    return (log - log.mean()).exp().clamp(1 / MOST, MOST)


# ---- choose


def int8_weight(weight: Tensor) -> Tensor:
    """(out, in), rounded to 255 steps per output."""
    step = weight.abs().amax(1, keepdim=True).clamp(min=LEAST) / 127
    return (weight / step).round() * step


def margin_changes(model: ViT, scales: dict[str, Scale], pixels: Tensor, preprocess: Preprocess) -> dict[str, Tensor]:
    """To first order, how quantizing each layer alone changes the margin of each picture, (n,)."""
    changes: dict[str, list[Tensor]] = {name: [] for name in scales}

    def watch(name: str, layer: nn.Linear, x: Tensor, out: Tensor) -> None:
        with torch.no_grad():
            error = F.linear(scales[name].rounded(x), int8_weight(layer.weight), layer.bias) - out
        out.register_hook(lambda gradient: changes[name].append((gradient * error).flatten(1).sum(1)))

    hooks = [
        layer.register_forward_hook(lambda m, args, out, name=name: watch(name, m, args[0], out))
        for name, layer in dense_layers(model).items()
    ]
    model.requires_grad_(False)
    for images in batches(pixels, preprocess, "choosing layers"):
        best, second = model(images.requires_grad_()).topk(2).values.unbind(1)
        (best - second).sum().backward()
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in changes.items()}


def ranked(changes: dict[str, Tensor], weights: dict[str, int]) -> dict[str, float]:
    """The variance of each layer; first those that bring the most of it per weight."""
    variance = {name: float(change.double().square().mean()) for name, change in changes.items()}
    return dict(sorted(variance.items(), key=lambda item: item[1] / weights[item[0]], reverse=True))


def enough(variance: dict[str, float], margins: Tensor, aim: float) -> int:
    """How many of the first layers to leave float, so that a share `aim` of these margins may be expected to hold."""
    values = list(variance.values())
    for count in range(len(values)):
        deviation = max(sum(values[count:]), LEAST**2) ** 0.5
        if float(torch.special.ndtr(margins.double() / deviation).mean()) >= aim:
            return count
    return len(values)
