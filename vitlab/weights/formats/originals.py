"""What the files of DINOv2, DINOv3, MAE and CLIP have in common: state dicts as their authors' code saves them.

They are read and not written: they hold parts for pre-training alone, which are left out here.
"""

import dataclasses
import logging
from collections.abc import Callable

from vitlab.models.config import Preprocess
from vitlab.weights.formats.base import RawCheckpoint
from vitlab.weights.formats.table import pair, quote_names, row

IMAGENET = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bicubic")
# the names that DINOv2, DINOv3 and MAE share
BODY = [
    *pair("embed", "patch_embed.proj"),
    row("token", "cls_token"),
    *pair("blocks.#.norm1", "blocks.#.norm1"),
    row("blocks.#.attention.qkv.weight", "blocks.#.attn.qkv.weight"),
    *pair("blocks.#.attention.out", "blocks.#.attn.proj"),
    *pair("blocks.#.norm2", "blocks.#.norm2"),
    *pair("head", "head"),
]
SCALES = [row(f"blocks.#.scale{i}.factor", f"blocks.#.ls{i}.gamma") for i in (1, 2)]
MLP = [*pair("blocks.#.mlp.up", "blocks.#.mlp.fc1"), *pair("blocks.#.mlp.down", "blocks.#.mlp.fc2")]
log = logging.getLogger("vitlab")


def leave_out(source: RawCheckpoint, extra: Callable[[str], bool], why: str) -> RawCheckpoint:
    """The checkpoint without some of its tensors, which are logged."""
    names = [name for name in source.shapes if extra(name)]
    if names:
        log.info("%s: left out %s: %s", source.name, quote_names(names, limit=6), why)
    return without(source, extra)


def without(source: RawCheckpoint, extra: Callable[[str], bool]) -> RawCheckpoint:
    kept = {name: shape for name, shape in source.shapes.items() if not extra(name)}
    return dataclasses.replace(source, tensors=dataclasses.replace(source.tensors, shapes=kept))
