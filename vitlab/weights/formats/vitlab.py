"""Our own folder: model.safetensors and config.json, which holds the sha256 of the weights and everything beside them.

What refuses images (`card.unknown`) fits one set of weights alone, so it is in their file, by names that begin with
"unknown.": the two cannot be mixed up, and one rename replaces both.

The weights of a run with low-rank updates are the updates alone; config.json then has the place of their base.

A new folder appears complete, by one rename. In an existing folder the new config is first written as
config.next.json, then the weights are replaced by one rename, then config.json by another: at any moment one of the two
configs has the weights' sha256, so an interrupted save leaves the old model or the new one.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import fsync, largest_number, parse_json, read_json, save_tensors, sha256
from vitlab.models.card import LARGEST_TEMPERATURE, Card
from vitlab.models.config import MOST_LAYERS, ModelConfig, Preprocess, ResNetConfig, Size, StemConfig, ViTConfig
from vitlab.models.meta import meta_model
from vitlab.models.unknown import Unknown
from vitlab.settings import check_value, from_json, to_json
from vitlab.weights.formats.base import OWN, CardPart, FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.table import row
from vitlab.weights.lora import Adapter, adapter_state, base_json, header_json, read_adapter
from vitlab.weights.tensors import TensorFile

NAME = "vitlab"
SUFFIXES = ("",)
PREPROCESS = Preprocess()
FORMAT = "vitlab/1"
UNKNOWN = "unknown."
WEIGHTS, CONFIG, NEXT = "model.safetensors", "config.json", "config.next.json"
KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}
LARGEST = 10_000_000  # far above any dimension of a model; larger numbers are an attack on our arithmetic
C = TypeVar("C", ViTConfig, ResNetConfig, StemConfig)


# ---- saving


def lost(config: ModelConfig, card: Card, folder: bool) -> list[CardPart]:
    return []


def write(
    config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path, adapter: Adapter | None = None
) -> None:
    """Write the two files into an empty folder; those of an adapter, if one is given."""
    digest = write_weights(model_json(config, adapter), tensors, card, path / WEIGHTS)
    (path / CONFIG).write_text(config_text(config, card, digest, path, adapter))


def overwrite(
    config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path, adapter: Adapter | None = None
) -> None:
    """Write the two files into an existing folder, which at any moment holds the old model or the new one."""
    check_folder(path)
    if (path / NEXT).exists():
        finish_interrupted_save(path)
    weights, config_file = path / f"{WEIGHTS}.new", path / f"{NEXT}.new"
    digest = write_weights(model_json(config, adapter), tensors, card, weights)
    config_file.write_text(config_text(config, card, digest, path, adapter))
    for file in (weights, config_file):
        fsync(file)
    for old, new in ((config_file, path / NEXT), (weights, path / WEIGHTS), (path / NEXT, path / CONFIG)):
        old.replace(new)
        fsync(path)


def finish_interrupted_save(path: Path) -> None:
    """Keep the config that has the weights' sha256, if either has, as config.json, and remove config.next.json."""
    with contextlib.suppress(UserError):
        if find_config(path) == path / NEXT:
            (path / NEXT).replace(path / CONFIG)
    (path / NEXT).unlink(missing_ok=True)


def check_folder(path: Path) -> None:
    """Raise a UserError for a folder with the model of another program."""
    if not path.is_dir():
        raise UserError(f"{path} is a file; a model is saved to a folder")
    configs = [path / name for name in (CONFIG, NEXT) if (path / name).exists()]
    others = [file for file in configs if read_json(file).get("format") != FORMAT]
    if others or (not configs and (path / WEIGHTS).exists()):
        raise UserError(f"{path} holds another program's model; save to a folder of its own")


