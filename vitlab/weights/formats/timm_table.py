"""The tables of timm's ViTs and BiT ResNets.

Its two classes of ViTs, VisionTransformer and Eva, differ in a few names: where the final norm is, how LayerScale is
called, whether queries, keys and values, and the two halves of a SwiGLU, are one tensor or several. A `Names` says
which; it follows from a file's tensors, or from a config such that each of timm's models is written as it was.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitlab.models.config import ViTConfig
from vitlab.weights.formats.table import SAME, Row, Transform, pair, per_tensor, row, stage_rows
from vitlab.weights.tensors import Shape

STEM = "patch_embed.backbone."
POINT = per_tensor(lambda x: x.flatten(1), lambda x: x[:, :, None, None])  # a 1x1 convolution as a dense layer
SPLIT2 = Transform(lambda xs: xs[0].chunk(2), lambda xs: [torch.cat(list(xs))])  # keys and values
JOIN2 = Transform(lambda xs: [torch.cat(list(xs))], lambda xs: xs[0].chunk(2))
JOIN3 = Transform(lambda xs: [torch.cat(list(xs))], lambda xs: xs[0].chunk(3))
UNIT = [r for k in (1, 2, 3) for r in (row(f"conv{k}.weight", f"conv{k}.weight"), *pair(f"norm{k}", f"norm{k}"))]


@dataclass(frozen=True)
class Names:
    """What differs between timm's ViTs in names."""

    eva: bool = False  # LayerScale's are gamma_1 and gamma_2, and biases of queries and values tensors of their own
    pooled_norm: bool = False  # the final norm comes after pooling
    split_qkv: bool = False
    split_mlp: bool = False  # SwiGLU's gate and value
    swap: int = 0  # heads, if their first channels turn by columns and not by rows

    @classmethod
    def of_file(cls, shapes: Mapping[str, Shape]) -> "Names":
        block = "blocks.0."
        return cls(
            eva=any(f"{block}{name}" in shapes for name in ("gamma_1", "attn.q_bias", "attn.q_proj.weight")),
            pooled_norm="fc_norm.weight" in shapes,
            split_qkv=f"{block}attn.q_proj.weight" in shapes,
            split_mlp=f"{block}mlp.fc1_g.weight" in shapes,
        )

    @classmethod
    def of_config(cls, c: ViTConfig) -> "Names":
        swiglu = c.mlp_kind == "swiglu"
        eva = c.rotary != "none" or c.qkv_bias == "qv" or (swiglu and c.mlp_norm)
        return cls(
            eva=eva,
            pooled_norm=c.final_norm == "pooled",
            split_qkv=swiglu and c.mlp_norm and c.qkv_bias == "qv",  # EVA-02 B and L
            split_mlp=eva and swiglu and (c.mlp_norm or c.rotary == "centers"),  # these and DINOv3
            swap=c.heads if c.rotary == "cells" and c.qkv_bias == "all" else 0,
        )


# ---- the tables


def vit_table(names: Names, stages: Sequence[int] | None = None) -> list[Row]:
    """A ViT's table; `stages` are those of a hybrid's stem."""
    scale = "blocks.#.gamma_{}" if names.eva else "blocks.#.ls{}.gamma"
    swap = swap_axes(names.swap) if names.swap else SAME
    swap_norm = swap_axes(1, 1) if names.swap else SAME
    return [
        *(stem_table(stages) if stages is not None else ()),
        *pair("embed", "patch_embed.proj"),
        row("token", "cls_token"),
        row("registers", "reg_token"),
        row("positions.table", "pos_embed"),
        *pair("norm_before", "norm_pre"),
        *pair("blocks.#.norm1", "blocks.#.norm1"),
        *qkv_rows(names.split_qkv, swap),
        *(row(f"blocks.#.attention.{x}_norm.{y}", f"blocks.#.attn.{x}_norm.{y}", swap_norm) for x in "qk" for y in WB),
        *pair("blocks.#.attention.norm", "blocks.#.attn.norm"),
        *pair("blocks.#.attention.out", "blocks.#.attn.proj"),
        row("blocks.#.scale1.factor", scale.format(1)),
        *pair("blocks.#.norm2", "blocks.#.norm2"),
        *up_rows(names.split_mlp),
        *pair("blocks.#.mlp.norm", "blocks.#.mlp.norm"),
        *pair("blocks.#.mlp.down", "blocks.#.mlp.fc2"),
        row("blocks.#.scale2.factor", scale.format(2)),
        *pair("norm", "fc_norm" if names.pooled_norm else "norm"),
        *POOL,
        *pair("prelogits", "pre_logits.fc"),
        *pair("head", "head"),
    ]


