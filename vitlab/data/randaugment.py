"""RandAugment: a few operations per image, drawn from a list of sixteen, all at one magnitude.

The list, the strength of each operation at magnitude 10 and the grey that fills empty corners are the authors'; so
is the oddity that solarising and posterising get weaker as the magnitude grows. Distances are in shares of the side,
so that the magnitude means the same at any resolution.

Works on batches of bytes on any device. Operations of one family run as one: five are an affine map, eight a table
of 256 values; so a batch takes a few kernels, whatever its images drew. Arithmetic that sums is in whole numbers:
an image comes out the same in any batch.

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

GREY = 128
REACH = 100 / 224  # of a translation at magnitude 10
HOLE = 40 / 224  # half the side of a cutout at magnitude 10
LUMA = (19595, 38470, 7471)  # of red, green and blue in a grey, out of 65536

MOVES = ("rotate", "shear x", "shear y", "translate x", "translate y")  # with a sign
TABLES = ("posterize", "solarize", "solarize add", "brightness", "invert", "contrast", "autocontrast", "equalize")
OPERATIONS = (*MOVES, *TABLES, "color", "sharpness", "cutout")


def randaugment(pixels: Tensor, key: Keys, augment: Augment) -> Tensor:
    """Bytes in, bytes out, (n, 3, h, w)."""
    layers, magnitude = augment.randaugment
    draws = uniforms(key, LAYERS, 4 * layers).reshape(len(key), layers, 4)
    for layer in draws.transpose(1, 0, 2):
        chosen = (layer[:, 0] * len(OPERATIONS)).astype(np.int64)
        sign = np.where(layer[:, 1] < 0.5, -1.0, 1.0)
        pixels = operate(pixels, chosen, magnitude / 10, sign, layer[:, 2:])
    return pixels


def operate(pixels: Tensor, chosen: Ints, level: float, sign: Floats, place: Floats) -> Tensor:
    """One operation for each image: its number in the list, its sign (n,), its place (n, 2)."""
    out = pixels.clone()

    def apply(names: tuple[str, ...], family: Callable[[Tensor, Ints], Tensor]) -> None:
        where = np.flatnonzero(np.isin(chosen, [OPERATIONS.index(name) for name in names]))
        if len(where):
            members = send(where, pixels.device)
            out[members] = family(pixels[members], where)

    apply(MOVES, lambda x, at: moved(x, matrices(chosen[at], level * sign[at], x.shape[2], x.shape[3])))
    apply(TABLES, lambda x, at: looked_up(x, chosen[at] - len(MOVES), level))
    apply(("color",), lambda x, at: blended(grey(x)[:, None].float(), x, strength(level)))
    apply(("sharpness",), lambda x, at: sharpened(x, strength(level)))
    apply(("cutout",), lambda x, at: cutout(x, level, place[at]))
    return out


def strength(level: float) -> float:
    """Of the four enhancements: 1 changes nothing."""
    return 1.8 * level + 0.1


# ---- moves


def matrices(chosen: Ints, level: Floats, h: int, w: int) -> Floats:
    """From a pixel to where it comes from, (n, 2, 3), x first; pixels have their centers at halves."""
    m = np.zeros((len(chosen), 2, 3))
    m[:, 0, 0] = m[:, 1, 1] = 1
    turn = np.where(chosen == 0, np.radians(30) * level, 0.0)
    cos, sin = np.cos(turn), np.sin(turn)
    m[:, 0, 0], m[:, 0, 1], m[:, 1, 0], m[:, 1, 1] = cos, sin, -sin, cos
    m[:, 0, 2] = w / 2 - cos * w / 2 - sin * h / 2  # about the center
    m[:, 1, 2] = h / 2 + sin * w / 2 - cos * h / 2
    m[:, 0, 1] -= np.where(chosen == 1, 0.3 * level, 0.0)  # the authors shear about the corner
    m[:, 1, 0] -= np.where(chosen == 2, 0.3 * level, 0.0)
    m[:, 0, 2] -= np.where(chosen == 3, np.rint(REACH * level * w), 0.0)
    m[:, 1, 2] -= np.where(chosen == 4, np.rint(REACH * level * h), 0.0)
    return m


def moved(pixels: Tensor, matrix: Floats) -> Tensor:
    """Each pixel is fetched from the nearest one; what comes from outside is grey."""
    n, _, h, w = pixels.shape
    m = send(matrix, pixels.device)[..., None, None]  # (n, 2, 3, 1, 1)
    x = torch.arange(w, device=pixels.device) + 0.5
    y = (torch.arange(h, device=pixels.device) + 0.5)[:, None]
    column = (m[:, 0, 0] * x + m[:, 0, 1] * y + m[:, 0, 2]).floor().long()  # (n, h, w)
    row = (m[:, 1, 0] * x + m[:, 1, 1] * y + m[:, 1, 2]).floor().long()
    inside = (column >= 0) & (column < w) & (row >= 0) & (row < h)
    source = (row.clamp(0, h - 1) * w + column.clamp(0, w - 1)).reshape(n, 1, h * w).expand(-1, 3, -1)
    fetched = pixels.flatten(2).gather(2, source).reshape(pixels.shape)
    return torch.where(inside[:, None], fetched, GREY)


# ---- tables


def looked_up(pixels: Tensor, chosen: Ints, level: float) -> Tensor:
    """Each byte replaced by a table's, the same for all images or made from the image itself."""
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
    """(5, 256) bytes: posterise, solarise, solarise by adding, brighten, invert."""
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
    """(n, 1, 256): away from, or towards, the mean grey."""
    h, w = pixels.shape[2:]
    mean = (grey(pixels).flatten(1).sum(1) / (h * w)).round()[:, None, None]
    return (mean + factor * (values(pixels) - mean)).clamp(0, 255).to(torch.uint8)


