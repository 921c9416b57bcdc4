"""timm's ViTs (plain, hybrid and those of later families) and BiT ResNets: state dicts, and the folders of its hub.

A bare file has neither heads nor GELU nor preprocessing; a config.json in its folder names the architecture, from which
they follow, and holds the preprocessing. Its fields may also stand at the top, without `pretrained_cfg`.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import save_tensors
from vitlab.models.card import Card
from vitlab.models.config import Fit, ModelConfig, Pool, Preprocess, ResNetConfig, Size, ViTConfig, as_size
from vitlab.settings import from_json
from vitlab.weights.formats.base import PARTS, CardPart, FormatDefaults, ParsedCheckpoint, RawCheckpoint, parts_of
from vitlab.weights.formats.express import check_resnet, check_settings, check_vit
from vitlab.weights.formats.shapes import count_units, default_heads, read_resnet, read_vit, stored_shape
from vitlab.weights.formats.table import expand, from_vitlab, refuse_foreign
from vitlab.weights.formats.timm_describe import (
    ACTIVATIONS,
    POOLS,
    bit_name,
    check_names,
    describe_arguments,
    read_rotary,
    vit_name,
)
from vitlab.weights.formats.timm_families import PREPROCESS as USUAL
from vitlab.weights.formats.timm_families import (
    Family,
    check_arithmetic,
    find_family,
    is_gated,
    named_settings,
    usual_pool,
)
from vitlab.weights.formats.timm_table import STEM, Names, bit_table, vit_table

NAME = "timm"
SUFFIXES = (".safetensors", "")
PREPROCESS = USUAL
BIT_PREPROCESS = Preprocess(crop=1.0)
STD = FormatDefaults(group_eps=1e-5, standardize="variance", standardize_eps=1e-8)
BIT_DEFAULT = FormatDefaults(preprocess=BIT_PREPROCESS).over(STD)
FIELDS: tuple[str, ...] = (
    "extra_token",
    "registers",
    "prefix_positions",
    "embed_bias",
    "norm_before",
    "final_norm",
    "layer_scale",
)
FIELDS += ("qkv_bias", "qk_norm", "attention_norm", "mlp_kind", "mlp_norm")
FIELDS += ("rotary", "rotary_layout", "rotary_base", "rotary_grid")

# Arguments that change nothing, or that follow from the tensors.
HARMLESS = {"img_size", "patch_size", "in_chans", "embed_dim", "depth", "mlp_ratio", "num_classes", "class_token"}
HARMLESS |= {"fc_norm", "pos_embed", "dynamic_img_size", "reg_tokens", "init_values", "qkv_bias", "qk_norm"}
HARMLESS |= {"no_embed_class", "pre_norm", "final_norm", "scale_attn_norm", "scale_mlp_norm", "num_reg_tokens"}
HARMLESS |= {"use_abs_pos_emb", "use_pre_transformer_norm", "use_post_transformer_norm", "use_fc_norm", "attn_type"}
HARMLESS |= {"scale_attn_inner", "scale_mlp", "swiglu_mlp", "swiglu_align_to", "qkv_fused"}
READ = {"num_heads", "act_layer", "global_pool", "use_post_norm", "pool_include_prefix", "use_rot_pos_emb", "rope_type"}
READ |= {"rope_temperature", "rope_rotate_half", "rope_grid_indexing", "rope_grid_offset", "ref_feat_shape"}
CROPS: dict[str, Fit] = {"center": "crop", "squash": "stretch"}
log = logging.getLogger("vitlab")


# ---- reading


def recognizes(source: RawCheckpoint) -> bool:
    shapes = source.shapes
    bit = "stem.conv.weight" in shapes and "stages.0.blocks.0.conv1.weight" in shapes
    return bit or "patch_embed.proj.weight" in shapes


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    try:
        return read_model(source, given, image_size)
    except UserError:
        if "patch_embed.proj.weight" in source.shapes:  # a tensor of another architecture may be the reason
            stem = read_stem(source)
            refuse_foreign(vit_table(Names.of_file(source.shapes), stem and stem[0]), source.tensors)
        raise


def read_model(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    labels = source.config.get("label_names") or pretrained_config(source).get("label_names")
    if "stem.conv.weight" in source.shapes:
        stored = FormatDefaults(preprocess=read_preprocess(source, BIT_PREPROCESS))
        known = given.over(stored.over(STD) if architecture(source) else stored)
        stages, size = count_units(source, "stages.#.", "blocks.#."), read_size(source) or image_size
        return read_resnet(source, bit_table(stages), known, BIT_DEFAULT, size, stages, labels)
    width, family = stored_shape(source, "patch_embed.proj.weight", 4)[0], find_family(source)
    check_arithmetic(source, family, architecture(source), model_args(source), given.rotary is not None)
    known, default = given.over(read_settings(source, family, width)), family.settings(width)
    if architecture(source):
        known = known.over(FormatDefaults(pool=find_pool(source, usual_pool(architecture(source), family))))
    before = "norm_pre.weight" in source.shapes
    stem = read_stem(source)
    return read_vit(
        source,
        vit_table(find_names(source, known.over(default), width), stem and stem[0]),
        known,
        default.over(STD) if stem else default,
        image_size,
        config_size=read_size(source),
        stem=stem,
        pool=find_pool(source, default.pool),
        positions="1d" if "pos_embed" in source.shapes else "none",
        fields=FIELDS,
        values={"embed_bias": not before} | ({"final_norm": "pooled"} if "fc_norm.weight" in source.shapes else {}),
        labels=labels,
    )


def find_names(source: RawCheckpoint, settings: FormatDefaults, width: int) -> Names:
    """Where a file's names differ; all models with rotary positions and biases of keys turn by columns first."""
    names = Names.of_file(source.shapes)
    columns = model_args(source).get("rope_grid_indexing", "xy") == "xy" and "blocks.0.attn.qkv.bias" in source.shapes
    if settings.rotary != "cells" or not columns:
        return names
    heads = settings.heads if settings.heads is not None else default_heads(source, width)
    if width % (2 * heads):
        raise UserError(
            f"{source.name} has a width of {width}, which {heads} heads with rotary positions do not divide"
        )
    return dataclasses.replace(names, swap=heads)


