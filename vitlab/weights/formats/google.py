"""The authors' .npz files: ViT (class token, mean or attention pooling; with pre-logits or not), hybrids, BiT ResNets.

Kernels are stored with the output last, (in, out) and (height, width, in, out); attention kernels have an axis of
heads, so their number is known. The authors' code has the tanh GELU; hybrids divide kernels by sigma + 1e-5 under norms
with epsilon 1e-6, while BiT's divides by sqrt(variance + 1e-10) under norms with 1e-5.
"""

import dataclasses
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, Pool, Preprocess, ResNetConfig, Size
from vitlab.weights.formats.base import CardPart, FormatDefaults, ParsedCheckpoint, RawCheckpoint, parts_of
from vitlab.weights.formats.express import cannot_express, check_resnet, check_settings, check_vit
from vitlab.weights.formats.google_names import (
    BIG_VISION,
    PUBLISHED,
    STYLES,
    Names,
    add_sinusoids,
    find_names,
    select_tree,
    strip_numbers,
)
from vitlab.weights.formats.shapes import IMAGE_SIZE, count_units, read_resnet, read_vit, stored_shape
from vitlab.weights.formats.table import SAME, Row, Transform, expand, from_vitlab, per_tensor, row, stage_rows

NAME = "google"
SUFFIXES = (".npz",)
PREPROCESS = Preprocess(fit="stretch")
PLAIN = FormatDefaults(gelu="tanh", norm_eps=1e-6, preprocess=PREPROCESS)
HYBRID = PLAIN.over(FormatDefaults(group_eps=1e-6, standardize="sigma", standardize_eps=1e-5))
BIT = FormatDefaults(group_eps=1e-5, standardize="variance", standardize_eps=1e-10, preprocess=PREPROCESS)

BIT_CONV = "standardized_conv2d/kernel"
BIT_ROOT = re.compile(r"resnet/root_block/standardized_conv2d(_\d+)?/kernel")
MAP_HEAD = "MAPHead_0"
log = logging.getLogger("vitlab")

TRANSPOSE = per_tensor(lambda x: x.T, lambda x: x.T)
CONV = per_tensor(lambda x: x.permute(3, 2, 0, 1), lambda x: x.permute(2, 3, 1, 0))  # (h, w, in, out), (out, in, h, w)
POINT_LAST = per_tensor(lambda x: x.flatten(0, 2).T, lambda x: x.T[None, None])  # (1, 1, in, out) as a dense layer
MAP_NORM = per_tensor(lambda x: x.flatten(), lambda x: x[None, None, None], loose=True)  # (1, 1, 1, C), newer ones (C)


# ---- reading


def recognizes(source: RawCheckpoint) -> bool:
    return find_names(source.shapes) is not None or any(map(BIT_ROOT.fullmatch, source.shapes))


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    names = find_names(source.shapes)
    if names is None:
        source = dataclasses.replace(source, tensors=strip_numbers(source.tensors))
        stages = count_units(source, "resnet/block#/", "unit#/", first=1)
        return read_resnet(source, bit_table(stages), given, BIT, image_size, stages)
    source = dataclasses.replace(source, tensors=select_tree(source.tensors, names.prefix))
    _, heads, _ = stored_shape(source, names.query(), 3)
    if given.heads not in (None, heads):
        raise UserError(f"{source.name} has {heads} heads by the shape of its kernels, not {given.heads}")
    known = given.over(FormatDefaults(heads=heads))
    pool = find_pool(source, names)
    root = f"{names.prefix}conv_root/kernel"
    if root in source.shapes:
        stages = count_units(source, f"{names.prefix}block#/", "unit#/", first=1)
        stem = stages, stored_shape(source, root, 4)[3]
        table = vit_table(heads, names, pool, stages)
        return read_vit(source, table, known, HYBRID, image_size, stem=stem, pool=pool)
    size = None
    if not names.table:
        source, names, size = compute_positions(source, names, image_size or IMAGE_SIZE)
    table = vit_table(heads, names, pool)
    return read_vit(source, table, known, PLAIN, image_size, config_size=size, pool=pool)


def find_pool(source: RawCheckpoint, names: Names) -> Pool:
    if f"{names.prefix}{MAP_HEAD}/probe" in source.shapes:
        return "attention"
    return "token" if f"{names.prefix}cls" in source.shapes else "mean"


