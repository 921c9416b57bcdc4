"""Masked patch prediction, the paper's self-supervision: corrupt half of the patches, predict their mean color.

Of the corrupted patches 80 % become a learned mask embedding, 10 % another patch's embedding, and 10 % stay as they
are. The target is the patch's mean color in 3 bits a channel: 8 x 8 x 8 = 512 classes. How a patch is corrupted is a
hash of (seed, step, image, patch), so a resumed run corrupts the same patches. Half of the patches are those for which
a coin falls so, or exactly those with the lowest hashes of the image.

Shapes: B batch, N patches, D width.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.data.loader import Batch
from vitlab.device import send
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size
from vitlab.models.vit import ViT
from vitlab.training.objectives import Forward, at_least_float32

LEVELS = 8
COLORS = LEVELS**3
CORRUPTED, MASKED, SWAPPED = 0.5, 0.8, 0.1
Masking = Literal["coin", "half"]
TEST_STEP = -1  # in place of a training step, so that every test corrupts alike


@dataclass(frozen=True)
class Corruption:
    """How each patch is corrupted, all (B, N): which are to be predicted, which of them are masked or swapped."""

    chosen: Tensor
    masked: Tensor
    swapped: Tensor
    other: Tensor  # the patch whose embedding a swapped one gets


def corrupt(seed: int, step: int, index: Tensor, patches: int, masking: Masking = "coin") -> Corruption:
    """Choose the corruption of every patch of the images number `index`, (B,), at a step."""
    place = torch.arange(patches, device=index.device)
    image = mix(mix(mix(torch.zeros_like(index, dtype=torch.long) + seed) + step) + index)  # (B,)
    keys = mix(image[:, None] + place)  # (B, N)
    first, second = mix(keys + 1), uniform(mix(keys + 2))
    distance = 1 + shift_right(mix(keys + 3), 1) % max(1, patches - 1)  # 1 ... N-1: always another patch
    if masking == "half":
        chosen = first.argsort(dim=1, stable=True).argsort(dim=1) < half(patches)
    else:
        chosen = uniform(first) < CORRUPTED
    swapped = chosen & (second >= MASKED) & (second < MASKED + SWAPPED)
    return Corruption(chosen, chosen & (second < MASKED), swapped, (place + distance) % patches)


def half(patches: int) -> int:
    return round(CORRUPTED * patches)


def color_classes(images: Tensor, preprocess: Preprocess, stride: int) -> Tensor:
    """The class of each patch, (B, N): mean color in pixel space, 3 bits a channel, red the most significant."""
    mean, std = (send(np.array(x), images.device)[:, None, None] for x in (preprocess.mean, preprocess.std))
    pixels = images.float() * std + mean  # (B, 3, height, width) in [0, 1]
    average = F.avg_pool2d(pixels, stride)
    level = (average * LEVELS).long().clamp(0, LEVELS - 1)
    red, green, blue = level.unbind(1)
    return ((red * LEVELS + green) * LEVELS + blue).flatten(1)


class MaskedPatches(nn.Module):
    """A ViT that predicts the colors of corrupted patches; the ViT inside is the run's product."""

    def __init__(self, vit: ViT) -> None:
        super().__init__()
        if vit.pool is not None:
            raise UserError("masked patch prediction trains no pooling; use pool=token or pool=mean, not attention")
        if vit.config.final_norm == "pooled":
            raise UserError("masked patch prediction trains no norm after pooling; use final_norm=tokens")
        if vit.config.patch_dropout:
            raise UserError("masked patch prediction needs the corrupted patches, all of them; set patch_dropout=0")
        self.vit = vit
        self.mask = nn.Parameter(torch.zeros(vit.config.width))
        nn.init.normal_(self.mask, std=0.02)
        self.head = nn.Linear(vit.config.width, COLORS)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, corruption: Corruption) -> Tensor:
        """Logits of the color of every patch, (B, N, 512)."""
        return self.colors(self.tokens(images, corruption))

    def tokens(self, images: Tensor, corruption: Corruption) -> Tensor:
        """The encoded sequence of corrupted images, (B, prefix + N, D)."""
        x = self.vit.patches(images)  # (B, N, D)
        swapped = x.gather(1, corruption.other[..., None].expand_as(x))
        x = torch.where(corruption.swapped[..., None], swapped, x)
        x = torch.where(corruption.masked[..., None], self.mask.to(x.dtype), x)
        return self.vit.encode(x)

    def colors(self, tokens: Tensor) -> Tensor:
        return self.head(tokens[:, self.vit.config.prefix :])


@dataclass(frozen=True)
class PatchPrediction:
    """The objective: colors of corrupted patches. On the test set every image is corrupted the same way each time."""

    preprocess: Preprocess
    seed: int
    grid: Size
    stride: int
    masking: Masking = "coin"

    def loss(self, module: Forward, batch: Batch, step: int) -> Tensor:
        losses, _, _, corruption = self.predict(module, batch, step)
        # not how many were drawn: a mean over micro-batches must add up
        share = half(losses.shape[1]) / losses.shape[1] if self.masking == "half" else CORRUPTED
        expected = share * losses.numel()
        return (losses * corruption.chosen).sum() / expected

    def sums(self, module: nn.Module, batch: Batch) -> Tensor:
        losses, logits, targets, corruption = self.predict(module, batch, TEST_STEP)
        chosen = corruption.chosen
        right = (logits.argmax(-1) == targets) & chosen
        sums = torch.stack([chosen.sum(), right.sum(), (losses * chosen).sum()])
        return torch.cat([sums, torch.bincount(targets[chosen], minlength=COLORS).to(sums)])

    def report(self, sums: list[float]) -> dict[str, float]:
        """`prior` is the least loss that any fixed guess can have on these patches: the entropy of their colors."""
        patches, right, loss, *colors = sums
        prior = -sum(n / patches * math.log(n / patches) for n in colors if n)
        return {"accuracy": right / patches, "loss": loss / patches, "prior": prior}

    def score(self, report: dict[str, float]) -> float:
        return -report["loss"]

    def predict(self, module: Forward, batch: Batch, step: int) -> tuple[Tensor, Tensor, Tensor, Corruption]:
        """Losses (B, N), logits (B, N, 512), targets (B, N) and the corruption of a batch."""
        corruption = corrupt(self.seed, step, batch.index, self.grid[0] * self.grid[1], self.masking)
        targets = color_classes(batch.images, self.preprocess, self.stride)
        logits = module(batch.images, corruption)
        flat = at_least_float32(logits).flatten(0, 1)
        losses = F.cross_entropy(flat, targets.flatten(), reduction="none").view_as(targets)
        return losses, logits, targets, corruption


# ---- splitmix64 on tensors, whose 64-bit integers wrap around

WRAP = 1 << 64
GAMMA, FIRST, SECOND = (x - WRAP for x in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(x: Tensor) -> Tensor:
    """Hash 64-bit integers: every bit of the input flips half of the bits of the output."""
    x = x + GAMMA
    x = (x ^ shift_right(x, 30)) * FIRST
    x = (x ^ shift_right(x, 27)) * SECOND
    return x ^ shift_right(x, 31)


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift to the right and fill with zeros; torch fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform(x: Tensor) -> Tensor:
    """The upper 24 bits as a float32 in [0, 1), exact on every device."""
    return shift_right(x, 40).float() / (1 << 24)
