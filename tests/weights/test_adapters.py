"""Low-rank updates apart from their base: merged when loaded, found again when moved, refused when tampered with."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from conftest import Command, fill
from families import mostly_slow
from safetensors.torch import load_file, save_file
from test_hostile import check_refused
from test_load import add_to_cache

import vitlab
from vitlab.errors import UserError
from vitlab.files import sha256
from vitlab.models.card import Card
from vitlab.models.vit import ViT
from vitlab.training.lora import add_updates, own_state
from vitlab.weights.load import LONGEST_CHAIN
from vitlab.weights.lora_base import name_base
from vitlab.weights.save import write_folder

RANK, ALPHA = 3, 6.0
# axial blocks hold two blocks each; a bias of q and v alone goes past the layer's own bias
FAMILIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "axial": {"attention": "axial", "pool": "mean"},
    "relative": {"positions": "relative"},
    "attention pooling": {"pool": "attention"},
    "late": {
        "pool": "token_mean",
        "registers": 2,
        "qkv_bias": "qv",
        "qk_norm": True,
        "mlp_kind": "swiglu",
        "mlp_norm": True,
        "layer_scale": True,
        "rotary": "cells",
    },
}


def tiny(**settings: Any) -> ViT:
    options = {"image_size": 8, "depth": 2, "width": 16, "mlp": 24, "heads": 2, "classes": 5} | settings
    model = vitlab.create("Ti/4", **options)
    assert isinstance(model, ViT)
    return fill(model).eval()


def adapt(base: Path | str, out: Path, seed: int = 1, **settings: Any) -> ViT:
    """Random updates of a base, written to a folder, and the model that computes with them unmerged."""
    model = vitlab.load(base, **settings)
    assert isinstance(model, ViT)
    add_updates(model, RANK, ALPHA, seed=0)
    with torch.no_grad():
        for i, (name, p) in enumerate(model.named_parameters()):
            if p.requires_grad:
                draw = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i))
                p.copy_(draw * (0.2 if "lora" in name else 0.5))
    tensors = {name: tensor.detach().clone() for name, tensor in own_state(model).items()}
    write_folder(model.config, tensors, Card(), out, name_base(str(base), RANK, ALPHA))
    return model.eval()


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """A base and an adapter, side by side."""
    vitlab.save(tiny(), tmp_path / "base")
    adapt(tmp_path / "base", tmp_path / "adapter")
    return tmp_path / "base", tmp_path / "adapter"


# ---- merged


@pytest.mark.parametrize("family", FAMILIES)
def test_merged_and_unmerged_logits_agree(family: str, tmp_path: Path) -> None:
    vitlab.save(tiny(**FAMILIES[family]), tmp_path / "base")
    images = torch.randn(4, 3, 8, 8)
    unmerged, plain = adapt(tmp_path / "base", tmp_path / "adapter")(images), vitlab.load(tmp_path / "base")(images)
    merged = vitlab.load(tmp_path / "adapter")(images)
    scale = unmerged.abs().max()
    assert (unmerged - plain).abs().max() > 0.05 * scale
    assert (merged - unmerged).abs().max() <= 1e-5 * scale


def test_another_size_and_head_than_the_base(tmp_path: Path) -> None:
    """Updates that were trained at 16 px with a new head, on weights of 8 px with pre-logits."""
    vitlab.save(tiny(prelogits=7), tmp_path / "base")
    images = torch.randn(3, 3, 16, 16)
    unmerged = adapt(tmp_path / "base", tmp_path / "adapter", image_size=16, classes=3)(images)
    merged = vitlab.load(tmp_path / "adapter")
    assert (merged.config.classes, merged.config.image_size) == (3, (16, 16))
    torch.testing.assert_close(merged(images), unmerged, rtol=1e-5, atol=1e-5)


def test_another_resolution_when_loading(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    larger, native = vitlab.load(adapter, image_size=24), vitlab.load(adapter)
    positions = vitlab.load(base, image_size=24).state_dict()["positions.table"]
    assert torch.equal(larger.state_dict()["positions.table"], positions)
    assert torch.equal(larger.state_dict()["blocks.0.mlp.up.weight"], native.state_dict()["blocks.0.mlp.up.weight"])
    assert larger(torch.randn(1, 3, 24, 24)).shape == (1, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_base_in_another_precision(pair: tuple[Path, Path], tmp_path: Path, dtype: torch.dtype) -> None:
    """The base's rounding is all that differs: the sum itself is made in float32."""
    base, adapter = pair
    shutil.copytree(base, tmp_path / "other")
    (tmp_path / "other" / "config.json").unlink()
    file, tensors = tmp_path / "other" / "model.safetensors", load_file(base / "model.safetensors")
    save_file({name: x.to(dtype) for name, x in tensors.items()}, file, metadata_of(base / "model.safetensors"))
    merged = vitlab.load(adapter, base=file).state_dict()
    own, name = load_file(adapter / "model.safetensors"), "blocks.1.attention.out"
    a, b = own[f"{name}.lora_a.weight"].double(), own[f"{name}.lora_b.weight"].double()
    exact = tensors[f"{name}.weight"].to(dtype).double() + ALPHA / RANK * b @ a
    assert merged[f"{name}.weight"].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(merged[f"{name}.weight"].double(), exact, rtol=1e-6, atol=1e-6)
    assert all(torch.isfinite(x).all() for x in merged.values())


