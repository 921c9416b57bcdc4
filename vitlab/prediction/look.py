"""Where a model looked, as a picture: the image, and beside it what speaks for its class in colors over the gray image.

Drawn without matplotlib, which is optional; `vitlab inspect` has the figures of several classes, layers and heads.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.analysis.class_map import class_map
from vitlab.analysis.gallery import folder_names
from vitlab.data.images import BrokenImage
from vitlab.data.transforms import eval_pixels, normalize
from vitlab.files import atomic_file, mark_pictures
from vitlab.plots.inside import HEAT, smooth_map
from vitlab.prediction.classifier import Classifier
from vitlab.prediction.inputs import STDIN, Inputs

LEAST = 256  # pixels of the longer side: a small model's input would be hard to see
# Colors of matplotlib's viridis (CC0) at equal distances, from low to high
COLORS = (
    *((68, 1, 84), (71, 45, 123), (59, 82, 139), (44, 114, 142), (33, 145, 140)),
    *((40, 174, 128), (94, 201, 98), (173, 220, 48), (253, 231, 37)),
)
GRAY = np.array([0.299, 0.587, 0.114])  # of red, green and blue


def write_looks(classifier: Classifier, inputs: Inputs, indices: Sequence[int], folder: Path) -> list[Path]:
    """Write NAME-looked.png for each of these images; broken ones, which are counted elsewhere, are left out."""
    names = folder_names([Path("stdin" if name == STDIN else name) for name in map(inputs.name, range(len(inputs)))])
    paths = []
    for index in indices:
        try:
            picture = draw_look(classifier, inputs.image(index))
        except BrokenImage:
            continue
        path = folder.expanduser() / f"{names[index]}-looked.png"
        mark_pictures(path.parent)
        with atomic_file(path) as file:
            picture.save(file, "PNG")
        paths.append(path)
    return paths


def draw_look(classifier: Classifier, image: Image.Image) -> Image.Image:
    """The part of an upright RGB image that the model saw, and over it in gray the evidence for its best class."""
    pixels = classifier.pixels(image)[None]
    label = int(classifier.probabilities(pixels).argmax())
    grid = class_map(classifier.model, normalize(pixels.to(classifier.device), classifier.preprocess), label)[0]
    height, width = classifier.model.config.image_size
    times = -(-LEAST // max(height, width))
    seen = eval_pixels(image, (times * height, times * width), classifier.preprocess).permute(1, 2, 0).numpy()
    share = smooth_map(grid.double().cpu().numpy(), seen.shape[:2])
    colors = np.stack(
        [np.interp(share, np.linspace(0, 1, len(COLORS)), values) for values in zip(*COLORS, strict=True)], -1
    )
    opacity = HEAT * share[..., None]
    mixed = opacity * colors + (1 - opacity) * (seen @ GRAY)[..., None]
    return Image.fromarray(np.concatenate([seen, mixed.round().astype(np.uint8)], 1))
