"""`vitlab convert`: a checkpoint of any format written in another one, tensor for tensor, in the precision it has."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.files import atomic_path
from vitlab.models.config import Preprocess, Size, as_size
from vitlab.models.unknown import NOT_HELD
from vitlab.settings import from_json, takes
from vitlab.text import listed
from vitlab.weights.beside import beside_path, describe_parts, write_beside
from vitlab.weights.fold import fold_normalization
from vitlab.weights.formats import google
from vitlab.weights.formats.base import CardPart, FormatDefaults
from vitlab.weights.formats.google_names import STYLES
from vitlab.weights.formats.vitlab import NAME, WEIGHTS
from vitlab.weights.load import WRITERS, Checkpoint, check_format, read_checkpoint

log = logging.getLogger("vitlab")


@takes(FormatDefaults, skip=("preprocess",))
def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    to: str,
    *,
    format: str | None = None,
    image_size: int | Size | None = None,
    names: str | None = None,
    fold: bool = False,
    **settings: Any,
) -> None:
    """Write a checkpoint in another format, tensor for tensor, in the precision it has.

    Preprocessing, class names, thresholds and a temperature that the target cannot hold are written beside it, as
    NAME.vitlab.json, where `load` finds them.

    Args:
        source: anything that `vitlab.load` takes.
        target: the file or folder to write; it must not exist. Its ending must suit the format.
        to: vitlab, huggingface, timm, torchvision or google.
        format: the source's format, where it fits two.
        image_size: the source's, where neither the file nor its positions determine it.
        names: of a google file's tensors: published, linen (the authors' current code) or big_vision.
        fold: put the normalization into the patch projection, so that that of the target's own code gives the same
            logits; resize and crop remain the model's. Not for models with a ResNet.
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
    if to not in WRITERS:
        raise UserError(f"{to} files are read, not written; the formats to write are {listed(WRITERS)}")
    write = pick_writer(to, names)
    path, suffixes = Path(target), [suffix for suffix in WRITERS[to].SUFFIXES if suffix]
    folder = path.suffix not in suffixes
    if folder and "" not in WRITERS[to].SUFFIXES:
        raise UserError(f"a {to} checkpoint is a file that ends in {listed(suffixes)}, not {path}")
    if path.exists():
        raise UserError(f"{path} exists; remove it or name another place")
    size = None if image_size is None else as_size(image_size)
    checkpoint = read_checkpoint(source, from_json(FormatDefaults, settings), format=format, image_size=size)
    if size not in (None, checkpoint.config.image_size):
        raise UserError(f"convert does not resample positions; load {source} with image_size={size} and save that")
    if fold:
        checkpoint = fold_checkpoint(checkpoint, WRITERS[to].PREPROCESS)
    lost = WRITERS[to].lost(checkpoint.config, checkpoint.card, folder)
    write_files(checkpoint, path, to, folder, write, lost)


def write_files(
    checkpoint: Checkpoint, path: Path, to: str, folder: bool, write: Callable[..., None], lost: list[CardPart]
) -> None:
    """Write a file or a folder, and what it does not hold of the card beside the weights."""
    c, card = checkpoint.config, checkpoint.card
    beside = beside_path(path / WEIGHTS if folder else path)
    if lost and beside.exists():
        raise UserError(f"{beside} exists; remove it or name another place")
    with removed_after_error(beside if lost else None), atomic_path(path, folder) as new:
        write(c, checkpoint.tensors, card, new)
        if lost:  # complete before the weights get their name, so that they are never there without it
            weights = new / WEIGHTS if folder else new
            write_beside(c, card, weights, beside_path(weights) if folder else beside)
    if card.unknown is not None and to != NAME:
        log.info(NOT_HELD, path)
    if lost:
        words = describe_parts(card, lost)
        log.info("%s cannot hold %s: written to %s, for vitlab.load alone", path, words, beside)


def fold_checkpoint(checkpoint: Checkpoint, theirs: Preprocess) -> Checkpoint:
    c, card = checkpoint.config, checkpoint.card
    tensors, preprocess = fold_normalization(c, checkpoint.tensors, card.preprocess, theirs)
    return Checkpoint(c, tensors, dataclasses.replace(card, preprocess=preprocess))


@contextlib.contextmanager
def removed_after_error(path: Path | None) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if path is not None:
            path.unlink(missing_ok=True)
        raise


def pick_writer(to: str, names: str | None) -> Callable[..., None]:
    """A format's writer; `names` is a style of the authors' names, the only ones that exist in several."""
    if names is None:
        return WRITERS[to].write
    if to != google.NAME:
        raise UserError(f"names= is for the google format; {to} files have names of one style")
    if names not in STYLES:
        raise UserError(f"there are no names '{names}' of google files; there are {listed(STYLES)}")
    return functools.partial(google.write, names=names)
