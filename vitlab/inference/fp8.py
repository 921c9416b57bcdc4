"""Dense layers of a finished model in 8 bits: weights stored so, inputs with one scale that calibration has found.

Shapes: M rows, I inputs, O outputs of a layer.
"""

import torch
from torch import Tensor, nn

from vitlab.inference.scales import Scales
from vitlab.kernels.fp8 import E4M3, LARGEST, SMALLEST, has_float8, multiply, quantize
from vitlab.models.variants import Model

SIDE = 16  # that both sides of a product in 8 bits are multiples of


class StaticFloat8(nn.Module):
    """A dense layer whose product is in 8 bits. An input beyond the largest one of calibration saturates."""

    weight: Tensor  # (O, I)
    bias: Tensor | None  # (O,)
    weight_scale: Tensor  # ()
    input_scale: Tensor  # ()

    def __init__(self, layer: nn.Linear, maximum: float) -> None:
        super().__init__()
        weight = layer.weight.detach().float()
        scale = weight.abs().max().clamp(min=SMALLEST) / LARGEST[E4M3]
        self.native = has_float8(weight.device)
        self.register_buffer("weight", quantize(weight, scale, E4M3))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().to(torch.bfloat16))
        self.register_buffer("weight_scale", scale)
        self.register_buffer("input_scale", torch.full_like(scale, maximum / LARGEST[E4M3]))

    def forward(self, x: Tensor) -> Tensor:
        rows = quantize(x.flatten(0, -2), self.input_scale, E4M3)  # (M, I)
        y = multiply(rows, self.weight.t(), self.input_scale, self.weight_scale, self.bias, self.native)
        return y.unflatten(0, x.shape[:-1])


def float8_layers(model: Model) -> dict[str, nn.Linear]:
    """The dense layers of a model's blocks that can be in 8 bits, by name."""
    return {
        name: layer
        for name, layer in model.named_modules()
        if name.startswith("blocks.")
        and type(layer) is nn.Linear
        and layer.in_features % SIDE == 0
        and layer.out_features % SIDE == 0
    }


def use_scales(model: Model, scales: Scales) -> None:
    """Replace the layers that have a scale, in place; it is then called in mixed precision."""
    layers = float8_layers(model)
    for name, maximum in scales.maxima.items():
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, StaticFloat8(layers[name], maximum))
