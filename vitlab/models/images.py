"""The check that every model makes of its input."""

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import Size


def check_images(images: Tensor, size: Size, weight: Tensor) -> None:
    """Raise UserError unless images are RGB floats (B, 3, height, width) of the size, dtype and device expected."""
    if not isinstance(images, Tensor):
        raise UserError(f"images must be a tensor, (batch, 3, height, width), not {type(images).__name__}")
    if images.ndim != 4 or images.shape[1] != 3:
        raise UserError(f"images must be RGB, (batch, 3, height, width), not of shape {tuple(images.shape)}")
    if not images.is_floating_point():
        raise UserError(f"images must be normalized floats, not {images.dtype}; scale them to [-1, 1] first")
    if tuple(images.shape[2:]) != size:
        h, w = images.shape[2:]
        fix = f"call model.resize(({h}, {w})) first, or resize the images"
        raise UserError(f"this model takes images of {size[0]}x{size[1]}, not {h}x{w}; {fix}")
    if images.device != weight.device:
        raise UserError(f"the images are on {images.device} and the model is on {weight.device}; move one of them")
    cast = torch.is_autocast_enabled(images.device.type) and images.dtype != torch.float64  # doubles are never cast
    if images.dtype != weight.dtype and not cast:
        raise UserError(f"the images are {images.dtype} and the model is {weight.dtype}; convert one of them")
