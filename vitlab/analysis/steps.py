"""The five steps on one picture, as arrays: patches, tokens, positions, attention by depth, class scores.

Shapes: h and w the grid of tokens, N = hw of them, D width, L layers, H heads, K classes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vitlab.analysis.attention import each_attention
from vitlab.analysis.rollout import rollout, to_grid
from vitlab.errors import UserError
from vitlab.models.config import Size
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Steps:
    """What became of one picture. An axial block has two attention layers, so L counts twice as many of them."""

    pixels: Floats  # (height, width, 3) in [0, 1]: what the model sees
    tokens: Floats  # (h, w, 3) in [0, 1]: the patch tokens before positions, in colors by PCA
    positions: Floats  # (h, w, 3) in [0, 1]: the position embeddings likewise; zeros where the stem adds none
    depths: Floats  # (blocks, h, w, 3): the tokens after each block, a PCA each, signs as in the block before
    attention: Floats  # (L, H, h, w): where the class token looks (or all tokens, on average); each sums to 1
    rollout: Floats  # (h, w): the same through all layers
    logits: Floats  # (K,); empty where the model has no head


@torch.no_grad()
def five_steps(model: ViT, image: Tensor) -> Steps:
    """The steps of one normalized image of the model's size, (3, height, width)."""
    model = vit_only(model)
    if image.ndim != 3:
        raise UserError(f"five_steps() takes one image, (3, height, width), not of shape {tuple(image.shape)}")
    parts: list[nn.Module] = [model, model.embed, *model.blocks]
    caught: dict[nn.Module, Tensor] = {}
    hooks = [part.register_forward_hook(lambda part, _, out: caught.update({part: out})) for part in parts]
    try:
        maps = each_attention(model, image[None])  # one pass gives everything
    finally:
        for hook in hooks:
            hook.remove()
    looks: list[Tensor] = []  # (1, H, h, w) of each layer

    def passing() -> Iterator[Tensor]:
        for one in maps:
            looks.append(to_grid(model, one))
            yield one

    through = rollout(passing())
    grid, lead = model.config.grid, int(model.config.token)
    seen = scores(caught[model.embed][0].flatten(1).T)
    tokens, depths = colored(seen, grid), []
    for block in model.blocks:
        seen = scores(caught[block][0, lead:], like=seen)
        depths.append(colored(seen, grid))
    places = None if model.positions is None else scores(model.positions(0)[lead:])
    logits = caught[model][0] if model.head is not None else image.new_zeros(0)
    return Steps(
        pixels=shown(model, image),
        tokens=tokens,
        positions=np.zeros((*grid, 3), np.float32) if places is None else colored(places, grid),
        depths=np.stack(depths),
        attention=array(torch.cat(looks)),
        rollout=array(to_grid(model, through)[0]),
        logits=array(logits),
    )


def vit_only(model: nn.Module) -> ViT:
    """The ViT in what we are given, or a sentence."""
    inner = getattr(model, "_orig_mod", model)  # what torch.compile wraps
    if isinstance(inner, ResNet):
        raise UserError("this model is a ResNet: it has no patches, tokens or attention to look at")
    if not isinstance(inner, ViT):
        raise UserError(f"this takes a vitlab model, not {type(inner).__name__}")
    return inner


def shown(model: ViT, image: Tensor) -> Floats:
    """A normalized image as it looks, (height, width, 3) in [0, 1]."""
    p = model.card.preprocess
    pixels = array(image).transpose(1, 2, 0) * np.array(p.std, np.float32) + np.array(p.mean, np.float32)
    return pixels.clip(0, 1)


def scores(x: Tensor, like: Tensor | None = None) -> Tensor:
    """Rows (N, D) along their first three principal axes, (N, 3); an axis that they do not have is zero.

    An axis has no sign of its own: it points as `like` does, else so that its largest score is positive.
    """
    x = x.cpu().double()
    u, s, _ = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    found = (u * s * (s > 1e-6 * x.abs().max()))[:, :3]
    found = torch.nn.functional.pad(found, (0, 3 - found.shape[1]))
    if like is None:
        signs = found.gather(0, found.abs().argmax(0, keepdim=True))[0]
    else:
        signs = (found * like).sum(0)
    return torch.where(signs < 0, -found, found)


def colored(scores: Tensor, grid: Size) -> Floats:
    """Scores (N, 3) as red, green and blue on the grid, (h, w, 3), each from 0 to 1; grey where all are alike."""
    low, high = scores.amin(0), scores.amax(0)
    share = torch.where(high > low, (scores - low) / (high - low), 0.5)
    return array(share.unflatten(0, grid))


def array(x: Tensor) -> Floats:
    return np.asarray(x.detach().float().cpu().numpy())
