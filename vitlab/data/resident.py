"""A complete training set in the device's memory, as uint8 at one size, augmented there in batches.

Each image is stored stretched to the common size, with its true aspect ratio beside it, so that no part of it is lost
and crops keep their shape. Cropping a box and resizing it to the input's size is two small matrix products per image,
with the weights of Pillow's antialiased resize: the result is what the workers would have made, to a rounding.

Shapes: n images in the set, c in a chunk, H and W the stored height and width, h and w the input's.
"""

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.data.decoder import FILTERS, DecodeHint
from vitlab.data.images import BrokenImage
from vitlab.data.randaugment import randaugment
from vitlab.data.rng import Floats, Ints, Keys
from vitlab.data.sharing import share
from vitlab.data.source import ImageSource
from vitlab.data.transforms import Augment, crop_boxes, draw_flips, to_pixels
from vitlab.data.workers import BrokenEntry, EvalReader, read_all
from vitlab.device import send
from vitlab.errors import UserError
from vitlab.models.config import Interpolation, Preprocess, Size

MEMORY_SHARE = 0.25  # of an accelerator's memory that a set may take
CPU_MEMORY = 1 << 30  # bytes, and
CPU_SIDE = 96  # pixels: beyond it, workers are faster than matrix products
DETAIL = (2.0, 1.5, 1.0)  # stored side over input side, the largest that fits: crops are enlarged parts
SIZE_SAMPLES = 64  # images whose sizes determine the stored size
BYTES_AT_ONCE = 1 << 28  # bytes of float pixels cropped, augmented and mixed at a time


def fits_on_device(source: ImageSource, size: Size, device: torch.device) -> bool:
    """Whether the set fits in the device's memory and gains from being there; the same answer on every run."""
    gains = source.groups is None and (device.type != "cpu" or max(size) <= CPU_SIDE)
    return gains and len(source) * 3 * size[0] * size[1] <= memory_budget(device)


def memory_budget(device: torch.device) -> int:
    """Bytes of the device's memory that a set may take."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * MEMORY_SHARE)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() * MEMORY_SHARE)
    return CPU_MEMORY


class ResidentSet:
    """All images of a set on the device; a broken one is replaced by the next good one."""

    def __init__(
        self, source: ImageSource, size: Size, preprocess: Preprocess, workers: int, device: torch.device
    ) -> None:
        self.size, self.preprocess, self.device = size, preprocess, device
        self.stored = stored_size(source, size, memory_budget(device))
        self.ratio: Floats = np.ones(len(source))
        self.pixels = torch.zeros(len(source), 3, *self.stored, dtype=torch.uint8, device=device)  # (n, 3, H, W)
        self.broken: list[BrokenEntry] = []
        for chunk in read_all(StretchReader(source, self.stored, preprocess), len(source), workers, "decoding once"):
            self.pixels[chunk.index] = chunk.pixels.to(device)
            self.ratio[chunk.index.numpy()] = chunk.ratio.numpy()
            self.broken += chunk.broken
        self.good = replace_broken(len(source), [index for index, _, _ in self.broken])

    @property
    def bytes(self) -> int:
        return self.pixels.numel()

    def augmented(self, index: Ints, key: Keys, augment: Augment, size: Size | None = None) -> tuple[Tensor, Tensor]:
        """Augmented uint8 images (b, 3, h, w) of the input's size or another one, and the indices (b,) that they really
        came from."""
        index = self.good[index]
        each = max(1, BYTES_AT_ONCE // (12 * self.stored[0] * self.stored[1]))
        size = size or self.size
        parts = [self._crop(index[s : s + each], key[s : s + each], augment, size) for s in range(0, len(index), each)]
        return randaugment(torch.cat(parts), key, augment), torch.from_numpy(index)

    @torch.no_grad()
    def _crop(self, index: Ints, key: Keys, augment: Augment, size: Size) -> Tensor:
        (h, w), (stored_h, stored_w) = size, self.stored
        drawn = crop_boxes(key, self.ratio[index], size, augment, self.preprocess)
        box = send(drawn * [stored_w, stored_h, stored_w, stored_h], self.device)  # (c, 4)
        flip = send(draw_flips(key, augment), self.device)
        rows = resize_weights(box[:, 1], box[:, 3], h, stored_h, self.preprocess.interpolation)  # (c, h, H)
        columns = resize_weights(box[:, 0], box[:, 2], w, stored_w, self.preprocess.interpolation)  # (c, w, W)
        columns = torch.where(flip[:, None, None], columns.flip(1), columns)
        pixels = self.pixels[send(index, self.device)].float()  # (c, 3, H, W)
        pixels = pixels @ columns[:, None].transpose(2, 3)  # (c, 3, H, w)
        pixels = rows[:, None] @ pixels  # (c, 3, h, w)
        return pixels.round_().clamp_(0, 255).to(torch.uint8)


def hold(source: ImageSource, size: Size, preprocess: Preprocess, workers: int, device: torch.device) -> ResidentSet:
    """A set in the device's memory: one that is there already, or a new one."""
    how, needed = (ResidentSet, size, preprocess, device), len(source) * 3 * math.prod(size)
    make = partial(ResidentSet, source, size, preprocess, workers, device)
    return share(source, how, needed, memory_budget(device), make)


