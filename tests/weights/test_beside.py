"""Preprocessing and class names survive every format: in the file, or in the JSON beside it."""

import dataclasses
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import randomize
from photos import WEIGHTS, pets, photos
from PIL import Image
from torch import Tensor
from torchvision.models import VisionTransformer, ViT_B_16_Weights
from torchvision.transforms import Normalize

import vitlab
from vitlab.data.transforms import eval_pixels
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ResNetConfig, StemConfig, ViTConfig
from vitlab.models.variants import Model, build
from vitlab.weights import convert, load, save
from vitlab.weights.beside import beside_path

VIT = ViTConfig((32, 32), patch=8, depth=2, width=64, mlp=80, heads=4, classes=4)  # by its width it would have 1 head
ODD = Preprocess((0.1, 0.25, 0.4), (0.3, 0.2, 0.6), "bicubic", "crop", 0.95)
NAMES = ["ant", "bee", "cow", "dög"]
TARGETS = {
    "vitlab": ("run", "vitlab", {}),
    "transformers": ("hub", "huggingface", {}),
    "timm folder": ("timm", "timm", {}),
    "timm file": ("vit.safetensors", "timm", {}),
    "torchvision": ("vit.pth", "torchvision", {}),
    "google": ("vit.npz", "google", {"gelu": "tanh"}),
    "linen": ("vit.npz", "google", {"gelu": "tanh", "names": "linen"}),
    "big_vision": ("vit.npz", "google", {"gelu": "tanh", "names": "big_vision"}),
}


def probabilities(model: Model | Path, images: list[Image.Image]) -> Tensor:
    classifier = vitlab.Classifier(model, device="cpu")
    return classifier.probabilities(torch.stack([classifier.pixels(image) for image in images]))


SHORT: list[tuple[str, tuple[int, int], Any]] = [("transformers", (16, 64), None), ("timm file", (16, 64), None)]
SHORT += [("google", (48, 32), None), ("torchvision", (32, 32), None)]
SHORT += [*((target, (32, 32), NAMES) for target in TARGETS)]
LONG = [(target, size, labels) for target in TARGETS for size in ((16, 64), (48, 32)) for labels in (None, NAMES)]
LONG = [case for case in LONG if case not in SHORT and case[0] != "torchvision"]  # which has square inputs alone


@pytest.mark.parametrize(
    ("target", "size", "labels"), [*SHORT, *(pytest.param(*case, marks=pytest.mark.slow) for case in LONG)]
)
def test_round_trip(target: str, size: tuple[int, int], labels: Any, tmp_path: Path) -> None:
    name, to, options = TARGETS[target]
    gelu: Any = options.get("gelu", "exact")
    model = randomize(build(dataclasses.replace(VIT, image_size=size, gelu=gelu)))
    save(model, tmp_path / "ours", preprocess=ODD, labels=labels)
    convert(tmp_path / "ours", tmp_path / name, to, names=options.get("names"))
    back = load(tmp_path / name)
    assert back.config == model.config
    assert back.card.preprocess == ODD
    assert back.card.labels == (None if labels is None else tuple(labels))
    difference = probabilities(back, photos(5)) - probabilities(tmp_path / "ours", photos(5))
    assert difference.abs().max() <= 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("size", [(224, 224), (160, 224)])
def test_round_trip_of_real_weights(size: tuple[int, int], tmp_path: Path) -> None:
    """Photos through every format, with class names of our own and, where the input is not square, ImageNet's."""
    real = pets(8)
    labels = [f"name {i}" for i in range(1000)] if size == (224, 224) else None
    names = tuple(labels or ViT_B_16_Weights.IMAGENET1K_V1.meta["categories"])
    gelus: tuple[Any, ...] = ("exact", "tanh")
    for gelu in gelus:
        save(load(WEIGHTS, image_size=size, gelu=gelu), tmp_path / gelu, labels=labels)
    expected = {gelu: probabilities(tmp_path / gelu, real) for gelu in gelus}
    for target, (name, to, options) in TARGETS.items():
        if target == "torchvision" and size != (224, 224):
            continue
        gelu, place = options.get("gelu", "exact"), tmp_path / target / name
        convert(tmp_path / gelu, place, to, names=options.get("names"))
        back = load(place)
        assert back.card.labels == names
        assert (probabilities(back, real) - expected[gelu]).abs().max() <= 1e-6, target


