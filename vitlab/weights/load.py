"""`vitlab.load`: everyone's checkpoints as our models. The way in: open, recognize, read, check, move, fill."""

import dataclasses
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import read_json, sha256
from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, ResNetConfig, Size, as_size
from vitlab.models.meta import fill_model, meta_model
from vitlab.models.positions import Resample
from vitlab.models.variants import Model
from vitlab.settings import from_json, takes
from vitlab.text import brief, listed, valid_text
from vitlab.weights import hub
from vitlab.weights.formats import google, huggingface, timm, torchvision, vitlab
from vitlab.weights.formats.base import Description, Format, FormatDefaults, RawCheckpoint, defaults_of
from vitlab.weights.formats.table import inward, named
from vitlab.weights.tensors import open_tensors

FORMATS: dict[str, Format] = {
    "vitlab": vitlab,
    "huggingface": huggingface,
    "timm": timm,
    "torchvision": torchvision,
    "google": google,
}
log = logging.getLogger("vitlab")


@takes(FormatDefaults)
def load(
    source: str | os.PathLike[str],
    *,
    classes: int | None = None,
    image_size: int | Size | None = None,
    resample: Resample = "bilinear",
    format: str | None = None,
    **settings: Any,
) -> Model:
    """The model in a file, a folder or on the Hugging Face hub.

    Args:
        source: a run folder, a .safetensors, .npz or .pth file, a hub's folder or a hub id such as
            "google/vit-base-patch16-224". Nothing in a file is ever executed.
        classes: another number than the file's gives a new head of zeros; 0 leaves the head out.
        image_size: another size than the file's resamples the position embeddings.
        resample: how: "bilinear" as the authors do, or "bicubic".
        format: vitlab, huggingface, timm, torchvision or google; by default recognized by content.
        settings: what many files do not state, listed below; each goes before the file's own and the format's default.

    Returns:
        The model in eval mode on the CPU, in float32 (float64 stays). `model.card` holds preprocessing, class names
        and provenance; `model(images)` takes (B, 3, height, width) to logits (B, classes).

    Raises:
        UserError: if there is no such file, it is damaged or of no known format, or tensors are missing or left over.

    >>> import tempfile, vitlab
    >>> folder = tempfile.mkdtemp() + "/model"
    >>> vitlab.save(vitlab.create("Ti/16", image_size=32, depth=1), folder)
    >>> vitlab.load(folder, classes=5)(torch.zeros(1, 3, 32, 32))
    tensor([[0., 0., 0., 0., 0.]], grad_fn=<AddmmBackward0>)
    """
    given = from_json(FormatDefaults, settings)
    size = None if image_size is None else as_size(image_size)
    found = read_checkpoint(source, given, format=format, image_size=size)
    if classes is not None and classes != found.config.classes:
        found = new_head(found, classes)
    model = fill_model(found.config, one_type(found.tensors, str(source)))
    model.card = found.card
    if size is not None and size != model.config.image_size:
        model.resize(size, resample)
    return model


@dataclass(frozen=True)
class Checkpoint:
    """A source as ours: nothing left over, nothing missing."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    card: Card


def read_checkpoint(
    name: str | os.PathLike[str], given: FormatDefaults, *, format: str | None = None, image_size: Size | None = None
) -> Checkpoint:
    try:
        source = open_source(name)
        return move(source, recognize(source, format), given, image_size)
    except OSError as error:
        raise UserError(f"{os.fspath(name)} cannot be read: {brief(error)}") from None


def move(source: RawCheckpoint, kind: str, given: FormatDefaults, image_size: Size | None) -> Checkpoint:
    """Their tensors as ours; what is wrong is said with the source's name."""
    try:
        reading = FORMATS[kind].read(source, given, image_size)
        tensors = inward(reading.table, meta_model(reading.config).state_dict(), source.tensors)
    except UserError as error:
        known = source.name in str(error) or str(source.tensors.path) in str(error)
        raise error if known else UserError(f"{source.name}: {error}") from None
    say_guesses(source, kind, reading)
    commit = hub.commit_of(source.tensors.path)
    origin = {"source": source.name, "format": kind, "sha256": sha256(source.tensors.path)}
    origin |= {} if commit is None else {"commit": commit}
    labels = None if reading.card.labels is None else tuple(map(valid_text, reading.card.labels))
    card = dataclasses.replace(reading.card, labels=labels, provenance=reading.card.provenance or origin)
    return Checkpoint(reading.config, tensors, card)


