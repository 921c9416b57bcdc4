"""Dense layers of a finished model in 8 bits: weights stored so, inputs with one scale that calibration has found.

The head itself is in float32.

Shapes: M rows, I inputs, O outputs of a layer.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from vitlab.inference.scales import Scales
from vitlab.kernels.class_token import token_block
from vitlab.kernels.fp8 import E4M3, LARGEST, SMALLEST, has_float8, multiply, quantize
from vitlab.kernels.fp8_mlp import has_exact_gelu
from vitlab.kernels.fp8_rounding import round_gelu, try_rounding
from vitlab.kernels.install import runs_here
from vitlab.models.variants import Model
from vitlab.models.vit import MLP, ViT

SIDE = 16  # that both sides of a product in 8 bits are multiples of


class StaticFloat8(nn.Module):
    """A dense layer whose product is in 8 bits, its outputs in a `dtype` of 16.

    An input beyond the largest one of calibration saturates.
    """

    weight: Tensor  # (O, I)
    bias: Tensor | None  # (O,)
    weight_scale: Tensor  # ()
    input_scale: Tensor  # ()

    def __init__(self, layer: nn.Linear, maximum: float, *, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        scale = weight.abs().max().clamp(min=SMALLEST) / LARGEST[E4M3]
        self.native, self.dtype = has_float8(weight.device), dtype
        self.register_buffer("weight", quantize(weight, scale, E4M3))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().to(dtype))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", torch.full_like(scale, maximum / LARGEST[E4M3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(quantize(x.flatten(0, -2), self.input_scale, E4M3)).unflatten(0, x.shape[:-1])

    def multiply(self, rows: Tensor) -> Tensor:
        """The layer's output (M, O) of inputs in 8 bits (M, I)."""
        scales = self.input_scale, self.weight_scale
        return multiply(rows, self.weight.t(), *scales, self.bias, self.native, self.dtype)


def run_mlp(part: MLP, x: Tensor) -> Tensor:
    """An MLP whose layers are both in 8 bits, with one kernel for GELU and the rounding after it."""
    assert isinstance(part.up, StaticFloat8)
    assert isinstance(part.down, StaticFloat8)
    u = part.up(x)
    y = part.down.multiply(round_gelu(u.flatten(0, -2), part.down.input_scale))
    return y.unflatten(0, u.shape[:-1])


class ExactHead(nn.Module):
    """The head in float32: in bf16, logits between 8 and 16 are 1/16 apart, and the best two often equal.

    It takes one token of an image, next to nothing of the work.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach().float().clone())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float().clone())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return linear(x.float(), self.weight, self.bias)


def float8_layers(model: Model) -> dict[str, nn.Linear]:
    """The dense layers of a model's blocks that can be in 8 bits, by name.

    Not those that see the class token alone, which stays in 16 and is next to no work.
    """
    last = token_block(model) if isinstance(model, ViT) else None
    narrow = [] if last is None else [last.attention.out, *last.mlp.modules()]
    return {
        name: layer
        for name, layer in model.named_modules()
        if name.startswith("blocks.")
        and type(layer) is nn.Linear
        and layer.in_features % SIDE == 0
        and layer.out_features % SIDE == 0
        and layer not in narrow
    }


def in_8_bits(model: Model, maxima: dict[str, float], dtype: torch.dtype) -> dict[str, StaticFloat8]:
    """What takes the place of the layers that have a largest input, by name."""
    layers = float8_layers(model)
    return {name: StaticFloat8(layers[name], most, dtype=dtype) for name, most in maxima.items()}


def use_scales(model: Model, source: Model, scales: Scales) -> None:
    """Replace the layers that have a scale, and the head, by those of another copy, which has not been rounded.

    In place; the model is then called in mixed precision.
    """
    replaced: dict[str, nn.Module] = {**in_8_bits(source, scales.maxima, scales.dtype)}
    if type(source.head) is nn.Linear:
        replaced["head"] = ExactHead(source.head)
    for name, layer in replaced.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    parts = [part for part in model.modules() if isinstance(part, MLP) and is_in_8_bits(part)]
    device = next(source.parameters()).device
    if parts and (device.type == "cpu" or runs_here("rounding to 8 bits", try_rounding, device)):
        for part in parts:
            part.forward = partial(run_mlp, part)  # type: ignore[method-assign]


def is_in_8_bits(part: MLP) -> bool:
    """Whether both layers are, and nothing but an exact GELU is between them: dropout does nothing here."""
    both = isinstance(part.up, StaticFloat8) and isinstance(part.down, StaticFloat8)
    return both and has_exact_gelu(part)
