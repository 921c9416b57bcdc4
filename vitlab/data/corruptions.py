"""The fifteen usual corruptions of images in five severities, from their published definitions.

Lengths are in pixels of an image of 224 and scale with the shorter side, so that a severity means the same at every
size. Every draw is a function of (seed, index, corruption, severity). What differs from the published benchmark, which
comes as files, is in docs/comparing.md.

Shapes: images are (h, w, 3), float64 from 0 to 1; `unit` is the image's shorter side over 224.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from vitlab.data.fields import (
    Draws,
    disk_blur,
    enlarge,
    fractal,
    gaussian_blur,
    mirrored,
    motion_blur,
    places,
    plasma,
    sample,
    smooth_noise,
)
from vitlab.data.rng import CORRUPT, Floats, keys

SIDE = 224  # pixels that the table below is in
BENT = 244  # pixels that its shares for elastic are of, in the benchmark's images of 224 too
SEVERITIES = (1, 2, 3, 4, 5)
LUMA = np.array([0.299, 0.587, 0.114])
ICE = np.array([0.88, 0.94, 1.0])  # the color of frost

Level = Any  # of a severity: a number, or a few
Corrupt = Callable[[Floats, Draws, Level, float], Floats]


def corrupt(image: Image.Image, name: str, severity: int, index: int, seed: int = 0) -> Image.Image:
    """An RGB image with a corruption; `index` is its place in its set, from which its draws follow."""
    kind = CORRUPTIONS[name]
    key = keys(seed, CORRUPT, index, list(CORRUPTIONS).index(name), severity)
    pixels = np.asarray(image).astype(np.float64) / 255
    found = kind.apply(pixels, Draws(key), kind.levels[severity - 1], min(pixels.shape[:2]) / SIDE)
    return to_image(found)


def to_image(pixels: Floats) -> Image.Image:
    return Image.fromarray((pixels.clip(0, 1) * 255).round().astype(np.uint8))


# ---- noise


def gaussian_noise(x: Floats, draws: Draws, deviation: float, unit: float) -> Floats:
    return x + deviation * draws.normal(*x.shape)


def shot_noise(x: Floats, draws: Draws, photons: float, unit: float) -> Floats:
    """Counts of photons, of which white has this many in the mean: Poisson's, by inversion.

    Pixels have 256 values v, so there is one table of distribution functions. The number of its entries below v + u
    finds all counts at once, as those of v lie between v and v + 1.
    """
    most = int(photons + 12 * np.sqrt(photons) + 12)
    means = photons * np.arange(256)[:, None] / 255
    steps = np.concatenate([np.exp(-means), means / np.arange(1, most)], 1).cumprod(1)  # e^-m m^k / k!
    table = (np.arange(256)[:, None] + steps.cumsum(1).clip(0, 1 - 1e-12)).ravel()
    value = (x * 255).round().astype(int)
    counts = np.searchsorted(table, (value + draws.uniform(*x.shape)).ravel(), "right").reshape(x.shape) - value * most
    return counts / photons


def impulse_noise(x: Floats, draws: Draws, share: float, unit: float) -> Floats:
    """This share of the values become black or white."""
    hit, white = draws.uniform(*x.shape) < share, draws.uniform(*x.shape) < 0.5
    return np.where(hit, white, x)


# ---- blur


def defocus_blur(x: Floats, draws: Draws, level: tuple[float, float], unit: float) -> Floats:
    radius, edge = level
    return gaussian_blur(disk_blur(x, radius * unit), max(edge * unit, 0.1))


def glass_blur(x: Floats, draws: Draws, level: tuple[float, float, int], unit: float) -> Floats:
    """Every pixel takes the color of a place near it, some times over, between two blurs."""
    sigma, reach, times = level
    x = gaussian_blur(x, sigma * unit)
    down, across = places(*x.shape[:2])
    for _ in range(times):
        moves = (2 * draws.uniform(2, *x.shape[:2]) - 1) * reach * unit
        x = sample(x, down + moves[0], across + moves[1])
    return gaussian_blur(x, sigma * unit)


def linear_blur(x: Floats, draws: Draws, level: tuple[float, float], unit: float) -> Floats:
    """Motion in a direction within 45 degrees of the horizontal."""
    radius, sigma = level
    return motion_blur(x, 2 * radius * unit, sigma * unit, draws.between(-45, 45))


def zoom_blur(x: Floats, draws: Draws, level: tuple[float, float], unit: float) -> Floats:
    """The mean of the image and of its enlargements up to a factor."""
    most, step = level
    image, (w, h) = to_image(x), (x.shape[1], x.shape[0])
    total, factors = x.copy(), np.arange(1, most, step)
    for factor in factors:
        left, top = (w - w / factor) / 2, (h - h / factor) / 2
        box = (left, top, w - left, h - top)
        total += np.asarray(image.resize((w, h), Image.Resampling.BILINEAR, box=box)) / 255
    return total / (len(factors) + 1)


# ---- weather


def snow(x: Floats, draws: Draws, level: tuple[float, ...], unit: float) -> Floats:
    """Flakes: noise above a threshold, blurred by their fall, over an image that is paler than it was."""
    mean, deviation, zoom, threshold, radius, sigma, kept = level
    h, w = x.shape[:2]
    cells = [max(2, min(side, round(side / (zoom * unit)))) for side in (h, w)]
    flakes = enlarge(mean + deviation * draws.normal(*cells), h, w, Image.Resampling.BILINEAR)
    flakes = np.where(flakes < threshold, 0, flakes.clip(0, 1))
    flakes = motion_blur(flakes, 2 * radius * unit, sigma * unit, draws.between(45, 135))[..., None]
    pale = np.maximum(x, (x @ LUMA)[..., None] * 1.5 + 0.5)
    return kept * x + (1 - kept) * pale + flakes + flakes[::-1, ::-1]


def frost(x: Floats, draws: Draws, level: tuple[float, float], unit: float) -> Floats:
    """Ice on a window: ridges of clouds, thicker toward the edges, which hide the image where they are thick."""
    kept, amount = level
    h, w = x.shape[:2]
    ridges = [(1 - np.abs(2 * fractal(draws, h, w, 1.5) - 1)) ** 4 for _ in range(3)]
    down, across = (np.abs(2 * place / max(1, side - 1) - 1) for place, side in zip(places(h, w), (h, w), strict=True))
    thick = (0.2 + 0.6 * np.maximum(down, across) ** 2) * fractal(draws, h, w, 1.8) + 0.5 * np.maximum.reduce(ridges)
    return kept * x + amount * thick.clip(0, 1)[..., None] * ICE


def fog(x: Floats, draws: Draws, level: tuple[float, float], unit: float) -> Floats:
    """A cloud over the image, and no value above its brightest."""
    strength, decay = level
    (h, w, _), peak = x.shape, x.max()
    cloud = plasma(draws, round(h / unit), round(w / unit), decay)
    return (x + strength * enlarge(cloud, h, w, Image.Resampling.BILINEAR)[..., None]) * peak / (peak + strength)


def brightness(x: Floats, draws: Draws, more: float, unit: float) -> Floats:
    """HSV's value raised, hue and saturation kept: the channels grow in proportion."""
    value = x.max(-1, keepdims=True)
    raised = (value + more).clip(0, 1)
    return np.where(value > 0, x * raised / np.maximum(value, 1e-9), raised)