@dataclass
class StretchReader(EvalReader):
    """Images stretched to the stored size, without any crop; broken ones are black."""

    def shrink(self, key: int) -> DecodeHint:
        return lambda picture: min(picture[0] / self.size[0], picture[1] / self.size[1])

    def convert(self, image: Image.Image, key: int) -> Tensor:
        size = self.size[1], self.size[0]
        return to_pixels(image if image.size == size else image.resize(size, FILTERS[self.preprocess.interpolation]))


def stored_size(source: ImageSource, size: Size, budget: int) -> Size:
    """The largest sides that fit, up to twice the input's and never beyond those of the images themselves."""
    height = width = 1
    for index in np.unique(np.linspace(0, len(source) - 1, SIZE_SAMPLES).astype(int)).tolist():
        try:
            image = source.image(index)
        except BrokenImage:
            continue
        height, width = max(height, image.height), max(width, image.width)
    for detail in DETAIL:
        stored = min(height, math.ceil(detail * size[0])), min(width, math.ceil(detail * size[1]))
        if len(source) * 3 * stored[0] * stored[1] <= budget:
            return stored
    need = len(source) * 3 * stored[0] * stored[1]
    raise UserError(f"the set needs {need / 1e9:.1f} GB in memory, beyond {budget / 1e9:.1f}; use resident=false")


def replace_broken(n: int, broken: list[int]) -> Ints:
    """For each of n indices itself or, where it is broken, the first good one after it."""
    good = np.setdiff1d(np.arange(n), broken)
    if not len(good):
        raise UserError(f"none of the {n} images can be read; check the data")
    return good[np.searchsorted(good, np.arange(n)) % len(good)]


# ---- Pillow's resize as a matrix


def resize_weights(low: Tensor, high: Tensor, size: int, stored: int, kind: Interpolation) -> Tensor:
    """(c, size, stored): row i holds the weights of pixel i of the result over the stored pixels from low to high."""
    scale = ((high - low) / size)[:, None, None]
    center = low[:, None, None] + (torch.arange(size, device=low.device)[:, None] + 0.5) * scale  # (c, size, 1)
    pixel = torch.arange(stored, device=low.device)
    if kind == "nearest":
        return (pixel == center.floor().clamp(0, stored - 1)).float()
    weight = KERNELS[kind]((pixel + 0.5 - center) / scale.clamp(min=1))
    return weight / weight.sum(2, keepdim=True)


def triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def cubic(x: Tensor) -> Tensor:
    x = x.abs()
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


KERNELS = {"bilinear": triangle, "bicubic": cubic, "lanczos": lanczos}