def read_stem(source: RawCheckpoint) -> tuple[tuple[int, ...], int] | None:
    """The stages and the width of a hybrid's stem."""
    if f"{STEM}conv.weight" in source.shapes:  # a root alone
        return (), stored_shape(source, f"{STEM}conv.weight", 4)[0]
    if f"{STEM}stem.conv.weight" not in source.shapes:
        return None
    stages = count_units(source, f"{STEM}stages.#.", "blocks.#.")
    return stages, stored_shape(source, f"{STEM}stem.conv.weight", 4)[0]


def find_pool(source: RawCheckpoint, usual: Pool | None) -> Pool:
    """The pooling of a folder's config, which the tensors must allow, or that which follows from the tensors."""
    names = source.shapes
    fit: list[Pool] = ["attention"] if "attn_pool.latent" in names else ["token", "mean"]
    if "cls_token" not in names and "token" in fit:
        fit = ["mean"]
    stored = model_args(source).get("global_pool", source.config.get("global_pool"))
    if stored is not None:
        pools = [pool for pool in fit if POOLS[pool] == stored]
        if not pools:
            words = " or ".join(repr(POOLS[pool]) for pool in fit)
            raise UserError(f"{source.name} pools by global_pool={stored!r} where its tensors fit {words} alone")
        return pools[0]
    if "fc_norm.weight" in names and "mean" in fit:
        return "mean"
    return usual if usual in fit else fit[0]


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


def read_settings(source: RawCheckpoint, family: Family, width: int) -> FormatDefaults:
    args = model_args(source)
    for key in args:
        if key not in HARMLESS | READ:
            raise UserError(f"{source.name} was built with {key}={args[key]!r}, which is not supported")
    act = args.get("act_layer")
    if act == "silu" and is_gated(source):
        act = None
    if act is not None and (not isinstance(act, str) or act not in ACTIVATIONS):
        raise UserError(f"{source.name} has the activation {act!r}; only GELU is supported")
    heads = args.get("num_heads", source.config.get("num_heads"))
    gelu = ACTIVATIONS[act] if act else None
    settings: FormatDefaults = from_json(
        FormatDefaults, {"heads": heads, "gelu": gelu, **read_rotary(source.name, dict(args))}
    )
    if name := architecture(source):  # then timm's own defaults hold, with the exceptions by name
        eps = source.config.get("norm_eps")
        named = FormatDefaults(norm_eps=eps).over(named_settings(name, family, width))
        preprocess = read_preprocess(source, family.defaults.preprocess or PREPROCESS)
        settings = settings.over(dataclasses.replace(named, preprocess=preprocess).over(STD))
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


def lost(config: ModelConfig, card: Card, folder: bool) -> list[CardPart]:
    return parts_of(card, ("thresholds", "temperature") if folder else PARTS)


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    """A folder that timm.create_model("local-dir:...") builds, or the state dict alone."""
    check_expressible(config)
    folder = path.is_dir()
    if not folder:
        check_alone(config)
    description = describe_model(config, card) if folder else {}
    if isinstance(config, ResNetConfig):
        table = bit_table(config.stages)
    else:
        table = vit_table(Names.of_config(config), config.stem.stages if config.stem else None)
    theirs = from_vitlab(expand(table, config), tensors)
    save_tensors(theirs, path / "model.safetensors" if folder else path, {"format": "pt"})
    if folder:
        (path / "config.json").write_text(json.dumps(description, indent=2))
        if card.preprocess.fit == "crop" and len(set(config.image_size)) > 1:
            log.info("timm's own transform scales photos bilinearly, and rounds, for an input that is not square")


def check_expressible(c: ModelConfig) -> None:
    if isinstance(c, ResNetConfig):
        return check_resnet(c, NAME, STD)
    pools: tuple[Pool, ...] = ("token", "mean", "attention")
    gelus = tuple(ACTIVATIONS.values())
    c = check_vit(c, NAME, stem=True, pools=pools, positions=("1d", "none"), gelus=gelus, fields=FIELDS)
    check_names(c, NAME)
    eps = FormatDefaults() if c.norm_eps == 1e-5 else FormatDefaults(norm_eps=1e-6)  # timm's architectures have both
    return check_settings(c, NAME, eps.over(STD))


def check_alone(c: ModelConfig) -> None:
    """Refuse a GELU that no architecture would have for a file alone; those of CLIP exist with both."""
    if isinstance(c, ViTConfig) and c.gelu == "quick" and c.norm_before:
        return
    check_settings(c, "a timm file alone, without a folder's config.json,", FormatDefaults(gelu="exact"))


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
