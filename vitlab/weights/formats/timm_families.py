"""What the tensors of timm's ViTs do not determine, by family.

A family is recognized by the tensors that a file has. Where a config names the architecture, the name decides what
differs inside a family. Architectures with the tensors of a family and other arithmetic are refused.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vitlab.errors import UserError
from vitlab.models.config import Gelu, Pool, Preprocess
from vitlab.weights.formats.base import FormatDefaults, RawCheckpoint
from vitlab.weights.formats.shapes import HEADS

IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # mean and std
CLIP_COLORS = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
PREPROCESS = Preprocess(interpolation="bicubic", crop=0.9)
HALF_FULL = Preprocess(interpolation="bicubic", crop=1.0)
IMAGENET_CROP = Preprocess(*IMAGENET, interpolation="bicubic", crop=0.9)
IMAGENET_FULL = Preprocess(*IMAGENET, interpolation="bicubic", crop=1.0)
CLIP_CROP = Preprocess(*CLIP_COLORS, interpolation="bicubic", crop=0.9)
CLIP_FULL = Preprocess(*CLIP_COLORS, interpolation="bicubic", crop=1.0)

# Architectures that differ from their families in what does not follow from the tensors.
TANH = r"giantopt|patch32_siglip|large_patch16_siglip(_gap)?_512|so400m_patch16_siglip"
LARGER_EPS = r"^vit_.*clip|^beit3|dinov3|lingbot|^vit_pe_"
ODD_HEADS = {"vit_base_patch16_gap_224": 16, "test_vit": 2, "test_vit2": 2, "test_vit3": 3, "test_vit4": 3}
POST_NORM = r"_rpn_|^eva02_enormous_"
NO_FINAL_NORM = r"^vit_intern300m|^vit_pe_(lang|spatial)"
POOLS_ALL = {"test_vit3"}  # attention pooling that sees the registers as ours does


@dataclass(frozen=True)
class Family:
    """Settings that are usual in a family; rotary positions and pooling among them where it has them."""

    name: str
    defaults: FormatDefaults
    heads: Mapping[int, int] = field(default_factory=dict)  # by width, where they are not those of the paper's sizes
    known: bool = True  # whether its tensors determine its rotary positions

    def settings(self, width: int) -> FormatDefaults:
        return FormatDefaults(heads=self.heads.get(width)).over(self.defaults)


def defaults(preprocess: Preprocess, eps: float = 1e-6, **more: Any) -> FormatDefaults:
    return FormatDefaults(gelu="exact", norm_eps=eps, preprocess=preprocess, **more)


def cells(base: float, grid: int) -> dict[str, Any]:
    return {"rotary": "cells", "rotary_layout": "pairs", "rotary_base": base, "rotary_grid": grid}


CENTERS = {"rotary": "centers", "rotary_layout": "halves", "rotary_base": 100.0, "rotary_grid": 0}
PLAIN = Family("ViT", defaults(PREPROCESS))
SCALED = Family("DeiT III", defaults(IMAGENET_CROP), {1536: 24})
SCALED_GAP = Family("ViT with LayerScale", defaults(PREPROCESS))
DINOV2 = Family("DINOv2", defaults(IMAGENET_FULL), {1536: 24})
CLIP = Family("CLIP", defaults(CLIP_FULL, 1e-5))
BEIT3 = Family("BEiT-3", defaults(IMAGENET_FULL, 1e-5))
EVA = Family("EVA", defaults(CLIP_CROP))
EVA02 = Family("EVA-02", defaults(CLIP_CROP, **cells(1e4, 16)))
DINOV3 = Family("DINOv3", defaults(IMAGENET_FULL, 1e-5, pool="mean", **CENTERS), {1280: 20, 1536: 24, 4096: 32})
ROPE_GAP = Family("ViT with rotary positions and registers", defaults(PREPROCESS, **cells(1e4, 16)))
ROPE = Family("RoPE-ViT", defaults(IMAGENET_CROP, **cells(100.0, 0)))
PE_LARGEST = Family(
    "PE of the largest size", defaults(Preprocess(interpolation="bicubic", crop=1.0), 1e-5, **cells(1e4, 32))
)
PE = Family("PE", defaults(PREPROCESS, 1e-5), known=False)
OTHER = Family("Eva", defaults(PREPROCESS), known=False)


def find_family(source: RawCheckpoint) -> Family:
    names = source.shapes
    token, registers, table = ("cls_token" in names, "reg_token" in names, "pos_embed" in names)
    before, normed = "norm_pre.weight" in names, bool({"norm.weight", "fc_norm.weight"} & names.keys())
    block = has_block(source)
    if before and ("attn_pool.latent" in names or not normed):
        return PE_LARGEST if block("gamma_1") and not token else PE
    if block("gamma_1"):
        if registers and not table:
            return DINOV3 if token else ROPE_GAP
        return ROPE if token and not registers and not before and block("attn.qkv.bias") else OTHER
    if block("attn.q_bias") or block("attn.q_proj.weight"):
        return EVA02 if is_gated(source) else EVA
    if before:
        return CLIP
    if block("attn.norm.weight") and block("mlp.norm.weight"):
        return BEIT3
    if block("ls1.gamma"):
        if not token:
            return SCALED_GAP
        return DINOV2 if registers or "head.weight" not in names else SCALED
    return PLAIN


def has_block(source: RawCheckpoint) -> Callable[[str], bool]:
    """Whether the first block has a tensor."""
    return lambda name: f"blocks.0.{name}" in source.shapes


def is_gated(source: RawCheckpoint) -> bool:
    """Whether the MLPs have a gate, by the widths of their layers."""
    up, down = (source.shapes.get(f"blocks.0.mlp.{name}.weight", ()) for name in ("fc1", "fc2"))
    packed = len(up) == 2 and len(down) == 2 and up[0] == 2 * down[1]
    return packed or "blocks.0.mlp.fc1_g.weight" in source.shapes


# ---- by the name of an architecture


def named_settings(name: str, family: Family, width: int) -> FormatDefaults:
    """All settings of an architecture but preprocessing and pooling."""
    gelu: Gelu = "quick" if "quickgelu" in name else "tanh" if re.search(TANH, name) else "exact"
    eps = 1e-5 if re.search(LARGER_EPS, name) else 1e-6
    heads = ODD_HEADS.get(name, family.heads.get(width, HEADS.get(width)))
    return dataclasses.replace(family.defaults, heads=heads, gelu=gelu, norm_eps=eps, pool=None)


def usual_pool(name: str, family: Family) -> Pool | None:
    return "token" if "lingbot" in name else family.defaults.pool


# ---- other arithmetic under the same names


def check_arithmetic(source: RawCheckpoint, family: Family, name: str, args: Mapping[str, Any], given: bool) -> None:
    """Refuse what has a family's tensors and other arithmetic.

    `name` and `args` are those of a folder's config; `given` says that the caller, or what we wrote beside the file,
    sets the rotary positions.
    """
    if re.search(POST_NORM, name) or args.get("use_post_norm"):
        raise UserError(
            f"{source.name} has blocks that norm the end of their branches; only norms before are supported"
        )
    if args.get("rope_grid_offset"):
        raise UserError(f"{source.name} has rotary positions that begin at {args['rope_grid_offset']!r}, not at 0")
    explicit = given or bool(name and not name.startswith("vit_pe_")) or "use_rot_pos_emb" in args
    if family is PE and not explicit:
        lack = "attn_pool.latent" if "attn_pool.latent" in source.shapes else "norm_pre.weight"
        raise UserError(
            f"{source.name} is a Perception Encoder by '{lack}' and others; its rotary positions begin at one, and it "
            "may pool by other heads, which is not supported"
        )
    if not family.known and not given and "use_rot_pos_emb" not in args and family is not PE:
        raise UserError(f"{source.name} has 'blocks.0.gamma_1' and is of no known family; give rotary=none, or which")
    if family is ROPE and "pos_embed" in source.shapes and not name and not given:
        raise UserError(
            f"{source.name} has 'blocks.0.gamma_1' and 'pos_embed', as DeiT III's own files and RoPE-ViT's have; give "
            "rotary=none for the former, rotary=cells for the latter"
        )
    if not name and not source.beside:
        check_post_norm(source, family)
    check_pooling(source, name, args)
    check_final_norm(source, family, name, args)


def check_post_norm(source: RawCheckpoint, family: Family) -> None:
    """The two architectures of timm whose norms come after the branches, which no name of a tensor shows."""
    names, block = source.shapes, has_block(source)
    bare = not names.keys() & {"cls_token", "reg_token"} and not block("attn.qkv.bias")
    residual = family is PLAIN and "fc_norm.weight" in names and bare
    enormous = family is EVA and names["patch_embed.proj.weight"][:1] == (1792,)
    if residual or enormous:
        what = "'fc_norm.weight' and no biases of queries" if residual else "'attn.q_bias' in a width of 1792"
        raise UserError(f"{source.name} has blocks that norm the end of their branches, by {what}; not supported")


def check_pooling(source: RawCheckpoint, name: str, args: Mapping[str, Any]) -> None:
    """Refuse attention pooling that may not see the tokens before the patches; ours does."""
    first = next((token for token in ("reg_token", "cls_token") if token in source.shapes), None)
    sees = name in POOLS_ALL or bool(args.get("pool_include_prefix") or "use_rot_pos_emb" in args or source.beside)
    if "attn_pool.latent" in source.shapes and first and not sees:
        raise UserError(f"{source.name} has 'attn_pool.latent' and '{first}', which that may leave out; not supported")


def check_final_norm(source: RawCheckpoint, family: Family, name: str, args: Mapping[str, Any]) -> None:
    """Refuse a file that lacks the norm after the blocks, unless it is of an architecture that has none."""
    if source.shapes.keys() & {"norm.weight", "fc_norm.weight"} or source.beside:
        return
    off = (args.get(key) is False for key in ("final_norm", "use_post_transformer_norm"))
    without = bool(re.search(NO_FINAL_NORM, name)) if name else family in (SCALED, DINOV2, PE, PE_LARGEST)
    if not any(off) and not without:
        whose = name or f"every {family.name} of timm"
        raise UserError(f"{source.name} lacks 'norm.weight', the norm after the blocks, which {whose} has")
