"""`load` for every format: recognize, replace the head, resize; hub ids without a network."""

import dataclasses
import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
import timm
import torch
from peers import agree, head_of, images, randomize, table_of, vit_config
from safetensors.torch import save_file
from torchvision.models import VisionTransformer

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ResNetConfig, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save
from vitlab.weights.beside import beside_path

SHARED = Path(os.environ.get("VITLAB_SHARED", Path(__file__).parents[3] / "shared"))
VIT = ViTConfig((32, 32), patch=8, depth=2, width=64, mlp=80, heads=1, classes=5)


def write_timm(file: Path, config: Any = VIT) -> dict[str, torch.Tensor]:
    """A timm file alone, as others write it, and the tensors of the model in it."""
    model = randomize(build(config))
    save(model, file.parent / "ours")
    convert(file.parent / "ours", file, "timm")
    beside_path(file).unlink(missing_ok=True)
    return model.state_dict()


# ---- real weights


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


def test_a_file_of_no_format_or_of_two(tmp_path: Path) -> None:
    save_file({"layer1.weight": torch.ones(2)}, tmp_path / "none.safetensors")
    with pytest.raises(UserError, match=r"none\.safetensors is of no supported format.*layer1\.weight"):
        load(tmp_path / "none.safetensors")
    one = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, embed_dim=64, num_heads=1).state_dict()
    two = VisionTransformer(32, 16, 1, 1, 64, 80).state_dict()
    save_file(one | two, tmp_path / "two.safetensors")
    with pytest.raises(UserError, match="timm and of torchvision"):
        load(tmp_path / "two.safetensors")
    with pytest.raises(UserError, match=r"class_token.* not belong"):  # named, but still not all of one format
        load(tmp_path / "two.safetensors", format="timm")
    with pytest.raises(UserError, match="no format 'keras'"):
        load(tmp_path / "two.safetensors", format="keras")


def test_the_ending_does_not_matter(tmp_path: Path) -> None:
    write_timm(tmp_path / "theirs.safetensors")
    (tmp_path / "theirs.safetensors").rename(tmp_path / "weights.bin")
    assert load(tmp_path / "weights.bin").config == VIT


@pytest.mark.parametrize("name", ["nowhere", "./no/where", "/no/where.pth", "a/b/c", "no/where.npz", "a/b.safetensors"])
def test_a_wrong_path_is_an_error_about_the_path(name: str) -> None:
    with pytest.raises(UserError, match=f"there is no file or folder {name}"):
        load(name)


def test_a_wrong_path_in_a_folder_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no file or folder runs/mine"):
        load("runs/mine")
    with pytest.raises(UserError, match=r"neither model\.safetensors nor"):
        load("runs")


def test_a_name_that_is_too_long() -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load("x" * 5000)


def test_defaults_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_timm(tmp_path / "theirs.safetensors")
    with caplog.at_level(logging.INFO, "vitlab"):
        load(tmp_path / "theirs.safetensors", gelu="tanh")
    assert "heads, norm_eps, preprocess as usual in timm files (-v shows the values)" in caplog.text
    assert "gelu" not in caplog.text  # the caller gave it
    caplog.clear()
    with caplog.at_level(logging.DEBUG, "vitlab"):
        load(tmp_path / "theirs.safetensors", gelu="tanh")
    assert "heads=1" in caplog.text
    assert "norm_eps=1e-06" in caplog.text
    assert "Preprocess(mean=(0.5, 0.5, 0.5)" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "vitlab"):
        load(tmp_path / "ours")
    assert not caplog.text


