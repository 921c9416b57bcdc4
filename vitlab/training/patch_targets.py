"""What masked patch prediction predicts of a patch, the three targets of the paper's appendix B.1.2.

`mean` is the patch's mean color in 3 bits a channel, one of 8 x 8 x 8 = 512 classes; `4x4` the same of each cell of the
patch downsized to 4 x 4, 16 predictions of 512 classes at once; `pixels` the patch itself, by least squares.

Shapes: B batch, N patches, C cells of a patch, M = 3 * stride * stride values of a patch.
"""

import math
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.device import send
from vitlab.models.config import Preprocess, ViTConfig
from vitlab.training.objectives import at_least_float32

LEVELS = 8
COLORS = LEVELS**3
TargetName = Literal["mean", "4x4", "pixels"]


class Target(Protocol):
    @property
    def outputs(self) -> int:
        """Numbers to predict for each patch."""
        ...

    def read(self, images: Tensor) -> Tensor:
        """The targets of every patch of normalized images (B, 3, height, width)."""
        ...

    def losses(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        """The loss of each patch, (B, N), of predictions (B, N, outputs)."""
        ...

    def sums(self, predicted: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
        """Sums over the chosen patches, (B, N), of a test batch, as one row of numbers; the first is their number."""
        ...

    def report(self, sums: list[float]) -> dict[str, float]:
        """The loss and the like; `prior` is the least loss that any fixed guess can have on these patches."""
        ...


@dataclass(frozen=True)
class Colors:
    """The 3-bit colors of a patch downsized to `side` x `side` cells, by the mean loss of its cells."""

    preprocess: Preprocess
    stride: int
    side: int

    @property
    def outputs(self) -> int:
        return self.side**2 * COLORS

    def read(self, images: Tensor) -> Tensor:
        """The class of each cell, (B, N, C): mean color in pixel space, 3 bits a channel, red the most significant.

        Cells of a patch that they do not divide share a row or column of pixels; none reaches into another patch.
        """
        mean, std = (
            send(np.array(x), images.device)[:, None, None] for x in (self.preprocess.mean, self.preprocess.std)
        )
        pixels = images.float() * std + mean  # (B, 3, height, width) in [0, 1]
        h, w = (length // self.stride for length in images.shape[2:])
        average = F.adaptive_avg_pool2d(pixels, (h * self.side, w * self.side))
        red, green, blue = (average * LEVELS).long().clamp(0, LEVELS - 1).unbind(1)
        classes = (red * LEVELS + green) * LEVELS + blue
        cells = classes.unflatten(2, (w, self.side)).unflatten(1, (h, self.side))  # (B, h, side, w, side)
        return cells.transpose(2, 3).flatten(3).flatten(1, 2)

    def losses(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        logits = at_least_float32(predicted).reshape(-1, COLORS)
        return F.cross_entropy(logits, wanted.flatten(), reduction="none").view_as(wanted).mean(-1)

    def sums(self, predicted: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
        """Patches, cells that are right, losses, then how often each color is in each cell, (C, 512)."""
        right = (predicted.unflatten(-1, (-1, COLORS)).argmax(-1) == wanted) & chosen[..., None]
        sums = torch.stack([chosen.sum(), right.sum(), (self.losses(predicted, wanted) * chosen).sum()])
        cells = torch.arange(self.side**2, device=wanted.device)
        counts = torch.bincount((cells * COLORS + wanted)[chosen].flatten(), minlength=self.outputs)
        return torch.cat([sums, counts.to(sums)])

    def report(self, sums: list[float]) -> dict[str, float]:
        """The prior is the entropy of the colors in a cell, the mean over cells."""
        patches, right, loss, *counts = sums
        cells = self.side**2
        prior = -sum(n / patches * math.log(n / patches) for n in counts if n) / cells
        return {"accuracy": right / patches / cells, "loss": loss / patches, "prior": prior}


@dataclass(frozen=True)
class Pixels:
    """The normalized pixels of a patch, by their mean squared error."""

    stride: int

    @property
    def outputs(self) -> int:
        return 3 * self.stride**2

    def read(self, images: Tensor) -> Tensor:
        """The values of each patch, (B, N, M), by channel, then row, then column."""
        return F.unfold(images.float(), self.stride, stride=self.stride).transpose(1, 2)

    def losses(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        return (at_least_float32(predicted) - wanted).square().mean(-1)

    def sums(self, predicted: Tensor, wanted: Tensor, chosen: Tensor) -> Tensor:
        """Patches, losses, the sum of all squares, then that of each of a patch's values, (M,)."""
        losses = self.losses(predicted, wanted) * chosen
        patches = wanted * chosen[..., None]
        sums = torch.stack([chosen.sum(), losses.sum(), patches.square().sum()])
        return torch.cat([sums, patches.sum((0, 1)).to(sums)])

    def report(self, sums: list[float]) -> dict[str, float]:
        """The prior is the variance of a value, the mean over a patch's values."""
        patches, loss, squares, *values = sums
        means = sum((value / patches) ** 2 for value in values)
        return {"loss": loss / patches, "prior": (squares / patches - means) / self.outputs}


def make_target(name: TargetName, preprocess: Preprocess, config: ViTConfig) -> Target:
    """The target of that name for the patches of a model, which a hybrid's stem has a stride apart."""
    if name == "pixels":
        return Pixels(config.stride)
    return Colors(preprocess, config.stride, 4 if name == "4x4" else 1)