def write_weights(about: dict[str, Any], tensors: Mapping[str, Tensor], card: Card, path: Path) -> str:
    # one entry: several have no fixed order, and the same model must give the same bytes
    metadata = {FORMAT: json.dumps(about)}
    refusing = {} if card.unknown is None else card.unknown.tensors()
    named = {**tensors, **{UNKNOWN + name: tensor for name, tensor in refusing.items()}}
    save_tensors({name: tensor.contiguous() for name, tensor in named.items()}, path, metadata)
    return sha256(path)


def config_text(config: ModelConfig, card: Card, digest: str, folder: Path, adapter: Adapter | None) -> str:
    data = {
        "format": FORMAT,
        "model": model_json(config, adapter),
        **({} if adapter is None else {"base": base_json(adapter, folder)}),
        "preprocess": to_json(card.preprocess),
        "labels": card.labels,
        "provenance": card.provenance,
        **({} if card.thresholds is None else {"thresholds": card.thresholds}),
        **({} if card.temperature == 1 else {"temperature": card.temperature}),
        "sha256": digest,
    }
    return json.dumps(data, indent=2) + "\n"


def model_json(config: ModelConfig, adapter: Adapter | None = None) -> dict[str, Any]:
    about = {"kind": "vit" if isinstance(config, ViTConfig) else "resnet", **to_json(config)}
    return about if adapter is None else about | {"lora": header_json(adapter)}


# ---- reading


def is_vitlab_folder(path: Path) -> bool:
    """Whether a folder has a config of this format."""
    configs = [path / name for name in (CONFIG, NEXT)]
    return any(file.is_file() and read_json(file).get("format") == FORMAT for file in configs)


def find_config(path: Path) -> Path:
    """The config of a folder that has the sha256 of its weights; a UserError if none has."""
    if not (path / WEIGHTS).is_file():
        raise UserError(f"{path} has a {CONFIG} and no {WEIGHTS}")
    digest = sha256(path / WEIGHTS)
    for file in (path / CONFIG, path / NEXT):
        if file.is_file() and read_json(file).get("sha256") == digest:
            return file
    raise UserError(
        f"{path / WEIGHTS} is not the file that {CONFIG} was written for (its sha256 differs); copy or save it again"
    )


def recognizes(source: RawCheckpoint) -> bool:
    return FORMAT in source.tensors.metadata


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    """Read a folder's config.json, which must agree with the weights' header, or a bare file's header alone."""
    where = f"the config in the header of {source.name}"
    header = parse_json(source.tensors.metadata.get(FORMAT, "").encode(), where)
    if source.config and source.config.get("model") != header:
        raise UserError(f"{source.name} has one model in its {CONFIG} and another in its weights' header")
    lora = header.pop("lora", None)
    adapter = None if lora is None else read_adapter(lora, source.config.get("base"))
    config = model_config(header, len(source.shapes) if adapter is None else MOST_LAYERS)  # its layers are the base's
    card = read_card(source.config, config) if source.config else Card()
    tensors, unknown = read_unknown(source)
    card = dataclasses.replace(card, preprocess=given.preprocess or card.preprocess, unknown=unknown)
    if unknown is not None and card.thresholds is not None:
        raise UserError("a multi-label model finds no class in an image that has none; it cannot refuse one as well")
    defaulted = () if source.config or given.preprocess else ("preprocess",)
    config = apply_settings(config, given)
    state = meta_model(config).state_dict()
    table = [row(name, name) for name in (state if adapter is None else adapter_state(state, adapter.rank))]
    return ParsedCheckpoint(config, card, defaulted, table, tensors, adapter)


def read_unknown(source: RawCheckpoint) -> tuple[TensorFile, Unknown | None]:
    """The tensors of the model alone, and what refuses images, checked against the head's shape."""
    file = source.tensors
    own = {name: shape for name, shape in file.shapes.items() if not name.startswith(UNKNOWN)}
    names = [name.removeprefix(UNKNOWN) for name in file.shapes if name.startswith(UNKNOWN)]
    if not names:
        return file, None
    classes, width = own.get("head.weight", (0, 0))[:2]
    tensors = {name: file.read(UNKNOWN + name) for name in names}
    return dataclasses.replace(file, shapes=own), Unknown.from_tensors(tensors, classes, width)


