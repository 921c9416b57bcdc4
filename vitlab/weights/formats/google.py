"""The authors' .npz files: ViT (with pre-logits, or AugReg's without), hybrids, and BiT ResNets.

Kernels are stored with the output last, (in, out) and (height, width, in, out); attention kernels keep heads apart,
so here the heads are told. Their code has the tanh GELU; hybrids divide kernels by sigma + 1e-5 under norms with
epsilon 1e-6, while BiT's divides by sqrt(variance + 1e-10) under norms with 1e-5.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, Preprocess, ResNetConfig, Size, StemConfig, ViTConfig
from vitlab.weights.formats.base import (
    IMAGE_SIZE,
    Description,
    FormatDefaults,
    RawCheckpoint,
    count,
    dims,
    guessed,
    patch_side,
    refuse,
    refuse_vit_defaults,
    require_defaults,
    require_plain,
    require_pools,
    require_square,
    resnet_config,
    said,
    stem_config,
    with_size,
)
from vitlab.weights.formats.table import (
    CONV,
    MAP_NORM,
    POINT_LAST,
    TRANSPOSE,
    Row,
    join_head_biases,
    join_heads,
    merge_heads,
    outward,
    row,
)

NAME = "google"
WRITES = (".npz",)
PREPROCESS = Preprocess(fit="stretch")
PLAIN = FormatDefaults(gelu="tanh", norm_eps=1e-6, preprocess=PREPROCESS)
HYBRID = PLAIN.over(FormatDefaults(group_eps=1e-6, standardize="sigma", standardize_eps=1e-5))
BIT = FormatDefaults(group_eps=1e-5, standardize="variance", standardize_eps=1e-10, preprocess=PREPROCESS)

LAYER = "Transformer/encoderblock_"
ATTENTION = "MultiHeadDotProductAttention_1"
POSITIONS = "Transformer/posembed_input/pos_embedding"


def fits(source: RawCheckpoint) -> bool:
    return "embedding/kernel" in source.shapes or "resnet/root_block/standardized_conv2d/kernel" in source.shapes


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> Description:
    if "embedding/kernel" not in source.shapes:
        return read_bit(source, given, image_size)
    *sides, _, width = dims(source, "embedding/kernel", 4)
    hybrid = "conv_root/kernel" in source.shapes
    default = HYBRID if hybrid else PLAIN
    traits = given.over(default)
    stem = read_stem(source, traits) if hybrid else None
    patch = patch_side(source, "embedding/kernel", (sides[0], sides[1]))
    stride = patch * (stem.stride if stem else 1)
    _, heads, _ = dims(source, f"{LAYER}0/{ATTENTION}/query/kernel", 3)
    if given.heads not in (None, heads):
        raise UserError(f"{source.name} has {heads} heads by the shape of its kernels, not {given.heads}")
    config = ViTConfig(
        image_size=(stride, stride),
        patch=patch,
        depth=count(source, f"{LAYER}#/"),
        width=width,
        mlp=dims(source, f"{LAYER}0/MlpBlock_3/Dense_0/kernel", 2)[1],
        heads=heads,
        classes=dims(source, "head/kernel", 2)[1] if "head/kernel" in source.shapes else 0,
        stem=stem,
        prelogits=dims(source, "pre_logits/kernel", 2)[1] if "pre_logits/kernel" in source.shapes else 0,
        gelu=said(traits.gelu),
        norm_eps=said(traits.norm_eps),
    )
    rows = table(config)
    config = with_size(source, config, rows, dims(source, POSITIONS, 3)[1] - 1, None, image_size)
    return Description(config, Card(said(traits.preprocess)), guessed(default, given), rows)


def read_stem(source: RawCheckpoint, traits: FormatDefaults) -> StemConfig:
    blocks = count(source, "block#/", first=1)
    stages = tuple(count(source, f"block{i}/unit#/", first=1) for i in range(1, blocks + 1))
    return stem_config(stages, dims(source, "conv_root/kernel", 4)[3], traits)


def read_bit(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> Description:
    refuse_vit_defaults(source, given)
    traits = given.over(BIT)
    blocks = count(source, "resnet/block#/", first=1)
    config = resnet_config(
        image_size or IMAGE_SIZE,
        tuple(count(source, f"resnet/block{i}/unit#/", first=1) for i in range(1, blocks + 1)),
        dims(source, "resnet/root_block/standardized_conv2d/kernel", 4)[3],
        dims(source, "resnet/head/conv2d/kernel", 4)[3] if "resnet/head/conv2d/kernel" in source.shapes else 0,
        traits,
    )
    unsaid = guessed(BIT, given) + (() if image_size else ("image_size",))
    return Description(config, Card(said(traits.preprocess)), unsaid, table(config))


# ---- the table


def table(c: ModelConfig) -> list[Row]:
    if isinstance(c, ResNetConfig):
        return bit_rows(c)
    rows = [
        *(stem_rows(c.stem) if c.stem else []),
        row("embed.weight", "embedding/kernel", CONV),
        row("embed.bias", "embedding/bias"),
        row("token", "cls"),
        row("positions.table", POSITIONS),
    ]
    for i in range(c.depth):
        rows += layer_rows(f"blocks.{i}", f"{LAYER}{i}", c.heads)
    rows += norm("norm", "Transformer/encoder_norm")
    rows += dense("prelogits", "pre_logits") if c.prelogits else []
    return rows + (dense("head", "head") if c.classes else [])


def layer_rows(ours: str, theirs: str, heads: int) -> list[Row]:
    attention = f"{theirs}/{ATTENTION}"
    kernels = tuple(f"{attention}/{part}/kernel" for part in ("query", "key", "value"))
    biases = tuple(f"{attention}/{part}/bias" for part in ("query", "key", "value"))
    return [
        *norm(f"{ours}.norm1", f"{theirs}/LayerNorm_0"),
        Row((f"{ours}.attention.qkv.weight",), kernels, join_heads(heads)),
        Row((f"{ours}.attention.qkv.bias",), biases, join_head_biases(heads)),
        row(f"{ours}.attention.out.weight", f"{attention}/out/kernel", merge_heads(heads)),
        row(f"{ours}.attention.out.bias", f"{attention}/out/bias"),
        *norm(f"{ours}.norm2", f"{theirs}/LayerNorm_2"),
        *dense(f"{ours}.mlp.up", f"{theirs}/MlpBlock_3/Dense_0"),
        *dense(f"{ours}.mlp.down", f"{theirs}/MlpBlock_3/Dense_1"),
    ]


def dense(ours: str, theirs: str) -> list[Row]:
    return [row(f"{ours}.weight", f"{theirs}/kernel", TRANSPOSE), row(f"{ours}.bias", f"{theirs}/bias")]


def norm(ours: str, theirs: str) -> list[Row]:
    return [row(f"{ours}.weight", f"{theirs}/scale"), row(f"{ours}.bias", f"{theirs}/bias")]


def map_norm(ours: str, theirs: str) -> list[Row]:
    return [row(f"{ours}.weight", f"{theirs}/scale", MAP_NORM), row(f"{ours}.bias", f"{theirs}/bias", MAP_NORM)]


def stem_rows(c: StemConfig) -> list[Row]:
    rows = [row("stem.root.weight", "conv_root/kernel", CONV), *map_norm("stem.norm", "gn_root")]
    for i, units in enumerate(c.stages):
        for j in range(units):
            ours, theirs = f"stem.stages.{i}.{j}", f"block{i + 1}/unit{j + 1}"
            for k in (1, 2, 3):
                rows.append(row(f"{ours}.conv{k}.weight", f"{theirs}/conv{k}/kernel", CONV))
                rows += map_norm(f"{ours}.norm{k}", f"{theirs}/gn{k}")
            if j == 0:
                rows.append(row(f"{ours}.shortcut.0.weight", f"{theirs}/conv_proj/kernel", CONV))
                rows += map_norm(f"{ours}.shortcut.1", f"{theirs}/gn_proj")
    return rows


def bit_rows(c: ResNetConfig) -> list[Row]:
    def gamma(ours: str, theirs: str) -> list[Row]:
        return [row(f"{ours}.weight", f"{theirs}/gamma"), row(f"{ours}.bias", f"{theirs}/beta")]

    conv = "standardized_conv2d/kernel"
    rows = [row("root.weight", f"resnet/root_block/{conv}", CONV)]
    for i, units in enumerate(c.stages):
        for j in range(units):
            ours, theirs = f"stages.{i}.{j}", f"resnet/block{i + 1}/unit{j + 1:02d}"
            for k, letter in enumerate("abc", 1):
                rows += gamma(f"{ours}.norm{k}", f"{theirs}/{letter}/group_norm")
                rows.append(row(f"{ours}.conv{k}.weight", f"{theirs}/{letter}/{conv}", CONV))
            if j == 0:
                rows.append(row(f"{ours}.shortcut.weight", f"{theirs}/a/proj/{conv}", CONV))
    rows += gamma("norm", "resnet/group_norm")
    if c.classes:
        rows.append(row("head.weight", "resnet/head/conv2d/kernel", POINT_LAST))
        rows.append(row("head.bias", "resnet/head/conv2d/bias"))
    return rows


# ---- writing


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    require_expressible(config)
    theirs = outward(table(config), tensors)
    for name, tensor in theirs.items():
        if tensor.dtype == torch.bfloat16:
            raise refuse(NAME, f"bfloat16 ('{name}')", "convert the model to float32 first")
    arrays = {name: tensor.numpy() for name, tensor in theirs.items()}
    np.savez(path, allow_pickle=False, **arrays)


def require_expressible(c: ModelConfig) -> None:
    if isinstance(c, ResNetConfig):
        return require_defaults(c, NAME, BIT)
    require_plain(c, NAME)
    require_pools(c, NAME, "token")
    require_square(c, NAME)
    return require_defaults(c, NAME, HYBRID if c.stem else PLAIN)
