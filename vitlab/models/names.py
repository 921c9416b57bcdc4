"""The paper's models by name, as configs. Nothing here imports torch.

size/patch         B/16, L/32, H/14, Ti/8 ...   any size with any patch
stem+size/patch    R50+B/16, R26+S/32, R+Ti/16  a ResNet stem before it
RdepthxFactor      R50x1, R152x4                BiT ResNets
"""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ResNetConfig, StemConfig, ViTConfig, as_size
from vitlab.settings import annotations, from_json
from vitlab.text import listed

#        layers, width, MLP, heads
SIZES = {
    "Ti": (12, 192, 768, 3),
    "S": (12, 384, 1536, 6),
    "B": (12, 768, 3072, 12),
    "L": (24, 1024, 4096, 16),
    "H": (32, 1280, 5120, 16),
    "g": (40, 1408, 6144, 16),
}
STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3), 200: (3, 24, 36, 3)}
# Stages of a stem with stride 32; for stride 16 the fourth stage's units move into the third.
STEMS = {"R": (), "R26": (2, 2, 2, 2), "R50": STAGES[50]}
ROOT_PATCH = 8  # the stem "R" is a root alone, under 8x8 patches: stride 32, though its public name has /16

LISTED = (
    *("Ti/16", "S/16", "S/32", "B/16", "B/32", "L/16", "L/32", "H/14", "g/14"),
    *("R+Ti/16", "R26+S/32", "R50+B/16", "R50+B/32", "R50+L/16", "R50+L/32"),
    *("R50x1", "R50x2", "R101x1", "R152x1", "R152x2", "R200x3", "R152x4"),
)

BY_NAME = ("patch", "stem")  # what a model's name decides
GRAMMAR = "size/patch (B/16), stem+size/patch (R50+B/16) or a ResNet (R50x1)"


def create_keys() -> dict[str, Any]:
    """The settings that `create` takes, with their annotations."""
    return {key: hint for key, hint in annotations(ViTConfig).items() if key not in BY_NAME}


def configure(name: str, settings: Mapping[str, Any]) -> ModelConfig:
    """The config of a variant with settings of its own; None stands for the variant's value."""
    given = {key: value for key, value in settings.items() if value is not None}
    given["image_size"] = as_size(given.get("image_size", 224))
    if match := re.fullmatch(r"R(\d+)x(\d+)", name):
        return resnet_config(name, int(match[1]), int(match[2]), given)
    if match := re.fullmatch(r"(?:(\w+)\+)?([A-Za-z]+)/(\d+)", name):
        return vit_config(name, match[1], match[2], int(match[3]), given)
    raise UserError(f"'{name}' is not a model; write {GRAMMAR}, with the sizes {listed(SIZES)}")


def resnet_config(name: str, depth: int, factor: int, given: dict[str, Any]) -> ResNetConfig:
    if depth not in STAGES or factor < 1:
        raise UserError(f"there is no ResNet '{name}'; the depths are {listed(STAGES)}, as in R50x1")
    for key in given:
        if key not in {field.name for field in dataclasses.fields(ResNetConfig)} - {"width"}:
            raise UserError(f"{name} is a ResNet and has no setting '{key}'")
    return from_json(ResNetConfig, {"stages": STAGES[depth], "width": 64 * factor, **given})


def vit_config(name: str, stem: str | None, size: str, stride: int, given: dict[str, Any]) -> ViTConfig:
    if size not in SIZES:
        raise UserError(f"there is no size '{size}' (in '{name}'); the sizes are {listed(SIZES)}")
    depth, width, mlp, heads = SIZES[size]
    fields: dict[str, Any] = {"depth": depth, "width": width, "mlp": mlp, "heads": heads, "patch": stride}
    if stem is not None:
        fields["stem"], fields["patch"] = stem_config(name, stem, stride)
    if given.get("attention") == "axial":
        fields["pool"] = "mean"
    return from_json(ViTConfig, fields | given)


def stem_config(name: str, stem: str, stride: int) -> tuple[StemConfig, int]:
    """The stem and the patch on its map."""
    if stem not in STEMS:
        raise UserError(f"there is no stem '{stem}' (in '{name}'); the stems are {listed(STEMS)}")
    if stride not in (16, 32):
        raise UserError(f"hybrids have patches of 16 or 32, not {stride} (in '{name}')")
    stages = STEMS[stem]
    if not stages:
        return StemConfig(()), ROOT_PATCH
    first, second, third, fourth = stages
    return StemConfig(stages if stride == 32 else (first, second, third + fourth)), 1


def name_of(config: ModelConfig) -> str | None:
    """The name by which `configure` makes a model of this shape; None if there is none."""
    if isinstance(config, ResNetConfig):
        depth = next((depth for depth, stages in STAGES.items() if stages == config.stages), None)
        return f"R{depth}x{config.width // 64}" if depth and config.width % 64 == 0 else None
    shape = config.depth, config.width, config.mlp, config.heads
    size = next((name for name, row in SIZES.items() if row == shape), None)
    if size is None or config.stem is None:
        return size and f"{size}/{config.patch}"
    for stem, stride in itertools.product(STEMS, (16, 32)):
        made, patch = stem_config(size, stem, stride)
        if (made.stages, patch) == (config.stem.stages, config.patch):
            return f"{stem}+{size}/{stride}"
    return None
