"""Usual JPEGs straight to tensors, by torchvision's decoder. Imports nothing heavy before the first one.

The pixels are Pillow's, as both have libjpeg-turbo with the same settings; what is saved is the way out of a Pillow
image, a tenth of the time. torchvision has deprecated its decoder in 0.29: where there is none, and for every file that
is not usual or that it refuses, the answer is None, and Pillow decodes within the limits of images.py.
"""

import torch
from torch import Tensor

from vitlab.data.decoder import DecodeError, DecodeHint
from vitlab.data.headers import read_header
from vitlab.data.images import is_cheap


def decode_usual(data: bytes, shrink: DecodeHint) -> Tensor | None:
    """The pixels (height, width, 3) of a JPEG that is shown as it is stored; None for any other file, and where
    `shrink` allows a smaller one."""
    try:
        header = read_header(data)
    except DecodeError:
        return None
    if header is None or not header.is_usual or not is_cheap(header) or shrink((header.height, header.width)) >= 2:
        return None
    try:
        from torchvision.io import decode_jpeg

        return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8)).permute(1, 2, 0)
    except (ImportError, RuntimeError):
        return None
