"""transformers' Vision Transformers: a folder with config.json and preprocessor_config.json.

Their tables are in `huggingface_families`. ViTModel's pooler, a dense layer with tanh on the class token, is our
pre-logits layer without a head. CLIP's projection is a head whose biases are zero. What a file has beside an image
model (a text model, a decoder, a mask token) is left out, which is logged.
"""

import dataclasses
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import save_tensors
from vitlab.models.card import Card
from vitlab.models.config import Gelu, ModelConfig, Pool, Preprocess, Size, ViTConfig, as_size
from vitlab.settings import check_value
from vitlab.text import listed
from vitlab.weights.formats.base import CardPart, FormatDefaults, ParsedCheckpoint, RawCheckpoint, parts_of
from vitlab.weights.formats.express import cannot_express, check_vit
from vitlab.weights.formats.huggingface_families import (
    CLIP,
    DEIT,
    DINOV2,
    DINOV2_REGISTERS,
    DINOV3,
    FAMILIES,
    REGISTERS,
    SIGLIP,
    VIT,
    Family,
    find_ratio,
)
from vitlab.weights.formats.huggingface_processor import describe_preprocess, has_processor, read_preprocess
from vitlab.weights.formats.shapes import read_vit
from vitlab.weights.formats.table import Row, expand, from_vitlab, refuse_foreign

NAME = "huggingface"
SUFFIXES = ("",)
PREPROCESS = Preprocess(fit="stretch")
ACTIVATIONS: dict[str, Gelu] = {
    "gelu": "exact",
    "gelu_new": "tanh",
    "gelu_pytorch_tanh": "tanh",
    "quick_gelu": "quick",
}
GELUS = {"exact": "gelu", "tanh": "gelu_pytorch_tanh", "quick": "quick_gelu"}
log = logging.getLogger("vitlab")


# ---- reading


def recognizes(source: RawCheckpoint) -> bool:
    return find_by_mark(source) is not None


def find_by_mark(source: RawCheckpoint) -> Family | None:
    """The family of a file by its tensors."""
    marks = ((family, prefix + family.mark) for family in FAMILIES for prefix in family.prefixes)
    return next((family for family, mark in marks if mark in source.shapes), None)


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    family = find_family(source)
    prefix = next((p for p in family.prefixes if p + family.patches in source.shapes), "")
    has_head = any(r.theirs[0] in source.shapes for r in family.head)
    registers = f"{prefix}{REGISTERS}"
    lacks_registers = family in (DINOV2_REGISTERS, DINOV3) and registers not in source.shapes
    source = leave_out(source, family, prefix, has_head)
    table, is_gated = find_table(source, family, prefix)
    config = image_config(source)
    known = given.over(read_settings(source, family, config, is_gated))
    size = config.get("image_size")
    try:
        if lacks_registers:
            raise UserError(f"{source.name} lacks '{registers}'")  # a model without has an empty one
        return read_vit(
            source,
            table,
            known,
            dataclasses.replace(family.default, heads=None),  # without a config, heads go by the width
            image_size,
            config_size=None if size is None else as_size(size),
            pool=find_pool(source, family, config, has_head),
            positions=family.positions,
            table_rank=family.table_rank,
            fields=tuple(family.holds),
            values=family.values() | find_biases(source, family, table),
            labels=read_labels(source),
        )
    except UserError:
        refuse_foreign(table, source.tensors)  # a tensor of another architecture may be the reason
        raise


def find_family(source: RawCheckpoint) -> Family:
    """The family that the config names; without a config, that of the tensors."""
    kind = source.config.get("model_type")
    named = next((family for family in FAMILIES if kind in list(family.kinds)), None)
    if named is None and kind is not None:
        kinds = listed(sorted({kind for family in FAMILIES for kind in family.kinds}))
        raise UserError(f"{source.name} is a {kind!r} of transformers; of its models {kinds} are supported")
    return named or find_by_mark(source) or VIT


def leave_out(source: RawCheckpoint, family: Family, prefix: str, has_head: bool) -> RawCheckpoint:
    """The checkpoint without the tensors that an image's features do not need, and without registers that are none."""
    others = dict(family.left_out)
    if has_head and family is SIGLIP:
        others["head."] = "the attention pooling, which its classifier does not use"

    def part(name: str) -> str | None:
        return next((words for start, words in others.items() if name.removeprefix(prefix).startswith(start)), None)

    parts = {name: part(name) for name in source.shapes}
    if left := [words for words in dict.fromkeys(others.values()) if words in parts.values()]:
        log.info("%s: left out %s", source.name, " and ".join(left))
    empty = {f"{prefix}{REGISTERS}"} if source.shapes.get(f"{prefix}{REGISTERS}", ())[1:2] == (0,) else set()
    shapes = {name: shape for name, shape in source.shapes.items() if parts[name] is None and name not in empty}
    return dataclasses.replace(source, tensors=dataclasses.replace(source.tensors, shapes=shapes))


