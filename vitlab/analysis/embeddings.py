"""The learned embeddings: principal components of the patch filters, similarities of the position embeddings.

Shapes: D width (filters), P side of a filter in pixels, h and w patches down and across.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.analysis.attention import check_vit
from vitlab.analysis.distance import cell_distances, rank_correlation
from vitlab.analysis.steps import to_array
from vitlab.errors import UserError
from vitlab.models.vit import ViT

Floats = NDArray[np.float32]
COMPONENTS = 28  # as many as the paper shows


@dataclass(frozen=True)
class Filters:
    """Filters over pixels, each of length 1, signed."""

    filters: Floats  # (n, P, P, 3)
    shares: Floats  # (n,) of the variance; empty where these are a stem's own filters
    stem: bool  # these are the 7x7 root filters of a hybrid's stem, the only ones over pixels


@torch.no_grad()
def patch_filters(model: ViT, count: int = COMPONENTS) -> Filters:
    """Compute the first principal components of the patch embedding's D filters; of a hybrid, its stem's root filters.

    A component has no sign of its own: here its largest weight is positive.
    """
    model = check_vit(model)
    if model.stem is not None:
        root = model.stem.root.standardized().cpu().double()
        root = root / root.flatten(1).norm(dim=1)[:, None, None, None]
        return Filters(channels_last(root), np.zeros(0, np.float32), True)
    weight = model.embed.weight.cpu().double()  # (D, 3, P, P)
    flat = weight.flatten(1)
    _, s, axes = torch.linalg.svd(flat - flat.mean(0), full_matrices=False)
    axes = axes[:count]
    signs = axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    shares = s.square() / s.square().sum()
    return Filters(channels_last((axes * signs).unflatten(1, weight.shape[1:])), to_array(shares[:count]), False)


def channels_last(filters: Tensor) -> Floats:
    return to_array(filters.permute(0, 2, 3, 1))  # (n, P, P, 3)


@torch.no_grad()
def position_similarity(model: ViT, layer: int = 0) -> Floats:
    """Compute the cosine similarity of each patch's position embedding with every other's, (h, w, h, w).

    `layer` selects the table where each layer has its own; the stem's is the first.
    """
    model = check_vit(model)
    if model.positions is None:
        kind = model.config.positions
        inside = "; its relative offsets are in the attention layers" if kind == "relative" else ""
        inside = "; its rotary positions are in the attention layers" if model.config.rotary != "none" else inside
        raise UserError(f"this model adds no position embeddings at its stem (positions='{kind}'{inside})")
    table = model.positions(layer)[model.config.placed :].cpu().double()  # (hw, D)
    table = torch.nn.functional.normalize(table, dim=1)
    return to_array(table @ table.T).reshape(model.config.grid * 2)


def position_trend(similarity: Floats) -> float:
    """Rank-correlate similarity with distance on the grid, over all pairs; -1: the nearer, the more similar."""
    h, w = similarity.shape[:2]
    pairs = np.triu_indices(h * w, 1)
    return rank_correlation(cell_distances((h, w))[pairs], similarity.reshape(h * w, h * w)[pairs])
