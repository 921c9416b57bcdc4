"""torchvision's `vit_*` state dicts."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, Preprocess, Size, ViTConfig
from vitlab.weights.formats.base import (
    Description,
    FormatDefaults,
    RawCheckpoint,
    count,
    dims,
    find_heads,
    guessed,
    patch_side,
    refuse,
    require_defaults,
    require_plain,
    require_pools,
    require_square,
    said,
    with_size,
)
from vitlab.weights.formats.table import Row, outward, pair, row

NAME = "torchvision"
WRITES = (".safetensors", ".pth")
PREPROCESS = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
DEFAULT = FormatDefaults(gelu="exact", norm_eps=1e-6, preprocess=PREPROCESS)
LAYER = "encoder.layers.encoder_layer_"


def fits(source: RawCheckpoint) -> bool:
    return "encoder.pos_embedding" in source.shapes and "class_token" in source.shapes


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> Description:
    traits = given.over(DEFAULT)
    width, _, *sides = dims(source, "conv_proj.weight", 4)
    patch = patch_side(source, "conv_proj.weight", (sides[0], sides[1]))
    hidden = "heads.pre_logits.weight"
    config = ViTConfig(
        image_size=(patch, patch),
        patch=patch,
        depth=count(source, f"{LAYER}#."),
        width=width,
        mlp=dims(source, f"{LAYER}0.mlp.0.weight", 2)[0],
        heads=find_heads(source, width, traits),
        classes=dims(source, "heads.head.weight", 2)[0] if "heads.head.weight" in source.shapes else 0,
        prelogits=dims(source, hidden, 2)[0] if hidden in source.shapes else 0,
        gelu=said(traits.gelu),
        norm_eps=said(traits.norm_eps),
    )
    rows = table(config)
    config = with_size(source, config, rows, dims(source, "encoder.pos_embedding", 3)[1] - 1, None, image_size)
    unsaid = guessed(FormatDefaults(heads=config.heads).over(DEFAULT), given)
    return Description(config, Card(said(traits.preprocess)), unsaid, rows)


def table(c: ViTConfig) -> list[Row]:
    rows = [
        *pair("embed", "conv_proj"),
        row("token", "class_token"),
        row("positions.table", "encoder.pos_embedding"),
    ]
    for i in range(c.depth):
        ours, theirs = f"blocks.{i}", f"{LAYER}{i}"
        rows += pair(f"{ours}.norm1", f"{theirs}.ln_1")
        rows.append(row(f"{ours}.attention.qkv.weight", f"{theirs}.self_attention.in_proj_weight"))
        rows.append(row(f"{ours}.attention.qkv.bias", f"{theirs}.self_attention.in_proj_bias"))
        rows += pair(f"{ours}.attention.out", f"{theirs}.self_attention.out_proj")
        rows += pair(f"{ours}.norm2", f"{theirs}.ln_2")
        rows += pair(f"{ours}.mlp.up", f"{theirs}.mlp.0")
        rows += pair(f"{ours}.mlp.down", f"{theirs}.mlp.3")
    rows += pair("norm", "encoder.ln")
    rows += pair("prelogits", "heads.pre_logits") if c.prelogits else []
    return rows + (pair("head", "heads.head") if c.classes else [])


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    c = require_plain(config, NAME)
    if c.stem:
        raise refuse(NAME, "a ResNet stem")
    if not c.classes:
        raise refuse(NAME, "a model without a head")
    require_pools(c, NAME, "token")
    require_square(c, NAME)
    require_defaults(c, NAME, DEFAULT)
    theirs = outward(table(c), tensors)
    if path.suffix == ".pth":
        torch.save(theirs, path)
    else:
        save_file(theirs, path, {"format": "pt"})