def model_config(data: Mapping[str, Any], tensors: int) -> ModelConfig:
    """The inverse of `model_json`, for untrusted data: a model cannot have more layers than tensors."""
    if largest_number(data) > LARGEST:
        raise UserError(f"a model's config has a number above {LARGEST:,}")
    kind = data.get("kind")
    if kind not in list(KINDS):
        raise UserError(f"a model's kind must be vit or resnet, not {kind!r}")
    fields = {key: value for key, value in data.items() if key != "kind"}
    stem = fields.get("stem")
    stages = [part.get("stages") for part in (fields, stem) if isinstance(part, Mapping)]
    layers = [fields.get("depth", 0), *(units for part in stages if isinstance(part, list | tuple) for units in part)]
    if largest_number(layers) > tensors or len(layers) > tensors:
        raise UserError(f"a model's config has more layers than there are tensors ({tensors})")
    config: ModelConfig = from_json(KINDS[kind], fields)
    return config


def read_card(data: Mapping[str, Any], config: ModelConfig) -> Card:
    preprocess: Preprocess = check_value(data.get("preprocess"), Preprocess, "preprocess")
    labels: tuple[str, ...] | None = check_value(data.get("labels"), tuple[str, ...] | None, "labels")
    if labels is not None and len(labels) != config.classes:
        raise UserError(f"there are {len(labels)} class names for {config.classes} classes")
    thresholds: tuple[float, ...] | None = check_value(data.get("thresholds"), tuple[float, ...] | None, "thresholds")
    temperature = check_temperature(check_value(data.get("temperature", 1.0), float, "temperature"))
    return Card(preprocess, labels, read_provenance(data), check_thresholds(thresholds, config.classes), temperature)


def read_provenance(data: Mapping[str, Any]) -> dict[str, str] | None:
    """The provenance in untrusted JSON: words by name."""
    provenance = data.get("provenance")
    if provenance is None:
        return None
    if not isinstance(provenance, dict) or not all(isinstance(word, str) for word in provenance.values()):
        raise UserError(f"provenance must be an object of words, not {provenance!r}")
    return provenance


def check_thresholds(thresholds: tuple[float, ...] | None, classes: int) -> tuple[float, ...] | None:
    """Raise a UserError unless they are probabilities, one for each class."""
    if thresholds is not None and len(thresholds) != classes:
        raise UserError(f"there are {len(thresholds)} thresholds for {classes} classes")
    if thresholds is not None and not all(0 <= value <= 1 for value in thresholds):
        raise UserError(f"thresholds are probabilities from 0 to 1, not {thresholds[:5]}")
    return thresholds


def check_temperature(value: float) -> float:
    """Raise a UserError unless logits can be divided by it."""
    if not 1 / LARGEST_TEMPERATURE <= value <= LARGEST_TEMPERATURE:
        least, most = 1 / LARGEST_TEMPERATURE, LARGEST_TEMPERATURE
        raise UserError(f"the temperature must be from {least:g} to {most:g}, not {value:g}; 1 changes nothing")
    return value


def apply_settings(config: ModelConfig, given: FormatDefaults) -> ModelConfig:
    """The config with the values that the caller has given."""
    own = {name: getattr(given, name) for name in OWN}
    group = {"standardize": given.standardize, "standardize_eps": given.standardize_eps, "norm_eps": given.group_eps}
    if isinstance(config, ResNetConfig):
        return replace_given(config, group)
    return replace_given(config, {**own, "stem": replace_given(config.stem, group) if config.stem else None})


def replace_given(config: C, values: Mapping[str, Any]) -> C:
    return dataclasses.replace(config, **{name: value for name, value in values.items() if value is not None})
