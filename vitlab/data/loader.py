"""Batches for training and evaluation, from files by workers or from a set held in the device's memory.

The samples of training are one endless stream: epoch after epoch, each in its own seeded order. Global batch number
`step` holds the samples from step * batch on, so it is a function of (seed, step) alone; each rank uses a contiguous
slice of it. Every random draw is a function of (seed, epoch, index). Nothing here has state to save: to resume is to
start at a step.
"""

import itertools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitlab.data.mixing import Mix, draw_mix, mix_images, partners, targets
from vitlab.data.resident import BYTES_AT_ONCE, ResidentSet, fits_on_device
from vitlab.data.rng import ORDER, SHARDS, Ints, Keys, keys, permutation
from vitlab.data.source import ImageSource
from vitlab.data.transforms import Augment, normalize
from vitlab.data.workers import AHEAD, BrokenEntry, Chunk, EvalReader, Samples, TrainReader, chunk_size, read_batches
from vitlab.device import send
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size

log = logging.getLogger("vitlab")

WINDOW = 4  # shards whose images are shuffled among each other
BROKEN_LIMIT = 0.1  # share of a set that may be broken before training stops


@dataclass(frozen=True)
class Batch:
    """b images with labels; `targets` are smoothed and mixed, `index` holds each image's index in its source."""

    images: Tensor  # (b, 3, h, w), normalized
    labels: Tensor  # (b,) int64
    targets: Tensor  # (b, K) float32
    index: Tensor  # (b,) int64


@dataclass(frozen=True)
class BatchPlan:
    """What some batches are made of: the b images of this rank, then those of other ranks they are mixed with."""

    index: Ints  # (m,)
    key: Keys  # (m,)
    partner: Ints  # (b,) positions in `index`, b <= m
    mix: Mix | None

    @property
    def samples(self) -> Samples:
        return list(zip(self.index.tolist(), self.key.tolist(), strict=True))


