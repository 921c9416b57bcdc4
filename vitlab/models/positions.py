"""Position embeddings: learned tables and fixed sinusoids, each 1-D or 2-D, relative offsets; how each is resampled.

Shapes: N tokens (h*w patches, and a class token where there is one), D width, H heads, K head width,
T tables (one, or one per layer).
"""

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.errors import UserError
from vitlab.models.config import Size, ViTConfig

Resample = Literal["bilinear", "bicubic"]
INIT = 0.02


def check_mode(mode: str) -> None:
    if mode not in ("bilinear", "bicubic"):
        raise UserError(f"positions are resampled 'bilinear' or 'bicubic', not '{mode}'")


def resample(grid: Tensor, size: Size, mode: Resample = "bilinear") -> Tensor:
    """Stretch a table on a grid, (..., h, w, D), to another size.

    Bilinear aligns corners and does not antialias, as the authors' zoom does; bicubic aligns pixel edges, as
    other public code does.
    """
    if tuple(grid.shape[-3:-1]) == tuple(size):
        return grid
    lead, (h, w, d) = grid.shape[:-3], grid.shape[-3:]
    flat = grid.detach().reshape(-1, h, w, d).permute(0, 3, 1, 2)  # (T, D, h, w)
    new = F.interpolate(flat, size, mode=mode, align_corners=mode == "bilinear")
    return new.permute(0, 2, 3, 1).reshape(*lead, *size, d).contiguous()


