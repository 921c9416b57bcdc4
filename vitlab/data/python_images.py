"""Images as a Python program has them: paths, PIL images, arrays and tensors, each as an upright RGB image.

An array is (height, width, channels) and a tensor (channels, height, width), as numpy's and torch's own packages have
it; both may be (height, width), which is gray. Channels are 1 (gray), 3 (RGB) or 4 (RGB and alpha). Values are bytes,
or floats from 0 to 1. Whatever could be read in two ways is refused.

Shapes: b images, h and w the model's height and width.
"""

import os
from collections.abc import Iterable
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from vitlab.data.decoder import TRANSPOSE, orientation, to_rgb
from vitlab.data.images import BrokenImage, decode
from vitlab.data.transforms import eval_pixels, normalize
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, Size
from vitlab.text import brief

CHANNELS = (1, 3, 4)
ACCEPTED = "give a path, a PIL image, an array (height, width, 3), a tensor (3, height, width), or a list of them"


def is_path(value: object) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, str | os.PathLike)


def is_one(value: object) -> bool:
    """Whether a value is one image, rather than a batch or a list of them; UserError where it is neither."""
    if isinstance(value, np.ndarray | Tensor):
        return value.ndim != 4
    if is_path(value) or isinstance(value, Image.Image):
        return True
    if isinstance(value, bytes | bytearray | dict) or not isinstance(value, Iterable):
        raise UserError(f"an object of type {type(value).__name__} is not an image; {ACCEPTED}")
    return False


def list_images(value: object) -> list[object]:
    """The images of a list or a batch; one image alone is a list of it."""
    return [value] if is_one(value) or not isinstance(value, Iterable) else list(value)


def name_of(value: object, name: str) -> str:
    """A path or the file of a PIL image; else the given name."""
    if is_path(value):
        return os.fspath(value)
    return str(getattr(value, "filename", "") or name)


def to_image(value: object, name: str = "image") -> Image.Image:
    """One image of any kind as an upright RGB image; UserError, with its name, where it is none."""
    name = name_of(value, name)
    try:
        if is_path(value):
            return decode(name, name)
        if isinstance(value, Image.Image):
            turn = orientation(value)
            return to_rgb(value if turn == 1 else value.transpose(TRANSPOSE[turn]))
    except BrokenImage as broken:
        raise UserError(f"{broken.name} cannot be read: {broken.why}") from None
    except OSError as error:  # a PIL image reads its file when its pixels are needed
        raise UserError(f"{name} cannot be read: {brief(error)}") from None
    if isinstance(value, Tensor):
        return from_array(channels_last(value, name), name)
    if isinstance(value, np.ndarray):
        check_channels(value.shape, value.shape[-1] if value.ndim else 0, "an array", name)
        return from_array(value, name)
    raise UserError(f"{name}: an object of type {type(value).__name__} is not an image; {ACCEPTED}")


def model_input(images: object, size: Size, preprocess: Preprocess, like: Tensor) -> Tensor:
    """The model's input (b, 3, h, w), framed as in evaluation and normalized, of the dtype and on the device of `like`.

    One image of any kind gives a batch of one.
    """
    each = list_images(images)
    if not each:
        raise UserError(f"there is no image in the list; {ACCEPTED}")
    named = (to_image(value, f"image {i}" if len(each) > 1 else "image") for i, value in enumerate(each))
    pixels = torch.stack([eval_pixels(image, size, preprocess) for image in named])
    return normalize(pixels.to(like.device), preprocess).to(like.dtype)


# ---- arrays and tensors


def channels_last(tensor: Tensor, name: str) -> NDArray[Any]:
    """A tensor (channels, height, width) or (height, width) as an array with the channels at its end."""
    check_channels(tuple(tensor.shape), tensor.shape[0] if tensor.ndim else 0, "a tensor", name)
    plain = tensor.detach().cpu()
    plain = plain.float() if plain.is_floating_point() else plain  # numpy has no bfloat16
    return (plain.permute(1, 2, 0) if plain.ndim == 3 else plain).numpy()


def check_channels(shape: tuple[int, ...], channels: int, kind: str, name: str) -> None:
    """Raise UserError unless the shape is that of one image, with its channels where its kind has them."""
    last = kind == "an array"
    order = "(height, width, channels)" if last else "(channels, height, width)"
    if len(shape) not in (2, 3) or 0 in shape:
        raise UserError(f"{name} is {kind} of shape {shape}, and an image is {order} or (height, width)")
    if len(shape) == 2:
        return
    if channels not in CHANNELS:
        other = shape[0] if last else shape[-1]
        turn = "array.transpose(1, 2, 0)" if last else "tensor.permute(2, 0, 1)"
        fix = f"; {turn} turns it" if other in CHANNELS else ", with 1, 3 or 4 channels"
        raise UserError(f"{name} is {kind} of shape {shape}, and {kind} is {order}{fix}")
    if shape[0] in CHANNELS and shape[-1] in CHANNELS:
        fix = "make it a PIL image"
        raise UserError(f"{name} is {kind} of shape {shape}: its channels may be the first or the last axis; {fix}")


def from_array(array: NDArray[Any], name: str) -> Image.Image:
    """Bytes, or floats from 0 to 1, (height, width) or (height, width, channels), as an RGB image."""
    if np.issubdtype(array.dtype, np.floating):
        low, high = float(array.min()), float(array.max())
        if not (low >= 0 and high <= 1):  # nan is neither
            about = f"has values from {low:g} to {high:g}, and floats are from 0 to 1"
            fix = "divide by 255" if low >= 0 and 1 < high <= 255 else "undo its normalization"
            raise UserError(f"{name} {about}; {fix}, or give bytes (uint8)")
        array = (array.astype(np.float64) * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserError(f"{name} has values of type {array.dtype}; give bytes (uint8), or floats from 0 to 1")
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    return to_rgb(Image.fromarray(np.ascontiguousarray(array)))
