"""transformers' ViTForImageClassification and ViTModel: a folder with config.json and preprocessor_config.json.

ViTModel's pooler, a dense layer with tanh on the class token, is our pre-logits layer without a head. Since version 5
the names in memory differ from those in files; both are read, the files' are written.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import save_tensors
from vitlab.models.card import Card
from vitlab.models.config import Gelu, Interpolation, ModelConfig, Preprocess, Size, ViTConfig, as_size
from vitlab.settings import from_json
from vitlab.weights.formats.base import FormatDefaults, ParsedCheckpoint, RawCheckpoint
from vitlab.weights.formats.express import cannot_express, check_vit
from vitlab.weights.formats.shapes import count, read_vit
from vitlab.weights.formats.table import Row, Transform, expand, from_vitlab, pair, row

NAME = "huggingface"
SUFFIXES = ("",)
PREPROCESS = Preprocess(fit="stretch")
DEFAULT = FormatDefaults(gelu="exact", norm_eps=1e-12, preprocess=PREPROCESS)
ACTIVATIONS: dict[str, Gelu] = {"gelu": "exact", "gelu_new": "tanh", "gelu_pytorch_tanh": "tanh"}
RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
PATCHES = "embeddings.patch_embeddings.projection"
JOIN3 = Transform(lambda xs: [torch.cat(list(xs))], lambda xs: xs[0].chunk(3))  # queries, keys and values

# The names of a block's parts, in files and in memory.
FILE = (
    *("encoder.layer", "attention.attention.query", "attention.attention.key", "attention.attention.value"),
    *("attention.output.dense", "intermediate.dense", "output.dense"),
)
MEMORY = (
    *("layers", "attention.q_proj", "attention.k_proj", "attention.v_proj"),
    *("attention.o_proj", "mlp.fc1", "mlp.fc2"),
)


def table(prefix: str, names: tuple[str, ...] = FILE) -> list[Row]:
    layer, *qkv, out, up, down = names
    block = f"{prefix}{layer}.#"
    weights, biases = (tuple(f"{block}.{name}.{part}" for name in qkv) for part in ("weight", "bias"))
    return [
        *pair("embed", f"{prefix}{PATCHES}"),
        row("token", f"{prefix}embeddings.cls_token"),
        row("positions.table", f"{prefix}embeddings.position_embeddings"),
        *pair("blocks.#.norm1", f"{block}.layernorm_before"),
        Row(("blocks.#.attention.qkv.weight",), weights, JOIN3),
        Row(("blocks.#.attention.qkv.bias",), biases, JOIN3),
        *pair("blocks.#.attention.out", f"{block}.{out}"),
        *pair("blocks.#.norm2", f"{block}.layernorm_after"),
        *pair("blocks.#.mlp.up", f"{block}.{up}"),
        *pair("blocks.#.mlp.down", f"{block}.{down}"),
        *pair("norm", f"{prefix}layernorm"),
        *pair("prelogits", f"{prefix}pooler.dense"),
        *pair("head", "classifier"),
    ]


# ---- reading


def recognizes(source: RawCheckpoint) -> bool:
    return any(name.removeprefix("vit.") == f"{PATCHES}.weight" for name in source.shapes)


def read(source: RawCheckpoint, given: FormatDefaults, image_size: Size | None) -> ParsedCheckpoint:
    kind = source.config.get("model_type", "vit")
    if kind != "vit":
        raise UserError(f"{source.name} is a {kind!r} of transformers; of its models only 'vit' is supported")
    prefix = "vit." if f"vit.{PATCHES}.weight" in source.shapes else ""
    names = MEMORY if count(source, f"{prefix}layers.#.") else FILE
    known = given.over(read_settings(source))
    size = source.config.get("image_size")
    config_size = None if size is None else as_size(size)
    labels = read_labels(source)
    return read_vit(source, table(prefix, names), known, DEFAULT, image_size, config_size=config_size, labels=labels)


def read_settings(source: RawCheckpoint) -> FormatDefaults:
    act = source.config.get("hidden_act")
    if act is not None and act not in list(ACTIVATIONS):
        raise UserError(f"{source.name} has the activation {act!r}; only GELU is supported")
    pooler = source.config.get("pooler_act", "tanh")
    if pooler != "tanh":
        raise UserError(f"{source.name} has a pooler with {pooler!r}; only tanh is supported")
    eps = source.config.get("layer_norm_eps")
    if eps is not None and not isinstance(eps, int | float):
        raise UserError(f"layer_norm_eps of {source.name} must be a number, not {eps!r}")
    return FormatDefaults(
        heads=source.config.get("num_attention_heads"),
        gelu=None if act is None else ACTIVATIONS[act],
        norm_eps=eps,
        preprocess=read_preprocess(source),
    )


def read_preprocess(source: RawCheckpoint) -> Preprocess | None:
    data = source.processor
    if not data:
        return None
    resample = data.get("resample", 2)
    if resample not in list(RESAMPLE):
        raise UserError(f"{source.name} prepares images by resample={resample!r}; 0, 1, 2 and 3 are supported")
    fields: dict[str, Any] = {"interpolation": RESAMPLE[resample], "fit": "stretch"}
    edge, crop = find_side(data.get("size"), "shortest_edge"), data.get("crop_size")
    cut = min(find_side(crop, "height"), find_side(crop, "width"))
    if edge and cut and data.get("do_center_crop", True):
        fields |= {"fit": "crop", "crop": find_share(cut, edge, data.get("crop_pct"))}
    elif edge:
        fields |= {"fit": "crop", "crop": 1.0}
    normal = data.get("do_normalize", True)
    mean, std = data.get("image_mean", [0.5] * 3), data.get("image_std", [0.5] * 3)
    fields |= {"mean": mean, "std": std} if normal else {"mean": [0.0] * 3, "std": [1.0] * 3}
    scale = data.get("rescale_factor", 1 / 255)
    if not isinstance(scale, int | float) or abs(scale * 255 - 1) > 1e-6:
        raise UserError(f"{source.name} scales pixels by {scale!r}; only 1/255 is supported")
    return from_json(Preprocess, fields)


def find_side(size: object, key: str) -> int:
    """The length under a key of a processor's `size`, or 0."""
    value = size.get(key) if isinstance(size, Mapping) else None
    return value if type(value) is int and value > 0 else 0


