"""config.json of a folder for timm: an architecture to start from, and arguments for all that differs from it.

timm's norm epsilon and kind of MLP are not among the arguments that JSON can hold, so they choose the architecture.
"""

import math
from typing import Any

from vitlab.errors import UserError
from vitlab.models.config import Gelu, Pool, ResNetConfig, ViTConfig
from vitlab.weights.formats.express import cannot_express
from vitlab.weights.formats.timm_table import Names

POOLS: dict[Pool, str] = {"token": "token", "mean": "avg", "attention": "map"}
ACTIVATIONS: dict[str, Gelu] = {"gelu": "exact", "gelu_tanh": "tanh", "quick_gelu": "quick"}
ALONE = "write a file that ends in .safetensors instead"
STEMS = {
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
    (): "vit_tiny_r_s16_p8_224",
}
BITS: dict[tuple[tuple[int, ...], int], str] = {
    ((3, 4, 6, 3), 64): "resnetv2_50x1_bit",
    ((3, 4, 6, 3), 192): "resnetv2_50x3_bit",
    ((3, 4, 23, 3), 64): "resnetv2_101x1_bit",
    ((3, 4, 23, 3), 192): "resnetv2_101x3_bit",
    ((3, 8, 36, 3), 128): "resnetv2_152x2_bit",
    ((3, 8, 36, 3), 256): "resnetv2_152x4_bit",
}
SIZES = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1408: "giant"}
PLAIN = {f"vit_{size}_patch{patch}_224" for size in ("small", "base", "large") for patch in (16, 32)}
PLAIN |= {"vit_tiny_patch16_224", "vit_huge_patch14_224", "vit_giant_patch14_224"}
PLAIN |= {f"vit_{size}_patch16_dinov3" for size in ("small", "base", "large")}
PLAIN |= {"vit_base_patch16_clip_224", "vit_base_patch32_clip_224", "vit_large_patch14_clip_224"}


# ---- the architecture


def vit_name(c: ViTConfig) -> str:
    """An architecture with the model's epsilon and kind of MLP."""
    if c.stem is not None:
        if c.stem.stages not in STEMS or c.stem.width != 64:
            raise cannot_express("a timm folder", f"a stem with stages {c.stem.stages} and width {c.stem.width}", ALONE)
        return STEMS[c.stem.stages]
    size = SIZES.get(c.width, "base")
    if Names.of_config(c).eva:
        return known(f"vit_{size}_patch16_dinov3") if c.norm_eps == 1e-5 else "eva02_base_patch14_224"
    if c.mlp_kind == "swiglu":
        return "vit_giant_patch14_dinov2"
    ending = "clip_224" if c.norm_eps == 1e-5 else "224"
    return known(f"vit_{size}_patch{c.patch}_{ending}")


def known(name: str) -> str:
    return name if name in PLAIN else f"vit_base_patch16_{name.partition('_patch')[2].partition('_')[2]}"


def bit_name(c: ResNetConfig) -> str:
    if (c.stages, c.width) not in BITS:
        raise cannot_express("a timm folder", f"a ResNet with stages {c.stages} and width {c.width}", ALONE)
    return BITS[c.stages, c.width]


# ---- its arguments


def describe_arguments(c: ViTConfig) -> dict[str, Any]:
    eva = Names.of_config(c).eva
    hidden = 2 * c.mlp if c.mlp_kind == "swiglu" and not eva else c.mlp  # timm halves that of packed SwiGLU
    ratio = hidden / c.width
    while int(c.width * ratio) < hidden:  # timm rounds down
        ratio = math.nextafter(ratio, math.inf)
    return {
        "img_size": list(c.image_size),
        "patch_size": c.patch,
        "embed_dim": c.width,
        "depth": c.depth,
        "num_heads": c.heads,
        "mlp_ratio": ratio,
        "global_pool": POOLS[c.pool],
        "class_token": c.token,
        "no_embed_class": c.placed == 0,
        "init_values": 1e-5 if c.layer_scale else None,
        "qk_norm": c.qk_norm,
        "qkv_bias": c.qkv_bias != "none",
        "dynamic_img_size": False,
        **(describe_eva(c) if eva else describe_vit(c)),
    }


