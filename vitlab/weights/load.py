"""`vitlab.load`: checkpoints of all formats as our models: open, recognize, read, check, transform, merge, fill."""

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import sha256
from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, ResNetConfig, Size, as_size
from vitlab.models.meta import fill_model, meta_model
from vitlab.models.positions import Resample
from vitlab.models.variants import Model
from vitlab.settings import from_json, takes
from vitlab.text import brief, listed, valid_text
from vitlab.weights import box, hub
from vitlab.weights.beside import stored_settings
from vitlab.weights.class_names import imagenet_names
from vitlab.weights.formats import clip, dinov2, dinov3, google, huggingface, mae, timm, torchvision, vitlab
from vitlab.weights.formats.base import Format, FormatDefaults, ParsedCheckpoint, RawCheckpoint, Reader, settings_of
from vitlab.weights.formats.table import quote_names, to_vitlab
from vitlab.weights.formats.vitlab import read_card
from vitlab.weights.lora import Adapter, adapter_state, check_base, check_growth, merge
from vitlab.weights.lora_base import find_base
from vitlab.weights.open import open_source

MODULES: tuple[Format, ...] = (vitlab, huggingface, timm, torchvision, google)
ORIGINALS: tuple[Reader, ...] = (dinov2, dinov3, mae, clip)  # their authors' own files, which are read alone
WRITERS: dict[str, Format] = {module.NAME: module for module in MODULES}
FORMATS: dict[str, Reader] = {module.NAME: module for module in (*MODULES, *ORIGINALS)}
DIMENSIONS = ("depth", "num_hidden_layers", "embed_dim", "hidden_size")  # in configs of timm and transformers
LONGEST_CHAIN = 8  # low-rank updates of updates
log = logging.getLogger("vitlab")


