"""The own files of DINOv2, DINOv3, MAE and CLIP against plain forward passes, and against how timm converts them."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import originals
import pytest
import timm.models.eva as timm_eva
import timm.models.vision_transformer as timm_vit
import torch
from families import mostly_slow
from originals import Array, as_tensors
from peers import images, vit_config
from timm.layers.mlp import SwiGLUPacked
from torch import Tensor, nn

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import Preprocess
from vitlab.weights import convert, load

TYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]  # the stricter one is quick


@dataclass(frozen=True)
class Family:
    draw: Callable[[], dict[str, Array]]
    forward: Callable[[Any, Array], Array]
    format: str
    fields: dict[str, Any]  # what the config must have


V2 = functools.partial(originals.dino_forward, eps=1e-6)
V3 = functools.partial(originals.dino_forward, eps=1e-5)
ROTARY = {"rotary": "centers", "rotary_layout": "halves", "rotary_base": 100.0, "positions": "none", "norm_eps": 1e-5}
PRE = {"norm_before": True, "embed_bias": False, "gelu": "quick", "norm_eps": 1e-5}
FAMILIES = {
    "dinov2": Family(originals.dinov2, V2, "dinov2", {"layer_scale": True, "classes": 0, "registers": 0}),
    "dinov2 reg": Family(
        lambda: originals.dinov2(registers=4), V2, "dinov2", {"registers": 4, "prefix_positions": "token"}
    ),
    "dinov2 giant": Family(
        lambda: originals.dinov2(swiglu=True), V2, "dinov2", {"mlp_kind": "swiglu", "mlp": originals.HIDDEN}
    ),
    "dinov3": Family(originals.dinov3, V3, "dinov3", {"qkv_bias": "qv", "registers": 4, **ROTARY}),
    "dinov3 plus": Family(
        lambda: originals.dinov3(swiglu=True), V3, "dinov3", {"mlp_kind": "swiglu", "mlp": originals.HIDDEN, **ROTARY}
    ),
    "dinov3 7b": Family(
        lambda: originals.dinov3(swiglu=True, bias=False, untied=True), V3, "dinov3", {"qkv_bias": "none", **ROTARY}
    ),
    "dinov3 plain": Family(
        lambda: originals.dinov3(registers=0), V3, "dinov3", {"registers": 0, "prefix_positions": "none"}
    ),
    "mae": Family(originals.mae, originals.mae_forward, "mae", {"pool": "token", "final_norm": "tokens"}),
    "mae with decoder": Family(lambda: originals.mae(decoder=True), originals.mae_forward, "mae", {"classes": 0}),
    "mae tuned": Family(
        lambda: originals.mae(tuned=True),
        originals.mae_forward,
        "mae",
        {"pool": "mean", "final_norm": "pooled", "extra_token": True, "classes": originals.CLASSES},
    ),
    "clip": Family(originals.clip, originals.clip_forward, "clip", {"classes": originals.CLASSES, **PRE}),
    "clip image half": Family(
        lambda: originals.clip(projection=False, text=False), originals.clip_forward, "clip", {"classes": 0, **PRE}
    ),
}


def write(family: Family, path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Array]:
    """The file, and the numbers in it."""
    tensors = as_tensors(family.draw(), dtype)
    torch.save({"model": tensors} if family.format == "mae" else tensors, path)
    return {name: x.double().numpy() for name, x in tensors.items()}


def agree(ours: Tensor, theirs: Array) -> None:
    """Equal up to rounding, relative to the largest."""
    limit = 2e-5 if ours.dtype == torch.float32 else 1e-10
    assert ours.shape == theirs.shape
    assert theirs.std() > 0.1
    assert np.abs(ours.detach().double().numpy() - theirs).max() <= limit * np.abs(theirs).max()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", FAMILIES)
def test_load(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """At the size of the file's positions, and after a change to one that is not square."""
    family, file = FAMILIES[name], tmp_path / "theirs.pth"
    weights = write(family, file, dtype)
    for size in ((32, 32), (48, 24)):
        model = load(file, heads=originals.HEADS, image_size=size)
        x = images(size, dtype)
        agree(model(x), family.forward(weights, x.double().numpy()))
    for field, value in family.fields.items():
        assert getattr(vit_config(model), field) == value, field
    assert model.card.provenance is not None
    assert model.card.provenance["format"] == family.format


@pytest.mark.parametrize("name", FAMILIES)
def test_preprocessing_and_heads_of_the_authors(name: str, tmp_path: Path) -> None:
    family, file = FAMILIES[name], tmp_path / "theirs.pth"
    write(family, file)
    card = load(file, heads=originals.HEADS, image_size=32).card
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    if family.format == "clip":
        mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    crop = 1.0 if family.format == "clip" else 0.875
    assert card.preprocess == Preprocess(mean, std, "bicubic", "crop", crop)


# ---- timm converts the same files: a second judge


