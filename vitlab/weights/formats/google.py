"""The authors' .npz files: ViT (with pre-logits, or AugReg's without), hybrids, and BiT ResNets.

Kernels are stored with the output last, (in, out) and (height, width, in, out); attention kernels have an axis of
heads, so their number is known. The authors' code has the tanh GELU; hybrids divide kernels by sigma + 1e-5 under norms
with epsilon 1e-6, while BiT's divides by sqrt(variance + 1e-10) under norms with 1e-5.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.models.config import ModelConfig, Preprocess, ResNetConfig, Size
from vitlab.weights.formats.base import FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.express import cannot_express, check_settings, check_vit
from vitlab.weights.formats.shapes import count_units, read_resnet, read_vit, stored_shape
from vitlab.weights.formats.table import SAME, Row, Transform, expand, from_vitlab, per_tensor, row, stage_rows

NAME = "google"
SUFFIXES = (".npz",)
PREPROCESS = Preprocess(fit="stretch")
PLAIN = FormatDefaults(gelu="tanh", norm_eps=1e-6, preprocess=PREPROCESS)
HYBRID = PLAIN.over(FormatDefaults(group_eps=1e-6, standardize="sigma", standardize_eps=1e-5))
BIT = FormatDefaults(group_eps=1e-5, standardize="variance", standardize_eps=1e-10, preprocess=PREPROCESS)

BLOCK = "Transformer/encoderblock_#"
ATTENTION = f"{BLOCK}/MultiHeadDotProductAttention_1"
BIT_CONV = "standardized_conv2d/kernel"

TRANSPOSE = per_tensor(lambda x: x.T, lambda x: x.T)
CONV = per_tensor(lambda x: x.permute(3, 2, 0, 1), lambda x: x.permute(2, 3, 1, 0))  # (h, w, in, out), (out, in, h, w)
POINT_LAST = per_tensor(lambda x: x.flatten(0, 2).T, lambda x: x.T[None, None])  # (1, 1, in, out) as a dense layer
MAP_NORM = per_tensor(lambda x: x.flatten(), lambda x: x[None, None, None], loose=True)  # (1, 1, 1, C), newer ones (C)


def recognizes(source: RawCheckpoint) -> bool:
    return "embedding/kernel" in source.shapes or f"resnet/root_block/{BIT_CONV}" in source.shapes


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    if "embedding/kernel" not in source.shapes:
        stages = count_units(source, "resnet/block#/", "unit#/", first=1)
        return read_resnet(source, bit_table(stages), given, BIT, image_size, stages)
    _, heads, _ = stored_shape(source, f"{ATTENTION}/query/kernel".replace("#", "0"), 3)
    if given.heads not in (None, heads):
        raise UserError(f"{source.name} has {heads} heads by the shape of its kernels, not {given.heads}")
    known = given.over(FormatDefaults(heads=heads))
    if "conv_root/kernel" not in source.shapes:
        return read_vit(source, vit_table(heads), known, PLAIN, image_size)
    stages = count_units(source, "block#/", "unit#/", first=1)
    stem = stages, stored_shape(source, "conv_root/kernel", 4)[3]
    return read_vit(source, vit_table(heads, stages), known, HYBRID, image_size, stem=stem)


# ---- the tables


def layer(ours: str, theirs: str, weight: str, transform: Transform = SAME, bias: str = "bias") -> list[Row]:
    return [row(f"{ours}.weight", f"{theirs}/{weight}", transform), row(f"{ours}.bias", f"{theirs}/{bias}")]


def map_norm(ours: str, theirs: str) -> list[Row]:
    return [row(f"{ours}.weight", f"{theirs}/scale", MAP_NORM), row(f"{ours}.bias", f"{theirs}/bias", MAP_NORM)]


def join_heads(heads: int) -> Transform:
    """Three kernels (D, H, K) as one matrix (3D, D), or three biases (H, K) as one vector (3D)."""
    return Transform(
        lambda xs: [torch.cat([x.flatten(-2).movedim(0, -1) for x in xs])],
        lambda xs: [x.movedim(0, -1).unflatten(-1, (heads, -1)) for x in xs[0].chunk(3)],
    )


def merge_heads(heads: int) -> Transform:
    """A kernel (H, K, D) as a matrix (D, D)."""
    return per_tensor(lambda x: x.flatten(0, 1).T, lambda x: x.T.unflatten(0, (heads, -1)))


def vit_table(heads: int, stages: Sequence[int] | None = None) -> list[Row]:
    """A ViT's table; `stages` are those of a hybrid's stem."""
    kernels, biases = (
        tuple(f"{ATTENTION}/{x}/{kind}" for x in ("query", "key", "value")) for kind in ("kernel", "bias")
    )
    return [
        *(stem_table(stages) if stages is not None else ()),
        *layer("embed", "embedding", "kernel", CONV),
        row("token", "cls"),
        row("positions.table", "Transformer/posembed_input/pos_embedding"),
        *layer("blocks.#.norm1", f"{BLOCK}/LayerNorm_0", "scale"),
        Row(("blocks.#.attention.qkv.weight",), kernels, join_heads(heads)),
        Row(("blocks.#.attention.qkv.bias",), biases, join_heads(heads)),
        *layer("blocks.#.attention.out", f"{ATTENTION}/out", "kernel", merge_heads(heads)),
        *layer("blocks.#.norm2", f"{BLOCK}/LayerNorm_2", "scale"),
        *layer("blocks.#.mlp.up", f"{BLOCK}/MlpBlock_3/Dense_0", "kernel", TRANSPOSE),
        *layer("blocks.#.mlp.down", f"{BLOCK}/MlpBlock_3/Dense_1", "kernel", TRANSPOSE),
        *layer("norm", "Transformer/encoder_norm", "scale"),
        *layer("prelogits", "pre_logits", "kernel", TRANSPOSE),
        *layer("head", "head", "kernel", TRANSPOSE),
    ]


def stem_table(stages: Sequence[int]) -> list[Row]:
    unit: list[Row] = []
    for k in (1, 2, 3):
        unit += [row(f"conv{k}.weight", f"conv{k}/kernel", CONV), *map_norm(f"norm{k}", f"gn{k}")]
    shortcut = [row("shortcut.0.weight", "conv_proj/kernel", CONV), *map_norm("shortcut.1", "gn_proj")]
    return [
        row("stem.root.weight", "conv_root/kernel", CONV),
        *map_norm("stem.norm", "gn_root"),
        *stage_rows(stages, unit, shortcut, "stem.stages.{i}.{j}.", "block{stage}/unit{unit}/"),
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


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    check_expressible(config)
    if isinstance(config, ResNetConfig):
        table = bit_table(config.stages)
    else:
        table = vit_table(config.heads, config.stem.stages if config.stem else None)
    theirs = from_vitlab(expand(table, config), tensors)
    for name, tensor in theirs.items():
        if tensor.dtype == torch.bfloat16:
            raise cannot_express(NAME, f"bfloat16 ('{name}')", "convert the model to float32 first")
    np.savez(path, allow_pickle=False, **{name: tensor.numpy() for name, tensor in theirs.items()})


def check_expressible(c: ModelConfig) -> None:
    if isinstance(c, ResNetConfig):
        return check_settings(c, NAME, BIT)
    c = check_vit(c, NAME, stem=True, square=True)
    return check_settings(c, NAME, HYBRID if c.stem else PLAIN)
