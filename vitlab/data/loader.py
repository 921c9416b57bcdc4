"""Batches for training and evaluation, from files by workers or from a set held in the device's memory.

The samples of training are one endless stream: epoch after epoch, each in its own seeded order. Global batch number
`step` holds the samples from step * batch on, so it is a function of (seed, step) alone; each rank uses a contiguous
slice of it. Every random draw is a function of (seed, epoch, index). Nothing here has state to save: to resume is to
start at a step.
"""

import functools
import itertools
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.data.balance import balanced_order
from vitlab.data.label_sets import LabelSets
from vitlab.data.mixing import Mix, draw_mix, mix_images, partners, smooth
from vitlab.data.randaugment import randaugment
from vitlab.data.regions import RegionReader, scale_regions
from vitlab.data.resident import BYTES_AT_ONCE, ResidentSet, fits_on_device, hold, memory_budget
from vitlab.data.rng import BATCHES, ORDER, SHARDS, Ints, Keys, keys
from vitlab.data.sharing import share
from vitlab.data.source import ImageSource
from vitlab.data.transforms import Augment, draw_flips, normalize
from vitlab.data.workers import AHEAD, BrokenEntry, Chunk, EvalReader, TrainReader, chunk_size, read_batches
from vitlab.device import send
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size

log = logging.getLogger("vitlab")

CPU = torch.device("cpu")
WINDOW = 4  # shards whose images are shuffled among each other
BROKEN_LIMIT = 0.1  # share of a set that may be broken before training stops
NAMED = 3  # broken images that a message names
Resize = Literal["workers", "device"]


@dataclass(frozen=True)
class Batch:
    """b images with labels; `targets` are smoothed and mixed, `index` holds each image's index in its source."""

    images: Tensor  # (b, 3, h, w), normalized
    labels: Tensor  # (b,) int64; of a multi-label set (b, K) bool
    targets: Tensor  # (b, K) float32
    index: Tensor  # (b,) int64


@dataclass(eq=False)
class Loader:
    """What both loaders share: this rank's part of batches of images.

    With `resident` the images are held in the device's memory; None: where they fit.
    """

    source: ImageSource
    image_size: Size
    _: KW_ONLY
    batch: int
    workers: int = 0
    device: torch.device = CPU
    rank: int = 0
    world: int = 1
    resident: bool = None  # type: ignore[assignment]  # None: see __post_init__

    def __post_init__(self) -> None:
        self.device = torch.device(self.device)
        if self.resident is None:
            self.resident = fits_on_device(self.source, self.image_size, self.device)

    def labels_and_targets(self, index: Tensor, smoothing: float = 0.0) -> tuple[Tensor, Tensor]:
        """On the device: labels (b,) or (b, K) and smoothed targets (b, K) of the images at an index (b,)."""
        chosen, classes = self.source.truth[index.numpy()], len(self.source.classes)
        if isinstance(chosen, LabelSets):
            labels = torch.zeros(len(chosen), classes, dtype=torch.bool, device=self.device)
            labels[send(chosen.rows, self.device), send(chosen.numbers, self.device)] = True
            return labels, smooth(labels, smoothing)
        labels = send(chosen, self.device)
        return labels, smooth(F.one_hot(labels, classes), smoothing)


# ---- training


@dataclass(frozen=True)
class BatchPlan:
    """What some batches are made of: the b images of this rank, then those of other ranks they are mixed with."""

    index: Ints  # (m,)
    key: Keys  # (m,)
    partner: Ints  # (b,) positions in `index`, b <= m
    mix: Mix | None


