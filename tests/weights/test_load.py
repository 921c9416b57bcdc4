"""What `load` does with any format: recognize, replace the head, resize; hub ids without a network."""

import dataclasses
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from peers import agree, images, randomize
from safetensors.torch import save_file
from torchvision.models import VisionTransformer

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ResNetConfig, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save

SHARED = Path(os.environ.get("VITLAB_SHARED", Path(__file__).parents[3] / "shared"))
VIT = ViTConfig((32, 32), patch=8, depth=2, width=64, mlp=80, heads=1, classes=5)


def theirs(file: Path, config: Any = VIT) -> dict[str, torch.Tensor]:
    """A timm file, and the tensors of the model in it."""
    model = randomize(build(config))
    save(model, file.parent / "ours")
    convert(file.parent / "ours", file, "timm")
    return model.state_dict()


# ---- the real thing


def test_real_weights_give_the_reference_logits() -> None:
    folder = SHARED / "weights"
    if not (folder / "reference_timm.npz").exists():
        pytest.skip(f"the ImageNet weights are not in {folder}; set VITLAB_SHARED to the folder that has weights/")
    model = load(folder / "vit_tiny_patch16_224.safetensors")
    reference = np.load(folder / "reference_timm.npz")
    pixels = torch.from_numpy(reference["pixels"])
    with torch.no_grad():
        assert np.abs(model(pixels).numpy() - reference["logits_fp32"]).max() <= 1e-4
        assert np.abs(model.double()(pixels.double()).numpy() - reference["logits_fp64"]).max() <= 1e-10
    assert model.card.preprocess == Preprocess(interpolation="bicubic", crop=0.9)


# ---- recognize


def test_a_file_that_fits_none_or_two(tmp_path: Path) -> None:
    save_file({"layer1.weight": torch.ones(2)}, tmp_path / "none.safetensors")
    with pytest.raises(UserError, match=r"none\.safetensors is of no supported format.*layer1\.weight"):
        load(tmp_path / "none.safetensors")
    one = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32).state_dict()
    two = VisionTransformer(32, 16, 1, 3, 192, 768).state_dict()
    save_file(one | two, tmp_path / "two.safetensors")
    with pytest.raises(UserError, match="timm and of torchvision"):
        load(tmp_path / "two.safetensors")
    with pytest.raises(UserError, match=r"class_token.* not belong"):  # named, but still not all of one format
        load(tmp_path / "two.safetensors", format="timm")
    with pytest.raises(UserError, match="no format 'keras'"):
        load(tmp_path / "two.safetensors", format="keras")


def test_the_ending_does_not_matter(tmp_path: Path) -> None:
    theirs(tmp_path / "theirs.safetensors")
    (tmp_path / "theirs.safetensors").rename(tmp_path / "weights.bin")
    assert load(tmp_path / "weights.bin").config == VIT


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where.pth", "a/b/c", "no/where.npz", "a/b.safetensors"])
def test_a_wrong_path_is_a_sentence_about_the_path(name: str) -> None:
    with pytest.raises(UserError, match=f"there is no file or folder {name}"):
        load(name)


def test_a_wrong_path_in_a_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no file or folder runs/mine"):
        load("runs/mine")
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        load("runs")


def test_a_name_no_system_takes() -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load("x" * 5000)


def test_what_the_file_does_not_say_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs(tmp_path / "theirs.safetensors")
    with caplog.at_level(logging.INFO, "vitlab"):
        load(tmp_path / "theirs.safetensors", gelu="tanh")
    assert "heads=1" in caplog.text
    assert "norm_eps=1e-06" in caplog.text
    assert "gelu" not in caplog.text  # the caller said it
    caplog.clear()
    with caplog.at_level(logging.INFO, "vitlab"):
        load(tmp_path / "ours")
    assert not caplog.text


