"""transformers' models loaded here and ours there, through `save_pretrained`: names in memory and files differ."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import agree, images, randomize
from safetensors.torch import load_file, save_file
from transformers import BitImageProcessor, ViTForImageClassification, ViTImageProcessor, ViTModel
from transformers import ViTConfig as TheirConfig

from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save

SMALL: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 130}
SMALL |= {"image_size": 32, "patch_size": 8, "num_labels": 7}
CASES: dict[str, dict[str, Any]] = {
    "B/16": {"image_size": 64, "num_hidden_layers": 2},
    "B/32": {"image_size": 64, "num_hidden_layers": 1, "patch_size": 32, "num_labels": 21},
    "Ti/16": {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768, "num_hidden_layers": 2},
    "small": SMALL,
    "tanh": {**SMALL, "hidden_act": "gelu_new", "layer_norm_eps": 1e-5},
    "not square": {**SMALL, "image_size": [32, 48]},
}
TYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]  # the stricter one is quick


def save_theirs(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("args", CASES.values(), ids=CASES.keys())
def test_load_theirs(args: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = randomize(ViTForImageClassification(TheirConfig(**args)), dtype)
    ours = load(save_theirs(theirs, tmp_path))
    x = images(ours.config.image_size, dtype)
    with torch.no_grad():
        agree(ours(x), theirs(x).logits)


@pytest.mark.parametrize("pooler", [True, False])
def test_vitmodel_is_a_model_without_a_head(pooler: bool, tmp_path: Path) -> None:
    theirs = randomize(ViTModel(TheirConfig(**SMALL, pooler_output_size=80), add_pooling_layer=pooler))
    ours = load(save_theirs(theirs, tmp_path))
    x = images(32)
    with torch.no_grad():
        out = theirs(x)
        agree(ours.tokens(x), out.last_hidden_state)
        agree(ours(x), out.pooler_output if pooler else out.last_hidden_state[:, 0])


@pytest.mark.parametrize("kind", [ViTForImageClassification, ViTModel])
def test_round_trip_is_bit_identical(kind: Any, tmp_path: Path) -> None:
    theirs = load_file(save_theirs(randomize(kind(TheirConfig(**SMALL))), tmp_path / "theirs") / "model.safetensors")
    convert(tmp_path / "theirs", tmp_path / "ours", "vitlab")
    convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[key], theirs[key]) for key in theirs)


VIT = ViTConfig((32, 48), patch=8, depth=2, width=96, mlp=200, heads=3, classes=5, norm_eps=1e-12)
OURS = {
    "plain": VIT,
    "tanh": dataclasses.replace(VIT, gelu="tanh", norm_eps=1e-6, heads=8),
    "square": dataclasses.replace(VIT, image_size=(32, 32)),
    "pooler": dataclasses.replace(VIT, classes=0, prelogits=64),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("config", OURS.values(), ids=OURS.keys())
def test_write_ours(config: ViTConfig, dtype: torch.dtype, tmp_path: Path) -> None:
    ours = randomize(build(config), dtype)
    save(ours, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    kind: Any = ViTForImageClassification if config.classes else ViTModel
    theirs, info = kind.from_pretrained(tmp_path / "theirs", dtype=dtype, output_loading_info=True)
    assert not any(info.values())  # nothing missing, unexpected or mismatched
    x = images(config.image_size, dtype)
    with torch.no_grad():
        out = theirs.eval()(x)
        agree(ours(x), out.logits if config.classes else out.pooler_output)
    assert load(tmp_path / "theirs").config == config


def test_names_in_memory_are_read_too(tmp_path: Path) -> None:
    theirs = randomize(ViTForImageClassification(TheirConfig(**SMALL)))
    torch.save(theirs.state_dict(), tmp_path / "memory.pth")
    ours = load(tmp_path / "memory.pth", heads=4)  # a bare file has no config with it
    x = images(32)
    with torch.no_grad():
        agree(ours(x), theirs(x).logits)


def test_labels_and_preprocessing_are_read(tmp_path: Path) -> None:
    names = ["ant", "bee", "cow", "doe", "elk", "fox", "gnu"]
    theirs = ViTForImageClassification(TheirConfig(**SMALL, id2label=dict(enumerate(names))))
    theirs.save_pretrained(tmp_path)
    ViTImageProcessor(size={"height": 32, "width": 32}, resample=3, image_mean=[0.1] * 3).save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert ours.card.labels == tuple(names)
    assert ours.card.preprocess == Preprocess(mean=(0.1, 0.1, 0.1), interpolation="bicubic", fit="stretch")


@pytest.mark.parametrize("fit", ["crop", "stretch"])
def test_their_processor_reads_our_preprocessing(fit: Any, tmp_path: Path) -> None:
    preprocess = Preprocess(mean=(0.1, 0.2, 0.3), interpolation="bicubic", fit=fit, crop=0.8)
    labels = ["a", "b", "c", "d", "e"]
    save(build(OURS["square"]), tmp_path / "ours", preprocess=preprocess, labels=labels)
    convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    kind = BitImageProcessor if fit == "crop" else ViTImageProcessor
    made = kind.from_pretrained(tmp_path / "theirs")
    photo = torch.randint(0, 256, (3, 50, 80), dtype=torch.uint8)
    assert made(photo, return_tensors="pt")["pixel_values"].shape == (1, 3, 32, 32)
    assert list(made.image_mean) == [0.1, 0.2, 0.3]
    back = load(tmp_path / "theirs")
    assert dataclasses.replace(back.card.preprocess, crop=0.8) == preprocess
    if fit == "crop":
        assert back.card.preprocess.crop == 0.8  # 32 of 40 pixels
    assert back.card.labels == tuple(labels)


def test_default_labels_are_no_labels(tmp_path: Path) -> None:
    assert load(save_theirs(ViTForImageClassification(TheirConfig(**SMALL)), tmp_path)).card.labels is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model_type", "deit"),
        ("hidden_act", "relu"),
        ("layer_norm_eps", "small"),
        ("num_attention_heads", 5),
        ("num_attention_heads", "4"),
        ("image_size", 40),
        ("image_size", ["32"]),
        ("id2label", {"0": 1}),
        ("pooler_act", "relu"),
    ],
)
def test_a_config_that_does_not_match_is_refused(key: str, value: Any, tmp_path: Path) -> None:
    save_theirs(ViTForImageClassification(TheirConfig(**SMALL)), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(UserError, match=str(tmp_path)):
        load(tmp_path)


def test_models_without_some_biases_are_refused_by_name(tmp_path: Path) -> None:
    save_theirs(ViTForImageClassification(TheirConfig(**SMALL)), tmp_path)
    file = tmp_path / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith("key.bias")}
    save_file(kept, file)
    with pytest.raises(UserError, match=r"encoder\.layer\.0-1\.attention\.attention\.key\.bias.*missing"):
        load(tmp_path)
