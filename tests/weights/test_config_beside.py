"""A config.json of timm or transformers beside a file of weights is read; another model's is not used."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from peers import agree, images, randomize
from safetensors.torch import save_file
from timm.models import save_for_hf
from transformers import ViTConfig as TheirConfig
from transformers import ViTForImageClassification, ViTImageProcessor

from vitlab.models.config import Preprocess, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save
from vitlab.weights.beside import beside_path

NAMES = ["ant", "bee", "cow"]
ODD = Preprocess((0.1, 0.25, 0.4), (0.3, 0.2, 0.6), "bilinear", "crop", 0.95)
ARGS: dict[str, Any] = {
    "depth": 1,
    "embed_dim": 64,
    "num_heads": 4,
    "img_size": 32,
    "num_classes": 3,
}  # by its width it has 1 head
FLAT: dict[str, Any] = {
    "arch": "vit_tiny_patch16_224",
    "embed_dim": 64,
    "depth": 1,
    "num_heads": 4,
    "image": 32,
    "num_classes": 3,
}
FLAT |= {"norm_eps": 1e-5, "mean": ODD.mean, "std": ODD.std, "crop_pct": 0.95, "interpolation": "bilinear"}


def timm_file(folder: Path) -> tuple[Any, Path]:
    """A model of timm and its state dict in a file of any name."""
    model = randomize(timm.create_model("vit_tiny_patch16_224", **ARGS))
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "any.safetensors")
    return model, folder / "any.safetensors"


def test_timms_own_config(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As timm writes it for the hub."""
    model, _ = timm_file(tmp_path)
    model.pretrained_cfg |= {"mean": ODD.mean, "std": ODD.std, "crop_pct": 0.95, "interpolation": "bilinear"}
    save_for_hf(model, str(tmp_path / "hub"), {"label_names": NAMES, "model_args": ARGS}, safe_serialization=True)
    (tmp_path / "hub" / "model.safetensors").rename(tmp_path / "hub" / "any.safetensors")
    with caplog.at_level(logging.INFO, "vitlab"):
        ours = load(tmp_path / "hub" / "any.safetensors")
    assert not caplog.text
    assert ours.card.preprocess == ODD
    assert ours.card.labels == tuple(NAMES)
    with torch.no_grad():
        agree(ours(images(32)), model(images(32)))


def test_fields_at_the_top(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, file = timm_file(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    with caplog.at_level(logging.INFO, "vitlab"):
        ours = load(file)
    assert not caplog.text
    assert ours.card.preprocess == ODD
    assert ours.config.norm_eps == 1e-5
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 1e-5
    with torch.no_grad():
        agree(ours(images(32)), model(images(32)))


def test_transformers_files(tmp_path: Path) -> None:
    names: dict[str, Any] = {"id2label": dict(enumerate(NAMES)), "label2id": {name: i for i, name in enumerate(NAMES)}}
    small: dict[str, Any] = {
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "intermediate_size": 80,
    }
    theirs = randomize(ViTForImageClassification(TheirConfig(**small, image_size=32, patch_size=8, **names)))
    theirs.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=list(ODD.mean)).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "any.safetensors")
    ours = load(tmp_path / "any.safetensors")
    assert ours.card.labels == tuple(NAMES)
    assert ours.card.preprocess.mean == ODD.mean
    with torch.no_grad():
        agree(ours(images(32)), theirs(images(32)).logits)


@pytest.mark.parametrize(
    "change",
    [{"embed_dim": 192}, {"num_classes": 1000}, {"depth": 12}, {"num_heads": "4"}, {"crop_mode": "border"}],
)
def test_the_config_of_another_model(change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _, file = timm_file(tmp_path)
    alone = load(file, heads=4)
    (tmp_path / "config.json").write_text(json.dumps(FLAT | change))
    with caplog.at_level(logging.INFO, "vitlab"):
        ours = load(file, heads=4 if "num_heads" not in change else None)
    assert "config.json is not used" in caplog.text
    assert ours.card.preprocess == alone.card.preprocess != ODD
    assert (ours.config == alone.config) == ("num_heads" not in change)


@pytest.mark.parametrize("text", ["{", "[]", '{"arch": 3}', '{"model_type": "bert"}', '{"name": "another program"}'])
def test_any_other_file_of_that_name(text: str, tmp_path: Path) -> None:
    _, file = timm_file(tmp_path)
    alone = load(file)
    (tmp_path / "config.json").write_text(text)
    ours = load(file)
    assert (ours.config, ours.card.preprocess) == (alone.config, alone.card.preprocess)


def test_what_vitlab_writes_beside_goes_first(tmp_path: Path) -> None:
    config = ViTConfig((32, 32), patch=16, depth=1, width=64, mlp=256, heads=4, classes=3)
    save(randomize(build(config)), tmp_path / "ours", preprocess=Preprocess(crop=0.5), labels=NAMES)
    convert(tmp_path / "ours", tmp_path / "any.safetensors", "timm")
    (tmp_path / "config.json").write_text(json.dumps(FLAT))
    assert load(tmp_path / "any.safetensors").card.preprocess == Preprocess(crop=0.5)
    beside_path(tmp_path / "any.safetensors").unlink()
    assert load(tmp_path / "any.safetensors").card.preprocess == ODD
    shutil.copy(tmp_path / "config.json", tmp_path / "ours" / "other.json")
    assert load(tmp_path / "ours" / "model.safetensors").card.preprocess == Preprocess(crop=0.5)