def test_overrides(tmp_path: Path) -> None:
    theirs(tmp_path / "theirs.safetensors")
    preprocess = Preprocess(crop=0.5)
    model = load(tmp_path / "theirs.safetensors", heads=8, gelu="tanh", norm_eps=1e-3, preprocess=preprocess)
    assert model.config == dataclasses.replace(VIT, heads=8, gelu="tanh", norm_eps=1e-3)
    assert model.card.preprocess == preprocess
    assert load(tmp_path / "ours", heads=8).config.heads == 8
    bit = ResNetConfig((32, 32), (1, 1), 32, 3, standardize_eps=1e-8)
    save(build(bit), tmp_path / "bit")
    convert(tmp_path / "bit", tmp_path / "bit.safetensors", "timm")
    model = load(tmp_path / "bit.safetensors", standardize="sigma", standardize_eps=1e-4, group_eps=1e-3, image_size=40)
    assert model.config == ResNetConfig((40, 40), (1, 1), 32, 3, "sigma", 1e-4, 1e-3)
    with pytest.raises(UserError, match="has no heads"):
        load(tmp_path / "bit.safetensors", heads=3)


def test_heads_that_cannot_be_guessed(tmp_path: Path) -> None:
    theirs(tmp_path / "theirs.safetensors", dataclasses.replace(VIT, width=100, heads=4))
    with pytest.raises(UserError, match="give heads="):
        load(tmp_path / "theirs.safetensors")
    assert load(tmp_path / "theirs.safetensors", heads=4).config.heads == 4


# ---- head and size


def test_other_classes_give_a_head_of_zeros(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = theirs(tmp_path / "theirs.safetensors")
    with caplog.at_level(logging.INFO, "vitlab"):
        model = load(tmp_path / "theirs.safetensors", classes=9)
    assert "head of 5 classes" in caplog.text
    assert model.head.weight.shape == (9, 64)
    assert not model.head.weight.any()
    assert not model.head.bias.any()
    rest = {name: x for name, x in model.state_dict().items() if not name.startswith("head.")}
    assert rest.keys() == tensors.keys() - {"head.weight", "head.bias"}
    assert all(torch.equal(x, tensors[name]) for name, x in rest.items())
    assert torch.equal(load(tmp_path / "theirs.safetensors", classes=5).head.weight, tensors["head.weight"])
    assert load(tmp_path / "theirs.safetensors", classes=0).head is None


def test_a_new_head_stands_on_the_features_themselves(tmp_path: Path) -> None:
    model = randomize(build(dataclasses.replace(VIT, prelogits=20)))
    save(model, tmp_path / "run")
    assert load(tmp_path / "run", classes=9).config.prelogits == 0  # as the paper fine-tunes
    x = images(32)
    with torch.no_grad():
        agree(load(tmp_path / "run", classes=0)(x), model.features(x))


def test_sizes(tmp_path: Path) -> None:
    tensors = theirs(tmp_path / "theirs.safetensors")
    for mode in ("bilinear", "bicubic"):
        wanted = randomize(build(VIT)).resize((48, 24), mode).positions.table
        model = load(tmp_path / "theirs.safetensors", image_size=(48, 24), resample=mode)
        assert torch.equal(model.positions.table, wanted)
    with pytest.raises(UserError, match="40 for 33"):
        load(tmp_path / "theirs.safetensors", image_size=33)
    assert torch.equal(load(tmp_path / "theirs.safetensors", image_size=32).positions.table, tensors["positions.table"])


def test_grids_that_are_not_square(tmp_path: Path) -> None:
    """A bare file does not say its shape: a square if it can be, else what the caller says, if that fits."""
    tensors = theirs(tmp_path / "theirs.safetensors", dataclasses.replace(VIT, image_size=(16, 24)))
    with pytest.raises(UserError, match="6 patches, which is no square"):
        load(tmp_path / "theirs.safetensors")
    with pytest.raises(UserError, match="6 patches, which is no square"):
        load(tmp_path / "theirs.safetensors", image_size=48)
    model = load(tmp_path / "theirs.safetensors", image_size=(16, 24))
    assert torch.equal(model.positions.table, tensors["positions.table"])


def test_half_precision_loads_as_float32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = randomize(build(VIT), torch.bfloat16)
    save(model, tmp_path / "half")
    with caplog.at_level(logging.INFO, "vitlab"):
        back = load(tmp_path / "half")
    assert "bfloat16" in caplog.text
    assert all(torch.equal(x, model.state_dict()[name].float()) for name, x in back.state_dict().items())


def test_wrapped_state_dicts(tmp_path: Path) -> None:
    tensors = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32).state_dict()
    for key in ("state_dict", "model"):
        torch.save({key: tensors, "epoch": 3}, tmp_path / f"{key}.pth")
        assert torch.equal(load(tmp_path / f"{key}.pth").head.weight, tensors["head.weight"])


