"""torchvision's vit_* loaded here and ours there."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from families import mostly_slow
from peers import agree, empty, images, randomize
from safetensors.torch import load_file, save_file
from torchvision.models import VisionTransformer

from vitlab.models.config import ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save

SMALL = {"image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 128, "mlp_dim": 200}
TYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]  # the stricter one is quick


def make(name: str) -> Any:
    small: dict[str, Any] = {**SMALL, "num_classes": 9}
    kinds = {
        "b_16": lambda: VisionTransformer(64, 16, 1, 12, 768, 3072),
        "b_32": lambda: VisionTransformer(64, 32, 1, 12, 768, 3072),
        "small": lambda: VisionTransformer(**small),
        "pre-logits": lambda: VisionTransformer(**small, representation_size=50),
    }
    return empty(kinds[name])


NAMES = ["b_16", "b_32", "small", "pre-logits"]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", mostly_slow(NAMES, "small", "pre-logits"))
def test_load_theirs(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = randomize(make(name), dtype)
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours = load(tmp_path / "theirs.pth")
    x = images(theirs.image_size, dtype)
    with torch.no_grad():
        agree(ours(x), theirs(x))
    assert ours.card.preprocess.mean == (0.485, 0.456, 0.406)


@pytest.mark.parametrize("ending", ["safetensors", "pth"])
@pytest.mark.parametrize("name", NAMES[2:])
def test_round_trip_is_bit_identical(name: str, ending: str, tmp_path: Path) -> None:
    theirs = randomize(make(name)).state_dict()
    save_file(theirs, tmp_path / "theirs.safetensors")
    convert(tmp_path / "theirs.safetensors", tmp_path / "ours", "vitlab")
    back = tmp_path / f"back.{ending}"
    convert(tmp_path / "ours", back, "torchvision")
    tensors = load_file(back) if ending == "safetensors" else torch.load(back)
    assert tensors.keys() == theirs.keys()
    assert all(torch.equal(tensors[key], theirs[key]) for key in theirs)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("prelogits", [0, 40])
def test_write_ours(prelogits: int, dtype: torch.dtype, tmp_path: Path) -> None:
    config = ViTConfig((32, 32), patch=8, depth=2, width=96, mlp=200, heads=3, classes=5, prelogits=prelogits)
    ours = randomize(build(config), dtype)
    save(ours, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs.pth", "torchvision")
    theirs = VisionTransformer(32, 8, 2, 3, 96, 200, num_classes=5, representation_size=prelogits or None).to(dtype)
    theirs.load_state_dict(torch.load(tmp_path / "theirs.pth"), strict=True)
    x = images(32, dtype)
    with torch.no_grad():
        agree(ours(x), theirs.eval()(x))
    assert dataclasses.replace(load(tmp_path / "theirs.pth", heads=3).config) == config
