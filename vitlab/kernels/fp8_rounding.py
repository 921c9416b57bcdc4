"""Operators of torch that round a matrix to 8 bits: as it is, through GELU, or times GELU's slope.

In Triton on a GPU, by torch elsewhere. torch.compile would do it in several passes, and compute an error function that
is more exact than 8 bits can tell.

Shapes: M rows, C columns.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.kernels.fp8 import E4M3, E5M2, LARGEST, quantize

What = Literal["plain", "gelu", "slope"]
KINDS = {"plain": 0, "gelu": 1, "slope": 2}
TILE, WARPS = (64, 128), 8  # rows and columns that are rounded at a time, and how many warps share them
WORDS = 32  # of four bytes: the side of what is turned at a time


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


# ---- the operators


@torch.library.custom_op("vitlab::round_gelu", mutates_args=())
def round_gelu(x: Tensor, scale: Tensor) -> Tensor:
    """gelu(x) in 8 bits, (M, C)."""
    x = x.contiguous()
    return triton_gelu(x, scale) if x.is_cuda else quantize(F.gelu(x.float()), scale, E4M3)


@round_gelu.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=E4M3)


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


# ---- the kernels


def triton_round(
    x: Tensor, u: Tensor | None, scale: Tensor, what: str, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rounded = torch.empty(x.shape, dtype=kind_of(gradient), device=x.device)
    tiles = tiles_of(x)
    sums, most = scale.new_empty(tiles[0], x.shape[1] if gradient else 0), scale.new_empty(tiles)
    launch(x, x if u is None else u.contiguous(), scale, rounded, sums, most, what)
    return rounded, triton_turn(rounded), sums.sum(0), most.amax()


def triton_gelu(x: Tensor, scale: Tensor) -> Tensor:
    rounded = torch.empty(x.shape, dtype=E4M3, device=x.device)
    nothing = scale.new_empty(0)
    launch(x, x, scale, rounded, nothing, nothing, "gelu")
    return rounded


def launch(x: Tensor, u: Tensor, scale: Tensor, rounded: Tensor, sums: Tensor, most: Tensor, what: str) -> None:
    """Round x; the sums and the largest are left out where there is no room for them."""
    from vitlab.kernels.fp8_rounding_triton import round_kernel

    asked = {"WHAT": KINDS[what], "SUM": sums.numel() > 0, "LOOK": most.numel() > 0}
    sizes = {"LIMIT": LARGEST[rounded.dtype], "ROWS": TILE[0], "COLUMNS": TILE[1]}
    with torch.cuda.device_of(x):  # Triton launches on the current device
        round_kernel[tiles_of(x)](x, u, scale, rounded, sums, most, *x.shape, **asked, **sizes, num_warps=WARPS)


def tiles_of(x: Tensor) -> tuple[int, int]:
    return -(-x.shape[0] // TILE[0]), -(-x.shape[1] // TILE[1])


def triton_turn(x: Tensor) -> Tensor:
    """(C, M) of a matrix of bytes, (M, C), whose sides are multiples of 4."""
    from vitlab.kernels.fp8_rounding_triton import turn_kernel

    rows, columns = x.shape
    turned = x.new_empty(columns, rows)
    tiles = -(-rows // (4 * WORDS)), -(-columns // (4 * WORDS))
    with torch.cuda.device_of(x):
        turn_kernel[tiles](x.view(torch.int32), turned.view(torch.int32), rows, columns, SIDE=WORDS, num_warps=4)
    return turned