@functools.lru_cache(32)  # a recorded CUDA graph may use them, so they must not be freed
def stretch_matrix(old: Size, new: Size, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """(n, N): what `resample` multiplies a table on a grid of N cells by, for one on n; None for the same grid."""
    cells = torch.eye(old[0] * old[1], dtype=torch.float64).unflatten(0, old)
    return None if old == new else resample(cells, new).flatten(0, 1).to(device, dtype)


def stretch(rows: Tensor, matrix: Tensor | None) -> Tensor:
    """A table (N, D) on another grid, (n, D), with a gradient that is the same in every run."""
    if matrix is None:
        return rows
    with torch.autocast(rows.device.type, enabled=False):  # positions keep their precision
        return matrix @ rows


def replace_parameter(old: nn.Parameter, new: Tensor) -> nn.Parameter:
    """A parameter with other values, of any shape; a frozen one stays frozen."""
    return nn.Parameter(new.detach(), requires_grad=old.requires_grad)


def sinusoids(length: int, width: int) -> Tensor:
    """Sine on even channels, cosine on odd ones, wavelengths from 2 pi to 10000 * 2 pi."""
    place = torch.arange(length, dtype=torch.float64)[:, None]
    channel = torch.arange(width, dtype=torch.float64)
    angle = place / 10000 ** (2 * (channel // 2) / width)
    return torch.where(channel % 2 == 0, angle.sin(), angle.cos()).float()  # (N, D)


def sinusoids_2d(grid: Size, width: int) -> Tensor:
    """Sine and cosine of the column, then of the row, D/4 channels each: wavelengths from 2 pi to 10000 * 2 pi."""
    quarter = width // 4
    rate = 10000 ** -(torch.arange(quarter, dtype=torch.float64) / max(1, quarter - 1))
    y, x = (torch.arange(side, dtype=torch.float64)[:, None] * rate for side in grid)  # (h, D/4), (w, D/4)
    columns, rows = torch.cat([x.sin(), x.cos()], 1), torch.cat([y.sin(), y.cos()], 1)
    both = [columns.expand(grid[0], -1, -1), rows[:, None].expand(-1, grid[1], -1)]
    return torch.cat(both, -1).flatten(0, 1).float()  # (hw, D)


def fixed_table(c: ViTConfig) -> Tensor:
    """The rows of all tokens, (N, D); 2-D sinusoids have no place for the class token, so its row is zero."""
    if c.positions == "sinusoidal":
        return sinusoids(c.placed + c.grid[0] * c.grid[1], c.width)
    return F.pad(sinusoids_2d(c.grid, c.width), (0, 0, c.placed, 0))


class Table(nn.Module):
    """One row of width D per token: learned ("1d") or fixed ("sinusoidal", "sincos2d")."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        self.lead, self.grid = c.placed, c.grid
        self.matrix: Tensor | None = None  # to the grid that is shown for now, if it is another one
        if c.positions == "1d":
            tables = c.depth if c.placement == "every" else 1
            self.table = nn.Parameter(torch.empty(tables, c.placed + c.grid[0] * c.grid[1], c.width))
            nn.init.normal_(self.table, std=INIT)
        else:  # kept with the weights: after a resize the rows are no longer the formula's
            self.register_buffer("table", fixed_table(c)[None])

    def forward(self, layer: int) -> Tensor:
        table = self.table[layer if self.table.shape[0] > 1 else 0]  # (N, D)
        if self.matrix is None:
            return table
        return torch.cat([table[: self.lead], stretch(table[self.lead :], self.matrix)])

    def show(self, grid: Size) -> None:
        """Give the rows of a grid from now on; the table stays."""
        self.matrix = stretch_matrix(self.grid, grid, self.table.device, self.table.dtype)

    def resize(self, grid: Size, mode: Resample) -> None:
        lead, rows = self.table[:, : self.lead], self.table[:, self.lead :].unflatten(1, self.grid)
        new = torch.cat([lead, resample(rows, grid, mode).flatten(1, 2)], 1).detach()
        self.table = replace_parameter(self.table, new) if isinstance(self.table, nn.Parameter) else new
        self.grid, self.matrix = grid, None


class Axes(nn.Module):
    """Two learned tables of width D/2, one per axis, concatenated; the class token has a row of its own ("2d")."""

    def __init__(self, c: ViTConfig) -> None:
        super().__init__()
        tables = c.depth if c.placement == "every" else 1
        self.grid = c.grid
        self.matrices: tuple[Tensor | None, Tensor | None] = None, None  # of rows and columns, as in Table
        self.columns = nn.Parameter(torch.empty(tables, c.grid[1], c.width // 2))
        self.rows = nn.Parameter(torch.empty(tables, c.grid[0], c.width // 2))
        self.token = nn.Parameter(torch.empty(tables, c.placed, c.width))
        for table in self.parameters():
            nn.init.normal_(table, std=INIT)

    def forward(self, layer: int) -> Tensor:
        layer = layer if self.rows.shape[0] > 1 else 0
        columns, rows = self.columns[layer], self.rows[layer]  # (w, D/2), (h, D/2)
        rows, columns = stretch(rows, self.matrices[0]), stretch(columns, self.matrices[1])
        both = torch.cat([columns.expand(len(rows), -1, -1), rows[:, None].expand(-1, len(columns), -1)], -1)
        return torch.cat([self.token[layer], both.flatten(0, 1)])  # (N, D)

    def show(self, grid: Size) -> None:
        """Give the rows of a grid from now on; the tables stay."""
        (h, w), like = self.grid, (self.rows.device, self.rows.dtype)
        self.matrices = stretch_matrix((h, 1), (grid[0], 1), *like), stretch_matrix((1, w), (1, grid[1]), *like)

    def resize(self, grid: Size, mode: Resample) -> None:
        self.grid, self.matrices = grid, (None, None)
        self.rows = replace_parameter(self.rows, resample(self.rows[:, :, None], (grid[0], 1), mode)[:, :, 0])
        self.columns = replace_parameter(self.columns, resample(self.columns[:, None], (1, grid[1]), mode)[:, 0])


class Relative(nn.Module):
    """Logits of the content query against an embedding of each (query, key) offset.

    The paper's offsets are 1-D; these are 2-D, (2h-1)(2w-1) of them, so that they can be resampled. The class
    token has three rows: token to itself, token to patch, patch to token.
    """

    index: Tensor

    def __init__(self, grid: Size, width: int, heads: int, token: bool) -> None:
        super().__init__()
        h, w = grid
        self.heads = heads
        self.offsets = nn.Parameter(torch.empty(2 * h - 1, 2 * w - 1, width))
        self.token = nn.Parameter(torch.empty(3 * int(token), width))
        for table in self.parameters():
            nn.init.normal_(table, std=INIT)
        self.register_buffer("index", offset_index(grid, token), persistent=False)

    def forward(self, q: Tensor) -> Tensor:
        rows = torch.cat([self.offsets.flatten(0, 1), self.token])  # (R, D)
        keys = rows.reshape(len(rows), self.heads, -1).permute(1, 2, 0)  # (H, K, R)
        logits = q @ keys.to(q.dtype)  # (B, H, N, R)
        return logits.gather(-1, self.index.expand(*logits.shape[:2], -1, -1))  # (B, H, N, N)

    def resize(self, grid: Size, mode: Resample) -> None:
        h, w = grid
        self.offsets = replace_parameter(self.offsets, resample(self.offsets, (2 * h - 1, 2 * w - 1), mode))
        self.number()

    def number(self) -> None:
        """Find the row of each pair in the table, as large as it is."""
        h, w = ((side + 1) // 2 for side in self.offsets.shape[:2])
        self.index = offset_index((h, w), len(self.token) > 0).to(self.offsets.device)


def offset_index(grid: Size, token: bool) -> Tensor:
    """For each query and key, the row of its offset: row-major over (2h-1, 2w-1), then the class token's three."""
    h, w = grid
    y, x = torch.arange(h).repeat_interleave(w), torch.arange(w).repeat(h)  # of each patch
    index = (y[:, None] - y + h - 1) * (2 * w - 1) + (x[:, None] - x + w - 1)  # (hw, hw)
    if token:
        index = F.pad(index, (1, 0, 1, 0))
        first = (2 * h - 1) * (2 * w - 1)
        index[0, 1:], index[1:, 0], index[0, 0] = first + 1, first + 2, first
    return index


def make_positions(c: ViTConfig) -> Table | Axes | None:
    """What is added to the tokens; relative offsets are part of the attention layers instead."""
    if c.positions in ("1d", "sinusoidal", "sincos2d"):
        return Table(c)
    return Axes(c) if c.positions == "2d" else None


def renew_positions(model: nn.Module) -> None:
    """Draw a model's learned positions anew, in place, all rows; raises UserError for a model that has none."""
    tables = [module for module in model.modules() if isinstance(module, Table | Axes | Relative)]
    learned = [table for module in tables for table in module.parameters()]
    if not learned:
        raise UserError("this model learns no positions that could be drawn anew; leave new_positions")
    for table in learned:
        nn.init.normal_(table, std=INIT)
