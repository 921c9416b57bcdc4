"""Attention through the whole model, and as a map over the image.

Shapes: B batch, H heads, N tokens, h and w patches down and across.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.vit import ViT


@torch.no_grad()
def rollout(maps: Iterable[Tensor]) -> Tensor:
    """How each token of the last layer is made of the patches: per layer (B, H, N, N) to (B, N, N).

    A block adds what its attention gathers to what it was given, so half of each step is the identity:
    (A + I) / 2, A the mean over heads. The product runs through the layers, later ones on the left.
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
    """Attention (..., N, N) as a map over the patches, (..., h, w), that sums to 1.

    With a class token: its row, without its look at itself. Without one: the mean over all rows, which says how
    much each patch is looked at. A class token that looks at itself alone prefers no patch: its map is even.
    """
    if model.config.token:
        cells = rows[..., 0, 1:]
    else:
        cells = rows.mean(-2)
    total = cells.sum(-1, keepdim=True)
    cells = torch.where(total > 0, cells / total, 1 / cells.shape[-1])
    return cells.unflatten(-1, model.config.grid)