@pytest.mark.slow
def test_updates_of_updates(pair: tuple[Path, Path], tmp_path: Path) -> None:
    images = torch.randn(2, 3, 8, 8)
    unmerged = adapt(pair[1], tmp_path / "second", seed=2)(images)
    torch.testing.assert_close(vitlab.load(tmp_path / "second")(images), unmerged, rtol=1e-5, atol=1e-5)
    last = tmp_path / "second"
    model = vitlab.load(last)
    head = {name: x for name, x in model.state_dict().items() if name.startswith("head.")}
    for i in range(LONGEST_CHAIN - 1):
        write_folder(model.config, head, Card(), tmp_path / f"chain{i}", name_base(str(last), rank=0))
        last = tmp_path / f"chain{i}"
    refused(last, "merge some first")
    torch.testing.assert_close(vitlab.load(tmp_path / f"chain{i - 1}")(images), unmerged, rtol=1e-5, atol=1e-5)


# ---- everything that takes a model takes the merged one


def test_saved_and_converted_models_are_complete(pair: tuple[Path, Path], tmp_path: Path) -> None:
    _, adapter = pair
    images, model = torch.randn(2, 3, 8, 8), vitlab.load(adapter)
    vitlab.save(model, tmp_path / "saved")
    vitlab.convert(adapter, tmp_path / "timm.safetensors", "timm")
    shutil.rmtree(pair[0])
    for file in ("saved", "timm.safetensors"):
        assert torch.equal(vitlab.load(tmp_path / file)(images), model(images))
    before = model(images)
    vitlab.save(model, adapter)  # in place: the adapter's folder becomes a complete model
    assert torch.equal(vitlab.load(adapter)(images), before)


def test_commands_take_an_adapter_and_name_its_base(
    pair: tuple[Path, Path], tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture
) -> None:
    from PIL import Image

    Image.new("RGB", (9, 9), "red").save(tmp_path / "red.png")
    code, out, _ = command("predict", str(pair[1]), str(tmp_path / "red.png"))
    assert code == 0
    assert out
    assert f"low-rank updates of {pair[0]}" in caplog.text
    shutil.rmtree(pair[0])
    code, _, err = command("predict", str(pair[1]), str(tmp_path / "red.png"))
    assert code == 1
    assert "Traceback" not in err
    assert f"needs its base {pair[0]}, which is missing" in " ".join(err.split())


# ---- the base: missing, another, moved


def refused(source: Path, words: str, **options: Any) -> None:
    with pytest.raises(UserError, match=words) as error:
        vitlab.load(source, **options)
    assert "\n" not in str(error.value)


def test_a_missing_base_is_named(pair: tuple[Path, Path], tmp_path: Path) -> None:
    base, adapter = pair
    base.rename(tmp_path / "elsewhere")
    refused(adapter, f"needs its base {base}, which is missing; put back .* copy them to {adapter}/base")
    expected = vitlab.load(adapter, base=tmp_path / "elsewhere").state_dict()
    shutil.copytree(tmp_path / "elsewhere", adapter / "base")  # as the message advises
    assert torch.equal(vitlab.load(adapter).state_dict()["blocks.0.mlp.up.weight"], expected["blocks.0.mlp.up.weight"])