def describe_vit(c: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer alone."""
    activation = next(name for name, gelu in ACTIVATIONS.items() if gelu == c.gelu)
    return {
        "reg_tokens": c.registers,
        "pos_embed": "learn" if c.positions == "1d" else "none",
        "pre_norm": c.norm_before,
        "final_norm": c.final_norm != "none",
        "fc_norm": c.final_norm == "pooled",
        "pool_include_prefix": c.pool == "attention" and c.prefix > 0,
        "scale_attn_norm": c.attention_norm,
        "scale_mlp_norm": c.mlp_norm,
        "act_layer": "silu" if c.mlp_kind == "swiglu" else activation,
    }


def describe_eva(c: ViTConfig) -> dict[str, Any]:
    """The arguments of timm's Eva alone."""
    names = Names.of_config(c)
    return {
        "num_reg_tokens": c.registers,
        "use_abs_pos_emb": c.positions == "1d",
        "use_pre_transformer_norm": c.norm_before,
        "use_post_transformer_norm": c.final_norm == "tokens",
        "use_fc_norm": c.final_norm == "pooled",
        "scale_attn_inner": c.attention_norm,
        "scale_mlp": c.mlp_norm,
        "swiglu_mlp": c.mlp_kind == "swiglu",
        "swiglu_align_to": 1 if names.split_mlp and not c.mlp_norm else 0,  # makes gate and value tensors of their own
        "qkv_fused": not names.split_qkv,
        "attn_type": "rope" if c.qkv_bias == "all" else "eva",  # the other has no bias of keys
        "use_rot_pos_emb": c.rotary != "none",
        "rope_type": "dinov3" if c.rotary == "centers" else "cat",
        "rope_temperature": c.rotary_base,
        "rope_rotate_half": c.rotary_layout == "halves",
        "rope_grid_indexing": "xy" if names.swap else "ij",
        "rope_grid_offset": 0.0,
        "ref_feat_shape": [c.rotary_grid, c.rotary_grid] if c.rotary_grid else None,
    }


def read_rotary(name: str, args: dict[str, Any]) -> dict[str, Any]:
    """The fields of rotary positions that arguments give; those of the architecture hold for the others."""
    if "use_rot_pos_emb" not in args:
        return {}
    if not args["use_rot_pos_emb"]:
        return {"rotary": "none", "rotary_layout": "pairs", "rotary_base": 1e4, "rotary_grid": 0}
    kinds = {"cat": "cells", "dinov3": "centers"}
    kind = args.get("rope_type", "cat")
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"{name} has rotary positions of rope_type={kind!r}; cat and dinov3 are supported")
    grid = args.get("ref_feat_shape") or 0
    if isinstance(grid, list):
        if len(grid) != 2 or grid[0] != grid[1]:
            raise UserError(f"{name} has ref_feat_shape={grid!r}; only squares are supported")
        grid = grid[0]
    return {
        "rotary": kinds[kind],
        "rotary_layout": "halves" if args.get("rope_rotate_half") else "pairs",
        "rotary_base": args.get("rope_temperature", 1e4),
        "rotary_grid": grid,
    }


# ---- what cannot be described


def check_names(c: ViTConfig, target: str) -> None:
    """Refuse what neither of timm's classes of ViTs has."""
    eva = Names.of_config(c).eva
    layouts = {"none": "pairs", "cells": "pairs", "centers": "halves"}
    faults = {
        "a pre-logits layer": bool(c.prelogits),
        f"embed_bias={c.embed_bias} with norm_before={c.norm_before}": c.embed_bias == c.norm_before,
        "registers without and a class token with a position": c.registers > 0
        and c.token
        and c.positions == "1d"
        and c.prefix_positions == "token",
        f"rotary='{c.rotary}' with rotary_layout='{c.rotary_layout}'": c.rotary_layout != layouts[c.rotary],
        f"gelu='{c.gelu}' with rotary positions, SwiGLU or partial biases": eva and c.gelu != "exact",
        "a ResNet stem with rotary positions, SwiGLU or partial biases": eva and c.stem is not None,
        f"norm_eps={c.norm_eps} with this kind of MLP or a stem": c.norm_eps == 1e-5
        and (c.stem is not None or (c.mlp_kind == "swiglu" and not eva)),
    }
    for part, is_fault in faults.items():
        if is_fault:
            raise cannot_express(target, part)