def find_table(source: RawCheckpoint, family: Family, prefix: str) -> tuple[list[Row], bool]:
    """The table for the names that a file has, and whether its MLPs are gated."""
    for in_memory in (False, True):
        for number, mlp in reversed(list(enumerate(family.mlps))):  # gated first: they have all names of plain ones
            table = family.rows(prefix, mlp, in_memory)
            rows = [r for r in table if r.ours[0] in ("blocks.#.attention.qkv.weight", "blocks.#.mlp.up.weight")]
            if all(name.replace("#", "0") in source.shapes for r in rows for name in r.theirs):
                return table, number > 0
    return family.rows(prefix, family.mlps[0]), False


def find_biases(source: RawCheckpoint, family: Family, table: list[Row]) -> dict[str, str]:
    """Which of queries, keys and values have a bias, where a family leaves that open."""
    names = next(r.theirs for r in table if "blocks.#.attention.qkv.bias" in r.ours)
    q, k, v = (name.replace("#", "0") in source.shapes for name in names)
    kind = "qv" if q and v and not k else "all" if q or k or v else "none"
    held = family.holds.get("qkv_bias", ("all",))
    return {"qkv_bias": kind} if held is None or kind in held else {}


def find_pool(source: RawCheckpoint, family: Family, config: Mapping[str, Any], has_head: bool) -> Pool:
    """What the head sees; without one what the class gives, and where SigLIP has no pooling, the mean."""
    if has_head:
        return family.head_pool
    has_pooling = (
        config.get("vision_use_head", True) if source.config else any(x.endswith("head.probe") for x in source.shapes)
    )
    return "mean" if family is SIGLIP and not has_pooling else family.pools[0]


# ---- config.json


def image_config(source: RawCheckpoint) -> Mapping[str, Any]:
    """The part of the config about images: that of a pair with a text model is inside."""
    config = source.config.get("vision_config", source.config)
    if not isinstance(config, Mapping):
        raise UserError(f"'vision_config' in the config of {source.name} must be an object, not {config!r}")
    return config


def read_settings(source: RawCheckpoint, family: Family, config: Mapping[str, Any], is_gated: bool) -> FormatDefaults:
    """What a config has, and what its class assumes where it leaves something out; nothing without a config."""
    preprocess = read_preprocess(source)
    if not source.config:
        return FormatDefaults(preprocess=preprocess)
    pooler = config.get("pooler_act", "tanh")
    if pooler != "tanh":
        raise UserError(f"{source.name} has a pooler with {pooler!r}; only tanh is supported")
    names = {"heads": "num_attention_heads", "norm_eps": "layer_norm_eps", "rotary_base": "rope_theta"}
    hints = {"heads": int, "norm_eps": float, "rotary_base": float}
    values: dict[str, Any] = {}
    for ours, theirs in names.items():
        if config.get(theirs) is not None and (ours != "rotary_base" or family is DINOV3):
            values[ours] = check_value(config[theirs], hints[ours], f"{theirs} of {source.name}")
    stored = FormatDefaults(**values, gelu=read_gelu(source, family, config, is_gated), preprocess=preprocess)
    return stored.over(dataclasses.replace(family.default, preprocess=None))


def read_gelu(source: RawCheckpoint, family: Family, config: Mapping[str, Any], is_gated: bool) -> Gelu | None:
    act = config.get("hidden_act")
    if is_gated and family is not DINOV3:
        return "exact"  # DINOv2's gate is SiLU, whatever the config has
    if is_gated and act != "silu":
        raise UserError(f"{source.name} has gates with {act or 'gelu'!r}; only 'silu' is supported")
    if is_gated or act is None:
        return "exact" if is_gated else None
    if act not in list(ACTIVATIONS):
        raise UserError(f"{source.name} has the activation {act!r}; only GELU is supported")
    return ACTIVATIONS[act]


def read_labels(source: RawCheckpoint) -> object:
    """The class names, unless they are those that transformers fills in."""
    names = source.config.get("id2label")
    filled_in = default_labels(len(names)) if isinstance(names, Mapping | list) else {}
    return None if names in (filled_in, list(filled_in.values())) else names


def default_labels(classes: int) -> dict[str, str]:
    return {str(i): f"LABEL_{i}" for i in range(classes)}


# ---- writing