class TrainLoader:
    """Endless augmented batches; batch number `step` is the same for any number of workers, ranks and restarts.

    With `resident` the complete set is held in the device's memory and augmented there; None: where it fits. Choose
    the same on resuming: both ways make the same crops, but they round differently. Raises UserError where more than
    the fraction `broken_limit` of the images cannot be read.
    """

    def __init__(
        self,
        source: ImageSource,
        image_size: Size,
        augment: Augment,
        preprocess: Preprocess,
        *,
        batch: int,
        seed: int = 0,
        workers: int = 0,
        device: str | torch.device = "cpu",
        rank: int = 0,
        world: int = 1,
        resident: bool | None = None,
        broken_limit: float = BROKEN_LIMIT,
    ) -> None:
        if batch < 1 or batch % world:
            raise UserError(f"a batch of {batch} does not divide among {world} ranks; use a multiple of {world}")
        if len(source) == 0:
            raise UserError("there are no images to train on")
        self.source, self.size, self.augment, self.preprocess = source, image_size, augment, preprocess
        self.batch, self.seed, self.workers, self.device = batch, seed, workers, torch.device(device)
        self.rank, self.world, self.broken_limit = rank, world, broken_limit
        self.broken: dict[int, str] = {}  # names of those met so far, by index
        self.labels = torch.from_numpy(source.labels)
        self._orders: dict[int, Ints] = {}
        hold = fits_on_device(source, image_size, self.device) if resident is None else resident
        self.held = ResidentSet(source, image_size, preprocess, workers, self.device) if hold else None
        # on an accelerator many images cost the host no more than a few
        self.images_at_once = 1 if self.device.type == "cpu" else BYTES_AT_ONCE // (12 * image_size[0] * image_size[1])
        if self.held:
            self._record_broken(self.held.broken)

    @property
    def resident(self) -> bool:
        return self.held is not None

    def batches(self, step: int = 0) -> Iterator[Batch]:
        """Batches from number `step` on."""
        if self.held:
            yield from self._from_memory(self.held, step)
        each = self.batch // self.world
        size = chunk_size(each, self.workers)
        ahead = max(2, math.ceil(2 * each / (size * max(1, self.workers))))  # two batches, over all workers
        plans, read = itertools.tee(map(self.plan, itertools.count(step)))
        reader = TrainReader(self.source, self.size, self.preprocess, self.augment)
        batches = (plan.samples for plan in read)
        pin = self.device.type == "cuda"
        for plan, chunks in zip(plans, read_batches(reader, batches, size, self.workers, ahead, pin), strict=False):
            yield self._finish(plan, *self._gather(chunks))

    def _from_memory(self, held: ResidentSet, step: int) -> Iterator[Batch]:
        """Several batches at a time, as many as have `images_at_once` images."""
        each = self.batch // self.world
        ahead = max(1, self.images_at_once // each)
        for first in itertools.count(step, ahead):
            plan = self.plan(first, ahead)
            many = self._finish(plan, *held.augmented(plan.index, plan.key, self.augment))
            for part in (slice(start, start + each) for start in range(0, ahead * each, each)):
                yield Batch(many.images[part], many.labels[part], many.targets[part], many.index[part])

    def plan(self, step: int, count: int = 1) -> BatchPlan:
        """What the `count` batches from number `step` on are made of."""
        place = step * self.batch + np.arange(count * self.batch)
        epoch = place // len(self.source)
        index = np.concatenate([self.order(int(e))[place[epoch == e] % len(self.source)] for e in np.unique(epoch)])
        key = keys(self.seed, epoch, index)
        low, high = (self.batch * r // self.world for r in (self.rank, self.rank + 1))
        start = self.batch * np.arange(count)[:, None]
        mine = (start + np.arange(low, high)).ravel()
        mix = draw_mix(key[(start + (np.arange(low, high) & ~1)).ravel()], self.augment)
        if mix is None:
            return BatchPlan(index[mine], key[mine], np.arange(len(mine)), None)
        other = (start + partners(self.batch)[low:high]).ravel()
        places = np.concatenate([mine, np.setdiff1d(other, mine)])
        found = np.zeros(len(index), np.int64)
        found[places] = np.arange(len(places))
        return BatchPlan(index[places], key[places], found[other], mix)

    def order(self, epoch: int) -> Ints:
        """The indices in the order of an epoch; where there are shards, a few are read and shuffled at a time."""
        if epoch not in self._orders:
            while len(self._orders) > 2:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = self._shuffle(epoch)
        return self._orders[epoch]

    def _shuffle(self, epoch: int) -> Ints:
        groups = self.source.groups
        if groups is None:
            return permutation(len(self.source), self.seed, epoch)
        names, group = np.unique(groups, return_inverse=True)
        window = keys(self.seed, epoch, SHARDS, names).argsort().argsort() // WINDOW
        return np.lexsort((keys(self.seed, epoch, ORDER, np.arange(len(groups))), window[group]))

    def _gather(self, chunks: list[Chunk]) -> tuple[Tensor, Tensor]:
        self._record_broken([broken for chunk in chunks for broken in chunk.broken])
        pixels = torch.cat([chunk.pixels.to(self.device, non_blocking=True) for chunk in chunks])
        return pixels, torch.cat([chunk.index for chunk in chunks])

    def _finish(self, plan: BatchPlan, pixels: Tensor, index: Tensor) -> Batch:
        labels = self.labels[index].to(self.device, non_blocking=True)
        goal = targets(labels, len(self.source.classes), self.augment.label_smoothing)
        images, b = normalize(pixels, self.preprocess), len(plan.partner)
        if plan.mix is not None:
            partner = send(plan.partner, self.device)
            images, own = mix_images(images, plan.mix, partner)
            goal = torch.lerp(goal[partner], goal[:b], own[:, None])
        return Batch(images, labels[:b], goal, index[:b].to(self.device, non_blocking=True))

    def _record_broken(self, broken: list[BrokenEntry]) -> None:
        for index, name, why in broken:
            if index not in self.broken:
                self.broken[index] = name
                log.warning("a broken image was skipped: %s (%s)", name, why)
        if len(self.broken) > self.broken_limit * len(self.source):
            raise UserError(
                f"{len(self.broken)} of {len(self.source)} training images cannot be read, such as {name}; "
                f"fix or remove them, or raise broken_limit ({self.broken_limit:g})"
            )


# ---- evaluation


class EvalLoader:
    """Every image exactly once over all ranks, in order, the last partial batch included.

    Ranks may differ by one image, so by one batch. With `resident` the framed bytes stay in the device's memory after
    the first pass; the batches are the same to the bit.
    """

    def __init__(
        self,
        source: ImageSource,
        image_size: Size,
        preprocess: Preprocess,
        *,
        batch: int,
        workers: int = 0,
        device: str | torch.device = "cpu",
        rank: int = 0,
        world: int = 1,
        resident: bool | None = None,
    ) -> None:
        self.source, self.size, self.preprocess = source, image_size, preprocess
        self.batch, self.workers, self.device = batch, workers, torch.device(device)
        self.low, self.high = (len(source) * r // world for r in (rank, rank + 1))
        self.labels = torch.from_numpy(source.labels)
        self.keep = fits_on_device(source, image_size, self.device) if resident is None else resident
        self.kept: list[Tensor] = []

    def __len__(self) -> int:
        return math.ceil((self.high - self.low) / self.batch)

    def shrink(self, most: int) -> None:
        """Make batches of at most `most` images from now on."""
        if most < self.batch:
            self.batch, self.kept = most, []

    def batches(self) -> Iterator[Batch]:
        """One pass over the images; raises UserError where one cannot be read."""
        done = len(self.kept) == len(self)
        kept: list[Tensor] = []
        for start, pixels in zip(self._starts(), self.kept if done else self._read(), strict=True):
            if self.keep:
                kept.append(pixels)
            index = torch.arange(start, start + len(pixels))
            labels = self.labels[index].to(self.device, non_blocking=True)
            goal = targets(labels, len(self.source.classes), 0.0)
            yield Batch(normalize(pixels, self.preprocess), labels, goal, index.to(self.device, non_blocking=True))
        self.kept = kept

    def _starts(self) -> range:
        return range(self.low, self.high, self.batch)

    def _read(self) -> Iterator[Tensor]:
        batches = ([(i, 0) for i in range(s, min(s + self.batch, self.high))] for s in self._starts())
        reader = EvalReader(self.source, self.size, self.preprocess)
        size, pin = chunk_size(self.batch, self.workers), self.device.type == "cuda"
        for chunks in read_batches(reader, batches, size, self.workers, AHEAD, pin):
            for _, name, why in itertools.chain.from_iterable(chunk.broken for chunk in chunks):
                raise UserError(f"{name} cannot be read ({why}); evaluation needs every image, so fix or remove it")
            yield torch.cat([chunk.pixels.to(self.device, non_blocking=True) for chunk in chunks])
