"""Masked patch prediction, the paper's self-supervision: corrupt a share of the patches, predict them.

Of the corrupted patches 80 % become a learned mask embedding, 10 % another patch's embedding, and 10 % stay as they
are. What is predicted of a patch is in patch_targets.py. How a patch is corrupted is a hash of (seed, step, image,
patch), so a resumed run corrupts the same patches. The share are those for which a coin falls so, or exactly those
with the lowest hashes of the image.

Shapes: B batch, N patches, D width.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from vitlab.data.loader import Batch
from vitlab.errors import UserError
from vitlab.models.config import Size
from vitlab.models.vit import ViT
from vitlab.training.objectives import Forward
from vitlab.training.patch_targets import Target

CORRUPTED, MASKED, SWAPPED = 0.5, 0.8, 0.1
Masking = Literal["coin", "exact"]
TEST_STEP = -1  # in place of a training step, so that every test corrupts alike


@dataclass(frozen=True)
class Corruption:
    """How each patch is corrupted, all (B, N): which are to be predicted, which of them are masked or swapped."""

    chosen: Tensor
    masked: Tensor
    swapped: Tensor
    other: Tensor  # the patch whose embedding a swapped one gets


def corrupt(
    seed: int, step: int, index: Tensor, patches: int, masking: Masking = "coin", share: float = CORRUPTED
) -> Corruption:
    """Choose the corruption of every patch of the images number `index`, (B,), at a step; `share` are corrupted."""
    place = torch.arange(patches, device=index.device)
    image = mix(mix(mix(torch.zeros_like(index, dtype=torch.long) + seed) + step) + index)  # (B,)
    keys = mix(image[:, None] + place)  # (B, N)
    first, second = mix(keys + 1), uniform(mix(keys + 2))
    distance = 1 + shift_right(mix(keys + 3), 1) % max(1, patches - 1)  # 1 ... N-1: always another patch
    if masking == "exact":
        chosen = first.argsort(dim=1, stable=True).argsort(dim=1) < exact_count(patches, share)
    else:
        chosen = uniform(first) < share
    swapped = chosen & (second >= MASKED) & (second < MASKED + SWAPPED)
    return Corruption(chosen, chosen & (second < MASKED), swapped, (place + distance) % patches)


def exact_count(patches: int, share: float) -> int:
    """The nearest whole number of patches, at least one."""
    return max(1, round(share * patches))


class MaskedPatches(nn.Module):
    """A ViT with so many `outputs` for each patch; the ViT inside is the run's product."""

    def __init__(self, vit: ViT, outputs: int) -> None:
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
        self.head = nn.Linear(vit.config.width, outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, corruption: Corruption) -> Tensor:
        """What is predicted of every patch, (B, N, outputs)."""
        return self.predict(self.tokens(images, corruption))

    def tokens(self, images: Tensor, corruption: Corruption) -> Tensor:
        """The encoded sequence of corrupted images, (B, prefix + N, D)."""
        x = self.vit.patches(images)  # (B, N, D)
        swapped = x.gather(1, corruption.other[..., None].expand_as(x))
        x = torch.where(corruption.swapped[..., None], swapped, x)
        x = torch.where(corruption.masked[..., None], self.mask.to(x.dtype), x)
        return self.vit.encode(x)

    def predict(self, tokens: Tensor) -> Tensor:
        return self.head(tokens[:, self.vit.config.prefix :])


@dataclass(frozen=True)
class PatchPrediction:
    """The objective: a target of corrupted patches. On the test set every image is corrupted the same way each time."""

    target: Target
    seed: int
    grid: Size
    masking: Masking = "coin"
    share: float = CORRUPTED

    def loss(self, module: Forward, batch: Batch, step: int) -> Tensor:
        predicted, wanted, corruption = self.predict(module, batch, step)
        losses = self.target.losses(predicted, wanted)
        # not how many were drawn: a mean over micro-batches must add up
        patches = losses.shape[1]
        expected = exact_count(patches, self.share) if self.masking == "exact" else self.share * patches
        return (losses * corruption.chosen).sum() / (expected * len(losses))

    def sums(self, module: nn.Module, batch: Batch) -> Tensor:
        predicted, wanted, corruption = self.predict(module, batch, TEST_STEP)
        return self.target.sums(predicted, wanted, corruption.chosen)

    def report(self, sums: list[float]) -> dict[str, float]:
        return self.target.report(sums)

    def score(self, report: dict[str, float]) -> float:
        return -report["loss"]

    def predict(self, module: Forward, batch: Batch, step: int) -> tuple[Tensor, Tensor, Corruption]:
        """Predictions (B, N, outputs), the targets and the corruption of a batch."""
        patches = self.grid[0] * self.grid[1]
        corruption = corrupt(self.seed, step, batch.index, patches, self.masking, self.share)
        return module(batch.images, corruption), self.target.read(batch.images), corruption


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