# ---- the hub


def hub_cache(folder: Path, name: str, files: Path) -> Path:
    """A cache as huggingface_hub lays it out."""
    repo = folder / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for file in files.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    return folder


def offline(cache: Path, code: str) -> str:
    """Python without a network, with this cache; what it prints."""
    settings = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(cache), "HF_HOME": str(cache)}
    words = [sys.executable, "-c", f"import vitlab\n{code}"]
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | settings, cwd=cache)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_hub_ids_come_from_the_cache(tmp_path: Path) -> None:
    config = dataclasses.replace(VIT, heads=2)
    save(randomize(build(config)), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "timm", "timm")
    convert(tmp_path / "ours", tmp_path / "hf", "huggingface")
    cache = hub_cache(tmp_path / "cache", "timm/vit_small.augreg_in21k", tmp_path / "timm")
    hub_cache(cache, "some-one/vit", tmp_path / "hf")
    code = "for name in ('timm/vit_small.augreg_in21k', 'some-one/vit'): print(vitlab.load(name).config)"
    assert offline(cache, code).splitlines() == [str(config), str(config)]


def test_revisions_are_chosen_by_name_and_kept_by_commit(tmp_path: Path) -> None:
    """A branch may move; what was loaded is kept in the card, and in the config of what is saved."""
    old, new = "0" * 40, "a1" * 20
    save(randomize(build(VIT)), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", "huggingface")
    cache = hub_cache(tmp_path / "cache", "some/vit", tmp_path / "hf")
    repo = cache / "models--some--vit"
    (repo / "refs" / "main").write_text(new)
    (repo / "refs" / "v1.0").write_text(old)
    (repo / "snapshots" / new).mkdir()
    for file in (tmp_path / "hf").iterdir():
        (repo / "snapshots" / new / file.name).write_bytes(file.read_bytes())
    code = f"""
import json
for name in ("some/vit", "some/vit@v1.0", "some/vit@{old}", "some/vit@{new}"):
    model = vitlab.load(name)
    vitlab.save(model, name.replace("/", "-"))
    print(json.load(open(name.replace("/", "-") + "/config.json"))["provenance"]["commit"])
try:
    vitlab.load("some/vit@v2.0")
except vitlab.UserError as error:
    print(error)
"""
    *commits, missing = offline(cache, code).splitlines()
    assert commits == [new, old, old, new]
    assert "some/vit@v2.0" in missing


def test_a_local_folder_goes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(build(VIT), tmp_path / "google" / "vit")
    monkeypatch.chdir(tmp_path)
    assert load("google/vit").config == VIT


def test_without_network_the_message_says_what_to_do(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    code = """
try:
    vitlab.load("google/vit-base-patch16-224")
except vitlab.UserError as error:
    print(error)
"""
    said = offline(cache, code)
    assert "google/vit-base-patch16-224" in said
    assert "network" in said
    assert "folder" in said
    assert "\n" not in said


def test_a_snapshot_without_weights(tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")
    cache = hub_cache(tmp_path / "cache", "some/one", tmp_path / "files")
    code = "try: vitlab.load('some/one')\nexcept vitlab.UserError as error: print(error)"
    assert "some/one has neither model.safetensors" in offline(cache, code)


def test_names_are_found_at_the_top() -> None:
    assert vitlab.load is load
    assert vitlab.save is save
    assert vitlab.convert is convert