def autocontrast_table(pixels: Tensor, factor: float) -> Tensor:
    """(n, 3, 256): the darkest value of a channel becomes 0 and the brightest 255."""
    low, high = (x[..., None].float() for x in pixels.flatten(2).aminmax(dim=2))
    scale = 255 / (high - low).clamp(min=1)
    spread = ((values(pixels) - low) * scale).clamp(0, 255)
    return torch.where(high > low, spread, values(pixels)).to(torch.uint8)


def equalize_table(pixels: Tensor, factor: float) -> Tensor:
    """(n, 3, 256): every value about as frequent as any other."""
    flat = pixels.flatten(2).long()
    counts = torch.zeros(*flat.shape[:2], 256, dtype=torch.long, device=pixels.device)
    counts.scatter_add_(2, flat, torch.ones_like(flat))
    brightest = counts.gather(2, flat.amax(2, keepdim=True))
    step = (flat.shape[2] - brightest) // 255  # (n, 3, 1)
    below = counts.cumsum(2) - counts
    level = ((below + step // 2) // step.clamp(min=1)).clamp(0, 255)
    return torch.where(step > 0, level, values(pixels).long()).to(torch.uint8)


def values(pixels: Tensor) -> Tensor:
    return torch.arange(256, device=pixels.device, dtype=torch.float32)


# ---- the rest


def grey(pixels: Tensor) -> Tensor:
    """(n, h, w), whole numbers from 0 to 255."""
    r, g, b = pixels.int().unbind(1)
    return (LUMA[0] * r + LUMA[1] * g + LUMA[2] * b + 32768) >> 16


def blended(base: Tensor, pixels: Tensor, factor: float) -> Tensor:
    return (base + factor * (pixels - base)).clamp(0, 255).to(torch.uint8)


def sharpened(pixels: Tensor, factor: float) -> Tensor:
    """Away from, or towards, a smoothed image; the border has too few neighbors and stays."""
    x = pixels.float()
    smooth = x.clone()
    if min(x.shape[2:]) > 2:
        around = F.avg_pool2d(x, 3, 1, divisor_override=1)
        smooth[..., 1:-1, 1:-1] = ((around + 4 * x[..., 1:-1, 1:-1]) / 13 + 0.5).floor()
    return blended(smooth, pixels, factor)


def cutout(pixels: Tensor, level: float, place: Floats) -> Tensor:
    """A grey square around a random point of each image."""
    h, w = pixels.shape[2:]
    center = send(place * [h, w], pixels.device)
    y = (torch.arange(h, device=pixels.device) + 0.5 - center[:, :1]).abs() < HOLE * level * h  # (n, h)
    x = (torch.arange(w, device=pixels.device) + 0.5 - center[:, 1:]).abs() < HOLE * level * w  # (n, w)
    return pixels.masked_fill((y[:, :, None] & x[:, None, :])[:, None], GREY)
