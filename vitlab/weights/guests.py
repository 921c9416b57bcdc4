"""Guests: torchvision's ResNets, EfficientNets and Swin Transformers from local files, to be measured beside ViT.

torchvision:resnet50:FILE                    a .pth or .safetensors of torchvision's own tensors
torchvision:resnet50.IMAGENET1K_V1:FILE      with the preprocessing of these weights

Preprocessing differs between the weights of one model, and files do not say which they are. A file that torchvision
publishes is recognized by its digest or by the digest in its name; for any other the id names the weights, or
torchvision's default is taken and the log says so.
"""

import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitlab.data import imagenet
from vitlab.errors import UserError
from vitlab.files import sha256
from vitlab.models.card import Card
from vitlab.models.config import Preprocess
from vitlab.models.guest import Guest, GuestConfig, Measured
from vitlab.text import brief, listed
from vitlab.weights.formats.table import quote_names
from vitlab.weights.load import load, unify_dtype
from vitlab.weights.open import GUEST, is_guest
from vitlab.weights.tensors import TensorFile, open_tensors

HEADS = {"resnet": "fc", "efficientnet": "classifier.1", "swin": "head"}  # the last layer, by the start of the name
DIGEST = 8  # digits of the sha256 in the names of torchvision's files
log = logging.getLogger("vitlab")


def open_measured(source: str | os.PathLike[str]) -> Measured:
    """A model to measure: a guest by its id, or anything that `load` takes."""
    return open_guest(os.fspath(source)) if is_guest(source) else load(source)


def open_guest(spec: str) -> Guest:
    """The model of an id, see above, in eval mode; UserError where there is no such model, or the file is another's."""
    name, _, place = spec.removeprefix(GUEST).partition(":")
    name, _, version = name.partition(".")
    if name not in guest_names():
        raise UserError(f"there is no guest '{name}' (in '{spec}'); torchvision's are {listed(guest_names())}")
    path = Path(place).expanduser()
    if not place or not path.is_file():
        missing = f"there is no file {place}" if place else f"'{spec}' names no weights"
        raise UserError(
            f"{missing}; write {GUEST}{name}:FILE, a .pth or .safetensors that torchvision publishes for it"
        )
    try:
        return fill_guest(name, version, path, spec)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {brief(error)}") from None


def guest_names() -> list[str]:
    """The models that can be guests, by torchvision's names."""
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    return [name for name in known if name.startswith(tuple(HEADS))]


def fill_guest(name: str, version: str, path: Path, spec: str) -> Guest:
    """Build torchvision's model around the tensors of a file."""
    import torchvision

    file, digest = open_tensors(path), sha256(path)
    layer = next(HEADS[start] for start in HEADS if name.startswith(start))
    shape = file.shapes.get(f"{layer}.weight", ())
    if len(shape) != 2:
        raise UserError(f"{path} has no matrix '{layer}.weight', so it is not torchvision's {name}")
    weights, certain = choose_weights(name, version, path.name, digest)
    frame = weights.transforms()
    with torch.random.fork_rng(devices=[]):  # initial values are replaced by the file's; draws elsewhere stay the same
        model = torchvision.models.get_model(name, weights=None, num_classes=shape[0])
    copy_tensors(model, file, name)
    head: Any = model.get_submodule(layer)
    parent, _, last = layer.rpartition(".")
    setattr(model.get_submodule(parent), last, nn.Identity())
    config = GuestConfig(name, (frame.crop_size[0],) * 2, head.in_features, head.out_features)
    labels = imagenet.short_names() if certain and shape[0] == imagenet.CLASSES else None
    origin = {"source": spec, "format": "torchvision guest", "sha256": digest}
    return Guest(model, head, config, Card(to_preprocess(frame), labels, origin)).eval()


def choose_weights(name: str, version: str, file: str, digest: str) -> tuple[Any, bool]:
    """torchvision's weights whose preprocessing a file needs, and whether the file is known to be these weights."""
    import torchvision

    choices = torchvision.models.get_model_weights(name)
    if version:
        if version not in choices.__members__:
            raise UserError(
                f"torchvision has no weights '{version}' of {name}; it has {listed(each.name for each in choices)}"
            )
        return choices[version], True
    in_name = re.search(rf"-([0-9a-f]{{{DIGEST}}})\.\w+$", file)
    for short in (digest[:DIGEST], in_name[1] if in_name else ""):
        for weights in choices:
            if short and weights.url.endswith(f"-{short}.pth"):
                return weights, True
    if len(choices) > 1:
        names, default = listed(each.name for each in choices), choices.DEFAULT.name
        words = "%s is none of torchvision's files; it is preprocessed as %s (write %s.NAME for another: %s)"
        log.info(words, file, default, name, names)
    return choices.DEFAULT, False


def to_preprocess(frame: Any) -> Preprocess:
    """torchvision's preset (scale the shorter side, crop the center, normalize) as this package has it."""
    resize, crop = frame.resize_size[0], frame.crop_size[0]
    share = crop / resize
    while int(crop / share) < resize:  # framing rounds down, and the quotient may be a little too small
        share = math.nextafter(share, 0)
    return Preprocess(tuple(frame.mean), tuple(frame.std), frame.interpolation.value, "crop", share)


def copy_tensors(model: nn.Module, file: TensorFile, name: str) -> None:
    """Fill a model with a file's tensors; UserError where one is missing, left over or of another shape.

    Integers (counts of batches, tables of offsets) follow from the architecture or are not used: the model's stay.
    """
    own = model.state_dict()
    floats = {key for key, tensor in own.items() if tensor.is_floating_point()}
    if lacking := sorted(floats - file.shapes.keys()):
        raise UserError(f"{file.path} is not torchvision's {name}: it lacks {quote_names(lacking[:3])}")
    if extra := sorted(file.shapes.keys() - own.keys()):
        raise UserError(f"{file.path} is not torchvision's {name}, which has no {quote_names(extra[:3])}")
    for key in sorted(floats):
        if file.shapes[key] != tuple(own[key].shape):
            sizes = f"{file.shapes[key]}, and torchvision's {name} has {tuple(own[key].shape)}"
            raise UserError(f"'{key}' in {file.path} has the shape {sizes}")
    tensors = unify_dtype({key: file.read(key) for key in sorted(floats)}, str(file.path))
    with torch.no_grad():
        model.load_state_dict({**own, **tensors}, assign=True)
