"""timm's ViTs (plain and hybrid) and BiT ResNets: state dicts, and the folders its hub models come in.

A bare file says neither heads nor GELU nor preprocessing; a folder's config.json names the architecture, from which
they follow, and holds the preprocessing.
"""

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.models.config import (
    Fit,
    Gelu,
    ModelConfig,
    Pool,
    Preprocess,
    ResNetConfig,
    Size,
    StemConfig,
    ViTConfig,
    as_size,
)
from vitlab.settings import from_json
from vitlab.weights.formats.base import (
    HEADS,
    IMAGE_SIZE,
    Description,
    FormatDefaults,
    RawCheckpoint,
    count,
    dims,
    find_heads,
    find_labels,
    guessed,
    patch_side,
    refuse,
    refuse_vit_defaults,
    require_defaults,
    require_plain,
    resnet_config,
    said,
    stem_config,
    with_size,
)
from vitlab.weights.formats.table import POINT, SPLIT2, Row, outward, pair, row

NAME = "timm"
PREPROCESS = Preprocess(interpolation="bicubic", crop=0.9)
BIT_PREPROCESS = Preprocess(crop=1.0)
STD = FormatDefaults(group_eps=1e-5, standardize="variance", standardize_eps=1e-8)
PLAIN_DEFAULT = FormatDefaults(gelu="exact", norm_eps=1e-6, preprocess=PREPROCESS)
DEFAULT = PLAIN_DEFAULT.over(STD)
BIT_DEFAULT = FormatDefaults(preprocess=BIT_PREPROCESS).over(STD)

ACTIVATIONS: dict[str, Gelu] = {"gelu": "exact", "gelu_tanh": "tanh"}
# Arguments that change nothing, or that the tensors tell themselves.
HARMLESS = {"img_size", "patch_size", "in_chans", "embed_dim", "depth", "mlp_ratio", "num_classes", "class_token"}
HARMLESS |= {"fc_norm", "pos_embed", "dynamic_img_size", "reg_tokens", "init_values", "qkv_bias", "qk_norm"}
READ = {"num_heads", "act_layer", "global_pool"}
# Architectures that differ from the others in what tensors do not tell.
TANH = r"giantopt|patch32_siglip|large_patch16_siglip(_gap)?_512|so400m_patch16_siglip"
ODD_HEADS = {"vit_base_patch16_gap_224": 16, "test_vit": 2}
POOLS: dict[Pool, str] = {"token": "token", "mean": "avg", "attention": "map"}
CROPS: dict[str, Fit] = {"center": "crop", "squash": "stretch"}


def fits(source: RawCheckpoint) -> bool:
    shapes = source.shapes
    bit = "stem.conv.weight" in shapes and "stages.0.blocks.0.conv1.weight" in shapes
    return bit or "patch_embed.proj.weight" in shapes


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> Description:
    if "stem.conv.weight" in source.shapes:
        return read_bit(source, given, image_size)
    width, _, *sides = dims(source, "patch_embed.proj.weight", 4)
    told = folder_traits(source, width)
    traits = given.over(told).over(DEFAULT)
    stem = read_stem(source, traits)
    patch = patch_side(source, "patch_embed.proj.weight", (sides[0], sides[1]))
    stride = patch * (stem.stride if stem else 1)
    learned = "pos_embed" in source.shapes
    config = ViTConfig(
        image_size=(stride, stride),
        patch=patch,
        depth=count(source, "blocks.#."),
        width=width,
        mlp=dims(source, "blocks.0.mlp.fc1.weight", 2)[0],
        heads=find_heads(source, width, traits),
        classes=dims(source, "head.weight", 2)[0] if "head.weight" in source.shapes else 0,
        stem=stem,
        pool=find_pool(source),
        prelogits=dims(source, "pre_logits.fc.weight", 2)[0] if "pre_logits.fc.weight" in source.shapes else 0,
        positions="1d" if learned else "none",
        gelu=said(traits.gelu),
        norm_eps=said(traits.norm_eps),
    )
    rows, size = table(config), folder_size(source)
    if learned:
        config = with_size(source, config, rows, dims(source, "pos_embed", 3)[1] - config.token, size, image_size)
    else:
        config = dataclasses.replace(config, image_size=size or image_size or IMAGE_SIZE)
    default = FormatDefaults(heads=config.heads).over(DEFAULT if stem else PLAIN_DEFAULT)
    return Description(config, read_card(source, config.classes, traits), guessed(default, given.over(told)), rows)


