"""RandAugment: a few operations per image, drawn from a list of sixteen, all at one magnitude.

The list, the strength of each operation at magnitude 10 and the grey that fills empty corners are the authors'; so
is the oddity that solarising and posterising get weaker as the magnitude grows. Distances are in shares of the side,
so that the magnitude means the same at any resolution. Works on batches of bytes on any device: each operation is
applied to the images that drew it.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.v2 import functional as F

from vitlab.data.draws import LAYERS, Floats, Keys, uniforms
from vitlab.data.transforms import Augment

GREY = 128
REACH = 100 / 224  # of a translation at magnitude 10
HOLE = 40 / 224  # half the side of a cutout at magnitude 10

Operation = Callable[[Tensor, float, float, Floats], Tensor]  # (n, 3, h, w), level, sign, places (n, 2)


def randaugment(pixels: Tensor, key: Keys, augment: Augment) -> Tensor:
    """Bytes in, bytes out, (n, 3, h, w)."""
    if not augment.layers:
        return pixels
    names = list(OPERATIONS)
    draws = uniforms(key, LAYERS, 4 * augment.layers).reshape(len(key), augment.layers, 4)
    for layer in draws.transpose(1, 0, 2):
        chosen = (layer[:, 0] * len(names)).astype(np.int64)
        signed = np.isin(chosen, [names.index(name) for name in SIGNED])
        sign = np.where(signed & (layer[:, 1] < 0.5), -1.0, 1.0)  # the fewer groups, the fewer kernels
        pixels = pixels.clone()
        for number, way in set(zip(chosen.tolist(), sign.tolist(), strict=True)):
            where = np.flatnonzero((chosen == number) & (sign == way))
            members = torch.from_numpy(where).to(pixels.device)
            apply = OPERATIONS[names[number]]
            pixels[members] = apply(pixels[members], augment.magnitude / 10, way, layer[where, 2:])
    return pixels


def moved(pixels: Tensor, *, angle: float = 0.0, shift: tuple[float, float] = (0, 0), shear: float = 0.0) -> Tensor:
    h, w = pixels.shape[2:]
    translate = [round(shift[0] * w), round(shift[1] * h)]
    slant = [math.degrees(math.atan(shear)), 0.0]
    centre = [0.0, 0.0] if shear else None  # the authors shear about the corner
    return F.affine(pixels, angle, translate, 1.0, slant, fill=[float(GREY)] * 3, center=centre)


def sheared_down(pixels: Tensor, shear: float) -> Tensor:
    return moved(pixels.transpose(2, 3), shear=shear).transpose(2, 3)


def posterized(pixels: Tensor, level: float) -> Tensor:
    return F.posterize(pixels, min(8, max(1, int(4 * level))))


def solarized(pixels: Tensor, level: float) -> Tensor:
    return torch.where(pixels.int() < int(256 * level), pixels, 255 - pixels)


def brightened_dark(pixels: Tensor, level: float) -> Tensor:
    brighter = (pixels.int() + int(110 * level)).clamp(0, 255).to(torch.uint8)
    return torch.where(pixels < 128, brighter, pixels)


def cutout(pixels: Tensor, level: float, place: Floats) -> Tensor:
    """A grey square around a random point of each image."""
    h, w = pixels.shape[2:]
    centre = torch.from_numpy(place).float().to(pixels.device) * torch.tensor([h, w], device=pixels.device)
    y = (torch.arange(h, device=pixels.device) + 0.5 - centre[:, :1]).abs() < HOLE * level * h  # (n, h)
    x = (torch.arange(w, device=pixels.device) + 0.5 - centre[:, 1:]).abs() < HOLE * level * w  # (n, w)
    return pixels.masked_fill((y[:, :, None] & x[:, None, :])[:, None], GREY)


def strength(level: float) -> float:
    return 1.8 * level + 0.1


SIGNED = ("rotate", "shear x", "shear y", "translate x", "translate y")
OPERATIONS: dict[str, Operation] = {
    "autocontrast": lambda x, level, sign, place: F.autocontrast(x),
    "equalize": lambda x, level, sign, place: F.equalize(x),
    "invert": lambda x, level, sign, place: F.invert(x),
    "rotate": lambda x, level, sign, place: moved(x, angle=30 * level * sign),
    "posterize": lambda x, level, sign, place: posterized(x, level),
    "solarize": lambda x, level, sign, place: solarized(x, level),
    "solarize add": lambda x, level, sign, place: brightened_dark(x, level),
    "colour": lambda x, level, sign, place: F.adjust_saturation(x, strength(level)),
    "contrast": lambda x, level, sign, place: F.adjust_contrast(x, strength(level)),
    "brightness": lambda x, level, sign, place: F.adjust_brightness(x, strength(level)),
    "sharpness": lambda x, level, sign, place: F.adjust_sharpness(x, strength(level)),
    "shear x": lambda x, level, sign, place: moved(x, shear=0.3 * level * sign),
    "shear y": lambda x, level, sign, place: sheared_down(x, 0.3 * level * sign),
    "translate x": lambda x, level, sign, place: moved(x, shift=(REACH * level * sign, 0)),
    "translate y": lambda x, level, sign, place: moved(x, shift=(0, REACH * level * sign)),
    "cutout": lambda x, level, sign, place: cutout(x, level, place),
}
