"""Rotary positions: queries and keys turn by angles that grow with the patch's row and column.

A quarter of the angles of a head is for rows, a quarter for columns; each turns two channels. So the product of a query
and a key depends on the offset of their patches alone. The class token and registers do not turn.

Shapes: N patches (h*w), K head width, H heads, P tokens before the patches.
"""

import functools
import math
from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn

from vitlab.models.config import ViTConfig

Turn = Callable[[Tensor], Tensor]  # of queries or keys


class Rotary(nn.Module):
    """Cosines and sines of all patches, (N, K); a function of the grid, so no file holds them."""

    cos: Tensor
    sin: Tensor

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.prefix, self.halves = c.prefix, c.rotary_layout == "halves"
        self.place(c)

    def place(self, c: ViTConfig) -> None:
        """Compute the tables of a grid."""
        self.config = c
        like = getattr(self, "cos", torch.empty(0, device="cpu"))  # on a device, in a precision
        cos, sin = channel_tables(angles(c), self.halves)
        self.register_buffer("cos", cos.to(like), persistent=False)
        self.register_buffer("sin", sin.to(like), persistent=False)

    def show(self, c: ViTConfig) -> None:
        """Turn by the angles of another grid from now on."""
        self.cos, self.sin = shown_tables(c, self.halves, self.cos.device, self.cos.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """On another device or in another precision the tables are computed again, not rounded a second time."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.place(self.config)
        return self

    def tables(self) -> tuple[Tensor, Tensor]:
        return self.cos, self.sin

    def of(self, kept: Tensor | None) -> Turn:
        """What turns the sequences of which only some patches are left, those number `kept`, (B, n)."""
        return self if kept is None else functools.partial(self, kept=kept)

    def forward(self, x: Tensor, kept: Tensor | None = None) -> Tensor:
        """Turn queries or keys, (B, H, P + N, K)."""
        lead, patches = x[..., : self.prefix, :], x[..., self.prefix :, :]
        cos, sin = (table.to(x.dtype) for table in self.tables())
        cos, sin = (cos, sin) if kept is None else (cos[kept][:, None], sin[kept][:, None])  # (B, 1, n, K)
        turned = patches * cos + self.quarter_turn(patches) * sin
        return torch.cat([lead, turned], -2) if self.prefix else turned

    def quarter_turn(self, x: Tensor) -> Tensor:
        """(a, b) becomes (-b, a) in every pair of channels."""
        if self.halves:
            a, b = x.chunk(2, -1)
            return torch.cat([-b, a], -1)
        pairs = x.unflatten(-1, (-1, 2))
        return torch.stack([-pairs[..., 1], pairs[..., 0]], -1).flatten(-2)


def angles(c: ViTConfig) -> Tensor:
    """Those of rows, then those of columns, (N, K/2), in float64."""
    cells = (torch.arange(side, dtype=torch.float64, device="cpu") for side in c.grid)
    rows, columns = (coordinates(c, numbers, len(numbers)) for numbers in cells)
    both = [rows.repeat_interleave(len(columns)), columns.repeat(len(rows))]  # row by row
    return torch.cat([place[:, None] * turn_rates(c) for place in both], 1)


def turn_rates(c: ViTConfig) -> Tensor:
    """Angle per unit of each pair of channels of an axis, (K/4,)."""
    quarter = c.width // c.heads // 4
    return c.rotary_base ** -(torch.arange(quarter, dtype=torch.float64, device="cpu") / quarter)


def coordinates(c: ViTConfig, cells: Tensor, side: int) -> Tensor:
    """Where the cells along an axis are: their number, on a grid of another size if one is given, or their centers from
    -1 to 1, in turns."""
    if c.rotary == "centers":
        return 2 * math.pi * (2 * (cells + 0.5) / side - 1)
    return cells if c.rotary_grid == 0 else cells / side * c.rotary_grid


def channel_tables(angle: Tensor, halves: bool) -> tuple[Tensor, Tensor]:
    """Cosines and sines (N, K) of angles (N, K/2), one for each channel of a pair."""
    angle = torch.cat([angle, angle], 1) if halves else angle.repeat_interleave(2, 1)
    return angle.cos(), angle.sin()


@functools.lru_cache(8)  # a recorded CUDA graph may use them, so they must not be freed
def shown_tables(c: ViTConfig, halves: bool, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    cos, sin = channel_tables(angles(c), halves)
    return cos.to(device, dtype), sin.to(device, dtype)


def turn(q: Tensor, k: Tensor, rotary: Turn | None) -> tuple[Tensor, Tensor]:
    return (q, k) if rotary is None else (rotary(q), rotary(k))