def compute_positions(source: RawCheckpoint, names: Names, size: Size) -> tuple[RawCheckpoint, Names, Size]:
    """A source without a table of positions as one with big_vision's fixed sinusoids for images of this size."""
    patch = stored_shape(source, f"{names.prefix}embedding/kernel", 4)[0]
    grid = max(1, size[0] // patch), max(1, size[1] // patch)
    log.info(
        "%s has no table of positions: big_vision's two-dimensional sinusoids for %dx%d patches become a learned one",
        *(source.name, *grid),
    )
    source = dataclasses.replace(source, tensors=add_sinusoids(source.tensors, names, grid))
    return source, dataclasses.replace(names, table=BIG_VISION.table), (grid[0] * patch, grid[1] * patch)


# ---- the tables


def layer(ours: str, theirs: str, weight: str, transform: Transform = SAME, bias: str = "bias") -> list[Row]:
    return [row(f"{ours}.weight", f"{theirs}/{weight}", transform), row(f"{ours}.bias", f"{theirs}/{bias}")]


def map_norm(ours: str, theirs: str) -> list[Row]:
    return [row(f"{ours}.weight", f"{theirs}/scale", MAP_NORM), row(f"{ours}.bias", f"{theirs}/bias", MAP_NORM)]


def split_heads(heads: int) -> Transform:
    """A kernel (D, H, K) as a matrix (D, D), or a bias (H, K) as a vector (D)."""
    return per_tensor(lambda x: x.flatten(-2).movedim(0, -1), lambda x: x.movedim(0, -1).unflatten(-1, (heads, -1)))


def join_heads(heads: int) -> Transform:
    """Three kernels (D, H, K) as one matrix (3D, D), or three biases (H, K) as one vector (3D)."""
    split = split_heads(heads)
    return Transform(lambda xs: [torch.cat(list(split.to_vitlab(xs)))], lambda xs: split.from_vitlab(xs[0].chunk(3)))


def merge_heads(heads: int) -> Transform:
    """A kernel (H, K, D) as a matrix (D, D)."""
    return per_tensor(lambda x: x.flatten(0, 1).T, lambda x: x.T.unflatten(0, (heads, -1)))


def split_token(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """A class token without a position, and a table with a first row of zeros for it."""
    token, table = xs
    return token, torch.cat([table.new_zeros(table.shape[0], 1, table.shape[2]), table], 1)


def fold_token(xs: Sequence[Tensor]) -> Sequence[Tensor]:
    """The inverse: the token's position is added to the token. Adding zero must not change a bit, not that of -0."""
    token, table = xs
    row = table[:, :1]
    return torch.where(row == 0, token, token + row), table[:, 1:]


def position_rows(names: Names, token: bool) -> list[Row]:
    table = f"{names.prefix}{names.table}"
    if names.token_row or not token:
        return [row("token", f"{names.prefix}cls"), row("positions.table", table)]
    return [Row(("token", "positions.table"), (f"{names.prefix}cls", table), Transform(split_token, fold_token))]


def vit_table(heads: int, names: Names, pool: Pool, stages: Sequence[int] | None = None) -> list[Row]:
    """A ViT's table; `stages` are those of a hybrid's stem."""
    top = names.prefix
    block = f"{top}Transformer/encoderblock_#"
    attention, mlp = f"{block}/{names.attention}", f"{block}/{names.mlp}"
    kernels, biases = (
        tuple(f"{attention}/{x}/{kind}" for x in ("query", "key", "value")) for kind in ("kernel", "bias")
    )
    return [
        *(stem_table(stages, top) if stages is not None else ()),
        *layer("embed", f"{top}embedding", "kernel", CONV),
        *position_rows(names, pool == "token"),
        *layer("blocks.#.norm1", f"{block}/LayerNorm_0", "scale"),
        Row(("blocks.#.attention.qkv.weight",), kernels, join_heads(heads)),
        Row(("blocks.#.attention.qkv.bias",), biases, join_heads(heads)),
        *layer("blocks.#.attention.out", f"{attention}/out", "kernel", merge_heads(heads)),
        *layer("blocks.#.norm2", f"{block}/{names.norm2}", "scale"),
        *layer("blocks.#.mlp.up", f"{mlp}/Dense_0", "kernel", TRANSPOSE),
        *layer("blocks.#.mlp.down", f"{mlp}/Dense_1", "kernel", TRANSPOSE),
        *layer("norm", f"{top}Transformer/encoder_norm", "scale"),
        *pool_rows(heads, f"{top}{MAP_HEAD}"),
        *layer("prelogits", f"{top}pre_logits", "kernel", TRANSPOSE),
        *layer("head", f"{top}head", "kernel", TRANSPOSE),
    ]


def pool_rows(heads: int, theirs: str) -> list[Row]:
    """Attention pooling; only big_vision has it, and its layers are named as Linen does."""
    attention, split = f"{theirs}/MultiHeadDotProductAttention_0", split_heads(heads)
    rows = [row("pool.probe", f"{theirs}/probe")]
    for ours, name in (("q", "query"), ("k", "key"), ("v", "value")):
        rows.append(row(f"pool.{ours}.weight", f"{attention}/{name}/kernel", split))
        rows.append(row(f"pool.{ours}.bias", f"{attention}/{name}/bias", split))
    return [
        *rows,
        *layer("pool.out", f"{attention}/out", "kernel", merge_heads(heads)),
        *layer("pool.norm", f"{theirs}/LayerNorm_0", "scale"),
        *layer("pool.mlp.up", f"{theirs}/MlpBlock_0/Dense_0", "kernel", TRANSPOSE),
        *layer("pool.mlp.down", f"{theirs}/MlpBlock_0/Dense_1", "kernel", TRANSPOSE),
    ]


def stem_table(stages: Sequence[int], top: str) -> list[Row]:
    unit: list[Row] = []
    for k in (1, 2, 3):
        unit += [row(f"conv{k}.weight", f"conv{k}/kernel", CONV), *map_norm(f"norm{k}", f"gn{k}")]
    shortcut = [row("shortcut.0.weight", "conv_proj/kernel", CONV), *map_norm("shortcut.1", "gn_proj")]
    return [
        row("stem.root.weight", f"{top}conv_root/kernel", CONV),
        *map_norm("stem.norm", f"{top}gn_root"),
        *stage_rows(stages, unit, shortcut, "stem.stages.{i}.{j}.", top + "block{stage}/unit{unit}/"),
    ]


def bit_table(stages: Sequence[int]) -> list[Row]:
    unit: list[Row] = []
    for k, letter in enumerate("abc", 1):
        unit += layer(f"norm{k}", f"{letter}/group_norm", "gamma", bias="beta")
        unit.append(row(f"conv{k}.weight", f"{letter}/{BIT_CONV}", CONV))
    shortcut = [row("shortcut.weight", f"a/proj/{BIT_CONV}", CONV)]
    return [
        row("root.weight", f"resnet/root_block/{BIT_CONV}", CONV),
        *stage_rows(stages, unit, shortcut, "stages.{i}.{j}.", "resnet/block{stage}/unit{unit:02d}/"),
        *layer("norm", "resnet/group_norm", "gamma", bias="beta"),
        *layer("head", "resnet/head/conv2d", "kernel", POINT_LAST),
    ]


# ---- writing


def lost(config: ModelConfig, card: Card, folder: bool) -> list[CardPart]:
    return parts_of(card)


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path, names: str = "published") -> None:
    check_expressible(config, names)
    if isinstance(config, ResNetConfig):
        table = bit_table(config.stages)
    else:
        table = vit_table(config.heads, STYLES[names], config.pool, config.stem.stages if config.stem else None)
    theirs = from_vitlab(expand(table, config), tensors)
    for name, tensor in theirs.items():
        if tensor.dtype == torch.bfloat16:
            raise cannot_express(NAME, f"bfloat16 ('{name}')", "convert the model to float32 first")
    np.savez(path, allow_pickle=False, **{name: tensor.numpy() for name, tensor in theirs.items()})


def check_expressible(c: ModelConfig, names: str = "published") -> None:
    target = NAME if STYLES[names] is PUBLISHED else f"{NAME} with {names} names"
    if isinstance(c, ResNetConfig):
        if target != NAME:
            raise cannot_express(target, "a ResNet")
        return check_resnet(c, target, BIT)
    newest = STYLES[names] is BIG_VISION
    pools: tuple[Pool, ...] = ("token", "mean", "attention") if newest else ("token", "mean")
    c = check_vit(c, target, stem=not newest, pools=pools)
    return check_settings(c, target, HYBRID if c.stem else PLAIN)
