"""Files of every kind, damaged at random: each loads as the bytes it still has, or is refused with one line."""

import io
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import authors
import numpy as np
import originals
import pytest
import timm
import torch
from peers import randomize
from safetensors.torch import load, save_file
from torch import Tensor
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel, ViTConfig, ViTForImageClassification

import vitlab
from vitlab.errors import UserError
from vitlab.weights import convert, save
from vitlab.weights.beside import beside_path

CASES = 60  # of each kind
TINY = vitlab.models.config.ViTConfig((16, 16), patch=8, depth=1, width=32, mlp=40, heads=2, classes=3)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small checkpoint of each kind: the file to damage."""
    folder = tmp_path_factory.mktemp("sources")
    ours = randomize(vitlab.build(TINY))
    save(ours, folder / "ours")
    for name in ("theirs.safetensors", "theirs"):
        convert(folder / "ours", folder / name, "timm")
    beside_path(folder / "theirs.safetensors").unlink()  # with it, any other byte is another file
    tensors = load((folder / "theirs.safetensors").read_bytes())
    torch.save(tensors, folder / "new.pth")
    torch.save({"state_dict": tensors}, folder / "old.pth", _use_new_zipfile_serialization=False)
    drawn = authors.vit(8, 2, 32, 40, 2, 1, 3)
    arrays: dict[str, Any] = {key: array.astype("f4") for key, array in drawn.w.items()}
    np.savez(folder / "theirs.npz", **arrays)
    np.savez_compressed(folder / "packed.npz", **arrays)
    config = ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40)
    config.image_size, config.patch_size, config.num_labels = 16, 8, 3
    randomize(ViTForImageClassification(config)).save_pretrained(folder / "hub")
    return {
        "safetensors": folder / "theirs.safetensors",
        "pth": folder / "new.pth",
        "old pth": folder / "old.pth",
        "npz": folder / "theirs.npz",
        "packed npz": folder / "packed.npz",
        "our weights": folder / "ours" / "model.safetensors",
        "our config": folder / "ours" / "config.json",
        "hub weights": folder / "hub" / "model.safetensors",
        "hub config": folder / "hub" / "config.json",
        "timm config": folder / "theirs" / "config.json",
    }


KINDS = ["safetensors", "pth", "old pth", "npz", "packed npz", "our weights", "hub weights"]
CONFIGS = ["our config", "hub config", "timm config"]


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small checkpoints of later families: their authors' files, timm's and transformers' folders."""
    folder = tmp_path_factory.mktemp("families")
    drawn = {
        "dinov2": originals.dinov2(registers=2),
        "dinov3": originals.dinov3(),
        "mae": originals.mae(decoder=True),
        "clip": originals.clip(),
    }
    for name, tensors in drawn.items():
        torch.save(originals.as_tensors(tensors, torch.float32), folder / f"{name}.pth")
    small: dict[str, Any] = {
        "depth": 1,
        "embed_dim": 32,
        "num_heads": 2,
        "img_size": 32,
        "patch_size": 16,
        "num_classes": 3,
    }
    for name, architecture in {"eva02": "eva02_base_patch14_224", "timm dinov3": "vit_small_patch16_dinov3"}.items():
        (folder / name).mkdir()
        save_file(randomize(timm.create_model(architecture, **small)).state_dict(), folder / name / "model.safetensors")
        config: dict[str, Any] = {
            "architecture": architecture,
            "model_args": {key: small[key] for key in ("num_heads", "img_size")},
        }
        (folder / name / "config.json").write_text(
            json.dumps({**config, "pretrained_cfg": {"input_size": [3, 32, 32]}})
        )
    body: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
    }
    hub = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**body, mlp_ratio=2))
    randomize(hub).save_pretrained(folder / "hub dinov2")
    return {path.stem: path for path in folder.iterdir()}


