"""RandAugment: a few operations per image, drawn from a list of sixteen, all at one magnitude.

The list, the strength of each operation at magnitude 10 and the gray that fills empty corners are the authors'; so
is the oddity that solarize and posterize get weaker as the magnitude grows. Distances are in fractions of the side,
so that the magnitude means the same at any resolution.

Works on batches of uint8 on any device. Operations of one family run as one: five are an affine map, eight a table
of 256 values; so a batch takes a few kernels, whatever its images drew. Sums are computed in integers: the result of
an image is the same in any batch.

Shapes: n images, h and w their height and width.
"""

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitlab.data.rng import LAYERS, Floats, Ints, Keys, uniforms
from vitlab.data.transforms import Augment
from vitlab.device import send

GRAY = 128
TRANSLATION = 100 / 224  # at magnitude 10
CUTOUT = 40 / 224  # half the side of the square at magnitude 10
LUMA = (19595, 38470, 7471)  # weights of red, green and blue in a gray, out of 65536

AFFINE = ("rotate", "shear x", "shear y", "translate x", "translate y")  # in either direction
TABLES = ("posterize", "solarize", "solarize add", "brightness", "invert", "contrast", "autocontrast", "equalize")
OPERATIONS = (*AFFINE, *TABLES, "color", "sharpness", "cutout")


def randaugment(pixels: Tensor, key: Keys, augment: Augment) -> Tensor:
    """Augmented images, (n, 3, h, w) uint8, as `pixels`; `key`, (n,), determines the operations."""
    layers, magnitude = augment.randaugment
    if not layers:  # which is most runs: even drawing no numbers takes time for every image
        return pixels
    draws = uniforms(key, LAYERS, 4 * layers).reshape(len(key), layers, 4)
    for layer in draws.transpose(1, 0, 2):
        chosen = (layer[:, 0] * len(OPERATIONS)).astype(np.int64)
        sign = np.where(layer[:, 1] < 0.5, -1.0, 1.0)
        pixels = apply_operations(pixels, chosen, magnitude / 10, sign, layer[:, 2:])
    return pixels


def apply_operations(pixels: Tensor, chosen: Ints, level: float, sign: Floats, place: Floats) -> Tensor:
    """One operation for each image: its number in OPERATIONS (n,), its sign (n,), and its position (n, 2)."""
    out = pixels.clone()

    def apply(names: tuple[str, ...], family: Callable[[Tensor, Ints], Tensor]) -> None:
        where = np.flatnonzero(np.isin(chosen, [OPERATIONS.index(name) for name in names]))
        if len(where):
            members = send(where, pixels.device)
            out[members] = family(pixels[members], where)

    apply(AFFINE, lambda x, at: affine(x, affine_matrices(chosen[at], level * sign[at], x.shape[2], x.shape[3])))
    apply(TABLES, lambda x, at: map_values(x, chosen[at] - len(AFFINE), level))
    apply(("color",), lambda x, at: blend(grayscale(x)[:, None].float(), x, strength(level)))
    apply(("sharpness",), lambda x, at: sharpen(x, strength(level)))
    apply(("cutout",), lambda x, at: cutout(x, level, place[at]))
    return out


def strength(level: float) -> float:
    """The factor of color, contrast, brightness and sharpness; 1 changes nothing."""
    return 1.8 * level + 0.1


# ---- affine maps


def affine_matrices(chosen: Ints, level: Floats, h: int, w: int) -> Floats:
    """Maps from a pixel to its source, (n, 2, 3), x first; pixel centers are at halves."""
    turn, shear_x, shear_y, shift_x, shift_y = (np.where(chosen == i, level, 0.0) for i in range(len(AFFINE)))
    cos, sin = np.cos(np.radians(30) * turn), np.sin(np.radians(30) * turn)
    right = w / 2 - cos * w / 2 - sin * h / 2 - np.rint(TRANSLATION * shift_x * w)  # rotated about the center
    down = h / 2 + sin * w / 2 - cos * h / 2 - np.rint(TRANSLATION * shift_y * h)
    # sheared about the corner, as the authors do
    return np.stack([cos, sin - 0.3 * shear_x, right, -sin - 0.3 * shear_y, cos, down], 1).reshape(-1, 2, 3)


def affine(pixels: Tensor, matrix: Floats) -> Tensor:
    """Fetch each pixel from the nearest one to its source; those from outside are gray."""
    n, _, h, w = pixels.shape
    m = send(matrix, pixels.device)[..., None, None]  # (n, 2, 3, 1, 1)
    x = torch.arange(w, device=pixels.device) + 0.5
    y = (torch.arange(h, device=pixels.device) + 0.5)[:, None]
    column = (m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2]).floor().long()  # (n, h, w)
    row = (m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]).floor().long()
    inside = (column >= 0) & (column < w) & (row >= 0) & (row < h)
    source = (row.clamp(0, h - 1) * w + column.clamp(0, w - 1)).reshape(n, 1, h * w).expand(-1, 3, -1)
    fetched = pixels.flatten(2).gather(2, source).reshape(pixels.shape)
    return torch.where(inside[:, None], fetched, GRAY)