def test_another_base_is_refused(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    vitlab.save(fill(tiny(), seed=7), base)
    refused(adapter, f"{base} is not the base of {adapter}: its sha256 differs")
    vitlab.load(adapter, base=base)  # unless the user names it


def test_a_base_that_does_not_fit_is_refused(pair: tuple[Path, Path], tmp_path: Path) -> None:
    vitlab.save(tiny(heads=4), tmp_path / "heads")
    refused(
        pair[1], "cannot be the base of .*: it has heads=4, and the adapter is for heads=2", base=tmp_path / "heads"
    )
    refused(pair[0], "is a complete model; base= is for low-rank updates", base=pair[1])


def test_both_move_together(pair: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = vitlab.load(pair[1]).state_dict()
    for folder in pair:
        (tmp_path / "new").mkdir(exist_ok=True)
        folder.rename(tmp_path / "new" / folder.name)
    with caplog.at_level(logging.INFO, "vitlab"):
        after = vitlab.load(tmp_path / "new" / "adapter").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert str(tmp_path / "new" / "base") in caplog.text  # nothing is opened silently


def test_a_base_of_the_updates_own_file_name(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The base may be named by a file `model.safetensors`, as the updates are: the advice must not overwrite them."""
    file, folder = pair[0] / "model.safetensors", tmp_path / "other"
    adapt(file, folder)
    before = vitlab.load(folder).state_dict()
    (tmp_path / "gone").mkdir()
    file.rename(tmp_path / "gone" / "weights")
    refused(folder, f"which is missing; .* copy them to {folder}/base/model.safetensors")
    (folder / "base").mkdir()
    shutil.copy(tmp_path / "gone" / "weights", folder / "base" / "model.safetensors")
    after = vitlab.load(folder).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_base_is_looked_for_at_all_places(pair: tuple[Path, Path]) -> None:
    """Something else at the first place does not hide the copy that the user made as the message advises."""
    base, adapter = pair
    before = vitlab.load(adapter).state_dict()
    shutil.copytree(base, adapter / "base")
    (base / "model.safetensors").write_bytes(b"no weights")
    after = vitlab.load(adapter).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    shutil.rmtree(adapter / "base")
    refused(adapter, f"{base} cannot be the base of {adapter}: .*model.safetensors .*; put back")


def test_a_run_of_another_system_finds_the_base_inside(pair: tuple[Path, Path]) -> None:
    base, adapter = pair
    config = json.loads((adapter / "config.json").read_text())
    place = {"source": "D:\\weights\\first", "near": ""}  # of Windows: neither a path here nor a hub id
    rewrite(adapter, load_file(adapter / "model.safetensors"), config["model"]["lora"], place)
    refused(adapter, "which is missing")
    base.rename(adapter / "first")
    vitlab.load(adapter)


def test_a_base_on_the_hub_is_named_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branch may move, and a folder here may have its name; without it, the message has the hub's reason."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    vitlab.save(tiny(), tmp_path / "files")
    repo = add_to_cache(tmp_path / "cache", "some/vit", tmp_path / "files")
    adapt("some/vit", tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter" / "config.json").read_text())["base"] == {"source": "some/vit@" + "0" * 40}
    before = vitlab.load(tmp_path / "adapter").state_dict()
    vitlab.save(fill(tiny(), seed=5), repo / "snapshots" / ("1" * 40))
    (repo / "refs" / "main").write_text("1" * 40)
    after = vitlab.load(tmp_path / "adapter").state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    shutil.rmtree(repo)
    refused(tmp_path / "adapter", f"some/vit@0* cannot be the base of .*cache.*copy them to {tmp_path}/adapter/vit")
    shutil.copytree(tmp_path / "files", tmp_path / "adapter" / "vit")
    assert torch.equal(vitlab.load(tmp_path / "adapter").state_dict()["embed.weight"], before["embed.weight"])


def test_a_file_without_its_config_needs_a_named_base(pair: tuple[Path, Path], tmp_path: Path) -> None:
    shutil.copy(pair[1] / "model.safetensors", tmp_path / "alone.safetensors")
    refused(tmp_path / "alone.safetensors", "name the weights they are for")
    vitlab.load(tmp_path / "alone.safetensors", base=pair[0])


# ---- tampered


def metadata_of(file: Path) -> dict[str, str]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return dict(opened.metadata())


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], lora: Any, base: Any) -> None:
    """A folder whose two files agree with each other, as an attacker would leave them."""
    config = json.loads((folder / "config.json").read_text())
    config["model"]["lora"], config["base"] = lora, base
    header = {"vitlab/1": json.dumps(config["model"])}
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors", header)
    config["sha256"] = sha256(folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


Tamper = Callable[[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]], object]
UP = "blocks.0.mlp.up.lora_a.weight"
TAMPERED: dict[str, tuple[Tamper, str]] = {
    "rank": (lambda t, lora, base: lora.update(rank=4), "has shape"),
    "huge rank": (lambda t, lora, base: lora.update(rank=10**9), "10,000,000|rank must be"),
    "negative rank": (lambda t, lora, base: lora.update(rank=-3), "rank must be"),
    "no rank": (lambda t, lora, base: lora.pop("rank"), "rank"),
    "rank of zero": (lambda t, lora, base: lora.update(rank=0), "do not belong"),
    "rank in words": (lambda t, lora, base: lora.update(rank="3"), "rank must be"),
    "NaN alpha": (lambda t, lora, base: lora.update(alpha=float("nan")), "NaN is no number"),
    "infinite alpha": (lambda t, lora, base: lora.update(alpha=float("inf")), "Infinity is no number"),
    "alpha beyond float": (lambda t, lora, base: lora.update(alpha=1e300), "alpha must be"),
    "alpha of zero": (lambda t, lora, base: lora.update(alpha=0), "alpha must be"),
    "foreign setting": (lambda t, lora, base: lora.update(beta=1), "beta"),
    "shape": (lambda t, lora, base: t.update({UP: t[UP][:, :-1]}), "has shape"),
    "transposed": (lambda t, lora, base: t.update({UP: t[UP].T}), "has shape"),
    "foreign tensor": (lambda t, lora, base: t.update(extra=torch.zeros(2)), "'extra' does not belong"),
    "weights of the body": (lambda t, lora, base: t.update({"norm.weight": torch.ones(16)}), "does not belong"),
    "missing tensor": (lambda t, lora, base: t.pop(UP), "is missing"),
    "integers": (lambda t, lora, base: t.update({UP: t[UP].int()}), "floating-point"),
    "sha256": (lambda t, lora, base: lora.update(sha256="0" * 64), "sha256 differs"),
    "short sha256": (lambda t, lora, base: lora.update(sha256="00"), "64 hexadecimal digits"),
    "hidden sha256": (lambda t, lora, base: base.update(sha256="0" * 64), "must not have 'sha256'"),
    "a device": (lambda t, lora, base: base.update(source="/dev/zero", near=""), "no file or folder"),
    "a folder": (lambda t, lora, base: base.update(source="/", near=""), "name a file in it"),
    "a path from here": (lambda t, lora, base: base.update(source="../base", near=""), "absolute path or a hub id"),
    "a path from home": (lambda t, lora, base: base.update(source="~/base", near=""), "absolute path or a hub id"),
    "a path without an end": (lambda t, lora, base: base.update(source="/a\0b"), "no path has"),
    "no path at all": (lambda t, lora, base: base.update(source=["/"]), "source must be"),
}


@pytest.mark.parametrize("kind", TAMPERED)
def test_tampered_adapters_are_refused(kind: str, pair: tuple[Path, Path]) -> None:
    tamper, words = TAMPERED[kind]
    folder = pair[1]
    config = json.loads((folder / "config.json").read_text())
    tensors, lora, base = load_file(folder / "model.safetensors"), config["model"]["lora"], config["base"]
    tamper(tensors, lora, base)
    rewrite(folder, tensors, lora, base)
    refused(folder, words)


def test_the_tampering_itself_is_not_what_is_refused(pair: tuple[Path, Path]) -> None:
    before = vitlab.load(pair[1]).state_dict()
    config = json.loads((pair[1] / "config.json").read_text())
    tensors = load_file(pair[1] / "model.safetensors")
    rewrite(pair[1], tensors, config["model"]["lora"], config["base"])
    after = vitlab.load(pair[1]).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_a_model_that_only_the_header_claims_takes_no_memory(pair: tuple[Path, Path]) -> None:
    folder = pair[1]
    config = json.loads((folder / "config.json").read_text())
    config["model"] |= {"depth": 100, "width": 65536, "mlp": 2**20, "heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    head = {"head.weight": torch.zeros(5, 65536), "head.bias": torch.zeros(5)}
    rewrite(folder, head, config["model"]["lora"] | {"rank": 0}, config["base"])
    check_refused(folder)


@pytest.mark.parametrize("positions", mostly_slow(["1d", "2d", "sinusoidal"], "2d"))
def test_an_image_size_that_only_the_header_claims_takes_no_memory(positions: str, tmp_path: Path) -> None:
    """The base is real and small; at the adapter's size its table of positions would have 2 to 4 GB."""
    vitlab.save(tiny(patch=1, positions=positions, placement="stem"), tmp_path / "base")
    head = {name: x for name, x in tiny(patch=1).state_dict().items() if name.startswith("head.")}
    config = tiny(patch=1, positions=positions).config
    write_folder(config, head, Card(), tmp_path / "adapter", name_base(str(tmp_path / "base"), rank=0))
    about = json.loads((tmp_path / "adapter" / "config.json").read_text())
    about["model"]["image_size"] = [8192, 8192]
    (tmp_path / "adapter" / "config.json").write_text(json.dumps(about))
    rewrite(tmp_path / "adapter", head, about["model"]["lora"], about["base"])
    if positions == "2d":  # two short tables
        assert vitlab.load(tmp_path / "adapter").config.image_size == (8192, 8192)
    else:
        assert "8192x8192" in check_refused(tmp_path / "adapter")
