"""What a format can express and what it cannot; the command line."""

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import head_of, randomize, vit_config
from safetensors.torch import load_file

from vitlab.errors import UserError
from vitlab.models.config import ResNetConfig, StemConfig, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save
from vitlab.weights.beside import beside_path

VIT = ViTConfig((16, 16), patch=8, depth=1, width=32, mlp=40, heads=2, classes=3)
TIMM_STEM = StemConfig((1, 1), 32, "variance", 1e-8, 1e-5)
BIT = ResNetConfig((32, 32), (1, 1), 32, classes=3)


def vit(**fields: Any) -> ViTConfig:
    return dataclasses.replace(VIT, **fields)


REFUSED: list[tuple[str, Any, str]] = [
    *[(to, vit(positions="relative"), "relative") for to in ("timm", "huggingface", "torchvision", "google")],
    *[(to, vit(positions="2d"), "2d") for to in ("timm", "huggingface", "torchvision", "google")],
    *[(to, vit(placement="shared"), "shared") for to in ("timm", "huggingface", "torchvision", "google")],
    *[(to, vit(attention="axial", pool="mean"), "axial") for to in ("timm", "huggingface", "torchvision", "google")],
    ("torchvision", vit(pool="mean"), "mean"),
    *[(to, vit(pool="attention"), "attention") for to in ("huggingface", "torchvision", "google")],
    *[(to, vit(stem=TIMM_STEM, patch=1), "stem") for to in ("timm", "huggingface", "torchvision")],
    *[(to, BIT, "ResNet") for to in ("huggingface", "torchvision")],
    *[(to, dataclasses.replace(BIT, attention="axial"), "axial attention") for to in ("timm", "google")],
    *[(to, vit(norm_eps=1e-12), "norm_eps=1e-12") for to in ("timm", "torchvision", "google")],
    ("torchvision", vit(image_size=(16, 24)), "16x24"),
    ("timm", vit(prelogits=9), "pre-logits"),
    ("timm", vit(attention="axial", pool="mean", positions="none"), "axial"),
    ("huggingface", vit(prelogits=9), "pre-logits"),
    ("torchvision", vit(gelu="tanh"), "gelu=tanh"),
    ("torchvision", vit(classes=0), "head"),
    ("google", VIT, "gelu=exact"),
    ("google", vit(gelu="tanh", stem=TIMM_STEM, patch=1), "group_eps=1e-05"),
    ("timm", BIT, "standardize_eps=1e-10"),
    ("google", dataclasses.replace(BIT, standardize="sigma"), "standardize=sigma"),
    ("timm", dataclasses.replace(BIT, standardize_eps=1e-8), "stages"),  # no architecture of this shape, see below
]
ENDINGS = {"torchvision": "x.pth", "google": "x.npz"}


@pytest.mark.parametrize(("to", "config", "part"), REFUSED)
def test_what_a_target_cannot_express_is_named(to: str, config: Any, part: str, tmp_path: Path) -> None:
    save(build(config), tmp_path / "ours")
    with pytest.raises(UserError, match=f"cannot express.*{part}"):
        convert(tmp_path / "ours", tmp_path / ENDINGS.get(to, "x"), to)
    assert [p.name for p in tmp_path.iterdir()] == ["ours"]  # and nothing is left behind


def test_a_file_alone_expresses_less_than_a_folder_or_more(tmp_path: Path) -> None:
    save(build(vit(gelu="tanh")), tmp_path / "tanh")
    convert(tmp_path / "tanh", tmp_path / "folder", "timm")
    with pytest.raises(UserError, match="gelu=tanh"):
        convert(tmp_path / "tanh", tmp_path / "file.safetensors", "timm")
    save(build(dataclasses.replace(BIT, standardize_eps=1e-8)), tmp_path / "bit")
    convert(tmp_path / "bit", tmp_path / "bit.safetensors", "timm")


def test_a_difference_can_be_accepted_by_name(tmp_path: Path) -> None:
    model = randomize(build(vit(norm_eps=1e-12)))
    save(model, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs.npz", "google", norm_eps=1e-6, gelu="tanh")
    back = load(tmp_path / "theirs.npz")
    assert (vit_config(back).gelu, back.config.norm_eps) == ("tanh", 1e-6)
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in back.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("to", ["timm", "huggingface", "torchvision", "google"])
def test_every_precision_survives(to: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config = vit(gelu="tanh") if to == "google" else VIT
    model = randomize(build(config), dtype)
    save(model, tmp_path / "ours")
    target = tmp_path / ENDINGS.get(to, "x")
    if to == "google" and dtype == torch.bfloat16:
        with pytest.raises(UserError, match="bfloat16"):
            convert(tmp_path / "ours", target, to)
        return
    convert(tmp_path / "ours", target, to)
    convert(target, tmp_path / "back", "vitlab", heads=2)
    weights = [tmp_path / name / "model.safetensors" for name in ("ours", "back")]
    ours, back = map(load_file, weights)
    assert ours.keys() == back.keys()
    assert all(torch.equal(ours[key], back[key]) and back[key].dtype == dtype for key in ours)
    assert head_of(load(tmp_path / "back")).bias.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize(
    ("target", "to", "message"),
    [("x", "keras", "no format 'keras'"), ("x", "google", ".npz"), ("x.npz", "torchvision", ".pth")],
)
def test_wrong_targets(target: str, to: str, message: str, tmp_path: Path) -> None:
    save(build(VIT), tmp_path / "ours")
    with pytest.raises(UserError, match=message):
        convert(tmp_path / "ours", tmp_path / target, to)


def test_convert_does_not_resample(tmp_path: Path) -> None:
    save(build(VIT), tmp_path / "ours")
    with pytest.raises(UserError, match="resample"):
        convert(tmp_path / "ours", tmp_path / "x", "vitlab", image_size=32)


def test_the_command(
    command: Callable[..., tuple[int, str, str]], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    ours, bare, back = (str(tmp_path / name) for name in ("ours", "x.safetensors", "back"))
    save(build(VIT), ours)
    convert(ours, bare, "timm")
    beside_path(Path(bare)).unlink()  # a file as others write it
    with caplog.at_level(logging.INFO, "vitlab"):
        code, _, err = command("convert", bare, back, "--to", "huggingface", "norm_eps=1e-5", "heads=4")
    assert code == 0, err
    assert "gelu" in caplog.text  # what the file does not have is reported
    assert load(back).config.norm_eps == 1e-5
    assert vit_config(load(back)).heads == 4
    code, _, err = command("convert", ours, str(tmp_path / "y.npz"), "--to", "google")
    assert code == 1
    assert "gelu" in err
