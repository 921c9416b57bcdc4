"""Attention rollout through all layers, and attention as a map over the image.

Shapes: B batch, H heads, N tokens, h and w patches down and across.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.vit import ViT


@torch.no_grad()
def rollout(maps: Iterable[Tensor]) -> Tensor:
    """Multiply the attention of all layers, (B, H, N, N) each, to the last layer's attention to the input, (B, N, N).

    A block adds its attention's output to its input, so each step is (A + I) / 2 with A the mean over heads. The
    product runs through the layers, later ones on the left.
    """
    through: Tensor | None = None
    for one in maps:
        step = one.mean(1) + torch.eye(one.shape[-1], dtype=one.dtype, device=one.device)
        step = step / step.sum(-1, keepdim=True)
        through = step if through is None else step @ through
    if through is None:
        raise UserError("rollout() needs the attention of at least one layer")
    return through


@torch.no_grad()
def to_grid(model: ViT, rows: Tensor) -> Tensor:
    """Reduce attention (..., N, N) to a map over the patches, (..., h, w), that sums to 1.

    Where the head sees the class token: its row, without its attention to itself and to registers. Elsewhere: the mean
    over the patches' rows, which is how much each patch is attended to. A class token that attends to itself alone
    gives an even map.
    """
    cells = seen_row(model.config, rows)[..., model.config.prefix :]
    total = cells.sum(-1, keepdim=True)
    cells = torch.where(total > 0, cells / total, 1 / cells.shape[-1])
    return cells.unflatten(-1, model.config.grid)


@torch.no_grad()
def to_prefix(model: ViT, rows: Tensor) -> Tensor:
    """The share of the same attention that goes to each token before the patches, (..., P): class token, registers."""
    return seen_row(model.config, rows)[..., : model.config.prefix]


def seen_row(c: ViTConfig, rows: Tensor) -> Tensor:
    """The attention (..., N) of what the head sees: of the class token, or of the patches, averaged."""
    return rows[..., 0, :] if sees_token(c) else rows[..., c.prefix :, :].mean(-2)


def sees_token(c: ViTConfig) -> bool:
    return c.pool in ("token", "token_mean")
