"""Our own folder: model.safetensors and config.json, which holds the sha256 of the weights and everything beside them.

A new folder appears whole, by one rename. In a folder that is there already the new config waits as
config.next.json while the weights are replaced, by one rename too, and only then takes its place: at any moment
one of the two configs has the weights' sha256, so an interrupted save leaves the old model or the new one.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from vitlab.config import ModelConfig, Preprocess, ResNetConfig, Size, UserError, ViTConfig, checked, from_json, to_json
from vitlab.models.resnet import ResNet
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.weights.assemble import blank
from vitlab.weights.files import brief, flush, parse_json, read_json, sha256
from vitlab.weights.reading import Card, Reading, Source, Traits
from vitlab.weights.table import row

NAME = "vitlab"
WRITES = ("",)
FORMAT = "vitlab/1"
WEIGHTS, CONFIG, NEXT = "model.safetensors", "config.json", "config.next.json"
KINDS: dict[str, type[ViTConfig] | type[ResNetConfig]] = {"vit": ViTConfig, "resnet": ResNetConfig}
LARGEST = 10_000_000  # no dimension of a model comes near; a larger one is an attack on our arithmetic


# ---- what travels with a model: kept on the module, so that it is copied with it


def card_of(model: nn.Module) -> Card:
    card = getattr(getattr(model, "_orig_mod", model), "card", None)  # torch.compile wraps
    return card if isinstance(card, Card) else Card()


def preprocess_of(model: nn.Module) -> Preprocess:
    """How photos become this model's input."""
    return card_of(model).preprocess


def labels_of(model: nn.Module) -> tuple[str, ...] | None:
    """The model's class names, if they are known."""
    return card_of(model).labels


def attach(model: nn.Module, card: Card) -> None:
    object.__setattr__(model, "card", card)


# ---- saving


def save(
    model: Model,
    folder: str | os.PathLike[str],
    *,
    preprocess: Preprocess | None = None,
    labels: Sequence[str] | None = None,
) -> None:
    """Write a model to a folder that `vitlab.load` takes, whole or not at all.

    Preprocessing and class names default to those the model was loaded with. A run folder is saved into, other
    programs' models are never overwritten.
    """
    inner: Any = getattr(model, "_orig_mod", model)
    if not isinstance(inner, ViT | ResNet):
        raise UserError(f"save() takes a vitlab model, not {type(inner).__name__}")
    old = card_of(inner)
    names = old.labels if labels is None else tuple(labels)
    if names is not None and len(names) != inner.config.classes:
        raise UserError(f"there are {len(names)} class names for {inner.config.classes} classes")
    card = Card(preprocess or old.preprocess, names, old.provenance)
    tensors = {name: tensor.detach().cpu() for name, tensor in inner.state_dict().items()}
    path = Path(folder)
    if path.exists():
        with writing(path):
            replace(inner.config, tensors, card, path)
    else:
        with whole(path, folder=True) as new:
            write(inner.config, tensors, card, new)


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
        flush(file)
    for old, new in ((config_file, path / NEXT), (weights, path / WEIGHTS), (path / NEXT, path / CONFIG)):
        old.replace(new)
        flush(path)


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


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full disk or a forbidden folder is the user's to mend."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be written: {brief(error)}") from None


@contextlib.contextmanager
def whole(path: Path, folder: bool) -> Iterator[Path]:
    """A place to write a file or a folder to; it appears at `path` at once, or, after an error, not at all."""
    if path.exists():
        raise UserError(f"{path} exists; remove it or name another place")
    place = path.with_name(f".{secrets.token_hex(4)}.{path.name}")  # keeps the ending, which names the kind of file
    try:
        with writing(path):
            (place if folder else path.parent).mkdir(parents=True, exist_ok=True)
            yield place
            for file in [*(place.iterdir() if folder else ()), place]:
                flush(file)
            place.rename(path)
            flush(path.parent)
    finally:  # after the rename there is nothing here
        shutil.rmtree(place, ignore_errors=True) if folder else place.unlink(missing_ok=True)


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


def fits(source: Source) -> bool:
    return FORMAT in source.tensors.metadata


def read(source: Source, given: Traits, image_size: Size | None) -> Reading:
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
    return Reading(config, card, unsaid, [row(name, name) for name in blank(config).state_dict()])


def model_config(data: Mapping[str, Any], tensors: int) -> ModelConfig:
    """The inverse of `model_json`, for data from anywhere: a model has no more layers than tensors."""
    if largest(data) > LARGEST:
        raise UserError(f"a model's config has a number above {LARGEST:,}")
    kind = data.get("kind")
    if kind not in list(KINDS):
        raise UserError(f"a model's kind must be vit or resnet, not {kind!r}")
    fields = {key: value for key, value in data.items() if key != "kind"}
    layers = [fields.get("depth", 0), *_list(fields.get("stages", ())), *_list(_stem(fields).get("stages", ()))]
    if largest(layers) > tensors or len(layers) > tensors:
        raise UserError(f"a model's config speaks of more layers than the {tensors} tensors there are")
    config: ModelConfig = from_json(KINDS[kind], fields)
    return config


def largest(data: object) -> int:
    """The largest integer anywhere in JSON."""
    if isinstance(data, Mapping | list | tuple):
        return max((largest(v) for v in (data.values() if isinstance(data, Mapping) else data)), default=0)
    return data if isinstance(data, int) else 0


def _list(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else ()


def _stem(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    stem = fields.get("stem")
    return stem if isinstance(stem, Mapping) else {}


def read_card(data: Mapping[str, Any], config: ModelConfig) -> Card:
    preprocess: Preprocess = checked(data.get("preprocess"), Preprocess, "preprocess")
    labels: tuple[str, ...] | None = checked(data.get("labels"), tuple[str, ...] | None, "labels")
    if labels is not None and len(labels) != config.classes:
        raise UserError(f"there are {len(labels)} class names for {config.classes} classes")
    provenance = data.get("provenance")
    if provenance is not None:
        known = isinstance(provenance, Mapping) and all(isinstance(value, str) for value in provenance.values())
        if not known:
            raise UserError(f"provenance must be an object of words, not {provenance!r}")
    return Card(preprocess, labels, provenance)


def override(config: ModelConfig, given: Traits) -> ModelConfig:
    """The caller's word goes before the file's."""
    group = {"standardize": given.standardize, "standardize_eps": given.standardize_eps, "norm_eps": given.group_eps}
    group = {key: value for key, value in group.items() if value is not None}
    if isinstance(config, ResNetConfig):
        return dataclasses.replace(config, **group)  # type: ignore[arg-type]
    own = {"heads": given.heads, "gelu": given.gelu, "norm_eps": given.norm_eps}
    own = {key: value for key, value in own.items() if value is not None}
    stem = dataclasses.replace(config.stem, **group) if config.stem else None  # type: ignore[arg-type]
    return dataclasses.replace(config, stem=stem, **own)  # type: ignore[arg-type]