# ---- open


def open_source(source: str | os.PathLike[str]) -> RawCheckpoint:
    name = os.fspath(source)
    path = Path(name).expanduser()
    if path.is_file():
        return RawCheckpoint(name, open_tensors(path), {}, {})
    if path.is_dir():
        return open_folder(name, path)
    if isinstance(source, str) and hub.looks_like_id(source):
        return open_folder(name, hub.fetch(source))
    owner = name.partition("/")[0]
    why = f" ({owner}/ is a folder here, so this is no hub id)" if Path(owner).is_dir() and owner else ""
    raise UserError(f"there is no file or folder {name}{why}")


def open_folder(name: str, path: Path) -> RawCheckpoint:
    if vitlab.is_ours(path):
        config = read_json(vitlab.find_config(path))
        return RawCheckpoint(name, open_tensors(path / vitlab.WEIGHTS), config, {})
    weights = next((path / file for file in (vitlab.WEIGHTS, hub.OLD_WEIGHTS) if (path / file).is_file()), None)
    if weights is None:
        raise UserError(f"{name} has neither {vitlab.WEIGHTS} nor {hub.OLD_WEIGHTS}; name a file in it")
    beside = [path / "config.json", path / "preprocessor_config.json"]
    config, processor = (read_json(file) if file.is_file() else {} for file in beside)
    return RawCheckpoint(name, open_tensors(weights), config, processor)


# ---- recognize


def recognize(source: RawCheckpoint, format: str | None) -> str:
    if format is not None:
        if format not in FORMATS:
            raise UserError(f"there is no format '{format}'; the formats are {listed(FORMATS)}")
        return format
    kinds = [name for name, module in FORMATS.items() if module.fits(source)]
    if len(kinds) == 1:
        return kinds[0]
    if kinds:
        raise UserError(f"{source.name} could be of {' and of '.join(kinds)}; name one with format=")
    some = named(list(source.shapes)[:3]) or "nothing"
    raise UserError(f"{source.name} is of no format this package knows ({listed(FORMATS)}): it holds {some} ...")


def say_guesses(source: RawCheckpoint, kind: str, reading: Description) -> None:
    traits = defaults_of(reading.config)
    values = {field.name: getattr(traits, field.name) for field in dataclasses.fields(traits)}
    values |= {"preprocess": reading.card.preprocess, "image_size": reading.config.image_size}
    if reading.guessed:
        words = ", ".join(f"{name}={values[name]}" for name in reading.guessed)
        log.info("%s does not say everything; as usual in %s files: %s", source.name, kind, words)


# ---- change


def new_head(found: Checkpoint, classes: int) -> Checkpoint:
    """A head of zeros for other classes, on the features themselves: as the paper fine-tunes, without pre-logits.

    With no classes at all the features stay what they were.
    """
    old = found.config
    config = dataclasses.replace(old, classes=classes)
    drop = ["head."]
    if classes and not isinstance(config, ResNetConfig) and config.prelogits:
        config, drop = dataclasses.replace(config, prelogits=0), ["head.", "prelogits."]
    tensors = {name: x for name, x in found.tensors.items() if not name.startswith(tuple(drop))}
    if classes:
        width = config.channels if isinstance(config, ResNetConfig) else config.width
        dtype = tensors["norm.weight"].dtype
        tensors |= {
            "head.weight": torch.zeros(classes, width, dtype=dtype),
            "head.bias": torch.zeros(classes, dtype=dtype),
        }
    gone = f"the head of {old.classes} classes" + (" and its pre-logits layer" if len(drop) > 1 else "")
    log.info("%s: %s", "replaced by zeros" if classes else "left out", gone)
    return Checkpoint(config, tensors, dataclasses.replace(found.card, labels=None))


def one_type(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """Double precision stays; anything else, half precision too, becomes float32, which every processor computes."""
    types = {x.dtype for x in tensors.values()}
    wanted = torch.float64 if types == {torch.float64} else torch.float32
    if types != {wanted}:
        log.info("%s is stored in %s; loaded in %s", name, listed(sorted(map(str, types))), wanted)
    return {key: x.to(wanted) for key, x in tensors.items()}