def timm_model(name: str, size: tuple[int, int]) -> tuple[nn.Module, Any]:
    """timm's model for a file, and the function that converts it."""
    base = {"img_size": size, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "num_classes": 0}
    base |= {"mlp_ratio": originals.HIDDEN / 32}
    eps = functools.partial(nn.LayerNorm, eps=1e-5)
    rope = {"rope_type": "dinov3", "rope_temperature": 100, "rope_rotate_half": True, "use_rot_pos_emb": True}
    rope |= {"use_abs_pos_emb": False, "num_reg_tokens": 4, "init_values": 1e-5, "use_fc_norm": False}
    rope |= {"global_pool": "token", "norm_layer": eps, "dynamic_img_size": True}
    swiglu = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU, "mlp_ratio": 2 * originals.HIDDEN / 32}
    quick = {"pre_norm": True, "act_layer": "quick_gelu", "norm_layer": eps}
    kinds: dict[str, dict[str, Any]] = {
        "dinov2": {"init_values": 1e-5},
        "dinov2 reg": {"init_values": 1e-5, "reg_tokens": 4, "no_embed_class": True},
        "dinov2 giant": {"init_values": 1e-5, **swiglu},
        "dinov3": {"qkv_bias": True, **rope},
        "dinov3 plus": {"qkv_bias": True, "swiglu_mlp": True, "swiglu_align_to": 8, **rope},
        "dinov3 7b": {"qkv_bias": False, "swiglu_mlp": True, "swiglu_align_to": 8, **rope},
        "mae": {},
        "mae tuned": {"global_pool": "avg", "num_classes": originals.CLASSES},
        "clip": {"num_classes": originals.CLASSES, **quick},
        "clip image half": quick,
    }
    module = timm_eva if name.startswith("dinov3") else timm_vit
    build: Any = timm_eva.Eva if name.startswith("dinov3") else timm_vit.VisionTransformer
    return build(**base | kinds[name]), module.checkpoint_filter_fn


