"""The five steps of a ViT on one image, as arrays: patches, tokens, positions, attention by depth, class scores.

Shapes: h and w the grid of tokens, N = hw of them, D width, L layers, H heads, K classes.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitlab.analysis.attention import check_vit, each_attention
from vitlab.analysis.rollout import rollout, to_grid
from vitlab.errors import UserError
from vitlab.models.config import Size
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.plots.steps import Steps

Floats = NDArray[np.float32]


@torch.no_grad()
def five_steps(model: ViT, image: Tensor) -> Steps:
    """Compute the steps of one normalized image of the model's size, (3, height, width)."""
    model = check_vit(model)
    if image.ndim != 3:
        raise UserError(f"five_steps() takes one image, (3, height, width), not of shape {tuple(image.shape)}")
    parts: list[nn.Module] = [model, model.embed, *model.blocks]
    outputs: dict[nn.Module, Tensor] = {}
    with ExitStack() as hooks:
        for part in parts:
            hooks.enter_context(part.register_forward_hook(lambda part, _, out: outputs.update({part: out})))
        maps = each_attention(model, image[None])  # one pass computes everything
    grids: list[Tensor] = []  # (1, H, h, w) of each layer

    def keep_grids() -> Iterator[Tensor]:
        for one in maps:
            grids.append(to_grid(model, one))
            yield one

    through = rollout(keep_grids())
    grid, first = model.config.grid, model.config.prefix
    components = principal_components(outputs[model.embed][0].flatten(1).T)
    tokens, depths = to_colors(components, grid), []
    for block in model.blocks:
        components = principal_components(outputs[block][0, first:], like=components)
        depths.append(to_colors(components, grid))
    places = None if model.positions is None else principal_components(model.positions(0)[model.config.placed :])
    logits = outputs[model][0] if model.head is not None else image.new_zeros(0)
    return Steps(
        pixels=denormalize(model, image),
        tokens=tokens,
        positions=np.zeros((*grid, 3), np.float32) if places is None else to_colors(places, grid),
        depths=np.stack(depths),
        attention=to_array(torch.cat(grids)),
        rollout=to_array(to_grid(model, through)[0]),
        logits=to_array(logits),
    )


def denormalize(model: Model, image: Tensor) -> Floats:
    """Undo the model's normalization of an image: (height, width, 3) in [0, 1]."""
    p = model.card.preprocess
    pixels = to_array(image).transpose(1, 2, 0) * np.array(p.std, np.float32) + np.array(p.mean, np.float32)
    return pixels.clip(0, 1)


def principal_components(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Project rows (N, D) on their first three principal axes, (N, 3); an axis beyond their rank is zero.

    An axis has no sign of its own: it correlates positively with `like`, or else its largest score is positive.
    """
    x = x.cpu().double()
    u, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    scores = (u * s * (s > 1e-6 * x.abs().max()))[:, :3]
    scores = torch.nn.functional.pad(scores, (0, 3 - scores.shape[1]))
    largest = scores.gather(0, scores.abs().argmax(0, keepdim=True))[0]
    signs = largest if like is None else (scores * like).sum(0)
    return torch.where(signs < 0, -scores, scores)


def to_colors(scores: Tensor, grid: Size) -> Floats:
    """Scale scores (N, 3) to red, green and blue on the grid, (h, w, 3), each from 0 to 1; gray where all are equal."""
    low, high = scores.amin(0), scores.amax(0)
    share = torch.where(high > low, (scores - low) / (high - low), 0.5)
    return to_array(share.unflatten(0, grid))


def to_array(x: Tensor) -> Floats:
    return np.asarray(x.detach().float().cpu().numpy())
