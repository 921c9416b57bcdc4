"""transformers' later Vision Transformers, every tensor random, loaded here, and ours loaded there."""

import dataclasses
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from families import mostly_slow
from peers import agree, images, randomize, vit_config
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.dinov3_vit import modeling_dinov3_vit

from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save

SMALL: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 72}
SMALL |= {"image_size": 32, "patch_size": 8}
DINO = {key: value for key, value in SMALL.items() if key != "intermediate_size"} | {"mlp_ratio": 2}
TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 40, "vocab_size": 50}
TEXT |= {"bos_token_id": 1, "eos_token_id": 2}
BOTH: dict[str, Any] = {"vision_config": SMALL, "text_config": TEXT}
DECODER: dict[str, Any] = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
DECODER |= {"decoder_intermediate_size": 20}
LABELS: dict[str, Any] = {"num_labels": 5}
NO_POOLING: dict[str, Any] = {"vision_use_head": False}
TYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]  # the stricter one is quick


def pooled(model: Any, x: Tensor, **kwargs: Any) -> Tensor:
    return model(x, **kwargs).pooler_output


def logits(model: Any, x: Tensor, **kwargs: Any) -> Tensor:
    return model(x, **kwargs).logits


def encoded(model: Any, x: Tensor, **kwargs: Any) -> Tensor:
    """The class token of MAE's encoder, which sees all patches in their order."""
    encoder = getattr(model, "vit", model)
    patches = x.shape[-1] * x.shape[-2] // 64
    noise = torch.arange(patches, dtype=x.dtype).expand(len(x), -1)
    return encoder(x, noise=noise, **kwargs).last_hidden_state[:, 0]


@dataclass(frozen=True)
class Case:
    make: Callable[[], Any]
    out: Callable[..., Tensor]
    config: dict[str, Any]  # what must be read beside the dimensions
    back: str = ""  # the class that is written, where it is another
    lost: tuple[str, ...] = ()  # the beginnings of names that do not come back, or as zeros


