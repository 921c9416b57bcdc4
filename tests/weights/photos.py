"""Generated photos of many shapes: smooth colors, so that a shift or another filter changes them visibly."""

from functools import cache

import numpy as np
from PIL import Image

SHAPES = [(200, 150), (150, 201), (97, 110), (320, 240), (333, 500), (71, 71), (300, 129), (127, 64), (90, 350)]


@cache
def photos(number: int = len(SHAPES), seed: int = 0) -> list[Image.Image]:
    made = []
    for i in range(number):
        rng = np.random.default_rng([seed, i])
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        made.append(coarse.resize(SHAPES[i % len(SHAPES)], Image.Resampling.BICUBIC))
    return made