def exact_rotary(model: Any, size: tuple[int, int]) -> None:
    """timm keeps periods in float32; the same from float64."""
    rope = model.rope.double()
    rope.periods.copy_(100.0 ** (torch.arange(len(rope.periods)).double() / len(rope.periods)))
    if rope.pos_embed_cached is not None:
        rope.pos_embed_cached = rope._create_embed([size[0] // 8, size[1] // 8], no_aug=True)


TIMM = [name for name in FAMILIES if name not in ("dinov3 plain", "mae with decoder")]


@pytest.mark.parametrize("name", mostly_slow(TIMM, "dinov2 reg", "dinov3 plus", "clip"))
def test_as_timm_converts_the_file(name: str, tmp_path: Path) -> None:
    family, file = FAMILIES[name], tmp_path / "theirs.pth"
    write(family, file, torch.float64)
    # timm resamples tables differently; its rotary coordinates are in float32, exact for these grids
    sizes = [(32, 32), (64, 16)] if family.format == "dinov3" else [(32, 32)]
    for size in sizes:
        theirs, convert_names = timm_model(name, size)
        tensors = convert_names(torch.load(file), theirs)
        theirs.double().eval().load_state_dict({key: x.double() for key, x in tensors.items()})
        if family.format == "dinov3":
            exact_rotary(theirs, size)
        x = images(size, torch.float64)
        with torch.no_grad():
            agree(load(file, heads=originals.HEADS, image_size=size)(x), theirs(x).numpy())


# ---- what is left out, and what is not guessed


def messages(caplog: pytest.LogCaptureFixture) -> str:
    return " | ".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    ("name", "left"),
    [
        ("dinov2", ["'mask_token'"]),
        ("dinov3 7b", ["'mask_token'", "'local_cls_norm.weight'"]),
        ("mae with decoder", ["'mask_token'", "'decoder_embed.weight'"]),
        ("clip", ["'positional_embedding'", "'text_projection'", "'logit_scale'"]),
    ],
)
def test_what_is_left_out_is_logged(
    name: str, left: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(FAMILIES[name], tmp_path / "theirs.pth")
    with caplog.at_level(logging.INFO, "vitlab"):
        load(tmp_path / "theirs.pth", heads=originals.HEADS)
    assert all(f"left out {left[0]}" in messages(caplog) and part in messages(caplog) for part in left)


def test_rounded_wavelengths_are_replaced_by_exact_ones(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact, rounded = (as_tensors(originals.dinov3(), torch.float32) for _ in range(2))
    rounded["rope_embed.periods"] = rounded["rope_embed.periods"].bfloat16()
    torch.save(exact, tmp_path / "exact.pth")
    torch.save(rounded, tmp_path / "rounded.pth")
    x = images(32)
    with caplog.at_level(logging.INFO, "vitlab"):
        a = load(tmp_path / "exact.pth", image_size=32)
        assert "periods" not in messages(caplog)
        b = load(tmp_path / "rounded.pth", image_size=32)
    assert "are rounded by up to" in messages(caplog)
    assert torch.equal(a(x), b(x))
    assert vit_config(a).heads == originals.HEADS  # from the number of periods


def test_another_rotary_base(tmp_path: Path) -> None:
    weights = originals.dinov3()
    count = len(weights["rope_embed.periods"])
    weights["rope_embed.periods"] = 50.0 ** (np.arange(count) / count)
    torch.save(as_tensors(weights, torch.float64), tmp_path / "fifty.pth")
    with pytest.raises(UserError, match="rotary_base=100"):
        load(tmp_path / "fifty.pth")
    x = images(32, torch.float64)
    agree(load(tmp_path / "fifty.pth", image_size=32, rotary_base=50)(x), V3(weights, x.numpy()))


def test_both_features_of_dinov2(tmp_path: Path) -> None:
    """`pool="token_mean"`: the class token and the mean of the patches, as its linear heads see them."""
    write(FAMILIES["dinov2 reg"], tmp_path / "theirs.pth")
    model = load(tmp_path / "theirs.pth", heads=2, pool="token_mean")
    tokens = model.tokens(images(32))
    both = torch.cat([tokens[:, 0], tokens[:, 5:].mean(1)], 1)
    assert torch.allclose(model(images(32)), both, atol=1e-6)


def test_timms_own_files_are_still_timms(tmp_path: Path) -> None:
    """No head, a class token, learned positions: nothing says MAE."""
    model = timm_vit.VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=1, num_heads=1, num_classes=0)
    torch.save(model.state_dict(), tmp_path / "plain.pth")
    provenance = load(tmp_path / "plain.pth").card.provenance
    assert provenance is not None
    assert provenance["format"] == "timm"


@pytest.mark.parametrize("wrap", ["teacher", "module", "backbone", "both"])
def test_wrappers_of_training_scripts(wrap: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    family = FAMILIES["dinov2 reg"]
    tensors = as_tensors(family.draw(), torch.float64)
    prefix = {"module": "module.", "backbone": "backbone.", "both": "module.backbone."}.get(wrap, "")
    named = {prefix + name: x for name, x in tensors.items()}
    if "backbone" in prefix:
        named[prefix.replace("backbone.", "") + "dino_head.mlp.0.weight"] = torch.zeros(3, 3)
    torch.save({"teacher": named} if wrap in ("teacher", "both") else named, tmp_path / "wrapped.pth")
    x = images(32, torch.float64)
    with caplog.at_level(logging.INFO, "vitlab"):
        agree(load(tmp_path / "wrapped.pth", heads=2)(x), family.forward(family.draw(), x.numpy()))
    assert ("dino_head.mlp.0.weight" in messages(caplog)) == ("backbone" in prefix)


# ---- elsewhere


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, "dinov3 plus", "mae tuned", "clip"))
def test_a_vitlab_folder_of_it_is_the_same_model(name: str, tmp_path: Path) -> None:
    write(FAMILIES[name], tmp_path / "theirs.pth")
    vitlab.convert(tmp_path / "theirs.pth", tmp_path / "ours", "vitlab", heads=2)
    a, b = load(tmp_path / "theirs.pth", heads=2), load(tmp_path / "ours")
    assert a.config == b.config
    assert all(torch.equal(x, b.state_dict()[key]) for key, x in a.state_dict().items())


@pytest.mark.parametrize("to", ["dinov2", "dinov3", "mae", "clip"])
def test_none_is_written(to: str, tmp_path: Path) -> None:
    write(FAMILIES["dinov2"], tmp_path / "theirs.pth")
    with pytest.raises(UserError, match="read, not written"):
        convert(tmp_path / "theirs.pth", tmp_path / "new.pth", to, heads=2)
    assert not (tmp_path / "new.pth").exists()


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_torchscript_is_refused_with_the_fix(tmp_path: Path) -> None:
    """OpenAI publishes CLIP so; the command in the message gives a file that loads."""
    tensors = as_tensors(originals.clip(), torch.float32)
    holder = nn.Module()
    for name, x in tensors.items():
        *path, last = name.split(".")
        at = holder
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, nn.Module())
            at = at.get_submodule(part)
        at.register_buffer(last, x)
    torch.jit.save(torch.jit.script(holder), tmp_path / "ViT-B-32.pt")
    with pytest.raises(UserError) as refused:
        load(tmp_path / "ViT-B-32.pt")
    assert "TorchScript" in str(refused.value)
    command = str(refused.value).partition("once, run ")[2]
    assert command.startswith("torch.save(torch.jit.load('ViT-B-32.pt'")
    full = command.replace("'ViT-B-32.pt'", repr(str(tmp_path / "ViT-B-32.pt")))
    exec(full.replace("'weights.pth'", repr(str(tmp_path / "weights.pth"))), {"torch": torch})
    x = images(32)
    agree(load(tmp_path / "weights.pth", heads=2)(x), originals.clip_forward(originals.clip(), x.double().numpy()))