# ---- tables of values


def map_values(pixels: Tensor, chosen: Ints, level: float) -> Tensor:
    """Replace each value by that of a table, which is fixed or computed from the image itself."""
    fixed, device = fixed_tables(level), pixels.device
    table = send(fixed[np.minimum(chosen, len(fixed) - 1)], device)[:, None].repeat(1, 3, 1)
    makers = {"contrast": contrast_table, "autocontrast": autocontrast_table, "equalize": equalize_table}
    for name, make in makers.items():
        where = np.flatnonzero(chosen == TABLES.index(name))
        if len(where):
            members = send(where, device)
            table[members] = make(pixels[members], strength(level))
    return table.gather(2, pixels.flatten(2).long()).reshape(pixels.shape)


def fixed_tables(level: float) -> np.ndarray:
    """(5, 256) uint8: posterize, solarize, solarize add, brightness, invert."""
    v = np.arange(256)
    bits = min(8, max(1, int(4 * level)))
    tables = [
        v & (0xFF << (8 - bits)),
        np.where(v < int(256 * level), v, 255 - v),
        np.where(v < 128, np.minimum(v + int(110 * level), 255), v),
        (v * strength(level)).clip(0, 255),
        255 - v,
    ]
    return np.stack(tables).astype(np.uint8)


def contrast_table(pixels: Tensor, factor: float) -> Tensor:
    """(n, 1, 256): away from, or towards, the mean gray."""
    h, w = pixels.shape[2:]
    mean = (grayscale(pixels).flatten(1).sum(1) / (h * w)).round()[:, None, None]
    return (mean + factor * (all_values(pixels) - mean)).clamp(0, 255).to(torch.uint8)


def autocontrast_table(pixels: Tensor, factor: float) -> Tensor:
    """(n, 3, 256): the darkest value of a channel becomes 0 and the brightest 255."""
    low, high = (x[..., None].float() for x in pixels.flatten(2).aminmax(dim=2))
    scale = 255 / (high - low).clamp(min=1)
    spread = ((all_values(pixels) - low) * scale).clamp(0, 255)
    return torch.where(high > low, spread, all_values(pixels)).to(torch.uint8)


def equalize_table(pixels: Tensor, factor: float) -> Tensor:
    """(n, 3, 256): every value about as frequent as any other."""
    flat = pixels.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.long, device=pixels.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    brightest = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - brightest) // 255  # (n, 3, 1)
    below = counts.cumsum(2) - counts
    level = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(step > 0, level, all_values(pixels).long()).to(torch.uint8)


def all_values(pixels: Tensor) -> Tensor:
    """0 to 255, on the device of the pixels."""
    return torch.arange(256, device=pixels.device, dtype=torch.float32)


# ---- the others


def grayscale(pixels: Tensor) -> Tensor:
    """(n, h, w), integers from 0 to 255."""
    r, g, b = pixels.int().unbind(1)
    return (LUMA[0] * r + LUMA[1] * g + LUMA[2] * b + 32768) >> 16


def blend(base: Tensor, pixels: Tensor, factor: float) -> Tensor:
    """Pixels moved away from the base by a factor above 1, towards it by one below 1."""
    return (base + factor * (pixels - base)).clamp(0, 255).to(torch.uint8)


def sharpen(pixels: Tensor, factor: float) -> Tensor:
    """Away from, or towards, a smoothed image; the border has too few neighbors and is unchanged."""
    x = pixels.float()
    smooth = x.clone()
    if min(x.shape[2:]) > 2:
        around = F.avg_pool2d(x, 3, 1, divisor_override=1)
        smooth[..., 1:-1, 1:-1] = ((around + 4 * x[..., 1:-1, 1:-1]) / 13 + 0.5).floor()
    return blend(smooth, pixels, factor)


def cutout(pixels: Tensor, level: float, place: Floats) -> Tensor:
    """A gray square around a random point of each image."""
    h, w = pixels.shape[2:]
    center = send(place * [h, w], pixels.device)
    y = (torch.arange(h, device=pixels.device) + 0.5 - center[:, :1]).abs() < CUTOUT * level * h  # (n, h)
    x = (torch.arange(w, device=pixels.device) + 0.5 - center[:, 1:]).abs() < CUTOUT * level * w  # (n, w)
    return pixels.masked_fill((y[:, :, None] & x[:, None, :])[:, None], GRAY)
