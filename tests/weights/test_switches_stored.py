"""Switches of later families in files: kept to the bit by our own format, refused by those without a place for them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import images, randomize

from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.variants import build
from vitlab.models.vit import ViT
from vitlab.weights import convert, load, save
from vitlab.weights.formats.express import COMMON
from vitlab.weights.formats.table import expand, from_vitlab, row

VIT = ViTConfig(image_size=(32, 32), patch=8, depth=2, width=64, mlp=96, heads=1, classes=5)
FIELDS: dict[str, dict[str, Any]] = {
    "extra_token": {"pool": "mean", "extra_token": True},
    "registers": {"registers": 3},
    "prefix_positions": {"prefix_positions": "none"},
    "embed_bias": {"embed_bias": False},
    "norm_before": {"norm_before": True},
    "final_norm": {"final_norm": "pooled"},
    "layer_scale": {"layer_scale": True},
    "qkv_bias": {"qkv_bias": "qv"},
    "qk_norm": {"qk_norm": True},
    "attention_norm": {"attention_norm": True},
    "mlp_kind": {"mlp_kind": "swiglu"},
    "mlp_norm": {"mlp_norm": True},
    "rotary": {"rotary": "centers"},
    "rotary_layout": {"rotary": "cells", "rotary_layout": "halves"},
    "rotary_base": {"rotary": "cells", "rotary_base": 1e8},
    "rotary_grid": {"rotary": "cells", "rotary_grid": 7},
}
MORE: dict[str, dict[str, Any]] = {
    "all of them": {
        "pool": "token_mean",
        "registers": 2,
        "prefix_positions": "all",
        "embed_bias": False,
        "norm_before": True,
        "final_norm": "none",
        "layer_scale": True,
        "qkv_bias": "none",
        "qk_norm": True,
        "attention_norm": True,
        "mlp_kind": "swiglu",
        "mlp_norm": True,
        "rotary": "cells",
        "rotary_base": 100.5,
        "rotary_grid": 3,
    },
    "quick": {"gelu": "quick"},
}


def test_every_switch_has_a_case() -> None:
    assert set(FIELDS) == {f.name for f in dataclasses.fields(ViTConfig)} - COMMON


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [*FIELDS, *MORE])
def test_our_own_format_keeps_it(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = dataclasses.replace(VIT, **(FIELDS | MORE)[name])
    model = randomize(build(config), dtype)
    if isinstance(model, ViT) and model.rotary is not None:
        model.rotary.place(config)  # in this precision
    save(model, tmp_path / "run")
    back = load(tmp_path / "run")
    assert back.config == config
    assert back.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(x, back.state_dict()[key]) for key, x in model.state_dict().items())
    x = images((32, 32), dtype)
    with torch.no_grad():
        assert torch.equal(back(x), model(x))


@pytest.mark.parametrize("name", [*FIELDS, "quick"])
@pytest.mark.parametrize(
    ("to", "file"), [("google", "a.npz"), pytest.param("torchvision", "a.pth", marks=pytest.mark.slow)]
)
def test_formats_without_it_refuse_it(name: str, to: str, file: str, tmp_path: Path) -> None:
    save(build(dataclasses.replace(VIT, **(FIELDS | MORE)[name])), tmp_path / "run")
    with pytest.raises(UserError, match=f"{to} cannot express") as error:
        convert(tmp_path / "run", tmp_path / file, to)
    assert "\n" not in str(error.value)
    assert not (tmp_path / file).exists()


def test_a_tensor_without_a_name_in_the_target_is_an_error() -> None:
    model = build(dataclasses.replace(VIT, registers=2, classes=0))
    rows = [row(name, name) for name in model.state_dict() if name != "registers"]
    with pytest.raises(UserError, match="registers"):
        from_vitlab(expand(rows, model.config), model.state_dict())


def test_settings_of_rotary_positions_need_them(tmp_path: Path) -> None:
    save(build(VIT), tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "a.pth", "torchvision")
    with pytest.raises(UserError, match="without rotary"):
        load(tmp_path / "a.pth", rotary="cells")
    assert load(tmp_path / "a.pth", rotary="none").config == VIT
    with pytest.raises(UserError, match="class_token"):
        load(tmp_path / "a.pth", pool="mean")  # the file has a class token, which this format always pools by
