"""A whole set in the device's memory, as bytes at one size, augmented there in batches.

Each picture is stored stretched to the common size, with its true ratio beside it, so that no part of it is lost and
crops keep their shape. Cutting a box at the input's size is two small matrix products per image, with the weights
that Pillow's antialiased resize would use: what comes out is what the workers would have cut, to a rounding.

Shapes: n images in the set, c in a chunk, H and W the stored height and width, h and w the input's.
"""

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.data import Dataset

from vitlab.data.framing import FILTERS
from vitlab.data.images import BrokenImage
from vitlab.data.randaugment import randaugment
from vitlab.data.rng import Floats, Ints, Keys
from vitlab.data.source import ImageSource
from vitlab.data.transforms import Augment, boxes, flips, to_pixels
from vitlab.data.workers import CHUNK, Broken, Chunk, Order, read_chunks
from vitlab.device import send
from vitlab.errors import UserError
from vitlab.models.config import Interpolation, Preprocess, Size

log = logging.getLogger("vitlab")

SHARE = 0.25  # of an accelerator's memory that a set may take
ON_CPU = 1 << 30  # bytes, and
CPU_SIDE = 96  # pixels: beyond it workers cut faster than matrix products do
DETAIL = (2.0, 1.5, 1.0)  # stored side over input side, the largest that fits: crops are enlarged parts
LOOK = 64  # images whose sizes are looked at
AT_ONCE = 1 << 28  # bytes of float pixels cut, augmented and mixed at a time


def worth_holding(source: ImageSource, size: Size, device: torch.device) -> bool:
    """Whether the set fits in the device's memory and gains from being there; the same answer on every run."""
    if source.groups is not None or (device.type == "cpu" and max(size) > CPU_SIDE):
        return False
    return len(source) * 3 * size[0] * size[1] <= budget(device)


def budget(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * SHARE)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() * SHARE)
    return ON_CPU


