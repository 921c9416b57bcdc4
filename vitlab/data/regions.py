"""Crops that workers only cut, and that the device scales (`resize=device`): scaling takes a third of a worker's time.

A worker sends the pixels around each crop as one run of bytes, and where the crop lies in them. On the device they are
scaled by two small matrix products with the weights of Pillow's resize: the result is what a worker would have made, to
one level of 255. What is much larger than the input is scaled by the worker, so that an image never takes much more
than four times the input's memory.

A GPU computes them in float16, in which bytes are exact: weights round to 2^-11 of themselves and results to 1/16 of a
level, and Pillow rounds to a level after each of its two steps, so that together they differ by less than two. A CPU
computes in float32 and rounds as Pillow does.

Shapes: c images, H and W the height and width that every region is padded to, h and w the input's.
"""

import contextlib
import math
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.data.images import BrokenImage
from vitlab.data.jpeg_tensor import decode_usual
from vitlab.data.resident import BYTES_AT_ONCE, resize_weights
from vitlab.data.rng import Floats
from vitlab.data.source import ImageSource
from vitlab.data.transforms import REDUCING_GAP, crop_and_resize
from vitlab.data.workers import BrokenEntry, Chunk, Samples, TrainReader
from vitlab.device import send
from vitlab.models.config import Interpolation, Preprocess, Size

SUPPORT = {"nearest": 0, "bilinear": 1, "bicubic": 2, "lanczos": 3}  # pixels of the result that each filter looks at

NONE = torch.empty(0)


@dataclass
class RegionReader(TrainReader):
    """Cuts the region of each image that its crop needs; `scale_regions` makes the input of it."""

    source: ImageSource
    pixels: bytearray = field(default_factory=bytearray, init=False, repr=False)  # of the regions of a chunk
    cuts: list[tuple[float, ...]] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        with contextlib.suppress(ImportError):  # here, once, rather than in each of the worker processes
            import torchvision.io  # noqa: F401

    @property
    def room(self) -> int:
        """A region of a usual photo has 1.3 times the input's pixels; there are larger and smaller ones in a chunk."""
        return 2 * super().room

    def read_chunk(self, samples: Samples) -> Chunk:
        self.pixels, self.cuts = bytearray(), []
        chunk = super().read_chunk(samples)
        return replace(chunk, cuts=torch.tensor(self.cuts, dtype=torch.float64))

    def join(self, tensors: list[Tensor]) -> Tensor:
        return torch.frombuffer(self.pixels, dtype=torch.uint8)

    def keep(self, pixels: bytes) -> Tensor:
        """Add the pixels of an image to the chunk's, which takes half the time of joining tensors; returns none."""
        self.pixels += pixels
        return NONE

    def read(self, index: int, key: int) -> tuple[Tensor, int, float, list[BrokenEntry]]:
        with contextlib.suppress(BrokenImage):  # which is met again, and named, where all other images are read
            data = self.source.encoded(index)
            image = None if data is None else decode_usual(data, self.shrink(key))
            if image is not None:
                height, width = image.shape[:2]
                if cut := self.cut(self.box(width, height, key), width, height):
                    left, top, right, bottom = cut
                    pixels = image[top:bottom, left:right].numpy().tobytes()
                    return self.keep(pixels), index, width / height, []
        return super().read(index, key)

    def convert(self, image: Image.Image, key: int) -> Tensor:
        """The bytes of an image's region; of one that is too large, those of the crop at the input's size."""
        box = self.box(*image.size, key)
        cut = self.cut(box, *image.size)
        if cut is not None:
            return self.keep(image.crop(cut).tobytes())
        self.cuts.append((*self.size, 0, 0, self.size[1], self.size[0]))
        scaled = crop_and_resize(image, box, self.size, self.preprocess, flip=False)
        return self.keep(scaled.permute(1, 2, 0).numpy().tobytes())

    def cut(self, box: Floats, *sides: int) -> tuple[int, int, int, int] | None:
        """The region (left, top, right, bottom) of an image of a width and height that a crop needs; None where it is
        too large. Its height and width, and the crop's edges in it, go to `cuts`."""
        low, high, edges = [0, 0], [0, 0], [0.0] * 4
        for axis, side in enumerate(sides):
            first, last = float(box[axis] * side), float(box[axis + 2] * side)
            margin = SUPPORT[self.preprocess.interpolation] * max(1.0, (last - first) / self.size[1 - axis])
            low[axis], high[axis] = max(0, math.floor(first - margin)), min(side, math.ceil(last + margin))
            edges[axis], edges[axis + 2] = first - low[axis], last - low[axis]
        width, height = high[0] - low[0], high[1] - low[1]
        most_h, most_w = padded_size(self.size, self.preprocess.interpolation)
        if height > most_h or width > most_w:
            return None
        self.cuts.append((height, width, *edges))
        return low[0], low[1], high[0], high[1]


