"""`vitlab convert`: a checkpoint of any format written in another one, tensor for tensor, in the precision it has."""

import os
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.files import atomic_path
from vitlab.models.config import Size, as_size
from vitlab.settings import from_json, takes
from vitlab.text import listed
from vitlab.weights.formats.base import FormatDefaults
from vitlab.weights.load import FORMATS, check_format, read_checkpoint


@takes(FormatDefaults, skip=("preprocess",))
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    format: str | None = None,
    image_size: int | Size | None = None,
    **settings: Any,
) -> None:
    """Write a checkpoint in another format, tensor for tensor, in the precision it has.

    Args:
        source: anything that `vitlab.load` takes.
        target: the file or folder to write; it must not exist. Its ending must suit the format.
        to: vitlab, huggingface, timm, torchvision or google.
        format: the source's format, where it fits two.
        image_size: the source's, where neither the file nor its positions determine it.
        settings: what the source does not state, listed below.

    Raises:
        UserError: if the target exists, or its format cannot express the model.

    >>> import os, tempfile, vitlab
    >>> folder = tempfile.mkdtemp()
    >>> vitlab.save(vitlab.create("Ti/16", image_size=32, depth=1), folder + "/model")
    >>> convert(folder + "/model", folder + "/vit.safetensors", "timm")
    >>> os.path.exists(folder + "/vit.safetensors")
    True
    """
    check_format(to)
    path, suffixes = Path(target), [suffix for suffix in FORMATS[to].SUFFIXES if suffix]
    folder = path.suffix not in suffixes
    if folder and "" not in FORMATS[to].SUFFIXES:
        raise UserError(f"a {to} checkpoint is a file that ends in {listed(suffixes)}, not {path}")
    if path.exists():
        raise UserError(f"{path} exists; remove it or name another place")
    size = None if image_size is None else as_size(image_size)
    checkpoint = read_checkpoint(source, from_json(FormatDefaults, settings), format=format, image_size=size)
    if size not in (None, checkpoint.config.image_size):
        raise UserError(f"convert does not resample positions; load {source} with image_size={size} and save that")
    if checkpoint.card.thresholds is not None and to != "vitlab":
        raise UserError(f"{source} is a multi-label model, which a {to} checkpoint cannot say; export it, or save it")
    with atomic_path(path, folder) as new:
        FORMATS[to].write(checkpoint.config, checkpoint.tensors, checkpoint.card, new)
