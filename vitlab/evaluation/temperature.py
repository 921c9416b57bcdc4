"""Temperature scaling: one number T, chosen on held-out images, makes softmax(logits / T) a confidence to rely on.

With b = 1 / T, z the logits (n, K) and y the targets, the mean log loss

    f(b) = mean( log sum_k exp(b z_k) - b z·y ),    f'(b) = mean( sum_k z_k softmax(b z)_k - z·y )

is convex in b, so f' grows with b and has one root, found by bisection in float64. Dividing by T changes no
prediction, only its confidence.

Held-out images that are all right would ask for T = 0, a confidence of 1 in everything. So one image is added whose
label is every class alike: each target is (1 - e) onehot + e / K with e = 1 / (n + 1). With hundreds of images it
hardly matters; with ten, it keeps the confidence near what ten images can support.

Shapes: n images, K classes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vitlab.data.rng import Ints
from vitlab.evaluation.scores import calibration, check_images, softmax
from vitlab.models.card import LARGEST_TEMPERATURE as LARGEST

STEPS = 60  # halvings of the interval of log T: beyond float64's digits


@dataclass(frozen=True)
class Temperature:
    """A temperature, and the calibration error of the held-out images without it and with it."""

    value: float
    before: float
    after: float
    images: int


def fit_temperature(logits: NDArray[np.floating], labels: Ints) -> Temperature:
    """Choose the temperature by which held-out logits (n, K) have the least log loss, within 1 / LARGEST … LARGEST.

    The images must not have been trained on: a model is surer of those than of any other. Validation images are good,
    and so are out-of-fold logits, of a head that was fitted without the image.
    """
    check_images(len(logits))
    z = np.asarray(logits, np.float64)
    z = z - z.max(1, keepdims=True)  # the softmax is the same, and exp(b z) does not overflow
    e = 1 / (len(z) + 1)
    wanted = (1 - e) * z[np.arange(len(z)), labels].mean() + e * z.mean()
    low, high = -np.log(LARGEST), np.log(LARGEST)
    for _ in range(STEPS):
        middle = (low + high) / 2
        b = float(np.exp(-middle))
        too_sure = (z * softmax(b * z)).sum(1).mean() > wanted  # f' > 0: b is too large, and T too small
        low, high = (middle, high) if too_sure else (low, middle)
    value = float(np.exp((low + high) / 2).clip(1 / LARGEST, LARGEST))  # exp(log(100)) is above 100
    before, after = (calibration(softmax(z / t), labels).error for t in (1.0, value))
    return Temperature(value, before, after, len(z))
