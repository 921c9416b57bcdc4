"""Mixup and CutMix: each image of a batch is blended with its neighbor in the order of the epoch.

Partners are the positions 2k and 2k + 1 of the global batch. The order is random, so the pairs are too; and they do not
depend on how many ranks share the batch, while a rank hardly ever needs an image that is not its own.

Shapes: b images, K classes, h and w the input's height and width.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlab.data.rng import CUTMIX, MIXUP, Floats, Ints, Keys, beta, uniforms
from vitlab.data.transforms import Augment
from vitlab.device import send


@dataclass(frozen=True)
class Mix:
    """For each image: the weight of its own pixels in Mixup, and the box that CutMix copies from its partner."""

    own: Floats  # (b,) 1 where CutMix was drawn
    box: Floats  # (b, 4) left, top, right, bottom in fractions of the sides; empty where Mixup was drawn


def partners(batch: int) -> Ints:
    """The position that each position of a batch is mixed with, (batch,); the last of an odd batch: the one before."""
    position = np.arange(batch)
    return np.where((position ^ 1) < batch, position ^ 1, np.maximum(position - 1, 0))


def draw_mix(key: Keys, augment: Augment) -> Mix | None:
    """How each image is mixed, from the key (b,) of the first of its pair; None where nothing is mixed."""
    if not augment.mixup and not augment.cutmix:
        return None
    draws = uniforms(key, CUTMIX, 3)
    cut = draws[:, 2] < (0.5 if augment.mixup and augment.cutmix else float(not augment.mixup))
    own, box = np.ones(len(key)), np.zeros((len(key), 4))
    if augment.mixup:
        share = beta(key, MIXUP, augment.mixup)
        own = np.where(cut, 1.0, np.maximum(share, 1 - share))  # an image keeps the larger weight
    if augment.cutmix:
        half = np.sqrt(1 - beta(key, CUTMIX + 100, augment.cutmix))[:, None] / 2
        corners = np.concatenate([draws[:, :2] - half, draws[:, :2] + half], 1).clip(0, 1)
        box = np.where(cut[:, None], corners, 0.0)
    return Mix(own, box)


def mix_images(images: Tensor, mix: Mix, partner: Tensor) -> tuple[Tensor, Tensor]:
    """Mixed images (b, 3, h, w), and the fraction of each that is its own, (b,); `partner` (b,) indexes `images`."""
    h, w = images.shape[2:]
    own, edges = send(mix.own, images.device), send(np.round(mix.box * [w, h, w, h]), images.device)
    x, y = torch.arange(w, device=images.device), torch.arange(h, device=images.device)
    inside_x = (x >= edges[:, :1]) & (x < edges[:, 2:3])  # (b, w)
    inside_y = (y >= edges[:, 1:2]) & (y < edges[:, 3:])  # (b, h)
    taken = (inside_y[:, :, None] & inside_x[:, None, :])[:, None]  # (b, 1, h, w)
    weight = torch.where(taken, 0.0, own[:, None, None, None])
    mixed = torch.lerp(images[partner], images[: len(partner)], weight)
    return mixed, weight.mean((1, 2, 3))


def smooth(hot: Tensor, smoothing: float) -> Tensor:
    """Smoothed targets (b, K) of labels that are one-hot, or multi-hot, (b, K)."""
    return hot.float() * (1 - smoothing) + smoothing / hot.shape[1]