def read_stem(source: RawCheckpoint, traits: FormatDefaults) -> StemConfig | None:
    if "patch_embed.backbone.conv.weight" in source.shapes:  # a root alone
        return stem_config((), dims(source, "patch_embed.backbone.conv.weight", 4)[0], traits)
    if "patch_embed.backbone.stem.conv.weight" not in source.shapes:
        return None
    width = dims(source, "patch_embed.backbone.stem.conv.weight", 4)[0]
    return stem_config(read_stages(source, "patch_embed.backbone."), width, traits)


def read_stages(source: RawCheckpoint, prefix: str) -> tuple[int, ...]:
    stages = count(source, f"{prefix}stages.#.")
    return tuple(count(source, f"{prefix}stages.{i}.blocks.#.") for i in range(stages))


def find_pool(source: RawCheckpoint) -> Pool:
    """The pooling the tensors tell; what a folder's config says must agree."""
    pool: Pool = "attention" if "attn_pool.latent" in source.shapes else "mean"
    if "cls_token" in source.shapes and pool == "mean":
        pool = "token"
    args = model_args(source)
    said = args.get("global_pool", source.config.get("global_pool"))
    if said is not None and said != POOLS[pool]:
        raise UserError(f"{source.name} pools by global_pool={said!r} where its tensors fit {POOLS[pool]!r} alone")
    return pool


