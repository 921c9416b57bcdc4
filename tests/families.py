"""One tiny config for each family of Vision Transformers, with all the switches that its models have."""

from collections.abc import Iterable
from typing import Any

import pytest

from vitlab.models.config import ViTConfig

FAMILIES: dict[str, dict[str, Any]] = {
    "CLIP": {"norm_before": True, "embed_bias": False, "gelu": "quick", "norm_eps": 1e-5},
    "SigLIP": {"pool": "attention", "gelu": "tanh"},
    "DINOv2": {"layer_scale": True, "pool": "token_mean"},
    "DINOv2 with registers": {"layer_scale": True, "registers": 4, "prefix_positions": "none"},
    "DINOv3": {
        "pool": "mean",
        "extra_token": True,
        "registers": 4,
        "prefix_positions": "none",
        "positions": "none",
        "rotary": "centers",
        "rotary_base": 100.0,
        "rotary_layout": "halves",
        "qkv_bias": "none",
        "layer_scale": True,
        "norm_eps": 1e-5,
    },
    "DINOv3, SwiGLU": {
        "registers": 4,
        "prefix_positions": "none",
        "positions": "none",
        "rotary": "centers",
        "rotary_base": 100.0,
        "rotary_layout": "halves",
        "qkv_bias": "none",
        "layer_scale": True,
        "mlp_kind": "swiglu",
    },
    "EVA-02": {
        "pool": "mean",
        "extra_token": True,
        "final_norm": "pooled",
        "rotary": "cells",
        "rotary_grid": 4,
        "qkv_bias": "qv",
        "mlp_kind": "swiglu",
        "mlp_norm": True,
        "attention_norm": True,
    },
    "DeiT III": {"layer_scale": True, "prefix_positions": "none"},
    "MAE": {"pool": "mean", "extra_token": True, "final_norm": "pooled", "positions": "sincos2d"},
    "registers with positions, q/k norm": {
        "registers": 2,
        "prefix_positions": "all",
        "qk_norm": True,
        "final_norm": "none",
        "rotary": "cells",
    },
}


def family(name: str, **settings: Any) -> ViTConfig:
    base: dict[str, Any] = {"image_size": (32, 48), "patch": 16, "depth": 2, "width": 24, "mlp": 32, "heads": 2}
    return ViTConfig(**(base | {"classes": 5} | FAMILIES[name] | settings))


# The other families have no switch that these lack: tests that are the same for all have them among the slow ones.
QUICK = ("CLIP", "DINOv2", "DINOv2 with registers", "DINOv3, SwiGLU", "EVA-02", "registers with positions, q/k norm")


def mostly_slow(names: Iterable[str], *quick: str) -> list[Any]:
    """Parameters of a test: some names in every run of the tests, the others in the slow ones."""
    names = list(names)
    assert set(quick) <= set(names)
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]
