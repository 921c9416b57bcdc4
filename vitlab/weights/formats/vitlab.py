"""Our own folder: model.safetensors and config.json, which holds the sha256 of the weights and everything beside them.

A new folder appears whole, by one rename. In a folder that is there already the new config waits as
config.next.json while the weights are replaced, by one rename too, and only then takes its place: at any moment
one of the two configs has the weights' sha256, so an interrupted save leaves the old model or the new one.
"""

import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import fsync, largest_number, parse_json, read_json, sha256
from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, Preprocess, ResNetConfig, Size, ViTConfig
from vitlab.models.meta import meta_model
from vitlab.settings import check_value, from_json, to_json
from vitlab.weights.formats.base import Description, FormatDefaults, RawCheckpoint
from vitlab.weights.formats.table import row

NAME = "vitlab"
WRITES = ("",)
FORMAT = "vitlab/1"
WEIGHTS, CONFIG, NEXT = "model.safetensors", "config.json", "config.next.json"
KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}
LARGEST = 10_000_000  # no dimension of a model comes near; a larger one is an attack on our arithmetic


# ---- saving


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    """The two files, in an empty folder."""
    digest = write_weights(config, tensors, path / WEIGHTS)
    (path / CONFIG).write_text(describe(config, card, digest))


def replace(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    """The same in a folder that exists, without a moment at which it holds neither model."""
    require_ours(path)
    if (path / NEXT).exists():  # an earlier save was cut short; finish or forget it before starting another
        settle(path)
    weights, config_file = path / f"{WEIGHTS}.new", path / f"{NEXT}.new"
    digest = write_weights(config, tensors, weights)
    config_file.write_text(describe(config, card, digest))
    for file in (weights, config_file):
        fsync(file)
    for old, new in ((config_file, path / NEXT), (weights, path / WEIGHTS), (path / NEXT, path / CONFIG)):
        old.replace(new)
        fsync(path)


def settle(path: Path) -> None:
    """Leave in place the config that has the weights' sha256, if either has."""
    with contextlib.suppress(UserError):
        if find_config(path) == path / NEXT:
            (path / NEXT).replace(path / CONFIG)
    (path / NEXT).unlink(missing_ok=True)


def require_ours(path: Path) -> None:
    if not path.is_dir():
        raise UserError(f"{path} is a file; a model is saved to a folder")
    configs = [path / name for name in (CONFIG, NEXT) if (path / name).exists()]
    theirs = [file for file in configs if read_json(file).get("format") != FORMAT]
    if theirs or (not configs and (path / WEIGHTS).exists()):
        raise UserError(f"{path} holds another program's model; save to a folder of its own")


def write_weights(config: ModelConfig, tensors: Mapping[str, Tensor], path: Path) -> str:
    # one entry: several are written in no fixed order, and the same model should be the same bytes
    metadata = {FORMAT: json.dumps(model_json(config))}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata)
    return sha256(path)


def describe(config: ModelConfig, card: Card, digest: str) -> str:
    data = {
        "format": FORMAT,
        "model": model_json(config),
        "preprocess": to_json(card.preprocess),
        "labels": card.labels,
        "provenance": card.provenance,
        "sha256": digest,
    }
    return json.dumps(data, indent=2) + "\n"


def model_json(config: ModelConfig) -> dict[str, Any]:
    return {"kind": "vit" if isinstance(config, ViTConfig) else "resnet", **to_json(config)}


# ---- reading


def is_ours(path: Path) -> bool:
    """Whether a folder says that it is of this kind."""
    configs = [path / name for name in (CONFIG, NEXT)]
    return any(file.is_file() and read_json(file).get("format") == FORMAT for file in configs)


def find_config(path: Path) -> Path:
    """The config that belongs to a folder's weights."""
    if not (path / WEIGHTS).is_file():
        raise UserError(f"{path} has a {CONFIG} and no {WEIGHTS}")
    digest = sha256(path / WEIGHTS)
    for file in (path / CONFIG, path / NEXT):
        if file.is_file() and read_json(file).get("sha256") == digest:
            return file
    raise UserError(
        f"{path / WEIGHTS} is not the file that {CONFIG} was written for (its sha256 differs); copy or save it again"
    )


def fits(source: RawCheckpoint) -> bool:
    return FORMAT in source.tensors.metadata


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> Description:
    """From a folder's config.json, which must agree with the weights' header; of a bare file, from the header."""
    where = f"the config in the header of {source.name}"
    header = parse_json(source.tensors.metadata.get(FORMAT, "").encode(errors="surrogatepass"), where)
    config = model_config(header, len(source.shapes))
    if source.config and source.config.get("model") != header:
        raise UserError(f"{source.name} has one model in its {CONFIG} and another in its weights' header")
    card = read_card(source.config, config) if source.config else Card()
    card = dataclasses.replace(card, preprocess=given.preprocess or card.preprocess)
    unsaid = () if source.config or given.preprocess else ("preprocess",)
    config = override(config, given)
    return Description(config, card, unsaid, [row(name, name) for name in meta_model(config).state_dict()])


def model_config(data: Mapping[str, Any], tensors: int) -> ModelConfig:
    """The inverse of `model_json`, for data from anywhere: a model has no more layers than tensors."""
    if largest_number(data) > LARGEST:
        raise UserError(f"a model's config has a number above {LARGEST:,}")
    kind = data.get("kind")
    if kind not in list(KINDS):
        raise UserError(f"a model's kind must be vit or resnet, not {kind!r}")
    fields = {key: value for key, value in data.items() if key != "kind"}
    layers = [fields.get("depth", 0), *_list(fields.get("stages", ())), *_list(_stem(fields).get("stages", ()))]
    if largest_number(layers) > tensors or len(layers) > tensors:
        raise UserError(f"a model's config speaks of more layers than the {tensors} tensors there are")
    config: ModelConfig = from_json(KINDS[kind], fields)
    return config


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _stem(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    stem = fields.get("stem")
    return stem if isinstance(stem, Mapping) else {}


def read_card(data: Mapping[str, Any], config: ModelConfig) -> Card:
    preprocess: Preprocess = check_value(data.get("preprocess"), Preprocess, "preprocess")
    labels: tuple[str, ...] | None = check_value(data.get("labels"), tuple[str, ...] | None, "labels")
    if labels is not None and len(labels) != config.classes:
        raise UserError(f"there are {len(labels)} class names for {config.classes} classes")
    provenance = data.get("provenance")
    if provenance is not None:
        known = isinstance(provenance, Mapping) and all(isinstance(value, str) for value in provenance.values())
        if not known:
            raise UserError(f"provenance must be an object of words, not {provenance!r}")
    return Card(preprocess, labels, provenance)


def override(config: ModelConfig, given: FormatDefaults) -> ModelConfig:
    """The caller's word goes before the file's."""
    group = {"standardize": given.standardize, "standardize_eps": given.standardize_eps, "norm_eps": given.group_eps}
    group = {key: value for key, value in group.items() if value is not None}
    if isinstance(config, ResNetConfig):
        return dataclasses.replace(config, **group)  # type: ignore[arg-type]
    own = {"heads": given.heads, "gelu": given.gelu, "norm_eps": given.norm_eps}
    own = {key: value for key, value in own.items() if value is not None}
    stem = dataclasses.replace(config.stem, **group) if config.stem else None  # type: ignore[arg-type]
    return dataclasses.replace(config, stem=stem, **own)  # type: ignore[arg-type]
