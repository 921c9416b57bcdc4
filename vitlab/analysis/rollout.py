"""Attention rollout through all layers, and attention as a map over the image.

Shapes: B batch, H heads, N tokens, h and w patches down and across.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from vitlab.errors import UserError
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

    With a class token: its row, without its attention to itself and to registers. Without one: the mean over all rows,
    which is how much each patch is attended to. A class token that attends to itself alone gives an even map.
    """
    cells = rows[..., 0, model.config.prefix :] if model.config.token else rows.mean(-2)[..., model.config.prefix :]
    total = cells.sum(-1, keepdim=True)
    cells = torch.where(total > 0, cells / total, 1 / cells.shape[-1])
    return cells.unflatten(-1, model.config.grid)
