"""Filters and random fields of images, as corruptions.py needs them: blurs, resampling, noise of several scales.

Shapes: h and w the image's height and width; images are (h, w, 3), from 0 to 1.
"""

import numpy as np
from PIL import Image

from vitlab.data.rng import Floats, Keys, uniforms

CUT = 3.5  # deviations at which a Gaussian kernel ends
FINER = 8  # times a plasma's grid is made finer, whose first points are 2^8 = 256 pixels apart


class Draws:
    """Random numbers of a key, one array after another."""

    def __init__(self, key: Keys) -> None:
        self.key, self.count = key, 0

    def uniform(self, *shape: int) -> Floats:
        """Numbers in [0, 1)."""
        self.count += 1
        return uniforms(self.key, self.count, int(np.prod(shape, dtype=int))).reshape(shape)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * float(self.uniform(1)[0])

    def normal(self, *shape: int) -> Floats:
        """Normal deviates, by Box and Muller."""
        radius, angle = 1 - self.uniform(*shape), self.uniform(*shape)
        return np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)


# ---- filters


def convolve(image: Floats, kernel: Floats) -> Floats:
    """An image (h, w) or (h, w, 3) with a kernel of odd sides; it goes on beyond its edges as in a mirror."""
    tall, wide = (side // 2 for side in kernel.shape)
    padded = np.pad(image, [(tall, tall), (wide, wide), *[(0, 0)] * (image.ndim - 2)], "symmetric")
    size = padded.shape[0] + kernel.shape[0] - 1, padded.shape[1] + kernel.shape[1] - 1
    weights = np.fft.rfft2(kernel / kernel.sum(), size)
    weights = weights if image.ndim == 2 else weights[..., None]
    full = np.fft.irfft2(np.fft.rfft2(padded, size, (0, 1)) * weights, size, (0, 1))
    return full[2 * tall : 2 * tall + image.shape[0], 2 * wide : 2 * wide + image.shape[1]]


def grid(radius: float) -> tuple[Floats, Floats]:
    """Distances of a kernel's cells to its center, down and across."""
    reach = np.arange(-int(np.ceil(radius)), int(np.ceil(radius)) + 1.0)
    return reach[:, None], reach[None, :]


def gaussian_blur(image: Floats, sigma: float) -> Floats:
    down, across = grid(CUT * sigma)
    return convolve(image, np.exp(-(down**2 + across**2) / (2 * sigma**2)))


def disk_blur(image: Floats, radius: float) -> Floats:
    """As of a lens out of focus; cells that the edge of the disk cuts count by about their share."""
    down, across = grid(radius + 0.5)
    return convolve(image, np.clip(radius + 0.5 - np.hypot(down, across), 0, 1))


def motion_blur(image: Floats, length: float, sigma: float, degrees: float) -> Floats:
    """Smeared along a line to one side of each pixel, with weights that fall as a Gaussian of this sigma."""
    along = np.linspace(0, length, max(2, int(4 * length) + 1))
    kernel = np.zeros((2 * int(np.ceil(length)) + 3,) * 2)
    center, turn = len(kernel) // 2, np.deg2rad(degrees)
    down, across = center + along * np.sin(turn), center + along * np.cos(turn)
    for rows, share in corners(down):
        for columns, other in corners(across):
            np.add.at(kernel, (rows, columns), share * other * np.exp(-(along**2) / (2 * sigma**2)))
    return convolve(image, kernel)


def corners(place: Floats) -> list[tuple[np.ndarray, Floats]]:
    """The cells before and after each place, and their shares in it."""
    low = np.floor(place)
    return [(low.astype(int), low + 1 - place), (low.astype(int) + 1, place - low)]


def sample(image: Floats, down: Floats, across: Floats) -> Floats:
    """The image between its pixels, bilinearly, at places (h, w) each; those outside have the nearest edge's value."""
    h, w = image.shape[:2]
    found = np.zeros_like(image)
    for rows, share in corners(down.clip(0, h - 1)):
        for columns, other in corners(across.clip(0, w - 1)):
            found += (share * other)[..., None] * image[rows.clip(0, h - 1), columns.clip(0, w - 1)]
    return found


def places(h: int, w: int) -> tuple[Floats, Floats]:
    """The row and the column of every pixel, (h, w) each."""
    down, across = np.meshgrid(np.arange(h, dtype=float), np.arange(w, dtype=float), indexing="ij")
    return down, across


def mirrored(place: Floats, side: int) -> Floats:
    """Places beyond a side's ends, as in mirrors there."""
    found = (place + 0.5) % (2 * side)
    return np.minimum(found, 2 * side - found) - 0.5


def enlarge(field: Floats, h: int, w: int, kind: Image.Resampling = Image.Resampling.BICUBIC) -> Floats:
    """A field of any size at (h, w), between its values by a filter."""
    image = Image.fromarray(field.astype(np.float32))
    return np.asarray(image.resize((w, h), kind)).astype(np.float64)


# ---- random fields


def fractal(draws: Draws, h: int, w: int, decay: float) -> Floats:
    """A cloud (h, w) from 0 to 1: noise of ever finer scales, each `decay` times weaker than the one before."""
    total, weight, cells = np.zeros((h, w)), 1.0, 2
    while cells <= max(h, w):
        total += weight * enlarge(draws.normal(cells + 1, cells + 1), h, w)
        weight, cells = weight / decay, 2 * cells
    low, high = total.min(), total.max()
    return (total - low) / max(high - low, 1e-9)


def plasma(draws: Draws, h: int, w: int, decay: float) -> Floats:
    """A cloud (h, w) by midpoints, cut from one that goes from 0 to 1 and whose sides are multiples of 256.

    The published fog takes a draw up to its step, times that step, and divides the step by `decay` from one scale to
    the next: what a scale adds falls by the square of `decay`.
    """
    total, weight = np.zeros((-(-h >> FINER), -(-w >> FINER))), 1.0
    for _ in range(FINER):
        total, weight = with_midpoints(total, draws, weight), weight / decay**2
    low, high = total.min(), total.max()
    return ((total - low) / (high - low))[:h, :w]


def with_midpoints(field: Floats, draws: Draws, weight: float) -> Floats:
    """A field whose edges meet, twice as fine: means of four neighbors, each with a draw from -weight to weight."""
    h, w = field.shape
    noise = weight * (2 * draws.uniform(3, h, w) - 1)
    below, right = np.roll(field, -1, 0), np.roll(field, -1, 1)
    centers = (field + below + right + np.roll(below, -1, 1)) / 4 + noise[0]
    found = np.empty((2 * h, 2 * w))
    found[::2, ::2], found[1::2, 1::2] = field, centers
    found[::2, 1::2] = (field + right + centers + np.roll(centers, 1, 0)) / 4 + noise[1]
    found[1::2, ::2] = (field + below + centers + np.roll(centers, 1, 1)) / 4 + noise[2]
    return found


def smooth_noise(draws: Draws, h: int, w: int, sigma: float) -> Floats:
    """Uniform noise from -1 to 1, blurred by a Gaussian; its edges meet, so the blur is a product of spectra."""
    spectrum = np.fft.rfft2(2 * draws.uniform(h, w) - 1)
    down, across = np.fft.fftfreq(h)[:, None], np.fft.rfftfreq(w)[None, :]
    return np.fft.irfft2(spectrum * np.exp(-2 * (np.pi * sigma) ** 2 * (down**2 + across**2)), (h, w))
