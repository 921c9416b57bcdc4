"""An MLP whose six products all run in 8 bits, with kernels for what lies between them.

`fp8.py` rounds the forward products and the gradients of inputs, layer by layer, and leaves the rest to torch.compile,
which reads the large matrices several times: for GELU, for rounding, for the sums that are the gradients of biases, and
in 16 bits for the gradients of weights. Here each matrix is read once and written in 8 bits, as it stands and turned,
which is how the gradient of a weight needs both of its factors.

Shapes: M rows, I inputs, F hidden units, O outputs; C columns of any matrix.
"""

import functools
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.kernels.fp8 import E4M3, E5M2, LARGEST, MARGIN, Float8Linear, largest, multiply, quantize, scale_of
from vitlab.kernels.install import runs_here
from vitlab.models.vit import MLP

What = Literal["plain", "gelu", "slope"]
KINDS: dict[What, int] = {"plain": 0, "gelu": 1, "slope": 2}
SIDE = 16  # that rows, too, must be multiples of: they are summed over
TILE, WARPS = (64, 128), 8  # rows and columns that are rounded at a time, and how many warps share them
WORDS = 32  # of four bytes: the side of what is turned at a time


def use_mlps(module: nn.Module) -> None:
    """Let the MLPs of a model whose layers are in 8 bits use these products, in place, where this machine allows it."""
    parts = [part for part in module.modules() if isinstance(part, MLP) and is_plain(part)]
    device = next(module.parameters()).device
    if parts and (device.type == "cpu" or runs_here("rounding to 8 bits", try_rounding, device)):
        for part in parts:
            part.forward = functools.partial(run, part)  # type: ignore[method-assign]


def is_plain(part: MLP) -> bool:
    """Whether both layers are in 8 bits and nothing but an exact GELU is between them; dropout is looked at later."""
    gelu = isinstance(part.gelu, nn.GELU) and part.gelu.approximate == "none"
    layers = (part.up, part.down)
    both = all(isinstance(layer, Float8Linear) and layer.bias.requires_grad for layer in layers)
    return gelu and both and isinstance(part.norm, nn.Identity)


def try_rounding(device: torch.device) -> None:
    """Compare the kernel with torch's on a few tiles; compilers of kernels have been seen to give wrong numbers."""
    x = torch.linspace(-4, 4, 208 * 160, device=device).sin().mul(3).reshape(208, 160).bfloat16()
    u, scale = x.flip(0), torch.full((), 0.02, device=device)
    for what, gradient in (("plain", False), ("gelu", False), ("plain", True), ("slope", True)):
        found = [t.float() for t in triton_round(x, u, scale, what, gradient)]
        wanted = [t.float() for t in plain_round(x, u, scale, what, gradient)]
        far = [(a - b).abs() > 0.3 * b.abs() + 0.01 for a, b in zip(found, wanted, strict=True)]
        if any(bool(each.any()) for each in far):
            raise ValueError(f"the kernel's numbers are wrong ({what})")


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
        native, exact = ctx.native, {"fast": False}  # the sums over all rows are too long for the fast ones
        dys, dy_turned, db, dy_most = round_turned(gradients[0], None, dy_scale, "plain", gradient=True)
        dh = multiply(dys, turn(down, down_scale).t(), dy_scale, down_scale, None, native)
        ddown = multiply(dy_turned, h_turned.t(), dy_scale, h_scale, None, native, **exact)
        dus, du_turned, da, du_most = round_turned(dh, u, du_scale, "slope", gradient=True)
        dx = multiply(dus, turn(up, up_scale).t(), du_scale, up_scale, None, native)
        dup = multiply(du_turned, x_turned.t(), du_scale, x_scale, None, native, **exact)
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


# ---- rounding


@torch.library.custom_op("vitlab::round_turned", mutates_args=())
def round_turned(
    x: Tensor, u: Tensor | None, scale: Tensor, what: str, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, gelu(x) or x gelu'(u) in 8 bits, (M, C), turned (C, M), its column sums if it is a gradient, its largest."""
    x = x.contiguous()
    return (triton_round if x.is_cuda else plain_round)(x, u, scale, what, gradient)


@round_turned.register_fake
def _(x: Tensor, u: Tensor | None, scale: Tensor, what: str, gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kind, (rows, columns) = kind_of(gradient), x.shape
    numbers = x.new_empty(rows, columns, dtype=kind), x.new_empty(columns, rows, dtype=kind)
    return *numbers, scale.new_empty(columns if gradient else 0), scale.new_empty(())


def kind_of(gradient: bool) -> torch.dtype:
    return E5M2 if gradient else E4M3


def plain_round(
    x: Tensor, u: Tensor | None, scale: Tensor, what: str, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the kernel computes, by torch."""
    value = x.float()
    if what == "gelu":
        value = F.gelu(value)
    elif what == "slope":
        assert u is not None
        value = torch.ops.aten.gelu_backward(value, u.float())
    rounded = quantize(value, scale, kind_of(gradient))
    sums = value.sum(0) if gradient else value.new_empty(0)
    return rounded, rounded.t().contiguous(), sums, value.abs().amax()


def triton_round(
    x: Tensor, u: Tensor | None, scale: Tensor, what: str, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    import triton

    from vitlab.kernels.rounding_triton import round_kernel

    kind, (rows, columns) = kind_of(gradient), x.shape
    rounded = x.new_empty(rows, columns, dtype=kind)
    tiles = triton.cdiv(rows, TILE[0]), triton.cdiv(columns, TILE[1])
    sums, most = scale.new_empty(tiles[0], columns if gradient else 0), scale.new_empty(tiles)
    arguments = (x, x if u is None else u.contiguous(), scale, rounded, sums, most, rows, columns)
    sizes = {"SUM": gradient, "LIMIT": LARGEST[kind], "ROWS": TILE[0], "COLUMNS": TILE[1]}
    with torch.cuda.device_of(x):  # Triton launches on the current device
        round_kernel[tiles](*arguments, WHAT=KINDS[what], **sizes, num_warps=WARPS)  # type: ignore[index]
    return rounded, triton_turn(rounded), sums.sum(0), most.amax()


def triton_turn(x: Tensor) -> Tensor:
    """(C, M) of a matrix of bytes, (M, C), whose sides are multiples of 4."""
    import triton

    from vitlab.kernels.rounding_triton import turn_kernel

    rows, columns = x.shape
    turned = x.new_empty(columns, rows)
    tiles = triton.cdiv(rows, 4 * WORDS), triton.cdiv(columns, 4 * WORDS)
    with torch.cuda.device_of(x):
        turn_kernel[tiles](x.view(torch.int32), turned.view(torch.int32), rows, columns, SIDE=WORDS, num_warps=4)
    return turned