LIST: dict[str, Case] = {
    "DeiTModel": Case(
        lambda: hf.DeiTModel(hf.DeiTConfig(**SMALL, pooler_output_size=40)),
        pooled,
        {"registers": 1, "prefix_positions": "all", "prelogits": 40},
    ),
    "DeiTForImageClassification": Case(
        lambda: hf.DeiTForImageClassification(hf.DeiTConfig(**SMALL, **LABELS)), logits, {"registers": 1}
    ),
    "CLIPVisionModel": Case(
        lambda: hf.CLIPVisionModel(hf.CLIPVisionConfig(**SMALL)),
        pooled,
        {"norm_before": True, "embed_bias": False, "gelu": "quick", "norm_eps": 1e-5},
    ),
    "CLIPVisionModelWithProjection": Case(
        lambda: hf.CLIPVisionModelWithProjection(hf.CLIPVisionConfig(**SMALL, hidden_act="gelu", projection_dim=20)),
        lambda model, x, **kwargs: model(x, **kwargs).image_embeds,
        {"classes": 20, "gelu": "exact"},
    ),
    "CLIPModel": Case(
        lambda: hf.CLIPModel(hf.CLIPConfig(**BOTH, projection_dim=20)),
        lambda model, x, **kwargs: model.get_image_features(x, **kwargs).pooler_output,
        {"classes": 20},
        back="CLIPVisionModelWithProjection",
        lost=("text_", "logit_scale"),
    ),
    "SiglipVisionModel": Case(
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL)), pooled, {"pool": "attention", "gelu": "tanh"}
    ),
    "SiglipModel": Case(
        lambda: hf.SiglipModel(hf.SiglipConfig(**BOTH)),
        lambda model, x, **kwargs: model.get_image_features(x, **kwargs).pooler_output,
        {"pool": "attention"},
        back="SiglipVisionModel",
        lost=("text_", "logit_"),
    ),
    "SiglipForImageClassification": Case(
        lambda: hf.SiglipForImageClassification(hf.SiglipConfig(**BOTH, **LABELS)),
        logits,
        {"pool": "mean", "classes": 5},
        lost=("vision_model.head.",),
    ),
    "SiglipVisionModel without pooling": Case(
        lambda: hf.SiglipVisionModel(hf.SiglipVisionConfig(**SMALL, **NO_POOLING)),
        lambda model, x, **kwargs: model(x, **kwargs).last_hidden_state.mean(1),
        {"pool": "mean", "classes": 0},
    ),
    "Dinov2Model": Case(
        lambda: hf.Dinov2Model(hf.Dinov2Config(**DINO)),
        pooled,
        {"layer_scale": True, "pool": "token"},
        lost=("embeddings.mask_token",),
    ),
    "Dinov2Model, gated, without biases": Case(
        lambda: hf.Dinov2Model(hf.Dinov2Config(**DINO | {"mlp_ratio": 3}, use_swiglu_ffn=True, qkv_bias=False)),
        pooled,
        {"mlp_kind": "swiglu", "mlp": 96, "qkv_bias": "none"},
        lost=("embeddings.mask_token",),
    ),
    "Dinov2ForImageClassification": Case(
        lambda: hf.Dinov2ForImageClassification(hf.Dinov2Config(**DINO, **LABELS)),
        logits,
        {"pool": "token_mean"},
        lost=("dinov2.embeddings.mask_token",),
    ),
    "Dinov2WithRegistersModel": Case(
        lambda: hf.Dinov2WithRegistersModel(hf.Dinov2WithRegistersConfig(**DINO, num_register_tokens=3)),
        pooled,
        {"registers": 3, "prefix_positions": "token"},
        lost=("embeddings.mask_token",),
    ),
    "Dinov2WithRegistersForImageClassification": Case(
        lambda: hf.Dinov2WithRegistersForImageClassification(
            hf.Dinov2WithRegistersConfig(**DINO, num_register_tokens=3, **LABELS)
        ),
        logits,
        {"registers": 3, "pool": "token_mean"},
        lost=("dinov2_with_registers.embeddings.mask_token",),
    ),
    "DINOv3ViTModel": Case(
        lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SMALL, num_register_tokens=4, rope_theta=70.0)),
        pooled,
        {"rotary": "centers", "rotary_base": 70.0, "qkv_bias": "qv", "registers": 4, "positions": "none"},
        lost=("embeddings.mask_token",),
    ),
    "DINOv3ViTModel, gated": Case(
        lambda: hf.DINOv3ViTModel(
            hf.DINOv3ViTConfig(
                **SMALL, use_gated_mlp=True, hidden_act="silu", query_bias=False, value_bias=False, key_bias=False
            )
        ),
        pooled,
        {"mlp_kind": "swiglu", "mlp": 72, "qkv_bias": "none", "registers": 0},
        lost=("embeddings.mask_token",),
    ),
    "DINOv3ViTModel, all biases": Case(
        lambda: hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SMALL, num_register_tokens=1, key_bias=True)),
        pooled,
        {"qkv_bias": "all", "registers": 1},
        lost=("embeddings.mask_token",),
    ),
    "ViTMAEModel": Case(
        lambda: hf.ViTMAEModel(hf.ViTMAEConfig(**SMALL, mask_ratio=0.0)), encoded, {"pool": "token"}, back="ViTModel"
    ),
    "ViTMAEForPreTraining": Case(
        lambda: hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SMALL, **DECODER, mask_ratio=0.0)),
        encoded,
        {"pool": "token"},
        back="ViTModel",
        lost=("decoder.",),
    ),
    "ViTMSNModel": Case(
        lambda: hf.ViTMSNModel(hf.ViTMSNConfig(**SMALL)),
        lambda model, x, **kwargs: model(x, **kwargs).last_hidden_state[:, 0],
        {"norm_eps": 1e-6},
        back="ViTModel",
    ),
    "ViTModel without biases": Case(
        lambda: hf.ViTModel(hf.ViTConfig(**SMALL, qkv_bias=False)), pooled, {"qkv_bias": "none", "prelogits": 48}
    ),
}
CASES = pytest.mark.parametrize("case", LIST.values(), ids=LIST.keys())
SOME = mostly_slow(LIST, "DeiTModel", "CLIPModel", "SiglipVisionModel", "Dinov2WithRegistersModel", "DINOv3ViTModel")