def padded_size(size: Size, kind: Interpolation) -> Size:
    """H and W: the largest region that is not scaled by its worker. Always the same, so that rounding is, too."""
    height, width = (math.ceil(REDUCING_GAP * (side + 2 * SUPPORT[kind])) + 2 for side in size)
    return height, width


@torch.no_grad()
def scale_regions(
    chunk: Chunk, flips: np.ndarray, size: Size, preprocess: Preprocess, kind: torch.dtype | None = None
) -> Tensor:
    """The crops of a chunk of regions, (c, 3, h, w) uint8, on the device of its pixels; `kind` computes them."""
    kind = kind or (torch.float32 if chunk.pixels.device.type == "cpu" else torch.float16)
    pixels, cuts = chunk.pixels.view(-1, 3), chunk.cuts.numpy()
    areas = (cuts[:, 0] * cuts[:, 1]).astype(np.int64)
    starts, (height, width) = areas.cumsum() - areas, padded_size(size, preprocess.interpolation)
    each = max(1, BYTES_AT_ONCE // (12 * height * width))
    groups = (slice(start, start + each) for start in range(0, len(cuts), each))
    return torch.cat([_scale(pixels, starts[g], cuts[g], flips[g], size, preprocess, kind) for g in groups])


def _scale(
    pixels: Tensor,
    starts: np.ndarray,
    cuts: np.ndarray,
    flips: np.ndarray,
    size: Size,
    preprocess: Preprocess,
    kind: torch.dtype,
) -> Tensor:
    device, name, (height, width) = pixels.device, preprocess.interpolation, padded_size(size, preprocess.interpolation)
    start, flip = (send(x, device)[:, None, None] for x in (starts, flips))  # (c, 1, 1)
    sides = send(cuts[:, :2].astype(np.int64), device)
    tall, wide = sides[:, 0, None, None], sides[:, 1, None, None]
    y, x = torch.arange(height, device=device)[:, None], torch.arange(width, device=device)
    found = pixels[start + torch.minimum(y, tall - 1) * wide + torch.minimum(x, wide - 1)]  # (c, H, W, 3)
    left, top, right, bottom = send(cuts[:, 2:], device).unbind(1)
    columns = within(resize_weights(left, right, size[1], width, name), wide)  # (c, w, W)
    rows = within(resize_weights(top, bottom, size[0], height, name), tall)  # (c, h, H)
    columns = torch.where(flip, columns.flip(1), columns)
    values = found.permute(0, 3, 1, 2).to(kind) @ columns.to(kind)[:, None].transpose(2, 3)  # (c, 3, H, w)
    values = (values if kind == torch.float16 else values.round_()).clamp_(0, 255)
    values = rows.to(kind)[:, None] @ values  # (c, 3, h, w)
    return values.round_().clamp_(0, 255).to(torch.uint8)


def within(weights: Tensor, side: Tensor) -> Tensor:
    """Weights over padded regions, (c, size, stored), without the padding beyond the first `side` pixels, (c, 1, 1)."""
    weights = torch.where(torch.arange(weights.shape[2], device=weights.device) < side, weights, 0.0)
    return weights / weights.sum(2, keepdim=True)