def lost(config: ModelConfig, card: Card, folder: bool) -> list[CardPart]:
    parts: list[CardPart] = ["thresholds", "temperature"]
    parts += [] if has_processor(config, card) else ["preprocess"]
    parts += ["labels"] if pick_family(config) is CLIP else []
    return parts_of(card, parts)


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    config, tensors = place_prefix(config, tensors)
    family = pick_family(config)
    c = check_family(config, family)
    if family is CLIP and c.classes and tensors["head.bias"].any():
        raise cannot_express(f"{NAME}'s {family.headed}", "a head with biases", "its projection has none")
    prefix = family.prefix if c.classes else family.bare_prefix
    theirs = from_vitlab(expand(family.rows(prefix, family.mlps[c.mlp_kind == "swiglu"]), c), tensors)
    theirs |= {prefix + name: tensor for name, tensor in empty_tensors(family, c, tensors).items()}
    save_tensors(theirs, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(describe_model(family, c, card), indent=2))
    if has_processor(c, card):
        text = json.dumps(describe_preprocess(c, card.preprocess), indent=2)
        (path / "preprocessor_config.json").write_text(text)


def place_prefix(c: ModelConfig, tensors: Mapping[str, Tensor]) -> tuple[ModelConfig, Mapping[str, Tensor]]:
    """A class token without a position as one whose position is zero, which every table here has a row for."""
    if not isinstance(c, ViTConfig) or c.prefix_positions != "none" or c.positions != "1d" or not c.token:
        return c, tensors
    table = tensors["positions.table"]
    placed = torch.cat([table.new_zeros(len(table), 1, c.width), table], 1)
    return dataclasses.replace(c, prefix_positions="token"), {**tensors, "positions.table": placed}


def pick_family(c: ModelConfig) -> Family:
    """The family whose classes are nearest to a model."""
    if not isinstance(c, ViTConfig):
        return VIT
    if c.rotary != "none":
        return DINOV3
    if c.norm_before:
        return CLIP
    if c.layer_scale:
        return DINOV2_REGISTERS if c.registers else DINOV2
    if c.pool in SIGLIP.pools:
        return SIGLIP
    return DEIT if c.registers else VIT


def check_family(config: ModelConfig, family: Family) -> ViTConfig:
    """Refuse a model that its family's classes would compute differently."""
    has_head = bool(config.classes)
    if has_head and not family.headed:
        raise cannot_express(f"{NAME}'s {family.body}", "a head", "load the model with classes=0 and save that")
    target = f"{NAME}'s {family.headed if has_head else family.body}"
    pools = (family.head_pool,) if has_head else family.pools
    c = check_vit(
        config,
        target,
        pools=pools,
        positions=(family.positions,),
        square=family.square,
        gelus=("exact", "tanh", "quick"),
        fields=family.holds,
    )
    for name, held in family.holds.items():
        value = getattr(c, name)
        if held is not None and value not in held and not (name == "prefix_positions" and c.positions == "none"):
            raise cannot_express(target, f"{name}={value!r}")
    if c.prelogits and (has_head or not family.pooler):
        raise cannot_express(target, "a pre-logits layer under a head" if has_head else "a pre-logits layer")
    if family in (DINOV2, DINOV2_REGISTERS) and not find_ratio(c):
        raise cannot_express(target, f"mlp={c.mlp}, only what an integer mlp_ratio gives")
    return c


def empty_tensors(family: Family, c: ViTConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a family's classes expect in a file and do not use for features; or registers where there are none."""
    shapes = {name: (1,) * (axes - 1) + (c.width,) for name, axes in family.zeros.items()}
    if family is DINOV3 and not c.registers:
        shapes[REGISTERS] = (1, 0, c.width)
    return {name: tensors["embed.weight"].new_zeros(shape) for name, shape in shapes.items()}


def describe_model(family: Family, c: ViTConfig, card: Card) -> dict[str, Any]:
    height, width = c.image_size
    gate = {"hidden_act": "silu"} if c.mlp_kind == "swiglu" and family is DINOV3 else {}
    body = {
        "image_size": height if height == width else [height, width],
        "num_channels": 3,
        "patch_size": c.patch,
        "hidden_size": c.width,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "hidden_act": GELUS[c.gelu],
        "layer_norm_eps": c.norm_eps,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": 0.0,
        **family.extra(c),
        **gate,
    }
    if not c.classes or family is CLIP:
        return {"architectures": [family.headed if c.classes else family.body], "model_type": family.kind, **body}
    labels = card.labels or default_labels(c.classes).values()
    names = {
        "id2label": {str(i): name for i, name in enumerate(labels)},
        "label2id": {name: i for i, name in enumerate(labels)},
    }
    if family is SIGLIP:
        body = {"vision_config": {"model_type": family.kind, **body}}
    kind = family.head_kind or family.kind
    return {"architectures": [family.headed], "model_type": kind, **body, **names}
