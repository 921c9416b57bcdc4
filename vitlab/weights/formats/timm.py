"""timm's ViTs (plain and hybrid) and BiT ResNets: state dicts, and the folders its hub models come in.

A bare file has neither heads nor GELU nor preprocessing; a config.json in its folder names the architecture, from which
they follow, and holds the preprocessing. Its fields may also stand at the top, without `pretrained_cfg`.
"""

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import save_tensors
from vitlab.models.card import Card
from vitlab.models.config import Fit, Gelu, ModelConfig, Pool, Preprocess, ResNetConfig, Size, ViTConfig, as_size
from vitlab.settings import from_json
from vitlab.weights.formats.base import FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.express import cannot_express, check_settings, check_vit
from vitlab.weights.formats.shapes import HEADS, count_units, read_resnet, read_vit, stored_shape
from vitlab.weights.formats.table import Row, Transform, expand, from_vitlab, pair, per_tensor, row, stage_rows

NAME = "timm"
SUFFIXES = (".safetensors", "")
PREPROCESS = Preprocess(interpolation="bicubic", crop=0.9)
BIT_PREPROCESS = Preprocess(crop=1.0)
STD = FormatDefaults(group_eps=1e-5, standardize="variance", standardize_eps=1e-8)
DEFAULT = FormatDefaults(gelu="exact", norm_eps=1e-6, preprocess=PREPROCESS)
BIT_DEFAULT = FormatDefaults(preprocess=BIT_PREPROCESS).over(STD)

ACTIVATIONS: dict[str, Gelu] = {"gelu": "exact", "gelu_tanh": "tanh"}
# Arguments that change nothing, or that follow from the tensors.
HARMLESS = {"img_size", "patch_size", "in_chans", "embed_dim", "depth", "mlp_ratio", "num_classes", "class_token"}
HARMLESS |= {"fc_norm", "pos_embed", "dynamic_img_size", "reg_tokens", "init_values", "qkv_bias", "qk_norm"}
READ = {"num_heads", "act_layer", "global_pool"}
# Architectures that differ from the others in what does not follow from the tensors.
TANH = r"giantopt|patch32_siglip|large_patch16_siglip(_gap)?_512|so400m_patch16_siglip"
ODD_HEADS = {"vit_base_patch16_gap_224": 16, "test_vit": 2}
POOLS: dict[Pool, str] = {"token": "token", "mean": "avg", "attention": "map"}
CROPS: dict[str, Fit] = {"center": "crop", "squash": "stretch"}
log = logging.getLogger("vitlab")


# ---- the tables

STEM = "patch_embed.backbone."
POINT = per_tensor(lambda x: x.flatten(1), lambda x: x[:, :, None, None])  # a 1x1 convolution as a dense layer
SPLIT2 = Transform(lambda xs: xs[0].chunk(2), lambda xs: [torch.cat(list(xs))])  # keys and values
VIT = [
    *pair("embed", "patch_embed.proj"),
    row("token", "cls_token"),
    row("positions.table", "pos_embed"),
    *pair("blocks.#.norm1", "blocks.#.norm1"),
    *pair("blocks.#.attention.qkv", "blocks.#.attn.qkv"),
    *pair("blocks.#.attention.out", "blocks.#.attn.proj"),
    *pair("blocks.#.norm2", "blocks.#.norm2"),
    *pair("blocks.#.mlp.up", "blocks.#.mlp.fc1"),
    *pair("blocks.#.mlp.down", "blocks.#.mlp.fc2"),
    *pair("norm", "norm"),
    row("pool.probe", "attn_pool.latent"),
    *pair("pool.q", "attn_pool.q"),
    Row(("pool.k.weight", "pool.v.weight"), ("attn_pool.kv.weight",), SPLIT2),
    Row(("pool.k.bias", "pool.v.bias"), ("attn_pool.kv.bias",), SPLIT2),
    *pair("pool.out", "attn_pool.proj"),
    *pair("pool.norm", "attn_pool.norm"),
    *pair("pool.mlp.up", "attn_pool.mlp.fc1"),
    *pair("pool.mlp.down", "attn_pool.mlp.fc2"),
    *pair("prelogits", "pre_logits.fc"),
    *pair("head", "head"),
]
UNIT = [r for k in (1, 2, 3) for r in (row(f"conv{k}.weight", f"conv{k}.weight"), *pair(f"norm{k}", f"norm{k}"))]


