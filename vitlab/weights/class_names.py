"""ImageNet's class names for weights that have none, where their origin shows that the classes are ImageNet's.

The number of classes must be ImageNet's, 1,000 or 21k's 21,843, and one of these hold:

- the file is one of the authors' .npz;
- the hub id, the file's or the folder's name, or the tag in timm's config.json has a word such as in1k or imagenet-21k;
- timm's config.json names an architecture and no tag, at its top: the old form, in which all were ImageNet's;
- the file has the name of one that torchvision publishes.

Any other head of 1,000 classes may be of someone's own data, and keeps numbers: "class 985". So do weights with a JSON
of vitlab's beside them, which holds what is known of their classes.
"""

import logging
import re

from vitlab.data import imagenet
from vitlab.weights.formats import google, timm, torchvision, vitlab
from vitlab.weights.formats.base import RawCheckpoint

# "1k" alone may be a thousand classes of anything; DeiT III's authors name their files so
WORDS = {
    imagenet.CLASSES: r"in1k|imagenet[-_]?1k|imagenet[-_]?2012|deit_3_\w+_1k",
    imagenet.CLASSES_21K: r"in21k|imagenet[-_]?21k",
}
PUBLISHED = re.compile(r"vit_[a-z]_\d+(_\w+)?-[0-9a-f]{8}\.(pth|safetensors)")  # by torchvision
ARCHITECTURE = re.compile(r"(vit|deit3?|eva|eva02|resnetv2)_\w+")
log = logging.getLogger("vitlab")


def imagenet_names(source: RawCheckpoint, format: str, classes: int) -> tuple[str, ...] | None:
    """The names of the classes of weights without any; None where they may be others than ImageNet's."""
    if classes not in WORDS or source.beside or format == vitlab.NAME:
        return None
    named = re.search(f"(?<![a-z0-9])({WORDS[classes]})(?![a-z0-9])", words_of_origin(source))
    if format != google.NAME and not named and not is_known(source, format):
        return None
    log.info("%s has no class names; its %s classes are ImageNet's", source.name, f"{classes:,}")
    return imagenet.short_names() if classes == imagenet.CLASSES else imagenet.names_21k()


def words_of_origin(source: RawCheckpoint) -> str:
    """The words of the last part of the path or hub id, and of timm's tag."""
    nested = source.config.get("pretrained_cfg")
    tag = (nested if isinstance(nested, dict) else source.config).get("tag")
    name = re.split(r"[/\\]", source.name.rstrip("/\\"))[-1]
    return f"{name} {tag if isinstance(tag, str) else ''}".lower()


def is_known(source: RawCheckpoint, format: str) -> bool:
    """Whether torchvision publishes the file, or timm's config is of the old form, without a tag."""
    if format == torchvision.NAME:
        return PUBLISHED.fullmatch(source.tensors.path.name) is not None
    old = format == timm.NAME and not source.config.keys() & {"pretrained_cfg", "tag"}
    return old and ARCHITECTURE.fullmatch(timm.architecture(source)) is not None
