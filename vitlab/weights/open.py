"""Files, folders and hub ids as raw checkpoints: their tensors, not read yet, and the JSON beside them."""

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.files import read_json
from vitlab.weights import box, hub
from vitlab.weights.beside import read_beside
from vitlab.weights.formats import vitlab
from vitlab.weights.formats.base import RawCheckpoint
from vitlab.weights.tensors import open_tensors

GUEST = "torchvision:"  # begins the id of a guest, see guests.py
log = logging.getLogger("vitlab")


def is_guest(source: str | os.PathLike[str]) -> bool:
    """Whether a source is the id of a guest; a Path of that name is a path."""
    return isinstance(source, str) and source.startswith(GUEST)


def open_source(source: str | os.PathLike[str]) -> RawCheckpoint:
    name = os.fspath(source)
    if is_guest(source):
        takers = "evaluate, fewshot, probe, embed and search take guests"
        raise UserError(f"'{name}' is a guest, and this needs a model of vitlab's own; {takers}")
    path = Path(name).expanduser()
    if source == box.NAME:  # a Path of that name is a path
        if path.exists():
            log.info("box is the model of the package; the one here is ./box")
        return open_folder(name, box.find_folder())
    if path.is_file():
        return open_file(name, path)
    if path.is_dir():
        return open_folder(name, path)
    if isinstance(source, str) and hub.looks_like_id(source):
        return open_folder(name, hub.fetch(source))
    owner = name.partition("/")[0]
    hint = f" ({owner}/ is a folder here, so this is not a hub id)" if Path(owner).is_dir() and owner else ""
    raise UserError(f"there is no file or folder {name}{hint}")


def open_file(name: str, path: Path) -> RawCheckpoint:
    with contextlib.suppress(UserError):  # the weights of a run folder, whose config.json is theirs
        if path.name == vitlab.WEIGHTS and vitlab.is_vitlab_folder(path.parent):
            config = read_json(vitlab.find_config(path.parent))
            return RawCheckpoint(name, open_tensors(path), config, {})
    beside = read_beside(path)
    config, processor = ({}, {}) if beside else find_configs(path.parent)
    return RawCheckpoint(name, open_tensors(path), config, processor, beside, is_guess=bool(config))


def find_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and preprocessor_config.json of timm or transformers in the folder of a file; empty without."""
    try:
        config, processor = read_configs(folder)
    except (UserError, OSError) as error:
        log.info("the config beside the weights is not used: %s", error)
        return {}, {}
    return (config, processor) if config.keys() & {"architecture", "arch", "model_type"} else ({}, {})


def read_configs(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    files = [folder / "config.json", folder / "preprocessor_config.json"]
    config, processor = (read_json(file) if file.is_file() else {} for file in files)
    return config, processor


def open_folder(name: str, path: Path) -> RawCheckpoint:
    if vitlab.is_vitlab_folder(path):
        config = read_json(vitlab.find_config(path))
        return RawCheckpoint(name, open_tensors(path / vitlab.WEIGHTS), config, {})
    weights = next((path / file for file in (vitlab.WEIGHTS, hub.OLD_WEIGHTS) if (path / file).is_file()), None)
    if weights is None and any(path.glob("*.index.json")):
        raise UserError(f"{name} has its weights in several files; save them in one, {vitlab.WEIGHTS}")
    if weights is None:
        raise UserError(f"{name} has neither {vitlab.WEIGHTS} nor {hub.OLD_WEIGHTS}; name a file in it")
    config, processor = read_configs(path)
    return RawCheckpoint(name, open_tensors(weights), config, processor, read_beside(weights))
