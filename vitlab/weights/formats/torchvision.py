"""torchvision's `vit_*` state dicts."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from vitlab.files import save_tensors
from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, Preprocess, Size
from vitlab.weights.formats.base import CardPart, FormatDefaults, ParsedCheckpoint, RawCheckpoint, parts_of
from vitlab.weights.formats.express import cannot_express, check_settings, check_vit
from vitlab.weights.formats.shapes import read_vit
from vitlab.weights.formats.table import expand, from_vitlab, pair, row

NAME = "torchvision"
SUFFIXES = (".safetensors", ".pth")
PREPROCESS = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
DEFAULT = FormatDefaults(gelu="exact", norm_eps=1e-6, preprocess=PREPROCESS)
BLOCK = "encoder.layers.encoder_layer_#"
TABLE = [
    *pair("embed", "conv_proj"),
    row("token", "class_token"),
    row("positions.table", "encoder.pos_embedding"),
    *pair("blocks.#.norm1", f"{BLOCK}.ln_1"),
    row("blocks.#.attention.qkv.weight", f"{BLOCK}.self_attention.in_proj_weight"),
    row("blocks.#.attention.qkv.bias", f"{BLOCK}.self_attention.in_proj_bias"),
    *pair("blocks.#.attention.out", f"{BLOCK}.self_attention.out_proj"),
    *pair("blocks.#.norm2", f"{BLOCK}.ln_2"),
    *pair("blocks.#.mlp.up", f"{BLOCK}.mlp.0"),
    *pair("blocks.#.mlp.down", f"{BLOCK}.mlp.3"),
    *pair("norm", "encoder.ln"),
    *pair("prelogits", "heads.pre_logits"),
    *pair("head", "heads.head"),
]


def recognizes(source: RawCheckpoint) -> bool:
    return "encoder.pos_embedding" in source.shapes and "class_token" in source.shapes


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    return read_vit(source, TABLE, given, DEFAULT, image_size)


def lost(config: ModelConfig, card: Card, folder: bool) -> list[CardPart]:
    return parts_of(card)


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    c = check_vit(config, NAME, square=True)
    if not c.classes:
        raise cannot_express(NAME, "a model without a head")
    check_settings(c, NAME, DEFAULT)
    theirs = from_vitlab(expand(TABLE, c), tensors)
    if path.suffix == ".pth":
        torch.save(theirs, path)
    else:
        save_tensors(theirs, path, {"format": "pt"})