class Resident:
    """The set on the device; `good` leads from a broken image to the one that stands in for it."""

    def __init__(
        self, source: ImageSource, size: Size, preprocess: Preprocess, workers: int, device: torch.device
    ) -> None:
        self.size, self.preprocess, self.device = size, preprocess, device
        self.stored = stored_size(source, size, budget(device))
        self.ratio: Floats = np.ones(len(source))
        self.pixels = torch.zeros(len(source), 3, *self.stored, dtype=torch.uint8, device=device)  # (n, 3, H, W)
        self.broken: list[Broken] = []
        self._fill(source, workers)
        self.good = stand_ins(len(source), [index for index, _, _ in self.broken])

    def _fill(self, source: ImageSource, workers: int) -> None:
        n = len(source)
        orders = [[(i, 0) for i in range(s, min(s + CHUNK, n))] for s in range(0, n, CHUNK)]
        chunks = read_chunks(Shelver(source, self.stored, self.preprocess), orders, workers, 4, False)
        console = Console(stderr=True)
        shown = track(
            chunks, "decoding once", len(orders), console=console, transient=True, disable=not console.is_terminal
        )
        for order, chunk in zip(orders, shown, strict=True):
            places = slice(order[0][0], order[-1][0] + 1)
            self.pixels[places] = chunk.pixels.to(self.device)
            self.ratio[places] = chunk.ratio.numpy()
            self.broken += chunk.broken

    def cut(self, index: Ints, key: Keys, augment: Augment) -> tuple[Tensor, Tensor]:
        """Augmented bytes (b, 3, h, w) of the images, and the indices they really came from."""
        index = self.good[index]
        each = max(1, AT_ONCE // (12 * self.stored[0] * self.stored[1]))
        parts = [self._cut(index[s : s + each], key[s : s + each], augment) for s in range(0, len(index), each)]
        return randaugment(torch.cat(parts), key, augment), torch.from_numpy(index)

    @torch.no_grad()
    def _cut(self, index: Ints, key: Keys, augment: Augment) -> Tensor:
        (h, w), (stored_h, stored_w) = self.size, self.stored
        drawn = boxes(key, self.ratio[index], self.size, augment, self.preprocess)
        box = send(drawn * [stored_w, stored_h, stored_w, stored_h], self.device)  # (c, 4)
        flip = send(flips(key, augment), self.device)
        rows = weights(box[:, 1], box[:, 3], h, stored_h, self.preprocess.interpolation)  # (c, h, H)
        columns = weights(box[:, 0], box[:, 2], w, stored_w, self.preprocess.interpolation)  # (c, w, W)
        columns = torch.where(flip[:, None, None], columns.flip(1), columns)
        pixels = self.pixels[send(index, self.device)].float()  # (c, 3, H, W)
        pixels = pixels @ columns[:, None].transpose(2, 3)  # (c, 3, H, w)
        pixels = rows[:, None] @ pixels  # (c, 3, h, w)
        return pixels.round_().clamp_(0, 255).to(torch.uint8)


@dataclass
class Shelver(Dataset[Chunk]):
    """Runs in the workers: whole pictures, stretched to the stored size; broken ones stay black."""

    source: ImageSource
    size: Size
    preprocess: Preprocess

    def __getitems__(self, order: Order) -> Chunk:
        pixels = torch.zeros(len(order), 3, *self.size, dtype=torch.uint8)
        ratio, broken = torch.ones(len(order), dtype=torch.float64), []
        for place, (index, _) in enumerate(order):
            try:
                image = self.source.image(
                    index, lambda picture: min(picture[0] / self.size[0], picture[1] / self.size[1])
                )
            except BrokenImage as bad:
                broken.append((index, bad.name, bad.why))
                continue
            ratio[place] = image.width / image.height
            if image.size != (self.size[1], self.size[0]):
                image = image.resize((self.size[1], self.size[0]), FILTERS[self.preprocess.interpolation])
            pixels[place] = to_pixels(image)
        return Chunk(pixels, torch.tensor([index for index, _ in order]), tuple(broken), "", ratio)


def stored_size(source: ImageSource, size: Size, room: int) -> Size:
    """The largest sides that fit, up to twice the input's and never beyond the pictures' own."""
    height = width = 1
    for index in np.unique(np.linspace(0, len(source) - 1, LOOK).astype(int)).tolist():
        try:
            image = source.image(index)
        except BrokenImage:
            continue
        height, width = max(height, image.height), max(width, image.width)
    for detail in DETAIL:
        stored = min(height, math.ceil(detail * size[0])), min(width, math.ceil(detail * size[1]))
        if len(source) * 3 * stored[0] * stored[1] <= room:
            return stored
    need = len(source) * 3 * stored[0] * stored[1]
    raise UserError(f"the set needs {need / 1e9:.1f} GB in memory, beyond {room / 1e9:.1f}; use resident=false")


def stand_ins(n: int, broken: list[int]) -> Ints:
    """For each index itself or, where it is broken, the first good one after it."""
    good = np.setdiff1d(np.arange(n), broken)
    if not len(good):
        raise UserError(f"none of the {n} images can be read; check the data")
    return good[np.searchsorted(good, np.arange(n)) % len(good)]


# ---- Pillow's resize as a matrix


def weights(low: Tensor, high: Tensor, size: int, stored: int, kind: Interpolation) -> Tensor:
    """(c, size, stored): row i holds how pixel i of the result draws on the stored pixels between low and high."""
    scale = ((high - low) / size)[:, None, None]
    center = low[:, None, None] + (torch.arange(size, device=low.device)[:, None] + 0.5) * scale  # (c, size, 1)
    pixel = torch.arange(stored, device=low.device)
    if kind == "nearest":
        return (pixel == center.floor().clamp(0, stored - 1)).float()
    weight = FILTER[kind]((pixel + 0.5 - center) / scale.clamp(min=1))
    return weight / weight.sum(2, keepdim=True)


def triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def cubic(x: Tensor) -> Tensor:
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


FILTER = {"bilinear": triangle, "bicubic": cubic, "lanczos": lanczos}
