"""From a picture to the model's input: the random crops of training, the fixed framing of evaluation.

A crop is a box (left, top, right, bottom) in shares of the picture's sides, drawn from a key; whether it is then cut
from a decoded file or from a set held in the accelerator's memory is the same. Pictures are uint8 until the end.

Shapes: n images, h and w the input's height and width.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.data.framing import FILTERS, frame
from vitlab.data.images import Shrink
from vitlab.data.rng import CROP, FLIP, Floats, Keys, uniforms
from vitlab.device import send
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size
from vitlab.settings import RATE, Range, check_types

Crop = Literal["inception", "resize", "none"]

ASPECT = (3 / 4, 4 / 3)  # width to height of an inception crop
TRIES = 10  # aspects tried before the whole picture is taken
GAP = 2.0  # a picture may first be shrunk cheaply to this many times the size it ends at


@dataclass(frozen=True)
class Augment:
    """What training does to images and labels."""

    crop: Annotated[Crop, "inception: a random part; resize: evaluation's scale, placed at random; none"] = "inception"
    area: Annotated[tuple[float, float], "least and largest share of the picture in an inception crop"] = (0.05, 1.0)
    flip: Annotated[bool, "mirror half of the images"] = True
    randaugment: Annotated[tuple[int, float], Range(0), "operations per image and their magnitude; 0: none"] = (0, 10.0)
    mixup: Annotated[float, Range(0, 1), "alpha of the Beta distribution; 0: none"] = 0.0
    cutmix: Annotated[float, Range(0, 1), "likewise; with both, each pair of images draws one of the two"] = 0.0
    label_smoothing: Annotated[float, RATE, "share of the target spread over all classes"] = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise UserError(f"area must be a least and a largest share between 0 and 1, not {self.area}")


def eval_image(image: Image.Image, size: Size, preprocess: Preprocess) -> Tensor:
    """One picture framed for evaluation, (3, h, w), normalized."""
    return normalize(eval_pixels(image, size, preprocess)[None], preprocess)[0]


def eval_pixels(image: Image.Image, size: Size, preprocess: Preprocess) -> Tensor:
    """One picture framed for evaluation, (3, h, w), uint8."""
    return to_pixels(frame(image, size, preprocess))


def to_pixels(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)  # (3, h, w), uint8


def normalize(pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """Bytes (n, 3, h, w) as the model's float32 input."""
    mean, std = (send(np.array(x), pixels.device).reshape(3, 1, 1) for x in (preprocess.mean, preprocess.std))
    plain = pixels.to(torch.float32, memory_format=torch.contiguous_format)  # a layout that no chunking can change
    return plain.div_(255).sub_(mean).div_(std)


# ---- crops


def flips(key: Keys, augment: Augment) -> np.ndarray:
    return (uniforms(key, FLIP, 1)[:, 0] < 0.5) & augment.flip


def boxes(key: Keys, ratio: Floats, size: Size, augment: Augment, preprocess: Preprocess) -> Floats:
    """The crop of each picture, (n, 4); `ratio` is its width over its height."""
    if augment.crop == "inception":
        width, height, place = inception(key, ratio, augment.area)
    else:
        share = preprocess.crop if preprocess.fit == "crop" or augment.crop == "resize" else 1.0
        wanted = ratio if preprocess.fit == "stretch" else np.full(len(key), size[1] / size[0])
        width, height = share * np.minimum(1, wanted / ratio), share * np.minimum(1, ratio / wanted)
        place = uniforms(key, CROP, 2) if augment.crop == "resize" else np.full((len(key), 2), 0.5)
    left, top = (1 - width) * place[:, 0], (1 - height) * place[:, 1]
    return np.stack([left, top, np.minimum(left + width, 1), np.minimum(top + height, 1)], 1)


def inception(key: Keys, ratio: Floats, area: tuple[float, float]) -> tuple[Floats, Floats, Floats]:
    """Widths and heights of crops in shares of the sides, and where they lie.

    As the authors' crop: the aspect is uniform, then the height is uniform between the one that gives the least
    area and the largest that fits. An aspect at which the least area does not fit is drawn again.
    """
    draws = uniforms(key, CROP, TRIES + 3)
    aspect = ASPECT[0] + (ASPECT[1] - ASPECT[0]) * draws[:, 3:]  # (n, TRIES)
    relative = aspect / ratio[:, None]  # share of the width per share of the height
    least = np.sqrt(area[0] / relative)
    most = np.minimum(np.sqrt(area[1] / relative), np.minimum(1, 1 / relative))
    fits = least <= most
    rows, first = np.arange(len(key)), fits.argmax(1)
    low, high, relative = least[rows, first], most[rows, first], relative[rows, first]
    height = low + (high - low) * draws[:, 2]
    width = np.minimum(height * relative, 1)
    whole = ~fits.any(1)
    return np.where(whole, 1.0, width), np.where(whole, 1.0, height), draws[:, :2]


def cut(image: Image.Image, box: Floats, size: Size, preprocess: Preprocess, flip: bool) -> Tensor:
    """The box of a picture at the input's size, (3, h, w), uint8: cropped, scaled and antialiased in one go."""
    w, h = image.size
    edges = (float(box[0] * w), float(box[1] * h), float(box[2] * w), float(box[3] * h))
    image = image.resize((size[1], size[0]), FILTERS[preprocess.interpolation], box=edges, reducing_gap=GAP)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return to_pixels(image)


def shrink_for(key: int, size: Size, augment: Augment, preprocess: Preprocess) -> Shrink:
    """How much smaller a picture may be decoded, given the crop that its key will cut."""

    def shrink(picture: Size) -> float:
        if min(picture[0] / size[0], picture[1] / size[1]) < 2 * GAP:  # even the whole picture has nothing to spare
            return 1.0
        each = np.array([key], np.uint64)
        box = boxes(each, np.array([picture[1] / picture[0]]), size, augment, preprocess)[0]
        spare = min((box[2] - box[0]) * picture[1] / size[1], (box[3] - box[1]) * picture[0] / size[0])
        return float(spare / GAP)

    return shrink
