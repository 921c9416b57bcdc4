"""Mean attention distance: how many pixels separate a patch from the patches it attends to, by layer and head.

Shapes: B batch, L layers, H heads, N tokens (h*w patches, and a class token where there is one).
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from vitlab.analysis.attention import check_vit, each_attention
from vitlab.errors import UserError
from vitlab.models.config import Size, ViTConfig
from vitlab.models.vit import ViT

Doubles = NDArray[np.float64]
MEMORY = 64 * 2**20  # bytes of attention weights held at once
COPIES = 3  # of a layer's attention: the scores, the weights, those of the patches


def cell_distances(grid: Size, stride: int = 1) -> Doubles:
    """Compute the pixels from the center of each patch to that of each other, (hw, hw), in raster order."""
    y, x = np.divmod(np.arange(grid[0] * grid[1]), grid[1])
    return stride * np.sqrt((y[:, None] - y) ** 2.0 + (x[:, None] - x) ** 2.0)


@torch.no_grad()
def query_distances(weights: Tensor, config: ViTConfig) -> Tensor:
    """Compute each patch's mean distance to the patches it attends to, (B, H, hw), in pixels, of weights (B, H, N, N).

    The class token has no place, so its row and its column are dropped and the rest of each row is scaled to sum
    to 1; nan where a patch attends to the class token alone. A hybrid's patches are its stem's stride apart.
    """
    first = config.prefix
    weights = weights[..., first:, first:]
    far = torch.as_tensor(cell_distances(config.grid, config.stride), dtype=weights.dtype, device=weights.device)
    return torch.einsum("bhij,ij->bhi", weights, far) / weights.sum(-1)


def mean_distance(model: ViT, batches: Iterable[Tensor]) -> Doubles:
    """Compute the mean attention distance of each layer and head, (L, H), in pixels, over normalized images.

    `batches`: tensors (B, 3, height, width) of any lengths, read one at a time; `batch_size` returns how many images
    fit into memory. An axial block has two layers, rows then columns.
    """
    config = check_vit(model).config
    total, count = np.zeros(()), np.zeros(())
    for images in batches:
        per_layer = [query_distances(one, config).cpu().double() for one in each_attention(model, images)]
        distances = torch.stack(per_layer)  # (L, B, H, hw)
        total = total + distances.nansum((1, 3)).numpy()  # (L, H)
        count = count + distances.isfinite().sum((1, 3)).numpy()
    if total.ndim == 0:
        raise UserError("mean_distance() needs at least one image")
    with np.errstate(invalid="ignore"):
        return total / count


def batch_size(config: ViTConfig) -> int:
    """Return how many images' attention of one layer, with its copies, fits into `MEMORY` bytes; at least one."""
    return int(max(1, MEMORY // (COPIES * 4 * config.heads * config.length**2)))


# ---- trends


def depth_trend(distance: Doubles) -> float:
    """Rank-correlate the layer's number with its mean distance over heads, of (L, H); 1: it grows with every layer."""
    return rank_correlation(np.arange(len(distance)), distance.mean(1))


def rank_correlation(a: ArrayLike, b: ArrayLike) -> float:
    """Compute Spearman's correlation, ranks of equal values averaged; nan for a constant."""
    ra, rb = ranks(np.asarray(a)), ranks(np.asarray(b))
    if len(ra) < 2 or ra.std() == 0 or rb.std() == 0:
        return float("nan")
    return float(np.corrcoef(ra, rb)[0, 1])


def ranks(values: NDArray[np.generic]) -> Doubles:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    middle = counts.cumsum() - (counts - 1) / 2  # of each run of equal values
    return np.asarray(middle[inverse].ravel())