def test_what_is_beside_is_reported_and_comes_with_the_next_conversion(
    tmp_path: Path, command: Callable[..., tuple[int, str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    save(randomize(build(VIT)), tmp_path / "ours", preprocess=ODD, labels=NAMES)
    with caplog.at_level(logging.INFO, "vitlab"):
        code, _, err = command("convert", str(tmp_path / "ours"), str(tmp_path / "vit.pth"), "--to", "torchvision")
    assert code == 0, err
    assert "vit.pth.vitlab.json" in caplog.text
    assert (
        "cannot hold preprocessing (bicubic, crop 0.95, mean 0.1, 0.25, 0.4, std 0.3, 0.2, 0.6) or class" in caplog.text
    )
    assert "temperature" not in caplog.text  # it is 1
    convert(tmp_path / "vit.pth", tmp_path / "again", "vitlab")
    assert load(tmp_path / "again").card.labels == tuple(NAMES)
    with pytest.raises(UserError, match=r"vit\.pth exists"):
        convert(tmp_path / "ours", tmp_path / "vit.pth", "torchvision")
    assert load(tmp_path / "vit.pth").card.preprocess == ODD  # neither file was touched
    (tmp_path / "vit.pth").unlink()
    with pytest.raises(UserError, match=r"vit\.pth\.vitlab\.json exists"):
        convert(tmp_path / "ours", tmp_path / "vit.pth", "torchvision")
    with pytest.raises(UserError, match="cannot express"):
        convert(tmp_path / "ours", tmp_path / "new.npz", "google")
    assert not list(tmp_path.glob("*new.npz*"))


@pytest.mark.parametrize("to", ["huggingface", "timm"])
def test_what_a_folder_holds_is_not_reported_as_lost(to: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder's own JSON has preprocessing and class names; the temperature alone has no place there."""
    with caplog.at_level(logging.INFO, "vitlab"):
        for temperature in (1.0, 1.25):
            model = build(VIT)
            model.card = dataclasses.replace(model.card, temperature=temperature)
            save(model, tmp_path / f"{temperature}", preprocess=ODD, labels=NAMES)
            caplog.clear()
            convert(tmp_path / f"{temperature}", tmp_path / f"{temperature}-{to}", to)
            lines = [line for line in caplog.messages if "cannot hold" in line]
            assert len(lines) == (temperature != 1)
    assert "the temperature (divide logits by 1.25" in lines[0]
    assert "preprocessing" not in lines[0]
    assert "class names" not in lines[0]
    assert load(tmp_path / f"1.25-{to}").card.temperature == 1.25
    assert NAMES[3] in str(json.loads((tmp_path / f"1.25-{to}" / "config.json").read_text()))


def test_class_names_of_a_family_that_has_none_are_kept(tmp_path: Path) -> None:
    """transformers' CLIP has a projection in place of a head, and no names for it."""
    clip = dataclasses.replace(VIT, norm_before=True, embed_bias=False, gelu="quick", norm_eps=1e-5)
    save(build(clip), tmp_path / "ours", labels=NAMES)
    convert(tmp_path / "ours", tmp_path / "hub", "huggingface")
    assert load(tmp_path / "hub").card.labels == tuple(NAMES)


def test_a_caller_goes_before_what_is_beside(tmp_path: Path) -> None:
    save(build(VIT), tmp_path / "ours", preprocess=ODD, labels=NAMES)
    convert(tmp_path / "ours", tmp_path / "vit.pth", "torchvision")
    model = load(tmp_path / "vit.pth", preprocess=Preprocess(), heads=2, image_size=64, classes=9)
    assert (model.card.preprocess, model.card.labels) == (Preprocess(), None)
    assert model.config == dataclasses.replace(VIT, heads=2, image_size=(64, 64), classes=9)


def test_the_weights_of_a_run_folder_come_with_its_config(tmp_path: Path) -> None:
    save(build(VIT), tmp_path / "ours", preprocess=ODD, labels=NAMES)
    assert load(tmp_path / "ours" / "model.safetensors").card.labels == tuple(NAMES)
    save(randomize(build(VIT)), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "ours")  # the config is another model's now
    assert load(tmp_path / "ours" / "model.safetensors").card.preprocess == Preprocess()


def bare(folder: Path) -> tuple[Path, dict[str, Any]]:
    """A torchvision file with its JSON."""
    save(randomize(build(VIT)), folder / "ours", preprocess=ODD, labels=NAMES)
    convert(folder / "ours", folder / "vit.pth", "torchvision")
    return folder / "vit.pth", json.loads(beside_path(folder / "vit.pth").read_text())


def test_other_weights_are_noticed(tmp_path: Path) -> None:
    file, _ = bare(tmp_path)
    theirs = torch.load(file)
    theirs["heads.head.bias"] += 1
    torch.save(theirs, file)
    with pytest.raises(UserError, match=r"vit\.pth\.vitlab\.json was written for other weights.*sha256"):
        load(file)
    beside_path(file).unlink()
    assert load(file, heads=4).card.preprocess.mean == (0.485, 0.456, 0.406)


HOSTILE: dict[str, Any] = {
    "no json": b"{",
    "a list": b"[]",
    "a key twice": b'{"format": 1, "format": 2}',
    "not text": b"\xff\xfe",
    "deep": b"[" * 100_000,
    "long": b" " * 11_000_000,
    "format": {"format": "vitlab/1"},
    "sha256": {"sha256": [1]},
    "no settings": {"settings": None},
    "unknown setting": {"settings": {"code": "x"}},
    "heads": {"settings": {"heads": "4"}},
    "many heads": {"settings": {"heads": 10**30}},
    "eps": {"settings": {"norm_eps": -1}},
    "gelu": {"settings": {"gelu": ["tanh"]}},
    "no preprocessing": {"preprocess": None},
    "std": {"preprocess": {"std": [0, 0, 0]}},
    "crop": {"preprocess": {"crop": 1e-9}},
    "size": {"image_size": [10**9, 32]},
    "another size": {"image_size": [32, 64]},
    "no size": {"image_size": "large"},
    "labels": {"labels": ["a", 2, "c", "d"]},
    "few labels": {"labels": ["a"]},
    "provenance": {"provenance": ["x"]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json(name: str, tmp_path: Path) -> None:
    file, data = bare(tmp_path)
    change = HOSTILE[name]
    beside_path(file).write_bytes(change if isinstance(change, bytes) else json.dumps({**data, **change}).encode())
    with pytest.raises(UserError, match=r"vit\.pth") as caught:
        load(file)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


# ---- folding


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_their_own_normalization_gives_the_same_logits_after_folding(dtype: torch.dtype, tmp_path: Path) -> None:
    model = randomize(build(VIT), dtype)
    save(model, tmp_path / "ours", preprocess=ODD, labels=NAMES)
    convert(tmp_path / "ours", tmp_path / "vit.pth", "torchvision", fold=True)
    theirs = VisionTransformer(32, 8, 2, 4, 64, 80, num_classes=4).to(dtype).eval()
    theirs.load_state_dict(torch.load(tmp_path / "vit.pth"))
    pixels = torch.stack([eval_pixels(image, (32, 32), ODD) for image in photos()]).to(dtype) / 255
    usual = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    with torch.no_grad():
        expected = model(Normalize(ODD.mean, ODD.std)(pixels))
        assert (theirs(usual(pixels)) - expected).abs().max() < (1e-4 if dtype == torch.float32 else 1e-11)
        assert (theirs(Normalize(ODD.mean, ODD.std)(pixels)) - expected).abs().max() > 0.1
    back = load(tmp_path / "vit.pth").card.preprocess
    assert back == dataclasses.replace(ODD, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    difference = probabilities(tmp_path / "vit.pth", photos()) - probabilities(tmp_path / "ours", photos())
    assert difference.abs().max() < 1e-5


def test_folding_what_agrees_changes_no_bit(tmp_path: Path) -> None:
    save(randomize(build(VIT)), tmp_path / "ours", preprocess=Preprocess(crop=0.9))
    for name, fold in (("a.safetensors", False), ("b.safetensors", True)):
        convert(tmp_path / "ours", tmp_path / name, "timm", fold=fold)
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


STEM = StemConfig((1, 1), 32)


@pytest.mark.parametrize(
    "config", [ResNetConfig((32, 32), (1, 1), 32), ViTConfig((32, 32), 2, 1, 64, 80, 1, stem=STEM)]
)
def test_padding_cannot_be_folded(config: Any, tmp_path: Path) -> None:
    save(build(config), tmp_path / "ours", preprocess=ODD)
    with pytest.raises(UserError, match="plain patches"):
        convert(tmp_path / "ours", tmp_path / "x.npz", "google", fold=True, gelu=None)
    assert [path.name for path in tmp_path.iterdir()] == ["ours"]