def test_overrides(tmp_path: Path) -> None:
    write_timm(tmp_path / "theirs.safetensors")
    preprocess = Preprocess(crop=0.5)
    model = load(tmp_path / "theirs.safetensors", heads=8, gelu="tanh", norm_eps=1e-3, preprocess=preprocess)
    assert model.config == dataclasses.replace(VIT, heads=8, gelu="tanh", norm_eps=1e-3)
    assert model.card.preprocess == preprocess
    assert vit_config(load(tmp_path / "ours", heads=8)).heads == 8
    bit = ResNetConfig((32, 32), (1, 1), 32, 3, standardize_eps=1e-8)
    save(build(bit), tmp_path / "bit")
    convert(tmp_path / "bit", tmp_path / "bit.safetensors", "timm")
    model = load(tmp_path / "bit.safetensors", standardize="sigma", standardize_eps=1e-4, group_eps=1e-3, image_size=40)
    assert model.config == ResNetConfig((40, 40), (1, 1), 32, 3, "sigma", 1e-4, 1e-3)
    with pytest.raises(UserError, match="has no heads"):
        load(tmp_path / "bit.safetensors", heads=3)


def test_heads_that_cannot_be_guessed(tmp_path: Path) -> None:
    write_timm(tmp_path / "theirs.safetensors", dataclasses.replace(VIT, width=100, heads=4))
    with pytest.raises(UserError, match="give heads="):
        load(tmp_path / "theirs.safetensors")
    assert vit_config(load(tmp_path / "theirs.safetensors", heads=4)).heads == 4


# ---- head and size


