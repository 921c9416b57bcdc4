"""From an image to the model's input: the random crops of training, the fixed framing of evaluation.

A crop is a box (left, top, right, bottom) in fractions of the image's sides, drawn from a key. The same box is used
for a decoded file and for an image held in the device's memory. Pixels are uint8 until they are normalized.

Shapes: n images, h and w the input's height and width.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitlab.data.decoder import FILTERS, DecodeHint, frame_image
from vitlab.data.rng import CROP, FLIP, Floats, Keys, uniforms
from vitlab.device import send
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size
from vitlab.settings import RATE, Range, check_types

Crop = Literal["inception", "resize", "none"]
MixBy = Literal["pair", "batch"]

ASPECT = (3 / 4, 4 / 3)  # width to height of an inception crop
TRIES = 10  # aspect ratios tried before the complete image is used
REDUCING_GAP = 2.0  # an image may first be reduced cheaply to this many times its final size


@dataclass(frozen=True)
class Augment:
    """What training does to images and labels."""

    crop: Annotated[Crop, "inception: a random part; resize: evaluation's scale, placed at random; none"] = "inception"
    area: Annotated[tuple[float, float], "least and largest share of the picture in an inception crop"] = (0.05, 1.0)
    flip: Annotated[bool, "mirror half of the images"] = True
    randaugment: Annotated[tuple[int, float], Range(0), "operations per image and their magnitude; 0: none"] = (0, 10.0)
    mixup: Annotated[float, Range(0, 1), "alpha of the Beta distribution; 0: none"] = 0.0
    cutmix: Annotated[float, Range(0, 1), "likewise; with both, each pair of images draws one of the two"] = 0.0
    mix_by: Annotated[MixBy, "draw Mixup and CutMix for each pair of images, or once for the batch"] = "pair"
    label_smoothing: Annotated[float, RATE, "share of the target spread over all classes"] = 0.0
    plain_end: Annotated[float, RATE, "share of the run, at its end, without Mixup, CutMix and RandAugment"] = 0.0

    def __post_init__(self) -> None:
        check_types(self)
        if not 0 < self.area[0] <= self.area[1] <= 1:
            raise UserError(f"area must be a least and a largest share between 0 and 1, not {self.area}")

    def plain(self) -> "Augment":
        """The augmentation of a run's end: crops and flips alone."""
        return replace(self, mixup=0.0, cutmix=0.0, randaugment=(0, self.randaugment[1]))


def eval_image(image: Image.Image, size: Size, preprocess: Preprocess) -> Tensor:
    """One image framed for evaluation, (3, h, w), normalized."""
    return normalize(eval_pixels(image, size, preprocess)[None], preprocess)[0]


def eval_pixels(image: Image.Image, size: Size, preprocess: Preprocess) -> Tensor:
    """One image framed for evaluation, (3, h, w), uint8."""
    return to_pixels(frame_image(image, size, preprocess))


def to_pixels(image: Image.Image) -> Tensor:
    """An RGB image as a tensor, (3, h, w), uint8."""
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def normalize(pixels: Tensor, preprocess: Preprocess) -> Tensor:
    """The model's float32 input, (n, 3, h, w), from uint8 pixels of that shape."""
    mean, std = (send(np.array(x), pixels.device).reshape(3, 1, 1) for x in (preprocess.mean, preprocess.std))
    dense = pixels.to(torch.float32, memory_format=torch.contiguous_format)  # whatever layout the chunks had
    return dense.div_(255).sub_(mean).div_(std)


# ---- crops


def draw_flips(key: Keys, augment: Augment) -> np.ndarray:
    """Whether each image is mirrored, (n,)."""
    return (uniforms(key, FLIP, 1)[:, 0] < 0.5) & augment.flip


def draw_crops(key: Keys) -> Floats:
    """The random numbers of each image's crop, (n, 3 + TRIES)."""
    return uniforms(key, CROP, 3 + TRIES)


def crop_boxes(key: Keys, ratio: Floats, size: Size, augment: Augment, preprocess: Preprocess) -> Floats:
    """The crop of each image, (n, 4); `ratio`, (n,), is its width over its height."""
    return drawn_boxes(draw_crops(key), ratio, size, augment, preprocess)


def drawn_boxes(draws: Floats, ratio: Floats, size: Size, augment: Augment, preprocess: Preprocess) -> Floats:
    """The same from random numbers that are drawn already."""
    if augment.crop == "inception":
        width, height, place = inception_crops(draws, ratio, augment.area)
    else:
        share = preprocess.crop if preprocess.fit == "crop" or augment.crop == "resize" else 1.0
        target = ratio if preprocess.fit == "stretch" else np.full(len(draws), size[1] / size[0])
        width, height = share * np.minimum(1, target / ratio), share * np.minimum(1, ratio / target)
        place = draws[:, :2] if augment.crop == "resize" else np.full((len(draws), 2), 0.5)
    left, top = (1 - width) * place[:, 0], (1 - height) * place[:, 1]
    return np.stack([left, top, np.minimum(left + width, 1), np.minimum(top + height, 1)], 1)


def inception_crops(draws: Floats, ratio: Floats, area: tuple[float, float]) -> tuple[Floats, Floats, Floats]:
    """Widths (n,) and heights (n,) of crops in fractions of the sides, and their relative positions (n, 2).

    As in the authors' code: the aspect ratio is uniform, then the height is uniform between the one that gives the
    least area and the largest that fits. An aspect ratio at which the least area does not fit is drawn again.
    """
    aspect = ASPECT[0] + (ASPECT[1] - ASPECT[0]) * draws[:, 3:]  # (n, TRIES)
    relative = aspect / ratio[:, None]  # fraction of the width per fraction of the height
    least = np.sqrt(area[0] / relative)
    most = np.minimum(np.sqrt(area[1] / relative), np.minimum(1, 1 / relative))
    fits = least <= most
    rows, first = np.arange(len(draws)), fits.argmax(1)
    low, high, relative = least[rows, first], most[rows, first], relative[rows, first]
    height = low + (high - low) * draws[:, 2]
    width = np.minimum(height * relative, 1)
    full = ~fits.any(1)
    return np.where(full, 1.0, width), np.where(full, 1.0, height), draws[:, :2]


def crop_and_resize(image: Image.Image, box: Floats, size: Size, preprocess: Preprocess, flip: bool) -> Tensor:
    """The box of an image at the input's size, (3, h, w), uint8: cropped, resized and antialiased in one step."""
    w, h = image.size
    edges = (float(box[0] * w), float(box[1] * h), float(box[2] * w), float(box[3] * h))
    image = image.resize((size[1], size[0]), FILTERS[preprocess.interpolation], box=edges, reducing_gap=REDUCING_GAP)
    if flip:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return to_pixels(image)


def shrink_for_crop(key: int, size: Size, augment: Augment, preprocess: Preprocess) -> DecodeHint:
    """How much smaller an image may be decoded, given the crop that its key will draw."""

    def shrink(picture: Size) -> float:
        if min(picture[0] / size[0], picture[1] / size[1]) < 2 * REDUCING_GAP:  # too small even without a crop
            return 1.0
        each = np.array([key], np.uint64)
        box = crop_boxes(each, np.array([picture[1] / picture[0]]), size, augment, preprocess)[0]
        spare = min((box[2] - box[0]) * picture[1] / size[1], (box[3] - box[1]) * picture[0] / size[0])
        return float(spare / REDUCING_GAP)

    return shrink
