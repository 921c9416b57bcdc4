"""The five steps of a ViT on one image, as arrays: patches, tokens, positions, attention by depth, class scores.

Shapes: h and w the grid of tokens, N = hw of them, D width, L layers, H heads, K classes.
"""

from collections.abc import Iterator
from contextlib import ExitStack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitlab.analysis.attention import check_vit, each_attention, on_this_thread
from vitlab.analysis.rollout import rollout, to_grid, to_prefix
from vitlab.errors import UserError
from vitlab.models.config import Size, ViTConfig
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
            hook = on_this_thread(lambda part, _, out: outputs.update({part: out}))
            hooks.enter_context(part.register_forward_hook(hook))
        maps = each_attention(model, image[None])  # one pass computes everything
    grids: list[Tensor] = []  # (1, H, h, w) of each layer
    shares: list[Tensor] = []  # (1, H, P)

    def keep_grids() -> Iterator[Tensor]:
        for one in maps:
            grids.append(to_grid(model, one))
            shares.append(to_prefix(model, one))
            yield one

    through = rollout(keep_grids())
    grid, first = model.config.grid, model.config.prefix
    components = principal_components(outputs[model.embed][0].flatten(1).T)
    tokens, depths, leads = to_colors(components, grid), [], []
    for block in model.blocks:
        lead, patches = outputs[block][0, :first], outputs[block][0, first:]
        center, axes = principal_axes(patches, like=components)
        components = (patches.cpu().double() - center) @ axes
        depths.append(to_colors(components, grid))
        leads.append(to_array(scale_colors((lead.cpu().double() - center) @ axes, components)))
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
        prefix=np.stack(leads),
        prefix_attention=to_array(torch.cat(shares)),
    )


def prefix_names(c: ViTConfig) -> list[str]:
    """Name the tokens before the patches: C the class token, R1 and so on the registers."""
    return [*(["C"] if c.token else []), *(f"R{i + 1}" for i in range(c.registers))]


def denormalize(model: Model, image: Tensor) -> Floats:
    """Undo the model's normalization of an image: (height, width, 3) in [0, 1]."""
    p = model.card.preprocess
    pixels = to_array(image).transpose(1, 2, 0) * np.array(p.std, np.float32) + np.array(p.mean, np.float32)
    return pixels.clip(0, 1)


def principal_components(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Project rows (N, D) on their first three principal axes, (N, 3); an axis beyond their rank is zero."""
    center, axes = principal_axes(x, like)
    return (x.cpu().double() - center) @ axes


def principal_axes(x: Tensor, like: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mean (D,) of rows (N, D) and their first three principal axes, (D, 3); zeros beyond their rank.

    An axis has no sign of its own: its scores correlate positively with `like`, or else the largest is positive.
    """
    x = x.cpu().double()
    center = x.mean(0)
    _, s, axes = torch.linalg.svd(x - center, full_matrices=False)
    axes = (axes * (s > 1e-6 * x.abs().max())[:, None])[:3].T
    axes = torch.nn.functional.pad(axes, (0, 3 - axes.shape[1]))
    scores = (x - center) @ axes
    largest = scores.gather(0, scores.abs().argmax(0, keepdim=True))[0]
    signs = largest if like is None else (scores * like).sum(0)
    return center, torch.where(signs < 0, -axes, axes)


def to_colors(scores: Tensor, grid: Size) -> Floats:
    """Scale scores (N, 3) to red, green and blue on the grid, (h, w, 3), each from 0 to 1; gray where all are equal."""
    return to_array(scale_colors(scores, scores).unflatten(0, grid))


def scale_colors(scores: Tensor, among: Tensor) -> Tensor:
    """Scores (n, 3) from 0 to 1, as the lowest and the highest of others (N, 3) are; those beyond them are cut off."""
    low, high = among.amin(0), among.amax(0)
    return torch.where(high > low, (scores - low) / (high - low), 0.5).clamp(0, 1)


def to_array(x: Tensor) -> Floats:
    return np.asarray(x.detach().float().cpu().numpy())