def vit_table(stages: Sequence[int] | None) -> list[Row]:
    """A ViT's table; `stages` are those of a hybrid's stem."""
    if stages is None:
        return VIT
    root = f"{STEM}stem" if stages else STEM.rstrip(".")
    shortcut = [row("shortcut.0.weight", "downsample.conv.weight"), *pair("shortcut.1", "downsample.norm")]
    return [
        row("stem.root.weight", f"{root}.conv.weight"),
        *pair("stem.norm", f"{root}.norm"),
        *stage_rows(stages, UNIT, shortcut, "stem.stages.{i}.{j}.", STEM + "stages.{i}.blocks.{j}."),
        *VIT,
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


# ---- reading


def recognizes(source: RawCheckpoint) -> bool:
    shapes = source.shapes
    bit = "stem.conv.weight" in shapes and "stages.0.blocks.0.conv1.weight" in shapes
    return bit or "patch_embed.proj.weight" in shapes


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    labels = source.config.get("label_names") or pretrained_config(source).get("label_names")
    if "stem.conv.weight" in source.shapes:
        stored = FormatDefaults(preprocess=read_preprocess(source, BIT_PREPROCESS))
        known = given.over(stored.over(STD) if architecture(source) else stored)
        stages, size = count_units(source, "stages.#.", "blocks.#."), read_size(source) or image_size
        return read_resnet(source, bit_table(stages), known, BIT_DEFAULT, size, stages, labels)
    known = given.over(read_settings(source, stored_shape(source, "patch_embed.proj.weight", 4)[0]))
    stem = read_stem(source)
    return read_vit(
        source,
        vit_table(stem and stem[0]),
        known,
        DEFAULT.over(STD) if stem else DEFAULT,
        image_size,
        config_size=read_size(source),
        stem=stem,
        pool=find_pool(source),
        positions="1d" if "pos_embed" in source.shapes else "none",
        labels=labels,
    )


def read_stem(source: RawCheckpoint) -> tuple[tuple[int, ...], int] | None:
    """The stages and the width of a hybrid's stem."""
    if f"{STEM}conv.weight" in source.shapes:  # a root alone
        return (), stored_shape(source, f"{STEM}conv.weight", 4)[0]
    if f"{STEM}stem.conv.weight" not in source.shapes:
        return None
    stages = count_units(source, f"{STEM}stages.#.", "blocks.#.")
    return stages, stored_shape(source, f"{STEM}stem.conv.weight", 4)[0]


def find_pool(source: RawCheckpoint) -> Pool:
    """The pooling that follows from the tensors; that of a folder's config must agree."""
    names = source.shapes
    pool: Pool = "attention" if "attn_pool.latent" in names else "token" if "cls_token" in names else "mean"
    stored = model_args(source).get("global_pool", source.config.get("global_pool"))
    if stored is not None and stored != POOLS[pool]:
        raise UserError(f"{source.name} pools by global_pool={stored!r} where its tensors fit {POOLS[pool]!r} alone")
    return pool


# ---- the folder's config.json


def architecture(source: RawCheckpoint) -> str:
    name = source.config.get("architecture", source.config.get("arch", ""))
    if not isinstance(name, str):
        raise UserError(f"'architecture' in the config of {source.name} must be a word, not {name!r}")
    return name


def find_object(source: RawCheckpoint, data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key) or {}
    if not isinstance(value, Mapping):
        raise UserError(f"'{key}' in the config of {source.name} must be an object, not {value!r}")
    return value


def model_args(source: RawCheckpoint) -> Mapping[str, Any]:
    return find_object(source, source.config, "model_args")


def pretrained_config(source: RawCheckpoint) -> Mapping[str, Any]:
    """Older folders have these fields at the top."""
    if not architecture(source):
        return {}
    return find_object(source, source.config, "pretrained_cfg") or source.config


def read_settings(source: RawCheckpoint, width: int) -> FormatDefaults:
    args = model_args(source)
    for key in args:
        if key not in HARMLESS | READ:
            raise UserError(f"{source.name} was built with {key}={args[key]!r}, which is not supported")
    act = args.get("act_layer")
    if act is not None and (not isinstance(act, str) or act not in ACTIVATIONS):
        raise UserError(f"{source.name} has the activation {act!r}; only GELU is supported")
    heads = args.get("num_heads", source.config.get("num_heads"))
    settings = FormatDefaults(heads=heads, gelu=ACTIVATIONS[act] if act else None)
    if name := architecture(source):  # then timm's own defaults hold, with the exceptions by name
        gelu: Gelu = "tanh" if re.search(TANH, name) else "exact"
        heads = ODD_HEADS.get(name, HEADS.get(width))
        eps, preprocess = source.config.get("norm_eps", 1e-6), read_preprocess(source, PREPROCESS)
        settings = settings.over(FormatDefaults(heads, gelu, norm_eps=eps, preprocess=preprocess).over(STD))
    return settings


def read_preprocess(source: RawCheckpoint, default: Preprocess) -> Preprocess | None:
    cfg = pretrained_config(source)
    if not cfg:
        return None
    mode = cfg.get("crop_mode") or "center"
    if mode not in list(CROPS):
        raise UserError(f"{source.name} prepares images by crop_mode={mode!r}; only center and squash are supported")
    names = {"mean": "mean", "std": "std", "interpolation": "interpolation", "crop": "crop_pct"}
    fields = {ours: getattr(default, ours) if cfg.get(key) is None else cfg[key] for ours, key in names.items()}
    return from_json(Preprocess, fields | {"fit": CROPS[mode]})


def read_size(source: RawCheckpoint) -> Size | None:
    size, input_size = model_args(source).get("img_size"), pretrained_config(source).get("input_size")
    if size is not None:
        return as_size(size)
    return as_size(input_size[1:]) if isinstance(input_size, list) else None


# ---- writing

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


def holds_card(config: ModelConfig, card: Card, folder: bool) -> bool:
    return folder and card.thresholds is None and card.temperature == 1


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    """A folder that timm.create_model("local-dir:...") builds, or the state dict alone."""
    check_expressible(config)
    folder = path.is_dir()
    if not folder:
        check_settings(config, "a timm file alone, without a folder's config.json,", FormatDefaults(gelu="exact"))
    description = describe_model(config, card) if folder else {}
    if isinstance(config, ResNetConfig):
        table = bit_table(config.stages)
    else:
        table = vit_table(config.stem.stages if config.stem else None)
    theirs = from_vitlab(expand(table, config), tensors)
    save_tensors(theirs, path / "model.safetensors" if folder else path, {"format": "pt"})
    if folder:
        (path / "config.json").write_text(json.dumps(description, indent=2))
        if card.preprocess.fit == "crop" and len(set(config.image_size)) > 1:
            log.info("timm's own transform scales photos bilinearly, and rounds, for an input that is not square")


def check_expressible(c: ModelConfig) -> None:
    if isinstance(c, ResNetConfig):
        return check_settings(c, NAME, STD)
    c = check_vit(c, NAME, stem=True, pools=("token", "mean", "attention"), positions=("1d", "none"))
    if c.prelogits:
        raise cannot_express(NAME, "a pre-logits layer")
    return check_settings(c, NAME, FormatDefaults(norm_eps=1e-6).over(STD))


def describe_model(c: ModelConfig, card: Card) -> dict[str, Any]:
    if isinstance(c, ResNetConfig):
        data: dict[str, Any] = {"architecture": bit_name(c), "num_classes": c.classes, "num_features": c.channels}
        layers = {"first_conv": "stem.conv", "classifier": "head.fc"}
    else:
        data = {"architecture": vit_name(c), "num_classes": c.classes, "num_features": c.width}
        data |= {"global_pool": POOLS[c.pool], "model_args": describe_arguments(c)}
        layers = {"first_conv": f"{STEM}stem.conv" if c.stem else "patch_embed.proj", "classifier": "head"}
    if card.labels:
        data["label_names"] = list(card.labels)
    p = card.preprocess
    data["pretrained_cfg"] = {
        "num_classes": c.classes,
        "input_size": [3, *c.image_size],
        "interpolation": p.interpolation,
        "crop_pct": p.crop if p.fit == "crop" else 1.0,
        "crop_mode": "center" if p.fit == "crop" else "squash",
        "mean": list(p.mean),
        "std": list(p.std),
        **layers,
    }
    return data


def describe_arguments(c: ViTConfig) -> dict[str, Any]:
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
    """An architecture to start from; the arguments give the rest."""
    if c.stem is None:
        sizes = {192: "tiny", 384: "small", 768: "base", 1024: "large", 1280: "huge", 1408: "giant"}
        name = f"vit_{sizes.get(c.width, 'base')}_patch{c.patch}_224"
        return name if name in PLAIN else "vit_base_patch16_224"
    if c.stem.stages not in STEMS or c.stem.width != 64:
        raise cannot_express("a timm folder", f"a stem with stages {c.stem.stages} and width {c.stem.width}", ALONE)
    return STEMS[c.stem.stages]


PLAIN = {f"vit_{size}_patch{patch}_224" for size in ("small", "base", "large") for patch in (16, 32)}
PLAIN |= {"vit_tiny_patch16_224", "vit_huge_patch14_224", "vit_giant_patch14_224"}
ALONE = "write a file that ends in .safetensors instead"


def bit_name(c: ResNetConfig) -> str:
    if (c.stages, c.width) not in BITS:
        raise cannot_express("a timm folder", f"a ResNet with stages {c.stages} and width {c.width}", ALONE)
    return BITS[c.stages, c.width]
