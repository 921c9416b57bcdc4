"""The same models in other packages: built from the same config, with as many parameters, or left out."""

import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.names import name_of

# What timm has under a name alone.
TIMM_NAMES = {
    "R+Ti/16": "vit_tiny_r_s16_p8_224",
    "R26+S/32": "vit_small_r26_s32_224",
    "R50+B/16": "vit_base_r50_s16_224",
    "R50+L/32": "vit_large_r50_s32_224",
    "R50x1": "resnetv2_50x1_bit",
    "R101x1": "resnetv2_101x1_bit",
    "R152x2": "resnetv2_152x2_bit",
    "R152x4": "resnetv2_152x4_bit",
}


class NotThere(Exception):
    """A package is not installed, or has no such model; the message is the reason."""


class LogitsOf(nn.Module):
    """A model of transformers as one that returns logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images).logits


def timm_model(c: ModelConfig) -> nn.Module:
    timm: Any = import_module("timm")
    if isinstance(c, ResNetConfig) or c.stem is not None:
        name = TIMM_NAMES.get(name_of(c) or "")
        if name is None:
            raise NotThere("has no such model")
        size = {} if isinstance(c, ResNetConfig) else {"img_size": c.image_size}
        return timm.create_model(name, num_classes=c.classes, **size)
    return timm.models.vision_transformer.VisionTransformer(
        img_size=c.image_size,
        patch_size=c.patch,
        embed_dim=c.width,
        depth=c.depth,
        num_heads=c.heads,
        mlp_ratio=math.nextafter(c.mlp / c.width, math.inf),  # it rounds width * ratio down
        num_classes=c.classes,
    )


def transformers_model(c: ModelConfig) -> nn.Module:
    transformers: Any = import_module("transformers")
    vit = check_plain(c)
    config = transformers.ViTConfig(
        image_size=vit.image_size[0],
        patch_size=vit.patch,
        hidden_size=vit.width,
        intermediate_size=vit.mlp,
        num_hidden_layers=vit.depth,
        num_attention_heads=vit.heads,
        num_labels=vit.classes,
        layer_norm_eps=vit.norm_eps,
    )
    return LogitsOf(transformers.ViTForImageClassification(config))


def torchvision_model(c: ModelConfig) -> nn.Module:
    torchvision: Any = import_module("torchvision")
    vit = check_plain(c)
    return torchvision.models.VisionTransformer(
        image_size=vit.image_size[0],
        patch_size=vit.patch,
        num_layers=vit.depth,
        num_heads=vit.heads,
        hidden_dim=vit.width,
        mlp_dim=vit.mlp,
        num_classes=vit.classes,
    )


PEERS: dict[str, Callable[[ModelConfig], nn.Module]] = {
    "timm": timm_model,
    "transformers": transformers_model,
    "torchvision": torchvision_model,
}


def check_plain(c: ModelConfig) -> ViTConfig:
    """A transformer without a stem, for square images."""
    if isinstance(c, ResNetConfig) or c.stem is not None:
        raise NotThere("has no such model")
    if c.image_size[0] != c.image_size[1]:
        raise NotThere("takes square images alone")
    return c


def make_peer(name: str, config: ModelConfig, parameters: int) -> nn.Module:
    """The same model of another package, with fresh weights; raises NotThere, with the reason, where it has none."""
    try:
        model = PEERS[name](config)
    except ImportError:
        raise NotThere("is not installed") from None
    count = sum(p.numel() for p in model.parameters())
    if count != parameters:
        raise NotThere(f"has another model of that name, with {count:,} parameters instead of {parameters:,}")
    return model


def version_of(name: str) -> str:
    """The version without the build that follows a plus."""
    return str(import_module(name).__version__).partition("+")[0]