def test_other_classes_give_a_head_of_zeros(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tensors = write_timm(tmp_path / "theirs.safetensors")
    with caplog.at_level(logging.INFO, "vitlab"):
        model = load(tmp_path / "theirs.safetensors", classes=9)
    assert "head of 5 classes" in caplog.text
    assert head_of(model).weight.shape == (9, 64)
    assert not head_of(model).weight.any()
    assert not head_of(model).bias.any()
    rest = {name: x for name, x in model.state_dict().items() if not name.startswith("head.")}
    assert rest.keys() == tensors.keys() - {"head.weight", "head.bias"}
    assert all(torch.equal(x, tensors[name]) for name, x in rest.items())
    assert torch.equal(head_of(load(tmp_path / "theirs.safetensors", classes=5)).weight, tensors["head.weight"])
    assert load(tmp_path / "theirs.safetensors", classes=0).head is None


def test_a_new_head_has_no_prelogits_layer(tmp_path: Path) -> None:
    model = randomize(build(dataclasses.replace(VIT, prelogits=20)))
    save(model, tmp_path / "run")
    assert vit_config(load(tmp_path / "run", classes=9)).prelogits == 0  # as the paper fine-tunes
    x = images(32)
    with torch.no_grad():
        agree(load(tmp_path / "run", classes=0)(x), model.features(x))


def test_sizes(tmp_path: Path) -> None:
    tensors = write_timm(tmp_path / "theirs.safetensors")
    for mode in ("bilinear", "bicubic"):
        expected = table_of(randomize(build(VIT)).resize((48, 24), mode))
        model = load(tmp_path / "theirs.safetensors", image_size=(48, 24), resample=mode)
        assert torch.equal(table_of(model), expected)
    with pytest.raises(UserError, match="40 for 33"):
        load(tmp_path / "theirs.safetensors", image_size=33)
    assert torch.equal(table_of(load(tmp_path / "theirs.safetensors", image_size=32)), tensors["positions.table"])


def test_grids_that_are_not_square(tmp_path: Path) -> None:
    """A bare file does not have its grid: a square if possible, else the caller's, if it has as many patches."""
    tensors = write_timm(tmp_path / "theirs.safetensors", dataclasses.replace(VIT, image_size=(16, 24)))
    with pytest.raises(UserError, match="6 patches, which is no square"):
        load(tmp_path / "theirs.safetensors")
    with pytest.raises(UserError, match="6 patches, which is no square"):
        load(tmp_path / "theirs.safetensors", image_size=48)
    model = load(tmp_path / "theirs.safetensors", image_size=(16, 24))
    assert torch.equal(table_of(model), tensors["positions.table"])


def test_half_precision_loads_as_float32(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = randomize(build(VIT), torch.bfloat16)
    save(model, tmp_path / "half")
    with caplog.at_level(logging.INFO, "vitlab"):
        back = load(tmp_path / "half")
    assert "bfloat16" in caplog.text
    assert all(torch.equal(x, model.state_dict()[name].float()) for name, x in back.state_dict().items())


def test_wrapped_state_dicts(tmp_path: Path) -> None:
    tensors = timm.create_model("vit_tiny_patch16_224", depth=1, img_size=32, embed_dim=64, num_heads=1).state_dict()
    for key in ("state_dict", "model"):
        torch.save({key: tensors, "epoch": 3}, tmp_path / f"{key}.pth")
        assert torch.equal(head_of(load(tmp_path / f"{key}.pth")).weight, tensors["head.weight"])


# ---- the hub


def add_to_cache(cache: Path, name: str, files: Path) -> Path:
    """A cache with the layout of huggingface_hub."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    for file in files.iterdir():
        (snapshot / file.name).write_bytes(file.read_bytes())
    return repo


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is the hub's cache for one test, without a network; as HF_HUB_CACHE and HF_HUB_OFFLINE."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "cache"


def test_hub_ids_come_from_the_cache(cache: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(VIT, heads=2)
    save(randomize(build(config)), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "timm", "timm")
    convert(tmp_path / "ours", tmp_path / "hf", "huggingface")
    add_to_cache(cache, "timm/vit_small.augreg_in21k", tmp_path / "timm")
    add_to_cache(cache, "some-one/vit", tmp_path / "hf")
    assert load("timm/vit_small.augreg_in21k").config == load("some-one/vit").config == config


def test_revisions_are_chosen_by_name_and_kept_by_commit(cache: Path, tmp_path: Path) -> None:
    """A branch may move; the commit that was loaded is in the card, and in the config of what is saved."""
    old, new = "0" * 40, "a1" * 20
    save(randomize(build(VIT)), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "hf", "huggingface")
    repo = add_to_cache(cache, "some/vit", tmp_path / "hf")
    (repo / "refs" / "main").write_text(new)
    (repo / "refs" / "v1.0").write_text(old)
    shutil.copytree(tmp_path / "hf", repo / "snapshots" / new)
    commits = {"some/vit": new, "some/vit@v1.0": old, f"some/vit@{old}": old, f"some/vit@{new}": new}
    for i, (name, commit) in enumerate(commits.items()):
        save(load(name), tmp_path / f"copy{i}")
        config = json.loads((tmp_path / f"copy{i}" / "config.json").read_text())
        assert config["provenance"]["commit"] == commit
    with pytest.raises(UserError, match=r"some/vit@v2\.0"):
        load("some/vit@v2.0")


def test_a_local_folder_goes_before_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(build(VIT), tmp_path / "google" / "vit")
    monkeypatch.chdir(tmp_path)
    assert load("google/vit").config == VIT


def test_without_network_the_message_has_the_fix(cache: Path) -> None:
    with pytest.raises(UserError, match=r"google/vit-base-patch16-224.*network.*folder") as caught:
        load("google/vit-base-patch16-224")
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_the_hub_is_set_up_by_its_environment_variables(tmp_path: Path) -> None:
    """In a new process, where the library reads them."""
    code = "import vitlab\ntry: vitlab.load('some/one')\nexcept vitlab.UserError as error: print(error)"
    settings = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | settings)
    assert "connect to the network" in done.stdout, done.stderr


def test_a_snapshot_without_weights(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "config.json").write_text("{}")
    add_to_cache(cache, "some/one", tmp_path / "files")
    with pytest.raises(UserError, match=r"some/one has neither model\.safetensors"):
        load("some/one")


def test_names_are_found_at_the_top() -> None:
    assert vitlab.load is load
    assert vitlab.save is save
    assert vitlab.convert is convert