def read_bit(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> Description:
    refuse_vit_defaults(source, given)
    told = FormatDefaults(preprocess=folder_preprocess(source, BIT_PREPROCESS)).over(
        STD if architecture(source) else FormatDefaults()
    )
    traits, size = given.over(told).over(BIT_DEFAULT), folder_size(source) or image_size
    config = resnet_config(
        size or IMAGE_SIZE,
        read_stages(source, ""),
        dims(source, "stem.conv.weight", 4)[0],
        dims(source, "head.fc.weight", 4)[0] if "head.fc.weight" in source.shapes else 0,
        traits,
    )
    unsaid = guessed(BIT_DEFAULT, given.over(told)) + (() if size else ("image_size",))
    return Description(config, read_card(source, config.classes, traits), unsaid, table(config))


# ---- the folder's config.json


def architecture(source: RawCheckpoint) -> str:
    name = source.config.get("architecture", "")
    if not isinstance(name, str):
        raise UserError(f"'architecture' in the config of {source.name} must be a word, not {name!r}")
    return name


def mapping(source: RawCheckpoint, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"'{key}' in the config of {source.name} must be an object, not {value!r}")
    return value


def model_args(source: RawCheckpoint) -> Mapping[str, Any]:
    return mapping(source, source.config, "model_args")


def pretrained(source: RawCheckpoint) -> Mapping[str, Any]:
    """Older folders have these fields at the top."""
    if "architecture" not in source.config:
        return {}
    return mapping(source, source.config, "pretrained_cfg") or source.config


def folder_traits(source: RawCheckpoint, width: int) -> FormatDefaults:
    args = model_args(source)
    for key in args:
        if key not in HARMLESS | READ:
            raise UserError(f"{source.name} was built with {key}={args[key]!r}, which this package does not know")
    act = args.get("act_layer")
    if act is not None and (not isinstance(act, str) or act not in ACTIVATIONS):
        raise UserError(f"{source.name} has the activation {act!r}; only GELU is known")
    told = FormatDefaults(heads=args.get("num_heads"), gelu=ACTIVATIONS[act] if act else None)
    if name := architecture(source):  # then timm's own defaults hold, except where the name says otherwise
        gelu: Gelu = "tanh" if re.search(TANH, name) else "exact"
        heads = ODD_HEADS.get(name, HEADS.get(width))
        preprocess = folder_preprocess(source, PREPROCESS)
        told = told.over(FormatDefaults(heads, gelu, norm_eps=1e-6, preprocess=preprocess).over(STD))
    return told


def folder_preprocess(source: RawCheckpoint, default: Preprocess) -> Preprocess | None:
    cfg = pretrained(source)
    if not cfg:
        return None
    mode = cfg.get("crop_mode") or "center"
    if mode not in list(CROPS):
        raise UserError(f"{source.name} prepares images by crop_mode={mode!r}; only center and squash are known")
    said = {
        "mean": cfg.get("mean"),
        "std": cfg.get("std"),
        "interpolation": cfg.get("interpolation"),
        "crop": cfg.get("crop_pct"),
        "fit": CROPS[mode],
    }
    fields = {"mean": default.mean, "std": default.std, "interpolation": default.interpolation, "crop": default.crop}
    return from_json(Preprocess, fields | {key: value for key, value in said.items() if value is not None})


def folder_size(source: RawCheckpoint) -> Size | None:
    args, cfg = model_args(source), pretrained(source)
    if args.get("img_size") is not None:
        return as_size(args["img_size"])
    size = cfg.get("input_size")
    return as_size(size[1:]) if isinstance(size, list) else None


def read_card(source: RawCheckpoint, classes: int, traits: FormatDefaults) -> Card:
    names = source.config.get("label_names") or pretrained(source).get("label_names")
    labels = find_labels(source, names, classes) if names else None
    return Card(said(traits.preprocess), labels)


# ---- the table


def table(c: ModelConfig) -> list[Row]:
    if isinstance(c, ResNetConfig):
        return [
            row("root.weight", "stem.conv.weight"),
            *stage_rows(c.stages, "", "", "shortcut", None),
            *pair("norm", "norm"),
            *([row("head.weight", "head.fc.weight", POINT), row("head.bias", "head.fc.bias")] if c.classes else []),
        ]
    rows = [
        *(stem_rows(c.stem) if c.stem else []),
        *pair("embed", "patch_embed.proj"),
        *([row("token", "cls_token")] if c.token else []),
        *([row("positions.table", "pos_embed")] if c.positions == "1d" else []),
    ]
    for i in range(c.depth):
        ours = theirs = f"blocks.{i}"
        rows += pair(f"{ours}.norm1", f"{theirs}.norm1")
        rows += pair(f"{ours}.attention.qkv", f"{theirs}.attn.qkv")
        rows += pair(f"{ours}.attention.out", f"{theirs}.attn.proj")
        rows += pair(f"{ours}.norm2", f"{theirs}.norm2")
        rows += pair(f"{ours}.mlp.up", f"{theirs}.mlp.fc1")
        rows += pair(f"{ours}.mlp.down", f"{theirs}.mlp.fc2")
    rows += pair("norm", "norm")
    rows += pool_rows() if c.pool == "attention" else []
    rows += pair("prelogits", "pre_logits.fc") if c.prelogits else []
    return rows + (pair("head", "head") if c.classes else [])


def pool_rows() -> list[Row]:
    split = [Row((f"pool.k.{p}", f"pool.v.{p}"), (f"attn_pool.kv.{p}",), SPLIT2) for p in ("weight", "bias")]
    return [
        row("pool.probe", "attn_pool.latent"),
        *pair("pool.q", "attn_pool.q"),
        *split,
        *pair("pool.out", "attn_pool.proj"),
        *pair("pool.norm", "attn_pool.norm"),
        *pair("pool.mlp.up", "attn_pool.mlp.fc1"),
        *pair("pool.mlp.down", "attn_pool.mlp.fc2"),
    ]


def stem_rows(c: StemConfig) -> list[Row]:
    root = "patch_embed.backbone.stem" if c.stages else "patch_embed.backbone"
    return [
        row("stem.root.weight", f"{root}.conv.weight"),
        *pair("stem.norm", f"{root}.norm"),
        *stage_rows(c.stages, "stem.", "patch_embed.backbone.", "shortcut.0", "shortcut.1"),
    ]


def stage_rows(stages: tuple[int, ...], ours: str, theirs: str, conv: str, norm: str | None) -> list[Row]:
    """Bottlenecks; the first unit of a stage has a projected shortcut, the hybrid's with a norm."""
    rows: list[Row] = []
    for i, units in enumerate(stages):
        for j in range(units):
            mine, other = f"{ours}stages.{i}.{j}", f"{theirs}stages.{i}.blocks.{j}"
            for k in (1, 2, 3):
                rows.append(row(f"{mine}.conv{k}.weight", f"{other}.conv{k}.weight"))
                rows += pair(f"{mine}.norm{k}", f"{other}.norm{k}")
            if j == 0:
                rows.append(row(f"{mine}.{conv}.weight", f"{other}.downsample.conv.weight"))
                rows += pair(f"{mine}.{norm}", f"{other}.downsample.norm") if norm else []
    return rows


# ---- writing

WRITES = (".safetensors", "")
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


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    """A folder that timm.create_model("local-dir:...") builds, or the state dict alone."""
    require_expressible(config)
    folder = path.is_dir()
    if not folder:
        require_defaults(config, "a timm file alone, without a folder's config.json,", FormatDefaults(gelu="exact"))
    description = describe(config, card) if folder else {}
    save_file(outward(table(config), tensors), path / "model.safetensors" if folder else path, {"format": "pt"})
    if folder:
        (path / "config.json").write_text(json.dumps(description, indent=2))


def require_expressible(c: ModelConfig) -> None:
    if isinstance(c, ResNetConfig):
        return require_defaults(c, NAME, STD)
    if c.positions != "none":
        require_plain(c, NAME)
    elif c.attention == "axial":
        raise refuse(NAME, "axial attention")
    if c.prelogits:
        raise refuse(NAME, "a pre-logits layer")
    return require_defaults(c, NAME, FormatDefaults(norm_eps=1e-6).over(STD))


def describe(c: ModelConfig, card: Card) -> dict[str, Any]:
    bit, p = isinstance(c, ResNetConfig), card.preprocess
    data: dict[str, Any] = {
        "architecture": bit_name(c) if isinstance(c, ResNetConfig) else vit_name(c),
        "num_classes": c.classes,
        "num_features": c.channels if isinstance(c, ResNetConfig) else c.width,
    }
    if isinstance(c, ViTConfig):
        data |= {"global_pool": POOLS[c.pool], "model_args": arguments(c)}
    if card.labels:
        data["label_names"] = list(card.labels)
    root = "patch_embed.backbone.stem.conv" if isinstance(c, ViTConfig) and c.stem else "patch_embed.proj"
    data["pretrained_cfg"] = {
        "num_classes": c.classes,
        "input_size": [3, *c.image_size],
        "interpolation": p.interpolation,
        "crop_pct": p.crop if p.fit == "crop" else 1.0,
        "crop_mode": "center" if p.fit == "crop" else "squash",
        "mean": list(p.mean),
        "std": list(p.std),
        "first_conv": "stem.conv" if bit else root,
        "classifier": "head.fc" if bit else "head",
    }
    return data


def arguments(c: ViTConfig) -> dict[str, Any]:
    ratio = c.mlp / c.width
    while int(c.width * ratio) < c.mlp:  # timm rounds down
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
        "fc_norm": False,
        "pos_embed": "learn" if c.positions == "1d" else "none",
        "act_layer": "gelu_tanh" if c.gelu == "tanh" else "gelu",
    }


def vit_name(c: ViTConfig) -> str:
    """An architecture to start from; the arguments say the rest."""
    if c.stem is None:
        sizes = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1408: "giant"}
        name = f"vit_{sizes.get(c.width, 'base')}_patch{c.patch}_224"
        return name if name in PLAIN else "vit_base_patch16_224"
    if c.stem.stages not in STEMS or c.stem.width != 64:
        raise refuse("a timm folder", f"a stem with stages {c.stem.stages} and width {c.stem.width}", ALONE)
    return STEMS[c.stem.stages]


PLAIN = {f"vit_{size}_patch{patch}_224" for size in ("small", "base", "large") for patch in (16, 32)}
PLAIN |= {"vit_tiny_patch16_224", "vit_huge_patch14_224", "vit_giant_patch14_224"}
ALONE = "write a file that ends in .safetensors instead"


def bit_name(c: ResNetConfig) -> str:
    if (c.stages, c.width) not in BITS:
        raise refuse("a timm folder", f"a ResNet with stages {c.stages} and width {c.width}", ALONE)
    return BITS[c.stages, c.width]