WB = ("weight", "bias")
POOL = [
    row("pool.probe", "attn_pool.latent"),
    *pair("pool.q", "attn_pool.q"),
    Row(("pool.k.weight", "pool.v.weight"), ("attn_pool.kv.weight",), SPLIT2),
    Row(("pool.k.bias", "pool.v.bias"), ("attn_pool.kv.bias",), SPLIT2),
    *pair("pool.out", "attn_pool.proj"),
    *pair("pool.norm", "attn_pool.norm"),
    *pair("pool.mlp.up", "attn_pool.mlp.fc1"),
    *pair("pool.mlp.down", "attn_pool.mlp.fc2"),
]


def qkv_rows(split: bool, swap: Transform) -> list[Row]:
    attn, weight, both = "blocks.#.attn.", "blocks.#.attention.qkv.weight", ("blocks.#.attention.qv_bias",)
    if split:
        joined = tuple(f"{attn}{x}_proj.weight" for x in "qkv")
        return [Row((weight,), joined, JOIN3), Row(both, (f"{attn}q_proj.bias", f"{attn}v_proj.bias"), JOIN2)]
    return [
        row(weight, f"{attn}qkv.weight", swap),
        row("blocks.#.attention.qkv.bias", f"{attn}qkv.bias", swap),
        Row(both, (f"{attn}q_bias", f"{attn}v_bias"), JOIN2),
    ]


def up_rows(split: bool) -> list[Row]:
    if not split:
        return pair("blocks.#.mlp.up", "blocks.#.mlp.fc1")
    return [Row((f"blocks.#.mlp.up.{x}",), (f"blocks.#.mlp.fc1_g.{x}", f"blocks.#.mlp.fc1_x.{x}"), JOIN2) for x in WB]


def swap_axes(heads: int, parts: int = 3) -> Transform:
    """Exchange the halves of every query and key head: the channels that turn by rows and those that turn by columns.

    The product of a query with a key is a sum over channels, so their order is free. Values stay as they are.
    """

    def swap(x: Tensor) -> Tensor:
        split = x.unflatten(0, (parts, heads, 2, -1))  # queries, keys, values; heads; halves
        turned = split[: min(parts, 2)].flip(2)
        return torch.cat([turned, split[2:]]).flatten(0, 3)

    return per_tensor(swap, swap)


def stem_table(stages: Sequence[int]) -> list[Row]:
    root = f"{STEM}stem" if stages else STEM.rstrip(".")
    shortcut = [row("shortcut.0.weight", "downsample.conv.weight"), *pair("shortcut.1", "downsample.norm")]
    return [
        row("stem.root.weight", f"{root}.conv.weight"),
        *pair("stem.norm", f"{root}.norm"),
        *stage_rows(stages, UNIT, shortcut, "stem.stages.{i}.{j}.", STEM + "stages.{i}.blocks.{j}."),
    ]


def bit_table(stages: Sequence[int]) -> list[Row]:
    shortcut = [row("shortcut.weight", "downsample.conv.weight")]
    return [
        row("root.weight", "stem.conv.weight"),
        *stage_rows(stages, UNIT, shortcut, "stages.{i}.{j}.", "stages.{i}.blocks.{j}."),
        *pair("norm", "norm"),
        row("head.weight", "head.fc.weight", POINT),
        row("head.bias", "head.fc.bias"),
    ]