LATER = ["dinov2", "dinov3", "mae", "clip", "eva02", "timm dinov3", "hub dinov2"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER)
def test_damaged_weights_of_later_families(name: str, families: dict[str, Path], tmp_path: Path) -> None:
    """Bytes at random: an error of one line, or the same model with what the bytes still say."""
    source = families[name]
    intact = attempt(source)
    assert intact is not None
    target = tmp_path / source.name
    if source.is_dir():
        target.mkdir()
        (target / "config.json").write_bytes((source / "config.json").read_bytes())
    file = target / "model.safetensors" if source.is_dir() else target
    data = (source / file.name if source.is_dir() else source).read_bytes()
    for seed in range(CASES):
        file.write_bytes(damage(data, random.Random(f"{name} {seed}")))
        model = attempt(target)
        assert model is None or model.config == intact.config


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER[4:])
def test_damaged_configs_of_later_families(name: str, families: dict[str, Path], tmp_path: Path) -> None:
    source, folder = families[name], tmp_path / "folder"
    intact = attempt(source)
    folder.mkdir()
    (folder / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    text = (source / "config.json").read_bytes()
    for seed in range(CASES):
        rng = random.Random(f"{name} {seed}")
        changed = damage(text, rng) if seed % 3 == 0 else json.dumps(change(json.loads(text), rng)).encode()
        (folder / "config.json").write_bytes(changed)
        model = attempt(folder)
        if model is not None:
            assert bits(model.state_dict()) == bits(intact.state_dict())


def damage(data: bytes, rng: random.Random) -> bytes:
    """One of the ways files break; half of the time near the start or the end, where the headers are."""
    size = len(data)
    near = rng.choice((min(400, size), size))
    place = rng.randrange(near) if rng.random() < 0.7 else size - 1 - rng.randrange(near)
    length = rng.choice((1, 1, 1, 4, 8, 100))
    kind = rng.randrange(6)
    if kind == 0:
        return data[:place]
    if kind == 1:
        return data[:place] + data[place + length :]
    if kind == 2:
        return data[:place] + rng.randbytes(length) + data[place:]
    if kind == 3:
        return data[:place] + data[place : place + length] * 2 + data[place + length :]
    if kind == 4:
        return data[:place] + b"\xff" * length + data[place + length :]
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


def attempt(path: Path) -> Any:
    """The model, or None after an error of one line."""
    try:
        return vitlab.load(path, heads=2)
    except UserError as error:
        message = str(error)
    assert "\n" not in message
    assert len(message) < 5000
    return None


def bits(tensors: dict[str, Tensor]) -> list[bytes]:
    return sorted(x.detach().contiguous().view(torch.uint8).numpy().tobytes() for x in tensors.values())


def remaining_bits(kind: str, data: bytes) -> list[bytes]:
    """The tensors in a damaged file, as the library that owns the format reads them."""
    if kind == "safetensors":
        return bits(load(data))
    if "pth" in kind:
        read = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        return bits(read.get("state_dict", read))
    raise AssertionError("the others have checksums")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_weights(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    original = sources[kind].read_bytes()
    intact = attempt(sources[kind] if kind in KINDS[:5] else sources[kind].parent)
    assert intact is not None
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in sources[kind].parent.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    for seed in range(CASES):
        data = damage(original, random.Random(f"{kind} {seed}"))
        file = folder / sources[kind].name
        file.write_bytes(data)
        model = attempt(file if kind in KINDS[:5] else folder)
        if model is None or data == original:
            continue
        if kind in ("safetensors", "pth", "old pth"):
            assert bits(model.state_dict()) == remaining_bits(kind, data)
        elif kind == "hub weights":  # no checksum, and several of its tensors make one of ours
            assert model.config == intact.config
        else:  # npz members and our own weights have checksums
            assert bits(model.state_dict()) == bits(intact.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_damaged_configs(kind: str, sources: dict[str, Path], tmp_path: Path) -> None:
    """Bytes and values at random: an error of one line, or the same tensors."""
    source = sources[kind]
    intact = attempt(source.parent)
    folder = tmp_path / "folder"
    folder.mkdir()
    for file in source.parent.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    for seed in range(CASES):
        rng = random.Random(f"{kind} {seed}")
        text = source.read_bytes()
        changed = damage(text, rng) if seed % 3 == 0 else json.dumps(change(json.loads(text), rng)).encode()
        (folder / source.name).write_bytes(changed)
        model = attempt(folder)
        if model is not None:
            assert bits(model.state_dict()) == bits(intact.state_dict())


def test_damaged_json_beside(sources: dict[str, Path], tmp_path: Path) -> None:
    convert(sources["our weights"].parent, tmp_path / "alone.safetensors", "timm")
    beside = beside_path(tmp_path / "alone.safetensors")
    text, intact = beside.read_bytes(), attempt(tmp_path / "alone.safetensors")
    assert intact is not None
    for seed in range(CASES):
        rng = random.Random(f"beside {seed}")
        changed = damage(text, rng) if seed % 3 == 0 else json.dumps(change(json.loads(text), rng)).encode()
        beside.write_bytes(changed)
        model = attempt(tmp_path / "alone.safetensors")
        if model is not None:
            assert bits(model.state_dict()) == bits(intact.state_dict())


def change(data: Any, rng: random.Random) -> Any:
    """The same JSON with one value, at any depth, of another kind or size."""
    if isinstance(data, dict) and data and rng.random() < 0.9:
        key = rng.choice(list(data))
        return {**data, key: change(data[key], rng)}
    if isinstance(data, list) and data and rng.random() < 0.7:
        place = rng.randrange(len(data))
        return [*data[:place], change(data[place], rng), *data[place + 1 :]]
    return rng.choice(
        (None, True, 0, -1, 3, 10**9, 10**30, 0.5, -1e300, "", "gelu", "x" * 50, [], [1, 2], {}, {"a": 1}, [[]], "../x")
    )


def test_the_archives_have_checksums(sources: dict[str, Path]) -> None:
    for kind in ("npz", "packed npz"):
        assert all(info.CRC for info in zipfile.ZipFile(sources[kind]).infolist())


def test_an_unknown_tensor_is_named(sources: dict[str, Path], tmp_path: Path) -> None:
    tensors = load(sources["safetensors"].read_bytes())
    tensors["blocks.0.attn.odd.weight"] = torch.ones(3)
    del tensors["norm.bias"]
    tensors["head.bias"] = torch.ones(4)
    save_file(tensors, tmp_path / "odd.safetensors")
    with pytest.raises(UserError, match=r"odd\.weight' does not belong; 'norm\.bias' is missing; 'head\.bias' has"):
        vitlab.load(tmp_path / "odd.safetensors", heads=2)
