"""Where a model looked, as a picture: the image, and beside it the same image, dark where nothing speaks for its class.

Drawn by Pillow alone, so that the package needs nothing else for it; `vitlab inspect` has the figures with scales.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.analysis.class_map import class_map
from vitlab.analysis.gallery import folder_names
from vitlab.data.images import BrokenImage
from vitlab.data.transforms import eval_pixels, normalize
from vitlab.files import atomic_file
from vitlab.plots.inside import smooth_map
from vitlab.prediction.classifier import Classifier
from vitlab.prediction.inputs import STDIN, Inputs

LEAST = 256  # pixels of the longer side: a small model's input would be hard to see
DARK = 0.15  # of the light is left where nothing speaks for the class


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
        with atomic_file(path) as file:
            picture.save(file, "PNG")
        paths.append(path)
    return paths


def draw_look(classifier: Classifier, image: Image.Image) -> Image.Image:
    """The part of an upright RGB image that the model saw, and the same in the light of its best class's evidence."""
    pixels = classifier.pixels(image)[None]
    label = int(classifier.probabilities(pixels).argmax())
    grid = class_map(classifier.model, normalize(pixels.to(classifier.device), classifier.preprocess), label)[0]
    height, width = classifier.model.config.image_size
    times = -(-LEAST // max(height, width))
    seen = eval_pixels(image, (times * height, times * width), classifier.preprocess).permute(1, 2, 0).numpy()
    light = DARK + (1 - DARK) * smooth_map(grid.double().cpu().numpy(), seen.shape[:2])
    lit = (seen * light[..., None]).round().astype(np.uint8)
    return Image.fromarray(np.concatenate([seen, lit], 1))
