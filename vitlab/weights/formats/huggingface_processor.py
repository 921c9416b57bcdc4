"""preprocessor_config.json, transformers' description of how photos become a model's input."""

import logging
import math
import re
from collections.abc import Mapping
from typing import Any

from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.models.config import Interpolation, ModelConfig, Preprocess, ViTConfig
from vitlab.settings import from_json
from vitlab.weights.formats.base import RawCheckpoint

RESAMPLE: dict[int, Interpolation] = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# What the classes do where a file leaves it out.
HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
COLORS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # of CLIP's photos
CROPPED = {"size": {"shortest_edge": 224}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True}
CLASSES: dict[str, dict[str, Any]] = {
    "ViT": {"resample": 2, **HALF},
    "DeiT": {"resample": 3, **HALF, **CROPPED, "size": {"height": 256, "width": 256}},
    "CLIP": {"resample": 3, **COLORS, **CROPPED},
    "Bit": {"resample": 3, **COLORS, **CROPPED},
    "Siglip": {"resample": 3, **HALF},
    "DINOv3ViT": {"resample": 2, **IMAGENET},
}
LARGEST_EDGE = 1 << 20  # of a scaled photo; larger numbers are an attack on our arithmetic
BY_SHORTER_SIDE = ("CLIP", "Bit", "Siglip")  # what one number as a size is to these
log = logging.getLogger("vitlab")


def read_preprocess(source: RawCheckpoint) -> Preprocess | None:
    if not source.processor:
        return None
    kind = find_class(source.processor)
    data = {**CLASSES[kind], **{key: value for key, value in source.processor.items() if value is not None}}
    resample = data["resample"]
    if resample not in list(RESAMPLE):
        raise UserError(f"{source.name} prepares images by resample={resample!r}; 0, 1, 2 and 3 are supported")
    scale = data.get("rescale_factor", 1 / 255) if data.get("do_rescale", True) else 1
    if not isinstance(scale, int | float) or abs(scale * 255 - 1) > 1e-6:
        raise UserError(f"{source.name} scales pixels by {scale!r}; only 1/255 is supported")
    normal = data.get("do_normalize", True)
    mean, std = (data["image_mean"], data["image_std"]) if normal else ([0.0] * 3, [1.0] * 3)
    fields = {"interpolation": RESAMPLE[resample], "mean": mean, "std": std, **read_framing(source, data, kind)}
    return from_json(Preprocess, fields)


def find_class(data: Mapping[str, Any]) -> str:
    """The class of a processor, without its ending; ViT's for all others."""
    name = data.get("image_processor_type", data.get("feature_extractor_type"))
    match = re.fullmatch(r"(\w+?)(ImageProcessor|FeatureExtractor)(Fast|Pil)?", name) if isinstance(name, str) else None
    return match[1] if match and match[1] in CLASSES else "ViT"


def read_framing(source: RawCheckpoint, data: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Whether photos are stretched, or cropped, and to which share."""
    size, crop = as_sides(data.get("size"), kind in BY_SHORTER_SIDE), as_sides(data.get("crop_size"), False)
    edge, side = find_side(size, "shortest_edge"), find_side(size, "height")
    cut = min(find_side(crop, "height"), find_side(crop, "width"))
    if cut and data.get("do_center_crop", bool(edge)) and (edge or side > cut):
        if not edge:
            log.info("%s stretches photos to a square and crops that; here they keep their shape", source.name)
        return {"fit": "crop", "crop": find_share(cut, edge or side, data.get("crop_pct"))}
    return {"fit": "crop", "crop": 1.0} if edge else {"fit": "stretch"}


def as_sides(size: object, shorter: bool) -> Mapping[str, Any]:
    """A processor's `size`; older files have one number, the shorter side to some classes and a square to others."""
    if type(size) is int:
        return {"shortest_edge": size} if shorter else {"height": size, "width": size}
    return size if isinstance(size, Mapping) else {}


def find_side(size: Mapping[str, Any], key: str) -> int:
    """The length under a key, or 0."""
    value = size.get(key)
    return value if type(value) is int and 0 < value <= LARGEST_EDGE else 0


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


# ---- writing


def has_processor(config: ModelConfig, card: Card) -> bool:
    """None of transformers' processors scales a photo to cover an input that is not square; theirs would pad it."""
    height, width = config.image_size
    return card.preprocess.fit == "stretch" or height == width


def describe_preprocess(c: ViTConfig, p: Preprocess) -> dict[str, Any]:
    """For two processors that all families share: each holds every value."""
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
