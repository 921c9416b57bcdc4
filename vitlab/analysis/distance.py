"""How far attention reaches: the mean distance in pixels between a patch and what it looks at, by layer and head.

Shapes: B batch, L layers, H heads, N tokens (h*w patches, and a class token where there is one).
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vitlab.analysis.attention import each_attention
from vitlab.errors import UserError
from vitlab.models.config import Size, ViTConfig
from vitlab.models.vit import ViT

Doubles = NDArray[np.float64]
ROOM = 64 * 2**20  # bytes of attention weights held at once
COPIES = 3  # of a layer's: the scores, the weights, those of the patches


def cell_distances(grid: Size, stride: int = 1) -> Doubles:
    """Pixels from the center of each patch to that of each other, (hw, hw), patches in raster order."""
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    return stride * np.sqrt((y[:, None] - y) ** 2.0 + (x[:, None] - x) ** 2.0)


@torch.no_grad()
def query_distances(weights: Tensor, config: ViTConfig) -> Tensor:
    """Of one layer's attention (B, H, N, N), the mean distance to what each patch looks at, (B, H, hw), in pixels.

    The class token has no place, so its row and its column are dropped and the rest of each row is scaled to sum
    to 1. Not a number where a patch looks at the class token alone. A hybrid's patches lie its stem's stride apart.
    """
    lead = int(config.token)
    weights = weights[..., lead:, lead:]
    far = torch.as_tensor(cell_distances(config.grid, config.stride), dtype=weights.dtype, device=weights.device)
    return torch.einsum("bhij,ij->bhi", weights, far) / weights.sum(-1)


def mean_distance(model: ViT, batches: Iterable[Tensor]) -> Doubles:
    """The mean attention distance of each layer and head, (L, H), in pixels, over normalized images.

    `batches`: tensors (B, 3, height, width) of any lengths, read one at a time; `batch_size` says how many images
    fit into memory. An axial block has two layers, rows then columns.
    """
    config = getattr(model, "_orig_mod", model).config
    total: Doubles | None = None
    count: Doubles | None = None
    for images in batches:
        per_layer = [query_distances(one, config).cpu().double() for one in each_attention(model, images)]
        found = torch.stack(per_layer)  # (L, B, H, hw)
        sums, counts = found.nansum((1, 3)).numpy(), found.isfinite().sum((1, 3)).numpy()  # (L, H)
        total, count = (sums, counts) if total is None or count is None else (total + sums, count + counts)
    if total is None or count is None:
        raise UserError("mean_distance() needs at least one image")
    with np.errstate(invalid="ignore"):
        return total / count


def batch_size(config: ViTConfig) -> int:
    """Images whose attention in one layer, with what is made of it, fits into a fixed room; at least one."""
    return int(max(1, ROOM // (COPIES * 4 * config.heads * config.length**2)))


# ---- in one number


def depth_trend(distance: Doubles) -> float:
    """Rank correlation of the layer's number with its mean distance over heads, of (L, H); 1: ever farther."""
    return rank_correlation(np.arange(len(distance)), distance.mean(1))


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman's: the correlation of the ranks, those of equal values averaged; not a number for a constant."""
    ra, rb = ranks(np.asarray(a)), ranks(np.asarray(b))
    if len(ra) < 2 or ra.std() == 0 or rb.std() == 0:
        return float("nan")
    return float(np.corrcoef(ra, rb)[0, 1])


def ranks(values: NDArray[np.generic]) -> Doubles:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = counts.cumsum() - (counts - 1) / 2  # of each run of equal values
    return np.asarray(middle[inverse].ravel())