def find_share(cut: int, edge: int, stored: object) -> float:
    """What share `cut` is of a scaled side of `edge` pixels: of those that give this side back, the shortest number.

    224 of 248 is 0.9, which scales to 248; 224 / 248 may not, by rounding. A stored share that fits is kept.
    """
    if isinstance(stored, float) and 0 < stored <= 1 and int(cut / stored) == edge:
        return stored
    if cut >= edge:
        return 1.0
    for digits in range(1, 16):
        share = math.floor(cut / edge * 10**digits) / 10**digits
        if share and int(cut / share) == edge:
            return share
    return math.nextafter(cut / edge, 0)


def read_labels(source: RawCheckpoint) -> object:
    """The class names, unless they are those that transformers fills in."""
    names = source.config.get("id2label")
    filled_in = default_labels(len(names)) if isinstance(names, Mapping | list) else {}
    return None if names in (filled_in, list(filled_in.values())) else names


def default_labels(classes: int) -> dict[str, str]:
    return {str(i): f"LABEL_{i}" for i in range(classes)}


# ---- writing


def holds_card(config: ModelConfig, card: Card, folder: bool) -> bool:
    return card.thresholds is None and card.temperature == 1 and has_processor(config, card)


def has_processor(config: ModelConfig, card: Card) -> bool:
    """None of transformers' processors scales a photo to cover an input that is not square; theirs would pad it."""
    height, width = config.image_size
    return card.preprocess.fit == "stretch" or height == width


def write(config: ModelConfig, tensors: Mapping[str, Tensor], card: Card, path: Path) -> None:
    c = check_vit(config, NAME)
    if c.classes and c.prelogits:
        raise cannot_express(NAME, "a pre-logits layer under a head")
    theirs = from_vitlab(expand(table("vit." if c.classes else ""), c), tensors)
    save_tensors(theirs, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(describe_model(c, card), indent=2))
    if has_processor(c, card):
        text = json.dumps(describe_preprocess(c, card.preprocess), indent=2)
        (path / "preprocessor_config.json").write_text(text)


def describe_model(c: ViTConfig, card: Card) -> dict[str, Any]:
    labels = card.labels or default_labels(c.classes).values()
    height, width = c.image_size
    data: dict[str, Any] = {
        "architectures": ["ViTForImageClassification" if c.classes else "ViTModel"],
        "model_type": "vit",
        "image_size": height if height == width else [height, width],
        "num_channels": 3,
        "patch_size": c.patch,
        "hidden_size": c.width,
        "intermediate_size": c.mlp,
        "num_hidden_layers": c.depth,
        "num_attention_heads": c.heads,
        "hidden_act": "gelu_pytorch_tanh" if c.gelu == "tanh" else "gelu",
        "layer_norm_eps": c.norm_eps,
        "qkv_bias": True,
        "hidden_dropout_prob": c.dropout,
        "attention_probs_dropout_prob": 0.0,
    }
    if c.prelogits:
        data |= {"pooler_output_size": c.prelogits, "pooler_act": "tanh"}
    if c.classes:
        data |= {"id2label": {str(i): name for i, name in enumerate(labels)}}
        data |= {"label2id": {name: i for i, name in enumerate(labels)}}
    return data


def describe_preprocess(c: ViTConfig, p: Preprocess) -> dict[str, Any]:
    height, width = c.image_size
    data: dict[str, Any] = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(p.mean),
        "image_std": list(p.std),
        "resample": next(number for number, name in RESAMPLE.items() if name == p.interpolation),
        "size": {"height": height, "width": width},
    }
    if p.fit == "crop":
        data |= {
            "image_processor_type": "BitImageProcessor",  # ViT's own cannot crop
            "size": {"shortest_edge": int(height / p.crop)},  # as evaluation scales: down to an integer
            "do_center_crop": True,
            "crop_size": {"height": height, "width": width},
            "crop_pct": p.crop,  # for us alone: at another image size the share counts
        }
    return data