def make(case: Case, folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Their model, saved to a folder, with every parameter random; buffers stay what their class needs."""
    torch.manual_seed(0)
    model = randomize(case.make(), dtype)
    model.save_pretrained(folder)
    return model


@pytest.fixture(autouse=True)
def exact_angles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary angles in float64: transformers computes them in float32 for all precisions."""
    compute = modeling_dinov3_vit.get_patches_center_coordinates

    def centers(height: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return compute(height, width, dtype=torch.float64, device=device)

    monkeypatch.setattr(modeling_dinov3_vit, "get_patches_center_coordinates", centers)


def sharpen(model: Any) -> None:
    """The rates of rotary positions in float64."""
    rope = getattr(model, "rope_embeddings", None)
    if rope is not None:
        step = torch.arange(rope.head_dim // 4, dtype=torch.float64) * (4 / rope.head_dim)
        rope.inv_freq = rope.base**-step


# ---- theirs, here


@pytest.mark.parametrize("dtype", TYPES)
@CASES
def test_their_model_gives_the_same_here(case: Case, dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = make(case, tmp_path, dtype)
    sharpen(theirs)
    ours = load(tmp_path)
    x = images(32, dtype)
    with torch.no_grad():
        agree(ours(x), case.out(theirs, x))
    config = vars(vit_config(ours))
    assert {name: config[name] for name in case.config} == case.config
    assert config["depth"] == 2
    assert config["heads"] == 3


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", SOME)
def test_another_resolution(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Against their own resampling where it is bicubic without antialiasing, in the model's precision."""
    case = LIST[name]
    theirs = make(case, tmp_path, dtype)
    sharpen(theirs)
    ours = load(tmp_path, image_size=48, resample="bicubic")
    x = images(48, dtype)
    name = type(theirs).__name__
    kwargs: dict[str, Any] = {}
    if name.startswith("Dinov2"):  # in float32, with registers antialiased: by hand instead
        place_again(getattr(theirs, theirs.base_model_prefix, theirs).embeddings)
    elif not name.startswith("DINOv3"):
        kwargs = {"interpolate_pos_encoding": True}
    with torch.no_grad():
        agree(ours(x), case.out(theirs, x, **kwargs))


def place_again(embeddings: Any) -> None:
    """A table for 6x6 patches in place of one for 4x4."""
    table = embeddings.position_embeddings.data
    grid = table[:, 1:].unflatten(1, (4, 4)).permute(0, 3, 1, 2)
    new = F.interpolate(grid, (6, 6), mode="bicubic", align_corners=False).permute(0, 2, 3, 1).flatten(1, 2)
    embeddings.position_embeddings = torch.nn.Parameter(torch.cat([table[:, :1], new], 1))


def test_what_is_left_out_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = {"CLIPModel": "the text half", "ViTMAEForPreTraining": "the decoder", "Dinov2Model": "the mask token"}
    for name, part in words.items():
        make(LIST[name], tmp_path / name)
        with caplog.at_level(logging.INFO, "vitlab"):
            load(tmp_path / name)
        assert f"{tmp_path / name}: left out {part}" in caplog.text


@pytest.mark.parametrize("name", ["DeiTModel", "Dinov2Model", "Dinov2Model, gated, without biases", "DINOv3ViTModel"])
def test_names_in_memory_are_read_too(name: str, tmp_path: Path) -> None:
    case = LIST[name]
    theirs = make(case, tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "memory.pth")
    settings: dict[str, Any] = {"rotary_base": 70.0, "image_size": 32} if name == "DINOv3ViTModel" else {}
    (tmp_path / "config.json").unlink()
    ours = load(tmp_path / "memory.pth", heads=3, **settings)
    x = images(32)
    assert vit_config(ours).norm_eps == theirs.config.layer_norm_eps
    with torch.no_grad():
        agree(ours(x), case.out(theirs, x))


def test_clip_files_of_older_versions(tmp_path: Path) -> None:
    """Their vision model has a prefix, and the numbers of its positions are stored."""
    theirs = make(LIST["CLIPVisionModel"], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {f"vision_model.{name}": tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "vision_model.embeddings.position_ids": torch.arange(17)[None]}, file)
    x = images(32)
    with torch.no_grad():
        agree(load(tmp_path)(x), pooled(theirs, x))


def test_msn_with_a_head(tmp_path: Path) -> None:
    """Version 5 leaves the prefix of its blocks out when writing; the files on the hub have it."""
    theirs = randomize(hf.ViTMSNForImageClassification(hf.ViTMSNConfig(**SMALL, **LABELS, layer_norm_eps=1e-3)))
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"vit.{key}" if key.startswith("encoder.") else key: x for key, x in load_file(file).items()}, file)
    ours = load(tmp_path)
    x = images(32)
    assert vit_config(ours).norm_eps == 1e-3
    with torch.no_grad():
        agree(ours(x), logits(theirs, x))


def test_a_config_with_its_class_defaults_left_out(tmp_path: Path) -> None:
    """As in SigLIP's files on the hub, whose vision_config has nothing but the kind."""
    arguments = {**SMALL, "num_attention_heads": 12}
    theirs = randomize(hf.SiglipModel(hf.SiglipConfig(vision_config=arguments, text_config=TEXT)))
    theirs.save_pretrained(tmp_path)
    config = {"model_type": "siglip", "vision_config": {"model_type": "siglip_vision_model"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = load(tmp_path)
    x = images(32)
    with torch.no_grad():
        agree(ours(x), theirs.get_image_features(x).pooler_output)


@pytest.mark.parametrize(("name", "eps"), [("ViTMSNModel", 1e-6), ("ViTModel without biases", 1e-12)])
def test_the_epsilon_that_a_config_leaves_out_is_its_class(name: str, eps: float, tmp_path: Path) -> None:
    make(LIST[name], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("layer_norm_eps") == eps
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vit_config(load(tmp_path)).norm_eps == eps


@pytest.mark.parametrize("name", ["Dinov2Model", "CLIPModel"])
@pytest.mark.parametrize(("key", "value", "stored"), [("num_hidden_layers", 3, 2), ("hidden_size", 96, 48)])
def test_a_config_of_another_shape_is_refused(name: str, key: str, value: int, stored: int, tmp_path: Path) -> None:
    """As of a file that lacks its last block, which is another model without."""
    make(LIST[name], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config.get("vision_config", config)[key] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"{key}={value} and the weights beside it have {stored}$") as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)


# ---- there and back


@pytest.mark.parametrize("which", SOME)
def test_round_trip_is_bit_identical(which: str, tmp_path: Path) -> None:
    case = LIST[which]
    name = type(make(case, tmp_path / "theirs")).__name__
    convert(tmp_path / "theirs", tmp_path / "ours", "vitlab")
    convert(tmp_path / "ours", tmp_path / "back", "huggingface")
    theirs, back = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "back"))
    if name in ("CLIPVisionModel", "SiglipVisionModel"):  # written as before version 5, which both can read
        theirs = {f"vision_model.{key}": tensor for key, tensor in theirs.items()}
    elif name == "ViTMAEForPreTraining":  # as a body of its own
        theirs = {key.removeprefix("vit."): tensor for key, tensor in theirs.items()}
    kept = {key for key in theirs if not key.startswith(case.lost)} if case.lost else theirs.keys()
    assert {key for key in back if not (case.lost and key.startswith(case.lost))} == kept
    assert all(torch.equal(back[key], theirs[key]) for key in kept)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["architectures"] == [case.back or name]
    assert load(tmp_path / "back").config == load(tmp_path / "ours").config


PLAIN = ViTConfig((32, 32), patch=8, depth=2, width=48, mlp=96, heads=3, classes=0, norm_eps=1e-5)
CLIP = dataclasses.replace(PLAIN, norm_before=True, embed_bias=False, gelu="quick")
DINOV2 = dataclasses.replace(PLAIN, layer_scale=True)
DINOV3 = dataclasses.replace(
    DINOV2,
    positions="none",
    prefix_positions="none",
    rotary="centers",
    rotary_layout="halves",
    rotary_base=50.0,
    qkv_bias="qv",
    registers=2,
)
DEIT = dataclasses.replace(PLAIN, registers=1, prefix_positions="all")
OURS: dict[str, tuple[ViTConfig, str]] = {
    "ViTModel": (dataclasses.replace(PLAIN, prelogits=40, qkv_bias="none"), "ViTModel"),
    "DeiTModel": (dataclasses.replace(DEIT, prelogits=40, image_size=(32, 48)), "DeiTModel"),
    "DeiT with a head": (dataclasses.replace(DEIT, classes=5), "DeiTForImageClassification"),
    "CLIP": (CLIP, "CLIPVisionModel"),
    "CLIP, projected": (dataclasses.replace(CLIP, classes=20), "CLIPVisionModelWithProjection"),
    "SigLIP": (dataclasses.replace(PLAIN, pool="attention", gelu="tanh"), "SiglipVisionModel"),
    "SigLIP with a head": (dataclasses.replace(PLAIN, pool="mean", classes=5), "SiglipForImageClassification"),
    "DINOv2": (DINOV2, "Dinov2Model"),
    "DINOv2, gated": (dataclasses.replace(DINOV2, mlp_kind="swiglu"), "Dinov2Model"),
    "DINOv2 with a head": (
        dataclasses.replace(DINOV2, pool="token_mean", classes=5),
        "Dinov2ForImageClassification",
    ),
    "DINOv2, registers": (dataclasses.replace(DINOV2, registers=2, qkv_bias="none"), "Dinov2WithRegistersModel"),
    "DINOv2, registers, head": (
        dataclasses.replace(DINOV2, registers=2, pool="token_mean", classes=5),
        "Dinov2WithRegistersForImageClassification",
    ),
    "DINOv3": (DINOV3, "DINOv3ViTModel"),
    "DINOv3, not square": (dataclasses.replace(DINOV3, image_size=(32, 48), gelu="tanh"), "DINOv3ViTModel"),
    "DINOv3, gated": (dataclasses.replace(DINOV3, mlp_kind="swiglu", registers=0, qkv_bias="all"), "DINOv3ViTModel"),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("which", mostly_slow(OURS, "ViTModel", "CLIP, projected", "SigLIP", "DINOv2", "DINOv3"))
def test_their_class_reads_ours(which: str, dtype: torch.dtype, tmp_path: Path) -> None:
    config, name = OURS[which]
    ours = randomize(build(config), dtype)
    if name == "CLIPVisionModelWithProjection":
        assert ours.head is not None
        ours.head.bias.data.zero_()
    save(ours, tmp_path / "ours")
    ours = load(tmp_path / "ours")  # with rotary angles in its precision
    convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())["architectures"] == [name]
    theirs, info = getattr(hf, name).from_pretrained(tmp_path / "theirs", dtype=dtype, output_loading_info=True)
    assert not any(info.values())  # nothing missing, unexpected or mismatched
    sharpen(theirs)
    x = images(config.image_size, dtype)
    with torch.no_grad():
        out = theirs.eval()(x)
        agree(ours(x), next(out[key] for key in ("logits", "image_embeds", "pooler_output") if key in out))
    assert load(tmp_path / "theirs").config == config


def test_a_token_without_a_position_gets_one_of_zeros(tmp_path: Path) -> None:
    """DINOv2 with registers as timm has it: the token's position is in the token."""
    ours = randomize(build(dataclasses.replace(DINOV2, registers=2, prefix_positions="none")))
    save(ours, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    theirs: Any = hf.Dinov2WithRegistersModel.from_pretrained(tmp_path / "theirs")
    x = images(32)
    with torch.no_grad():
        agree(ours(x), pooled(theirs.eval(), x))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "q/k norms": ({"qk_norm": True}, "ViTModel cannot express qk_norm=True"),
    "gated ViT": ({"mlp_kind": "swiglu"}, "ViTModel cannot express mlp_kind='swiglu'"),
    "a class token and the mean": ({"pool": "token_mean", "classes": 3}, "ViTForImageClassification cannot express"),
    "no final norm": ({"final_norm": "none"}, "ViTModel cannot express final_norm='none'"),
    "key without bias": ({"qkv_bias": "qv"}, "ViTModel cannot express qkv_bias='qv'"),
    "many registers": ({"registers": 2}, "DeiTModel cannot express registers=2"),
    "CLIP with a bias": ({"norm_before": True}, "CLIPVisionModel cannot express embed_bias=True"),
    "CLIP with a head": ({"norm_before": True, "embed_bias": False, "classes": 3}, "cannot express a head with biases"),
    "CLIP, not square": (
        {"norm_before": True, "embed_bias": False, "image_size": (32, 48)},
        "cannot express images that are not square",
    ),
    "a head on DINOv2's token": (
        {"layer_scale": True, "classes": 3},
        "Dinov2ForImageClassification cannot express pool='token', only token_mean",
    ),
    "another MLP": ({"layer_scale": True, "mlp": 97}, "Dinov2Model cannot express mlp=97"),
    "other gates": ({"layer_scale": True, "mlp_kind": "swiglu", "mlp": 88}, "Dinov2Model cannot express mlp=88"),
    "EVA's rotary positions": (
        {"layer_scale": True, "rotary": "cells", "positions": "none"},
        "DINOv3ViTModel cannot express rotary='cells'",
    ),
    "DINOv3 with a head": ({"rotary": "centers", "classes": 3}, "DINOv3ViTModel cannot express a head; load"),
    "pre-logits of DINOv2": ({"layer_scale": True, "prelogits": 8}, "Dinov2Model cannot express a pre-logits layer"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_class_holds_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(randomize(build(dataclasses.replace(PLAIN, **fields))), tmp_path / "ours")
    with pytest.raises(UserError, match=message) as error:
        convert(tmp_path / "ours", tmp_path / "theirs", "huggingface")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "theirs").exists()
    assert [file.name for file in tmp_path.iterdir()] == ["ours"]


# ---- hostile and unsupported


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    data = json.loads(file.read_text())
    part = data.get("vision_config", data)
    part |= values
    file.write_text(json.dumps(data))


def hostile_values() -> list[tuple[str, str, Any]]:
    everywhere = [
        ("hidden_act", "relu"),
        ("hidden_act", ["gelu"]),
        ("layer_norm_eps", "small"),
        ("layer_norm_eps", True),
        ("layer_norm_eps", -1.0),
        ("layer_norm_eps", 10**400),
        ("num_attention_heads", 5),
        ("num_attention_heads", 0),
        ("num_attention_heads", 10**30),
        ("num_attention_heads", "3"),
        ("num_attention_heads", [3]),
        ("image_size", 10**12),
        ("image_size", "32"),
        ("image_size", [32, 32, 32]),
        ("image_size", {"height": 32}),
    ]
    names = ["DeiTModel", "CLIPModel", "SiglipVisionModel", "Dinov2ForImageClassification", "DINOv3ViTModel"]
    own = [("DINOv3ViTModel", "rope_theta", value) for value in ("100", 0.5, -3, 10**400, True, [100.0])]
    return [(name, key, value) for name in [*names, "ViTMAEModel"] for key, value in everywhere] + own


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("theirs")


@pytest.mark.parametrize(("name", "key", "value"), hostile_values())
def test_a_config_that_does_not_match_is_refused(name: str, key: str, value: Any, folders: Path) -> None:
    folder = folders / name
    if not folder.exists():
        make(LIST[name], folder)
        load(folder)  # as it is, it loads
        (folder / "config.json").rename(folder / "kept.json")
    (folder / "config.json").write_text((folder / "kept.json").read_text())
    change_config(folder, **{key: value})
    with pytest.raises(UserError, match=str(folder)) as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_other_hostile_configs(tmp_path: Path) -> None:
    make(LIST["CLIPModel"], tmp_path)
    file = tmp_path / "config.json"
    for data in ({"model_type": "clip", "vision_config": [1]}, {"model_type": ["clip"]}, {"model_type": "swin"}):
        file.write_text(json.dumps(data))
        with pytest.raises(UserError, match=str(tmp_path)) as error:
            load(tmp_path)
        assert "\n" not in str(error.value)


def test_unsupported_models_are_refused_by_a_tensor(tmp_path: Path) -> None:
    """Two heads whose logits are averaged; a mean without the norm; a gate that is not SiLU."""
    teacher = hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**SMALL))
    teacher.save_pretrained(tmp_path / "teacher")
    with pytest.raises(UserError, match=r"'distillation_classifier\.weight'.* do not belong"):
        load(tmp_path / "teacher")
    hf.CLIPForImageClassification(hf.CLIPConfig(**BOTH)).save_pretrained(tmp_path / "clip")
    with pytest.raises(UserError, match=r"'classifier\.\w+'.* do not belong"):
        load(tmp_path / "clip")
    hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SMALL, use_gated_mlp=True)).save_pretrained(tmp_path / "dinov3")
    with pytest.raises(UserError, match="has gates with 'gelu'"):
        load(tmp_path / "dinov3")
    hf.DINOv3ViTModel(hf.DINOv3ViTConfig(**SMALL, mlp_bias=False)).save_pretrained(tmp_path / "biases")
    with pytest.raises(UserError, match=r"'layer\.0-1\.mlp\.up_proj\.bias'.* missing"):
        load(tmp_path / "biases")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["CLIPVisionModel", "SiglipVisionModel", "Dinov2Model", "DINOv3ViTModel", "DeiTModel"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    """Each one of a file: nothing is made up, and no other model is read instead."""
    make(LIST[name], tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    for missing in tensors:
        if missing.endswith("mask_token") or ".1." in missing or missing.startswith("pooler"):
            continue
        save_file({key: tensor for key, tensor in tensors.items() if key != missing}, file)
        with pytest.raises(UserError, match=str(tmp_path)):
            load(tmp_path)


# ---- processors

IMAGENET: dict[str, Any] = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
CLIP_COLORS: dict[str, Any] = {
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}
PROCESSORS: dict[str, tuple[Any, Preprocess]] = {
    "CLIP": (hf.CLIPImageProcessor(), Preprocess(**CLIP_COLORS, interpolation="bicubic", crop=1.0)),
    "SigLIP": (hf.SiglipImageProcessor(), Preprocess(interpolation="bicubic", fit="stretch")),
    "DINOv2": (
        hf.BitImageProcessor(
            size={"shortest_edge": 256},
            crop_size={"height": 224, "width": 224},
            image_mean=list(IMAGENET["mean"]),
            image_std=list(IMAGENET["std"]),
        ),
        Preprocess(**IMAGENET, interpolation="bicubic", crop=0.875),
    ),
    "DINOv3": (hf.DINOv3ViTImageProcessor(), Preprocess(**IMAGENET, fit="stretch")),
    "DeiT": (hf.DeiTImageProcessor(), Preprocess(interpolation="bicubic", crop=0.875)),
}


@pytest.mark.parametrize(("processor", "expected"), PROCESSORS.values(), ids=PROCESSORS.keys())
def test_processors(processor: Any, expected: Preprocess, tmp_path: Path) -> None:
    """Complete, as they are written, and with all but the class left out."""
    make(LIST["Dinov2Model"], tmp_path)
    processor.save_pretrained(tmp_path)
    assert load(tmp_path).card.preprocess == expected
    file = tmp_path / "preprocessor_config.json"
    kept = {"image_processor_type": json.loads(file.read_text())["image_processor_type"]}
    if "Bit" not in kept["image_processor_type"]:  # whose own colors and sizes are not DINOv2's
        file.write_text(json.dumps(kept))
        assert load(tmp_path).card.preprocess == expected


def test_processors_of_older_files(tmp_path: Path) -> None:
    """One number is the shorter side to CLIP, and a square to ViT."""
    make(LIST["CLIPVisionModel"], tmp_path)
    file = tmp_path / "preprocessor_config.json"
    old = {"crop_size": 224, "size": 224, "do_center_crop": True, "resample": 3}
    file.write_text(json.dumps({**old, "feature_extractor_type": "CLIPFeatureExtractor"}))
    assert load(tmp_path).card.preprocess == PROCESSORS["CLIP"][1]
    file.write_text(json.dumps({"size": 224, "feature_extractor_type": "ViTFeatureExtractor"}))
    assert load(tmp_path).card.preprocess == Preprocess(fit="stretch")


def test_without_a_processor_the_familys_is_assumed(tmp_path: Path) -> None:
    for name, key in {"CLIPModel": "CLIP", "SiglipModel": "SigLIP", "Dinov2Model": "DINOv2"}.items():
        make(LIST[name], tmp_path / name)
        assert load(tmp_path / name).card.preprocess == PROCESSORS[key][1]


def test_a_hostile_processor(tmp_path: Path) -> None:
    make(LIST["CLIPVisionModel"], tmp_path)
    file = tmp_path / "preprocessor_config.json"
    wrong: list[dict[str, Any]] = [{"do_rescale": False}, {"image_mean": [1.0]}, {"image_std": [0.0] * 3}]
    wrong += [{"resample": 9}, {"resample": [3]}, {"rescale_factor": "1/255"}]
    for data in wrong:
        file.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor", **data}))
        with pytest.raises(UserError, match=str(tmp_path)) as error:
            load(tmp_path)
        assert "\n" not in str(error.value)
    for size in (10**400, -1, "224", [224], {"shortest_edge": True}):
        file.write_text(json.dumps({"image_processor_type": "CLIPImageProcessor", "size": size, "crop_size": size}))
        assert load(tmp_path).card.preprocess.fit in ("crop", "stretch")