@dataclass(eq=False)
class TrainLoader(Loader):
    """Endless augmented batches; batch number `step` is the same for any number of workers, ranks and restarts.

    With `resident` the complete set is held in the device's memory and augmented there. Choose the same on resuming:
    both ways make the same crops, but they round differently. So do the values of `resize`: crops of files are scaled
    by the workers, or by the device, see regions.py. Raises UserError where more than the fraction `broken_limit` of
    the images cannot be read.
    """

    augment: Augment
    preprocess: Preprocess
    _: KW_ONLY
    seed: int = 0
    broken_limit: float = BROKEN_LIMIT
    resize: Resize = "workers"
    balanced: bool = False  # every class has the same share of the stream
    step: int | None = None  # images of an optimizer's step, which has several batches of micro-batches; None: `batch`
    plain_from: int | None = None  # images of the stream before the augmentation's plain end; None: there is none
    small_size: Size | None = None  # that of the first images of the stream,
    small_until: int = 0  # so many of them

    def __post_init__(self) -> None:
        batch, world = self.batch, self.world
        if batch < 1 or batch % world:
            raise UserError(f"a batch of {batch} does not divide among {world} ranks; use a multiple of {world}")
        if len(self.source) == 0:
            raise UserError("there are no images to train on")
        super().__post_init__()
        self.broken: dict[int, str] = {}  # names of those met so far, by index
        if self.balanced and self.source.groups is not None:
            raise UserError("a set that is read shard by shard cannot be sampled by class; use balance=weights")
        order = functools.partial(balanced_order, self.source.labels) if self.balanced else self._plain_order
        self.order = functools.lru_cache(3)(functools.partial(order, self.seed))
        # on an accelerator many images cost the host no more than a few
        self.images_at_once = 1 if self.device.type == "cpu" else BYTES_AT_ONCE // (12 * math.prod(self.image_size))
        self.held = None
        if self.resize == "device" and self.device.type == "cpu" and not self.resident:
            log.warning("resize=device is for GPUs: on a CPU one process scales all crops, slower than workers do")
        if self.resident:
            self.held = hold(self.source, self.image_size, self.preprocess, self.workers, self.device)
            self._record_broken(self.held.broken)

    def batches(self, step: int = 0) -> Iterator[Batch]:
        """Batches from number `step` on."""
        grown = self.small_until // self.batch if self.small_size else 0
        plain = math.inf if self.plain_from is None else self.plain_from // self.batch
        starts = sorted({step, *(int(start) for start in (grown, plain) if step < start < math.inf)})
        for start, end in itertools.zip_longest(starts, starts[1:]):
            numbers = itertools.count(start) if end is None else range(start, end)
            size = self.small_size if self.small_size and start < grown else self.image_size
            yield from self._batches(numbers, size, self.augment if start < plain else self.augment.plain())

    def _batches(self, numbers: Iterable[int], image_size: Size, augment: Augment) -> Iterator[Batch]:
        if self.held:
            yield from self._from_memory(self.held, numbers, image_size, augment)
            return
        each = self.batch // self.world
        size = chunk_size(each, self.workers)
        ahead = max(2, math.ceil(2 * each / (size * max(1, self.workers))))  # two batches, over all workers
        plans, read = itertools.tee(self.plan(number, 1, augment) for number in numbers)
        samples = (list(zip(plan.index.tolist(), plan.key.tolist(), strict=True)) for plan in read)
        kind = RegionReader if self.resize == "device" else TrainReader
        reader = kind(self.source, image_size, self.preprocess, augment)
        chunks = read_batches(reader, samples, size, self.workers, ahead, self.device)
        for plan, chunk in zip(plans, chunks, strict=False):
            self._record_broken(chunk.broken)
            scaled = chunk.pixels if kind is TrainReader else self._scaled(plan, chunk, image_size, augment)
            yield self._finish(plan, scaled, chunk.index)

    def _scaled(self, plan: BatchPlan, chunk: Chunk, image_size: Size, augment: Augment) -> Tensor:
        """The augmented pixels of a batch of regions, made on the device."""
        pixels = scale_regions(chunk, draw_flips(plan.key, augment), image_size, self.preprocess)
        return randaugment(pixels, plan.key, augment)

    def _from_memory(
        self, held: ResidentSet, numbers: Iterable[int], image_size: Size, augment: Augment
    ) -> Iterator[Batch]:
        """Several batches at a time, as many as have `images_at_once` images."""
        each, left = self.batch // self.world, iter(numbers)
        while some := list(itertools.islice(left, max(1, self.images_at_once // each))):
            plan = self.plan(some[0], len(some), augment)
            many = self._finish(plan, *held.augmented(plan.index, plan.key, augment, image_size))
            for part in (slice(start, start + each) for start in range(0, len(some) * each, each)):
                yield Batch(many.images[part], many.labels[part], many.targets[part], many.index[part])

    def plan(self, step: int, count: int = 1, augment: Augment | None = None) -> BatchPlan:
        """What the `count` batches from number `step` on are made of; with another augmentation than the loader's."""
        augment = augment or self.augment
        place = step * self.batch + np.arange(count * self.batch)
        epoch = place // len(self.source)
        index = np.concatenate([self.order(int(e))[place[epoch == e] % len(self.source)] for e in np.unique(epoch)])
        key = keys(self.seed, epoch, index)
        if self.balanced:  # an image may occur several times in an epoch, each time with draws of its own
            key = keys(self.seed, epoch, index, place % len(self.source))
        low, high = (self.batch * r // self.world for r in (self.rank, self.rank + 1))
        start = self.batch * np.arange(count)[:, None]
        mine = (start + np.arange(low, high)).ravel()
        mix = draw_mix(self._mix_keys(key, place)[(start + (np.arange(low, high) & ~1)).ravel()], augment)
        other = mine if mix is None else (start + partners(self.batch)[low:high]).ravel()
        places = np.concatenate([mine, np.setdiff1d(other, mine)])
        found = np.zeros(len(index), np.int64)
        found[places] = np.arange(len(places))
        return BatchPlan(index[places], key[places], found[other], mix)

    def _plain_order(self, seed: int, epoch: int) -> Ints:
        return epoch_order(self.source, seed, epoch)

    def _mix_keys(self, key: Keys, place: Ints) -> Keys:
        """The keys that decide how the images with the keys `key`, at a place in the stream, are mixed."""
        if self.augment.mix_by == "pair":
            return key
        return keys(self.seed, BATCHES, place // (self.step or self.batch))

    def _finish(self, plan: BatchPlan, pixels: Tensor, index: Tensor) -> Batch:
        labels, goal = self.labels_and_targets(index, self.augment.label_smoothing)
        images, b = normalize(pixels, self.preprocess), len(plan.partner)
        if plan.mix is not None:
            partner = send(plan.partner, self.device)
            images, own = mix_images(images, plan.mix, partner)
            goal = torch.lerp(goal[partner], goal[:b], own[:, None])
        return Batch(images, labels[:b], goal, index[:b].to(self.device, non_blocking=True))

    def _record_broken(self, broken: Sequence[BrokenEntry]) -> None:
        for index, name, why in broken:
            if index not in self.broken:
                self.broken[index] = name
                log.warning("a broken image was skipped: %s (%s)", name, why)
        if len(self.broken) > self.broken_limit * len(self.source):
            raise UserError(
                f"{len(self.broken)} of {len(self.source)} training images cannot be read, such as {name}; "
                f"fix or remove them, or raise broken_limit ({self.broken_limit:g})"
            )


def epoch_order(source: ImageSource, seed: int, epoch: int) -> Ints:
    """The indices in the order of an epoch; where there are shards, a few are read and shuffled at a time."""
    hashed = keys(seed, epoch, ORDER, np.arange(len(source)))
    if source.groups is None:
        return np.argsort(hashed, kind="stable")
    names, group = np.unique(source.groups, return_inverse=True)
    window = keys(seed, epoch, SHARDS, names).argsort().argsort() // WINDOW
    return np.lexsort((hashed, window[group]))


# ---- evaluation


@dataclass
class Framed:
    """The framed images of a pass, in batches, on the device; empty before the first pass is over."""

    batches: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # indices (b,) and pixels (b, 3, h, w)
    broken: dict[int, str] = field(default_factory=dict)  # names and reasons of those that cannot be read

    @property
    def bytes(self) -> int:
        return sum(pixels.numel() for _, pixels in self.batches)


@dataclass(eq=False)
class EvalLoader(Loader):
    """Every image that can be read exactly once over all ranks, in order, the last partial batch included.

    Images that cannot be read are left out, and `broken` has them by index after a pass. Ranks may differ by some
    images, so by some batches. With `resident` the framed bytes stay in the device's memory after the first pass, for
    other loaders too where they are shared; the batches are the same to the bit.
    """

    preprocess: Preprocess

    def __post_init__(self) -> None:
        super().__post_init__()
        self.low, self.high = (len(self.source) * r // self.world for r in (self.rank, self.rank + 1))
        self.kept, self.broken = Framed(), dict[int, str]()
        if self.resident:
            how = Framed, self.image_size, self.preprocess, self.device, self.batch, self.low, self.high
            needed = (self.high - self.low) * 3 * math.prod(self.image_size)
            self.kept = share(self.source, how, needed, memory_budget(self.device), Framed)

    def __len__(self) -> int:
        return math.ceil((self.high - self.low) / self.batch)

    def shrink(self, most: int) -> None:
        """Make batches of at most `most` images from now on."""
        if most < self.batch:
            self.batch, self.kept = most, Framed()

    def batches(self, *, empty: bool = False) -> Iterator[Batch]:
        """One pass over the images; with `empty`, also the batches of which no image can be read."""
        parts = [range(s, min(s + self.batch, self.high)) for s in range(self.low, self.high, self.batch)]
        kept: list[tuple[Tensor, Tensor]] = []
        ready = len(self.kept.batches) == len(parts)
        self.broken = dict(self.kept.broken) if ready else {}
        for index, pixels in self.kept.batches if ready else self._read(parts):
            if self.resident:
                kept.append((index, pixels))
            if len(kept) == len(parts):  # before the last is given, after which the caller may not come back
                self.kept.batches, self.kept.broken = kept, dict(self.broken)
            if len(index) or empty:
                images = normalize(pixels, self.preprocess)
                yield Batch(images, *self.labels_and_targets(index), index.to(self.device, non_blocking=True))

    def _read(self, parts: list[range]) -> Iterator[tuple[Tensor, Tensor]]:
        """The indices and pixels of each part's images that can be read."""
        reader = EvalReader(self.source, self.image_size, self.preprocess)
        samples, size = ([(i, 0) for i in part] for part in parts), chunk_size(self.batch, self.workers)
        chunks = read_batches(reader, samples, size, self.workers, AHEAD, self.device)
        for part, chunk in zip(parts, chunks, strict=True):
            index, pixels = torch.arange(part.start, part.stop), chunk.pixels
            if chunk.broken:
                self.broken |= {i: f"{name} ({why})" for i, name, why in chunk.broken}
                good = ~torch.isin(index, torch.tensor([i for i, _, _ in chunk.broken]))
                index, pixels = index[good], pixels[good.to(pixels.device)]
            yield index, pixels


def describe_broken(broken: Sequence[str], images: int, split: str = "") -> str:
    """How many images cannot be read, and which: 2 of 100 test images cannot be read: a.jpg (…), b.jpg (…)."""
    names = ", ".join(broken[:NAMED]) + (" …" if len(broken) > NAMED else "")
    return f"{len(broken)} of {images} {f'{split} ' if split else ''}images cannot be read: {names}"
