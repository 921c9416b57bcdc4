"""`vitlab convert`: a checkpoint of any format written in another one, tensor for tensor, in the precision it has."""

import os
from pathlib import Path

from vitlab.errors import UserError
from vitlab.files import atomic_path
from vitlab.models.config import Gelu, Size, Standardize, as_size
from vitlab.text import listed
from vitlab.weights.formats.base import FormatDefaults
from vitlab.weights.load import FORMATS, check_format, read_checkpoint


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    format: str | None = None,
    image_size: int | Size | None = None,
    heads: int | None = None,
    gelu: Gelu | None = None,
    norm_eps: float | None = None,
    group_eps: float | None = None,
    standardize: Standardize | None = None,
    standardize_eps: float | None = None,
) -> None:
    """Write `source`, which is anything `vitlab.load` takes, as a file or folder of the format `to`.

    >>> convert("ViT-B_16.npz", "vit-base", "huggingface")

    The target must not exist. What its format cannot express is refused. `image_size` and the rest are what many
    files do not say themselves.
    """
    check_format(to)
    path, suffixes = Path(target), [suffix for suffix in FORMATS[to].SUFFIXES if suffix]
    folder = path.suffix not in suffixes
    if folder and "" not in FORMATS[to].SUFFIXES:
        raise UserError(f"a {to} checkpoint is a file that ends in {listed(suffixes)}, not {path}")
    if path.exists():
        raise UserError(f"{path} exists; remove it or name another place")
    given = FormatDefaults(heads, gelu, norm_eps, group_eps, standardize, standardize_eps)
    size = None if image_size is None else as_size(image_size)
    checkpoint = read_checkpoint(source, given, format=format, image_size=size)
    if size not in (None, checkpoint.config.image_size):
        raise UserError(f"convert does not resample positions; load {source} with image_size={size} and save that")
    with atomic_path(path, folder) as new:
        FORMATS[to].write(checkpoint.config, checkpoint.tensors, checkpoint.card, new)
