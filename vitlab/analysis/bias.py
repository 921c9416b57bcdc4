"""Inductive bias: whether predictions stay as the image moves, as its tiles change places, and without positions.

An image that moves wraps around: what leaves it on one side comes in on the other, so nothing is lost. A convolution
follows a shift wherever it sees the same neighbors; in a ViT, one by complete patches changes only which position each
of them has. Tiles that change places keep what is in a tile and lose how tiles lie to each other.

Shapes: B batch, T tiles, S shifts.
"""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.data.loader import Batch
from vitlab.errors import UserError
from vitlab.models.positions import Axes, Relative, Table
from vitlab.models.resnet import ResNet
from vitlab.models.variants import Model
from vitlab.models.vit import ViT

Doubles = NDArray[np.float64]
WAYS = ((1, 0), (-1, 0), (0, 1), (0, -1))  # down, up, right, left


@dataclass(frozen=True)
class Agreement:
    """Shares of images whose predicted class stays the same, and of those whose class is right as they are."""

    images: int
    accuracy: float
    shifted: Doubles  # (S,) by a number of pixels, the mean over four directions
    shuffled: Doubles  # by the side of the tiles
    unplaced: float  # without positions


@torch.no_grad()
def measure_bias(
    model: Model, batches: Iterable[Batch], shifts: Sequence[int], sides: Sequence[int], seed: int = 0
) -> Agreement:
    """Compare a model's predictions on images, and on the same images shifted and shuffled, and without positions.

    `model` is in eval mode; `batches` are of its size, on its device. `shifts` are pixels, `sides` those of square
    tiles, which must divide the images. How an image is shuffled follows from `seed` and its index. Raises UserError
    for a model whose positions cannot be taken away, and where there is no image.
    """
    blind = without_positions(model)
    total, counts = 0, np.zeros(2 + len(shifts) + len(sides))
    for batch in batches:
        images, guess = batch.images, model(batch.images).argmax(-1)
        moved = [[model(torch.roll(images, (k * y, k * x), (2, 3))) for y, x in WAYS] for k in shifts]
        mixed = [[model(shuffle_tiles(images, side, tile_orders(batch, side, seed)))] for side in sides]
        same = [count_same(outputs, guess) for outputs in ([blind(images)], *moved, *mixed)]
        counts += [int((guess == batch.labels).sum()), *same]
        total += len(images)
    if not total:
        raise UserError("measure_bias() needs at least one image")
    accuracy, unplaced, *others = counts / total
    return Agreement(total, accuracy, np.array(others[: len(shifts)]), np.array(others[len(shifts) :]), unplaced)


def count_same(outputs: Sequence[Tensor], guess: Tensor) -> float:
    """How many images, in the mean over outputs (B, classes), have the class `guess`, (B,)."""
    return sum(int((output.argmax(-1) == guess).sum()) for output in outputs) / len(outputs)


# ---- tiles


def tile_orders(batch: Batch, side: int, seed: int) -> Tensor:
    """A random order of its tiles for each image, (B, T); UserError for tiles that do not divide the images."""
    height, width = batch.images.shape[2:]
    if height % side or width % side:
        raise UserError(f"tiles of {side} pixels do not divide images of {height}x{width}; use another side")
    tiles = (height // side) * (width // side)
    drawn = [np.random.default_rng((seed, index)).permutation(tiles) for index in batch.index.tolist()]
    return torch.from_numpy(np.stack(drawn)).to(batch.images.device)


def shuffle_tiles(images: Tensor, side: int, order: Tensor) -> Tensor:
    """Cut images (B, C, height, width) into square tiles; tile t of the result is tile order[:, t], in raster order."""
    h, w = images.shape[2] // side, images.shape[3] // side
    tiles = images.unflatten(3, (w, side)).unflatten(2, (h, side)).permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    mixed = tiles.gather(1, order[:, :, None, None, None].expand_as(tiles))  # (B, T, C, side, side)
    return mixed.unflatten(1, (h, w)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


# ---- positions


@torch.no_grad()
def without_positions(model: Model) -> Model:
    """A copy in which every patch has the same position, the mean of all; that of the class token stays.

    A model without any is returned as it is, such as a plain ResNet. Raises UserError for rotary positions, which are
    part of how queries and keys meet.
    """
    if isinstance(model, ResNet) and model.config.attention == "none":
        return model
    if isinstance(model, ViT) and model.rotary is not None:
        raise UserError("rotary positions cannot be taken from a model that has learned with them")
    blind = copy.deepcopy(model)
    for module in blind.modules():
        if isinstance(module, Table):
            patches = module.table[:, module.lead :]
            patches.copy_(patches.mean(1, keepdim=True).expand_as(patches))
        elif isinstance(module, Axes):
            for table in (module.rows, module.columns):
                table.copy_(table.mean(1, keepdim=True).expand_as(table))
        elif isinstance(module, Relative):
            module.offsets.copy_(module.offsets.mean((0, 1), keepdim=True).expand_as(module.offsets))
    return blind