# ---- digital


def contrast(x: Floats, draws: Draws, share: float, unit: float) -> Floats:
    mean = x.mean((0, 1))
    return mean + share * (x - mean)


def elastic(x: Floats, draws: Draws, level: tuple[float, float, float], unit: float) -> Floats:
    """Bent by a smooth random field after a random affine map; all three lengths are shares of BENT.

    A pixel moves by about strength / sigma / 6 pixels of an image of 224, as the noise before the blur is of pixels.
    """
    h, w = x.shape[:2]
    strength, sigma, reach = (share * unit * BENT for share in level)
    strength *= unit
    anchors = np.array([[1, 1], [1, -1], [-1, -1]]) * min(h, w) / 3
    moved = anchors + (2 * draws.uniform(3, 2) - 1) * reach
    affine = np.linalg.solve(np.column_stack([moved, np.ones(3)]), anchors)  # (3, 2): where a color comes from
    bend = [strength * smooth_noise(draws, h, w, sigma) for _ in range(2)]
    down, across = (place + far for place, far in zip(places(h, w), bend, strict=True))
    found = np.stack([down - (h - 1) / 2, across - (w - 1) / 2, np.ones((h, w))], -1) @ affine
    return sample(x, mirrored(found[..., 0] + (h - 1) / 2, h), mirrored(found[..., 1] + (w - 1) / 2, w))


def pixelate(x: Floats, draws: Draws, share: float, unit: float) -> Floats:
    """This share of the pixels of each side, rounded down, each a square."""
    h, w = x.shape[:2]
    image = to_image(x).resize((max(1, int(share * w)), max(1, int(share * h))), Image.Resampling.BOX)
    return np.asarray(image.resize((w, h), Image.Resampling.NEAREST)) / 255


def jpeg(x: Floats, draws: Draws, quality: int, unit: float) -> Floats:
    file = io.BytesIO()
    to_image(x).save(file, "JPEG", quality=quality)
    return np.asarray(Image.open(file).convert("RGB")) / 255


# ---- the table


@dataclass(frozen=True)
class Corruption:
    """How an image is changed, and the level of each severity."""

    apply: Corrupt
    levels: tuple[Level, Level, Level, Level, Level]


CORRUPTIONS: dict[str, Corruption] = {
    "gaussian_noise": Corruption(gaussian_noise, (0.08, 0.12, 0.18, 0.26, 0.38)),
    "shot_noise": Corruption(shot_noise, (60, 25, 12, 5, 3)),
    "impulse_noise": Corruption(impulse_noise, (0.03, 0.06, 0.09, 0.17, 0.27)),
    "defocus_blur": Corruption(defocus_blur, ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5))),
    "glass_blur": Corruption(glass_blur, ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2))),
    "motion_blur": Corruption(linear_blur, ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15))),
    "zoom_blur": Corruption(zoom_blur, ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03))),
    "snow": Corruption(
        snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
    ),
    "frost": Corruption(frost, ((1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75))),
    "fog": Corruption(fog, ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))),
    "brightness": Corruption(brightness, (0.1, 0.2, 0.3, 0.4, 0.5)),
    "contrast": Corruption(contrast, (0.4, 0.3, 0.2, 0.1, 0.05)),
    "elastic": Corruption(
        elastic, ((2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02))
    ),
    "pixelate": Corruption(pixelate, (0.6, 0.5, 0.4, 0.3, 0.25)),
    "jpeg": Corruption(jpeg, (25, 18, 15, 10, 7)),
}
