"""Files that two models have in common, and files of other architectures: nothing loads as what it is not."""

import json
from pathlib import Path
from typing import Any

import originals
import pytest
import timm
import torch
import transformers
from peers import images, randomize, vit_config
from safetensors.torch import save_file
from torch import Tensor

from vitlab.errors import UserError
from vitlab.weights import load

hf: Any = transformers  # some of its classes have no types
SMALL: dict[str, Any] = {"depth": 1, "embed_dim": 64, "num_heads": 4, "num_classes": 7, "img_size": 64}


def refusal(path: Path, **given: Any) -> str:
    with pytest.raises(UserError) as error:
        load(path, **given)
    assert "\n" not in str(error.value)
    return str(error.value)


def differs(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert b.std() > 0.05
    return float((a - b).abs().max() / b.abs().max())


# ---- the same tensors, other arithmetic


def test_deit3_of_its_authors_is_not_taken_for_rotary_positions(tmp_path: Path) -> None:
    """Its LayerScale has the names of timm's RoPE-ViT with a table: the caller decides between them."""
    theirs: Any = randomize(timm.create_model("deit3_small_patch16_224", **SMALL))
    weights = {key.replace("ls1.gamma", "gamma_1").replace("ls2.gamma", "gamma_2"): x for key, x in own(theirs).items()}
    torch.save({"model": weights}, tmp_path / "deit_3.pth")
    assert "rotary=none" in refusal(tmp_path / "deit_3.pth", heads=4)
    x = images(64)
    with torch.no_grad():
        assert differs(load(tmp_path / "deit_3.pth", heads=4, rotary="none")(x), theirs(x)) <= 2e-5


def test_rope_vit_with_a_table_is_asked_about_too(tmp_path: Path) -> None:
    theirs: Any = randomize(timm.create_model("vit_small_patch16_rope_ape_224", **SMALL))
    save_file(own(theirs), tmp_path / "rope.safetensors")
    assert "rotary=cells" in refusal(tmp_path / "rope.safetensors", heads=4)
    x = images(64)
    with torch.no_grad():
        assert differs(load(tmp_path / "rope.safetensors", heads=4, rotary="cells")(x), theirs(x)) <= 2e-5


def test_clip_without_its_first_norm_is_refused(tmp_path: Path) -> None:
    """Models of open_clip without it (CLIPA) take the mean of the patches, which no tensor shows."""
    tensors = originals.as_tensors(originals.clip(text=False), torch.float32)
    torch.save({key: x for key, x in tensors.items() if "ln_pre" not in key}, tmp_path / "clipa.pth")
    assert "'visual.ln_pre.weight'" in refusal(tmp_path / "clipa.pth", heads=originals.HEADS)


def own(model: Any) -> dict[str, Tensor]:
    return dict(model.state_dict())


# ---- a table of positions for two grids


def write_vit(path: Path, size: tuple[int, int], **more: Any) -> Any:
    model: Any = randomize(timm.create_model("vit_small_patch16_224", **{**SMALL, "img_size": size, **more}))
    save_file(own(model), path)
    return model


def test_another_size_is_no_reason_to_take_the_tokens_position_for_a_patchs(tmp_path: Path) -> None:
    """7x7 patches and the class token have as many positions as 5x10 patches."""
    theirs = write_vit(tmp_path / "a.safetensors", (112, 112))
    ours = load(tmp_path / "a.safetensors", heads=4, image_size=(80, 160))
    assert vit_config(ours).prefix_positions == "token"
    same = load(tmp_path / "a.safetensors", heads=4).resize((80, 160))
    x = images((80, 160))
    with torch.no_grad():
        assert torch.equal(ours(x), same(x))
        assert differs(load(tmp_path / "a.safetensors", heads=4)(images(112)), theirs(images(112))) <= 2e-5


def test_a_table_for_a_square_or_for_the_asked_size_is_refused(tmp_path: Path) -> None:
    """3x5 patches and the class token, or 4x4 patches whose class token has no position."""
    write_vit(tmp_path / "a.safetensors", (48, 80))
    assert "16 positions" in refusal(tmp_path / "a.safetensors", heads=4, image_size=(48, 80))
    theirs = write_vit(tmp_path / "b.safetensors", (64, 64), no_embed_class=True)
    ours = load(tmp_path / "b.safetensors", heads=4)
    assert vit_config(ours).prefix_positions == "none"
    with torch.no_grad():
        assert differs(ours(images(64)), theirs(images(64))) <= 2e-5


def test_a_square_that_may_be_a_rectangle_and_a_token_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """13x15 patches and the class token have as many positions as 14x14 patches; a config with the size decides."""
    theirs = write_vit(tmp_path / "a.safetensors", (208, 240))
    load(tmp_path / "a.safetensors", heads=4)
    assert "WARNING" in {record.levelname for record in caplog.records}
    assert "196 positions, taken as those of 14x14 patches; 13x15 patches and a class token" in caplog.text
    caplog.clear()
    folder = tmp_path / "hub"
    folder.mkdir()
    (tmp_path / "a.safetensors").rename(folder / "model.safetensors")
    args = {**SMALL, "img_size": [208, 240]}
    (folder / "config.json").write_text(json.dumps({"architecture": "vit_small_patch16_224", "model_args": args}))
    ours = load(folder)
    assert not caplog.records
    assert vit_config(ours).prefix_positions == "token"
    with torch.no_grad():
        assert differs(ours(images((208, 240))), theirs(images((208, 240)))) <= 2e-5


# ---- what a config names, and the file lacks


@pytest.mark.parametrize("named", [True, False])
def test_a_norm_that_the_architecture_has_is_not_left_out(named: bool, tmp_path: Path) -> None:
    model: Any = randomize(timm.create_model("vit_small_patch16_224", **SMALL))
    save_file({key: x for key, x in own(model).items() if key[:5] != "norm."}, tmp_path / "model.safetensors")
    if named:
        (tmp_path / "config.json").write_text(
            json.dumps({"architecture": "vit_small_patch16_224", "model_args": SMALL})
        )
    message = refusal(tmp_path if named else tmp_path / "model.safetensors", **({} if named else {"heads": 4}))
    assert "'norm.weight'" in message
    assert ("vit_small_patch16_224" in message) == named


def test_an_architecture_without_that_norm_loads_without(tmp_path: Path) -> None:
    theirs: Any = randomize(timm.create_model("vit_small_patch16_224", **SMALL, final_norm=False))
    save_file(own(theirs), tmp_path / "model.safetensors")
    config = {"architecture": "vit_small_patch16_224", "model_args": {**SMALL, "final_norm": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.no_grad():
        assert differs(load(tmp_path)(images(64)), theirs(images(64))) <= 2e-5


@pytest.mark.parametrize(("key", "value"), [("depth", 2), ("embed_dim", 128)])
def test_a_folder_whose_config_has_another_shape_is_refused(key: str, value: int, tmp_path: Path) -> None:
    """A file that lacks its last block is another model."""
    write_vit(tmp_path / "model.safetensors", (64, 64))
    config = {"architecture": "vit_small_patch16_224", "model_args": {**SMALL, key: value}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert f"{key}={value} and the weights beside it have {SMALL[key]}" in message
    assert str(tmp_path) in message


# ---- other architectures, by a tensor of theirs

TIMM: dict[str, tuple[str, dict[str, Any], str]] = {
    "Swin": ("swin_tiny_patch4_window7_224", {"depths": (1, 1), "embed_dim": 24, "num_heads": (1, 1)}, "layers.0"),
    "BEiT": ("beit_base_patch16_224", SMALL, "relative_position_bias_table"),
    "SAM": ("samvit_base_patch16", {"depth": 1, "embed_dim": 64, "num_heads": 4, "img_size": 64}, "rel_pos_h"),
    "ConvNeXt": ("convnext_atto", {"depths": (1,) * 4, "dims": (8,) * 4}, "head.norm"),
    "CaiT of an odd width": ("cait_xxs24_224", {"depth": 1, "embed_dim": 72, "num_heads": 4}, "proj_l"),
    "distilled DeiT": ("deit_tiny_distilled_patch16_224", SMALL, "dist_token"),
    "parallel blocks": ("vit_small_patch16_18x2_224", SMALL, "attns.0"),
}


@pytest.mark.parametrize("name", TIMM)
def test_timms_other_architectures(name: str, tmp_path: Path) -> None:
    architecture, args, part = TIMM[name]
    with torch.device("meta"):
        model = timm.create_model(architecture, **args)
    save_file({key: torch.zeros(x.shape) for key, x in model.state_dict().items()}, tmp_path / "a.safetensors")
    message = refusal(tmp_path / "a.safetensors")
    assert part in message
    assert "lacks" not in message


BODY: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40}
BODY |= {"image_size": 32, "patch_size": 8}
TEXT: dict[str, Any] = {key: BODY[key] for key in list(BODY)[:4]} | {"vocab_size": 20, "bos_token_id": 1}
HF: dict[str, tuple[Any, str]] = {
    "Swin": (
        lambda: hf.SwinModel(hf.SwinConfig(embed_dim=16, depths=[1, 1], num_heads=[1, 1], image_size=32)),
        "encoder.layers.0",
    ),
    "BEiT": (lambda: hf.BeitModel(hf.BeitConfig(**BODY, use_relative_position_bias=True)), "relative_position"),
    "ConvNeXt": (
        lambda: hf.ConvNextModel(hf.ConvNextConfig(depths=[1, 1], hidden_sizes=[8, 16], num_stages=2)),
        "layernorm",
    ),
    "CLIP's text half": (lambda: hf.CLIPTextModel(hf.CLIPTextConfig(**TEXT)), "token_embedding"),
    "YOLOS": (lambda: hf.YolosModel(hf.YolosConfig(**BODY | {"image_size": [32, 32]})), "detection_tokens"),
}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", HF)
def test_transformers_other_architectures(name: str, named: bool, tmp_path: Path) -> None:
    make, part = HF[name]
    make().save_pretrained(tmp_path / "hub")
    if not named:
        (tmp_path / "hub" / "config.json").unlink()
    message = refusal(tmp_path / "hub")
    assert part in message or (named and "of transformers" in message)
    assert "lacks" not in message


def test_weights_in_several_files_are_refused(tmp_path: Path) -> None:
    hf.ViTModel(hf.ViTConfig(**BODY)).save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    assert "several files" in refusal(tmp_path / "hub")
    first = min((tmp_path / "hub").glob("*.safetensors"))
    refusal(first)
