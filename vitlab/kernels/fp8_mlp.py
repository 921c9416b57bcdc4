"""An MLP whose six products all run in 8 bits, with kernels for what lies between them.

`fp8.py` rounds the forward products and the gradients of inputs, layer by layer, and leaves the rest to torch.compile,
which reads the large matrices several times: for GELU, for rounding, for the sums that are the gradients of biases, and
in 16 bits for the gradients of weights. Here each matrix is read once and written in 8 bits, as it stands and turned,
which is how the gradient of a weight needs both of its factors.

Shapes: M rows, I inputs, F hidden units, O outputs.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from vitlab.kernels.fp8 import E4M3, E5M2, MARGIN, Float8Linear, largest, multiply, quantize, scale_of
from vitlab.kernels.fp8_rounding import round_turned, try_rounding
from vitlab.kernels.install import runs_here
from vitlab.models.vit import MLP

SIDE = 16  # that rows, too, must be multiples of: they are summed over


def use_mlps(module: nn.Module) -> None:
    """Let the MLPs of a model whose layers are in 8 bits use these products, in place, where this machine allows it."""
    parts = [part for part in module.modules() if isinstance(part, MLP) and is_plain(part)]
    device = next(module.parameters()).device
    if parts and (device.type == "cpu" or runs_here("rounding to 8 bits", try_rounding, device)):
        for part in parts:
            part.forward = functools.partial(run, part)  # type: ignore[method-assign]


def is_plain(part: MLP) -> bool:
    """Whether both layers are in 8 bits and nothing but an exact GELU is between them; dropout is looked at later."""
    layers = (part.up, part.down)
    both = all(isinstance(layer, Float8Linear) and layer.bias.requires_grad for layer in layers)
    return both and has_exact_gelu(part)


def has_exact_gelu(part: MLP) -> bool:
    gelu = isinstance(part.gelu, nn.GELU) and part.gelu.approximate == "none"
    return gelu and isinstance(part.norm, nn.Identity)


def run(part: MLP, x: Tensor) -> Tensor:
    """What an MLP computes."""
    rows = x.to(part.up.weight.dtype).flatten(0, -2)
    if len(rows) % SIDE or (part.training and part.dropout.p > 0):
        return MLP.forward(part, x)
    layers = part.up, part.down
    assert isinstance(part.up, Float8Linear)
    parameters = [tensor for layer in layers for tensor in (layer.weight, layer.bias, layer.maxima)]
    y: Tensor = Products.apply(rows, *parameters, part.up.native)
    return y.unflatten(0, x.shape[:-1])


class Products(torch.autograd.Function):
    """gelu(x U^T + a) D^T + b, (M, O), of x (M, I), U (F, I) and D (O, F)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, up: Tensor, a: Tensor, up_maxima: Tensor, down: Tensor, b: Tensor, down_maxima: Tensor,
        native: bool,
    ) -> Tensor:  # fmt: skip
        (x_scale, up_scale), (h_scale, down_scale) = forward_scales(up_maxima), forward_scales(down_maxima)
        ups, downs = quantize(up, up_scale, E4M3), quantize(down, down_scale, E4M3)
        xs, x_turned, _, x_most = round_turned(x, None, x_scale, "plain", gradient=False)
        u = multiply(xs, ups.t(), x_scale, up_scale, a, native)
        hs, h_turned, _, h_most = round_turned(u, None, h_scale, "gelu", gradient=False)
        mosts = x_most, h_most, largest(ups) * up_scale, largest(downs) * down_scale
        ctx.save_for_backward(x_turned, u, h_turned, up, down, up_maxima, down_maxima, *mosts)
        ctx.native = native
        return multiply(hs, downs.t(), h_scale, down_scale, b, native)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_turned, u, h_turned, up, down, up_maxima, down_maxima, x_most, h_most, up_most, down_most = ctx.saved_tensors
        (x_scale, up_scale), (h_scale, down_scale) = forward_scales(up_maxima), forward_scales(down_maxima)
        du_scale, dy_scale = scale_of(up_maxima[1], E5M2), scale_of(down_maxima[1], E5M2)
        native = ctx.native  # weights' gradients are sums over all rows, too long for the fast ones
        dys, dy_turned, db, dy_most = round_turned(gradients[0], None, dy_scale, "plain", gradient=True)
        dh = multiply(dys, turn(down, down_scale).t(), dy_scale, down_scale, None, native)
        ddown = multiply(dy_turned, h_turned.t(), dy_scale, h_scale, None, native, fast=False)
        dus, du_turned, da, du_most = round_turned(dh, u, du_scale, "slope", gradient=True)
        dx = multiply(dus, turn(up, up_scale).t(), du_scale, up_scale, None, native)
        dup = multiply(du_turned, x_turned.t(), du_scale, x_scale, None, native, fast=False)
        return (
            *(dx, dup, da.to(up.dtype), seen(up_maxima, x_most, du_most, up_most)),
            *(ddown, db.to(down.dtype), seen(down_maxima, h_most, dy_most, down_most), None),
        )


def forward_scales(maxima: Tensor) -> tuple[Tensor, Tensor]:
    """Of a layer's input and of its weight."""
    return scale_of(maxima[0], E4M3), scale_of(maxima[2], E4M3)


def turn(weight: Tensor, scale: Tensor) -> Tensor:
    """A weight (O, I) in 8 bits as (I, O): a product wants the columns of its second factor together."""
    return quantize(weight, scale, E4M3).t().contiguous()


def seen(maxima: Tensor, *mosts: Tensor) -> Tensor:
    """The largest magnitudes, as far as the scales reach: an outlier doubles a scale and does not ruin it."""
    return torch.minimum(torch.stack(mosts), maxima * MARGIN)