@takes(FormatDefaults)
def load(
    source: str | os.PathLike[str],
    *,
    classes: int | None = None,
    image_size: int | Size | None = None,
    resample: Resample = "bilinear",
    format: str | None = None,
    base: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> Model:
    """The model in a file, a folder or on the Hugging Face hub.

    Args:
        source: a run folder, a .safetensors, .npz or .pth file, a hub's folder or a hub id such as
            "google/vit-base-patch16-224"; "box" is the small model in the package. Nothing in a file is ever executed.
        classes: another number than the file's gives a new head of zeros; 0 leaves the head out.
        image_size: another size than the file's resamples the position embeddings.
        resample: how: "bilinear" as the authors do, or "bicubic".
        format: vitlab, huggingface, timm, torchvision, google, dinov2, dinov3, mae or clip; by default recognized by
            content.
        base: of a run with low-rank updates (`lora=`), the weights to add them to, in place of those it names.
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
    size = None if image_size is None else as_size(image_size)
    given = from_json(FormatDefaults, settings)
    checkpoint = read_checkpoint(source, given, format=format, image_size=size, base=base)
    if classes is not None and classes != checkpoint.config.classes:
        checkpoint = replace_head(checkpoint, classes)
    model = fill_model(checkpoint.config, unify_dtype(checkpoint.tensors, str(source)))
    model.card = checkpoint.card
    if size is not None and size != model.config.image_size:
        model.resize(size, resample)
        if model.card.unknown is not None:
            log.info("%s: features of another image size differ, so no image is refused as none of the classes", source)
            model.card = dataclasses.replace(model.card, unknown=None)
    return model


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as ours: exactly the tensors of the model of this config or, of an adapter, its own."""

    config: ModelConfig
    tensors: dict[str, Tensor]
    card: Card
    adapter: Adapter | None = None


def read_checkpoint(
    source: str | os.PathLike[str],
    given: FormatDefaults,
    *,
    format: str | None = None,
    image_size: Size | None = None,
    base: str | os.PathLike[str] | None = None,
    chain: int = 0,
) -> Checkpoint:
    """A checkpoint of any format, in the precision it has; low-rank updates merged with their base, in float32.

    A UserError names the source. `chain` counts the updates of updates.
    """
    try:
        raw = open_source(source)
        kind = recognize_format(raw, format)
        if raw.is_guess and kind in (timm.NAME, huggingface.NAME):
            return parse_with_guess(raw, kind, given, image_size)
        checkpoint = parse_checkpoint(raw, kind, given, image_size)
        if kind in (timm.NAME, huggingface.NAME):
            check_folder(raw, checkpoint.config)
        if checkpoint.adapter is not None:
            return add_base(raw, checkpoint, given, base, chain)
        if base is not None:
            raise UserError(f"{raw.name} is a complete model; base= is for low-rank updates")
        return checkpoint
    except OSError as error:
        raise UserError(f"{os.fspath(source)} cannot be read: {brief(error)}") from None


def parse_with_guess(raw: RawCheckpoint, format: str, given: FormatDefaults, image_size: Size | None) -> Checkpoint:
    """A file with the config.json beside it or, where that is another model's, without."""
    try:
        checkpoint = parse_checkpoint(raw, format, given, image_size)
        check_shape(raw.config, checkpoint.config)
        return checkpoint
    except UserError as error:
        log.info("%s is not used: %s", raw.tensors.path.with_name("config.json"), error)
    return parse_checkpoint(dataclasses.replace(raw, config={}, processor={}), format, given, image_size)


def check_shape(stored: Mapping[str, Any], config: ModelConfig) -> None:
    """Raise UserError for a config.json that describes a model of another shape."""
    width = config.channels if isinstance(config, ResNetConfig) else config.width
    facts = {**dict.fromkeys(("num_features", "embed_dim", "hidden_size"), width), "num_classes": config.classes}
    facts |= {} if isinstance(config, ResNetConfig) else {"depth": config.depth, "num_hidden_layers": config.depth}
    for key, value in facts.items():
        if key in stored and stored[key] != value:
            raise UserError(f"it has {key}={stored[key]!r} and the weights beside it have {value}")


def check_folder(raw: RawCheckpoint, config: ModelConfig) -> None:
    """Raise UserError for a folder whose config.json has another depth or width than its weights."""
    inner = [raw.config.get(key) for key in ("model_args", "vision_config")]  # timm's; a pair's with a text model
    for part in [x for x in inner if isinstance(x, Mapping)] or [raw.config]:
        try:
            check_shape({key: part[key] for key in DIMENSIONS if part.get(key) is not None}, config)
        except UserError as error:
            raise UserError(f"config.json of {raw.name} is another model's: {error}") from None


def parse_checkpoint(raw: RawCheckpoint, format: str, given: FormatDefaults, image_size: Size | None) -> Checkpoint:
    try:
        known = given.over(stored_settings(raw.beside)) if raw.beside else given
        parsed = FORMATS[format].read(raw, known, image_size)
        card = read_card(raw.beside, parsed.config) if raw.beside else parsed.card
        state, adapter = meta_model(parsed.config).state_dict(), parsed.adapter
        state = state if adapter is None else adapter_state(state, adapter.rank)
        tensors = to_vitlab(parsed.table, state, parsed.tensors)
    except UserError as error:
        is_named = raw.name in str(error) or str(raw.tensors.path) in str(error)
        raise error if is_named else UserError(f"{raw.name}: {error}") from None
    log_defaults(raw, format, parsed)
    names = card.labels or imagenet_names(raw, format, parsed.config.classes)
    labels = None if names is None else tuple(map(valid_text, names))
    provenance = card.provenance or origin_of(raw, format)
    card = dataclasses.replace(card, preprocess=parsed.card.preprocess, labels=labels, provenance=provenance)
    return Checkpoint(parsed.config, tensors, card, adapter)


def find_origin(source: str | os.PathLike[str]) -> dict[str, str]:
    """Name, format and sha256 of the file that a source is, and the commit of one on the hub."""
    raw = open_source(source)
    return origin_of(raw, recognize_format(raw, None))


def origin_of(raw: RawCheckpoint, format: str) -> dict[str, str]:
    commit = hub.commit_of(raw.tensors.path)
    origin = {"source": raw.name, "format": format, "sha256": sha256(raw.tensors.path)}
    return origin | ({} if commit is None else {"commit": commit})


# ---- low-rank updates and their base


def add_base(
    raw: RawCheckpoint, own: Checkpoint, given: FormatDefaults, base: str | os.PathLike[str] | None, chain: int
) -> Checkpoint:
    """The complete model of low-rank updates: their base, at their image size and in float32, with them added."""
    assert own.adapter is not None
    if chain == LONGEST_CHAIN:
        raise UserError(f"{raw.name} would be low-rank updates of updates for the {chain + 1}th time; merge some first")
    place = find_base(own.adapter, raw.tensors.path.parent, raw.name) if base is None else base
    under = read_checkpoint(place, FormatDefaults(), image_size=own.config.image_size, chain=chain + 1)
    try:
        config = dataclasses.replace(under.config, image_size=own.config.image_size)
        check_base(own.config, vitlab.apply_settings(config, given))
        state = meta_model(own.config).state_dict()
        check_growth(state, under.tensors, own.config.image_size)
        model = fill_model(under.config, unify_dtype(under.tensors, str(place))).resize(own.config.image_size)
        tensors = merge(state, model.state_dict(), own.tensors, own.adapter)
    except UserError as error:
        raise UserError(f"{place} cannot be the base of {raw.name}: {error}") from None
    return Checkpoint(own.config, tensors, own.card)


def read_updates(folder: Path) -> Checkpoint:
    """The low-rank updates in a folder, without their base."""
    return parse_checkpoint(open_source(folder), vitlab.NAME, FormatDefaults(), None)


# ---- recognize


def check_format(name: str) -> None:
    if name not in FORMATS:
        raise UserError(f"there is no format '{name}'; the formats are {listed(FORMATS)}")


def recognize_format(source: RawCheckpoint, format: str | None) -> str:
    """The format's name: the caller's, or that of the one format that recognizes the tensors."""
    if format is not None:
        check_format(format)
        return format
    # the authors' names are timm's, and more
    originals = [module.NAME for module in ORIGINALS if module.recognizes(source)]
    formats = originals or [name for name, module in FORMATS.items() if module.recognizes(source)]
    if len(formats) == 1:
        return formats[0]
    if formats:
        raise UserError(f"{source.name} could be of {' and of '.join(formats)}; name one with format=")
    some = quote_names(list(source.shapes)[:3]) or "nothing"
    raise UserError(f"{source.name} is of no supported format ({listed(FORMATS)}): it holds {some} ...")


def log_defaults(source: RawCheckpoint, format: str, parsed: ParsedCheckpoint) -> None:
    """Log the settings that the file does not have and its format usually has; with `-v`, their values too."""
    if not parsed.defaulted:
        return
    values = vars(settings_of(parsed.config)) | {"image_size": parsed.config.image_size}
    values |= {"preprocess": parsed.card.preprocess}
    if log.isEnabledFor(logging.DEBUG):
        words = ", ".join(f"{name}={values[name]}" for name in parsed.defaulted)
        log.info("%s does not have every setting; as usual in %s files: %s", source.name, format, words)
    else:
        names = ", ".join(parsed.defaulted)
        log.info("%s: %s as usual in %s files (-v shows the values)", source.name, names, format)


# ---- change


def replace_head(checkpoint: Checkpoint, classes: int, why: str = "") -> Checkpoint:
    """A head of zeros for other classes, on the features themselves: as the paper fine-tunes, without pre-logits.

    With `classes=0` there is no head, and the pre-logits layer stays. The log has the reason, if one is given.
    """
    old = checkpoint.config
    config = dataclasses.replace(old, classes=classes)
    drop = ["head."]
    if classes and not isinstance(config, ResNetConfig) and config.prelogits:
        config, drop = dataclasses.replace(config, prelogits=0), ["head.", "prelogits."]
    tensors = {name: x for name, x in checkpoint.tensors.items() if not name.startswith(tuple(drop))}
    if classes:
        width = config.channels if isinstance(config, ResNetConfig) else config.features
        zeros = next(iter(tensors.values())).new_zeros
        tensors |= {"head.weight": zeros(classes, width), "head.bias": zeros(classes)}
    removed = f"the head of {old.classes} classes" + (" and its pre-logits layer" if len(drop) > 1 else "")
    log.info("%s: %s%s", "replaced by zeros" if classes else "left out", removed, why and f"; {why}")
    card = dataclasses.replace(checkpoint.card, labels=None, thresholds=None, temperature=1.0, unknown=None)
    return Checkpoint(config, tensors, card)


def unify_dtype(tensors: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """The tensors in float64 if all are; otherwise, also from half precision, in float32, which runs everywhere."""
    types = {x.dtype for x in tensors.values()}
    dtype = torch.float64 if types == {torch.float64} else torch.float32
    if types != {dtype} and name != box.NAME:  # which is known to be in half precision
        log.info("%s is stored in %s; loaded in %s", name, listed(sorted(map(str, types))), dtype)
    return {key: x.to(dtype) for key, x in tensors.items()}
