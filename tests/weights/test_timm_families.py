"""timm's later families loaded here and ours there: every tensor random, the same outputs, the same bits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from families import mostly_slow
from peers import images, randomize, table_of
from safetensors.torch import load_file, save_file
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.variants import build
from vitlab.models.vit import ViT
from vitlab.weights import convert, load, save

SMALL: dict[str, Any] = {
    "depth": 2,
    "embed_dim": 64,
    "num_heads": 4,
    "num_classes": 7,
    "img_size": 64,
    "patch_size": 16,
}
EVA02: dict[str, Any] = {"mlp_ratio": 4 * 2 / 3, "ref_feat_shape": (3, 3)}
# by family: an architecture whose arithmetic stays, and what the folder's config must say of it
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "CLIP": ("vit_base_patch16_clip_224", {}),
    "CLIP of OpenAI": ("vit_base_patch16_clip_quickgelu_224", {}),
    "SigLIP": ("vit_base_patch16_siglip_224", {}),
    "SigLIP 2": ("vit_giantopt_patch16_siglip_256", {}),
    "DINO": ("vit_small_patch16_224", {}),
    "DINOv2": ("vit_small_patch14_dinov2", {}),
    "DINOv2 g": ("vit_giant_patch14_dinov2", {"mlp_ratio": 3.0}),
    "DINOv2 with registers": ("vit_small_patch14_reg4_dinov2", {}),
    "MAE": ("vit_base_patch16_224", {"global_pool": "avg"}),
    "fc_norm": ("vit_base_patch16_reg4_gap_256", {}),
    "LayerScale, no biases": ("vit_medium_patch16_gap_256", {}),
    "no biases": ("vit_base_patch16_224_miil", {}),
    "BEiT-3": ("beit3_base_patch16_224", {}),
    "InternViT": ("vit_intern300m_patch14_448", {}),
    "DeiT III": ("deit3_small_patch16_224", {}),
    "EVA": ("eva_giant_patch14_224", {}),
    "EVA-CLIP": ("eva_giant_patch14_clip_224", {}),
    "EVA-02 Ti": ("eva02_tiny_patch14_224", EVA02),
    "EVA-02 B": ("eva02_base_patch14_224", EVA02),
    "EVA-02-CLIP": ("eva02_base_patch16_clip_224", EVA02),
    "DINOv3": ("vit_small_patch16_dinov3", {}),
    "DINOv3 with biases": ("vit_small_patch16_dinov3_qkvb", {}),
    "DINOv3 S+": ("vit_small_plus_patch16_dinov3", {"mlp_ratio": 3.0}),
    "LingBot": ("vit_small_patch16_lingbot", {}),
    "RoPE-ViT": ("vit_small_patch16_rope_224", {}),
    "RoPE-ViT with a table": ("vit_small_patch16_rope_ape_224", {}),
    "ViT with rotary positions": ("vit_medium_patch16_rope_reg1_gap_256", {"ref_feat_shape": (3, 3)}),
    "PE": ("vit_pe_spatial_gigantic_patch14_448", {"ref_feat_shape": (3, 3)}),
}
QUICK = ("CLIP of OpenAI", "SigLIP", "DINOv2 with registers", "MAE", "DeiT III", "EVA-02 B", "DINOv3 S+", "RoPE-ViT")
TYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]


def peer(name: str, dtype: torch.dtype = torch.float32, **args: Any) -> Any:
    """A small model of timm's with every tensor random, and rotary angles computed in its precision."""
    model: Any = randomize(timm.create_model(name, **args), dtype)
    rope = getattr(model, "rope", None)
    if rope is not None and dtype == torch.float64:
        model.rope.get_embed = lambda shape=None: exact_angles(rope, tuple(shape or rope.feat_shape), args)
    return model


def exact_angles(rope: Any, grid: tuple[int, int], args: dict[str, Any]) -> Tensor:
    """Sines and cosines of timm's angles, which it computes in float32, in float64: (N, 2K)."""
    quarter = rope.dim // 4
    rate = float(rope.temperature) ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    if type(rope).__name__ == "RotaryEmbeddingDinoV3":
        axes = [2 * torch.pi * ((torch.arange(n, dtype=torch.float64) + 0.5) / n * 2 - 1) for n in grid]
    else:
        reference = rope.ref_feat_shape or grid
        axes = [torch.arange(n, dtype=torch.float64) / n * r for n, r in zip(grid, reference, strict=True)]
    y, x = torch.meshgrid(*axes, indexing="ij")
    both = (x, y) if rope.grid_indexing == "xy" else (y, x)
    angle = torch.cat([place.flatten()[:, None] * rate for place in both], 1)
    half = type(rope).__name__ == "RotaryEmbeddingDinoV3"
    angle = torch.cat([angle, angle], 1) if half else angle.repeat_interleave(2, 1)
    return torch.cat([angle.sin(), angle.cos()], 1)


def write_folder(model: Any, name: str, args: dict[str, Any], folder: Path) -> None:
    """What timm's hub has: weights, and a config that names the architecture and what differs from it."""
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    said = {key: value for key, value in args.items() if key not in ("ref_feat_shape", "depth")}
    if "ref_feat_shape" in args:
        said |= {"use_rot_pos_emb": True, "ref_feat_shape": list(args["ref_feat_shape"])}
    size = [3, args["img_size"], args["img_size"]]
    config = {"architecture": name, "model_args": said, "pretrained_cfg": {"input_size": size}}
    (folder / "config.json").write_text(json.dumps(config))


def relative(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert b.std() > 0.05  # so that a difference is visible
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, *QUICK))
def test_outputs_are_theirs(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """At the native size, and at another that is not square."""
    name, more = FAMILIES[family]
    args = {**SMALL, **more}
    theirs = peer(name, dtype, **args)
    write_folder(theirs, name, args, tmp_path / "hub")
    ours = load(tmp_path / "hub")
    limit = 2e-5 if dtype == torch.float32 else 1e-10
    x = images(64, dtype)
    with torch.no_grad():
        assert relative(ours(x), theirs(x)) <= limit
    size = (48, 80)
    there = peer(name, dtype, **{**args, "img_size": size})
    weights = theirs.state_dict()
    table = weights.get("pos_embed")
    if table is not None:
        lead = 0 if theirs.no_embed_class else theirs.num_prefix_tokens
        weights["pos_embed"] = resample_abs_pos_embed(table, [3, 5], [4, 4], num_prefix_tokens=lead)
    there.load_state_dict(weights)
    ours.resize(size)
    if table is not None:
        table_of(ours).data.copy_(weights["pos_embed"])  # theirs is filtered against aliasing, ours is not
    x = images(size, dtype)
    with torch.no_grad():
        assert relative(ours(x), there(x)) <= limit


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, "DINOv2 with registers", "EVA-02 B", "DINOv3 S+"))
def test_there_and_back_is_bit_identical(family: str, tmp_path: Path) -> None:
    """As a file alone and as a folder, which timm itself builds and fills."""
    name, more = FAMILIES[family]
    args = {**SMALL, **more}
    theirs = peer(name, **args)
    write_folder(theirs, name, args, tmp_path / "hub")
    convert(tmp_path / "hub", tmp_path / "ours", "vitlab")
    convert(tmp_path / "ours", tmp_path / "timm", "timm")
    same(load_file(tmp_path / "timm" / "model.safetensors"), theirs.state_dict())
    built = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    same(built.state_dict(), theirs.state_dict())
    x = images(64)
    with torch.no_grad():
        assert relative(built(x), theirs(x)) <= 2e-5
    config = load(tmp_path / "ours").config
    assert load(tmp_path / "timm").config == config
    if isinstance(config, ViTConfig) and config.gelu != "tanh":
        convert(tmp_path / "ours", tmp_path / "alone.safetensors", "timm")
        same(load_file(tmp_path / "alone.safetensors"), theirs.state_dict())
        assert load(tmp_path / "alone.safetensors").config == config  # with the JSON that is written beside it


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in b)


VIT = ViTConfig(image_size=(48, 32), patch=8, depth=2, width=64, mlp=96, heads=4, classes=5)
OURS: dict[str, dict[str, Any]] = {
    "registers with positions": {"registers": 3, "prefix_positions": "all"},
    "attention pooling over registers": {"pool": "attention", "registers": 2},
    "mean beside a token": {"pool": "mean", "extra_token": True},
    "norms of all kinds": {"qk_norm": True, "attention_norm": True, "mlp_norm": True, "qkv_bias": "none"},
    "larger epsilon": {"norm_eps": 1e-5, "layer_scale": True},
    "SwiGLU": {"mlp_kind": "swiglu"},
    "rotary and q/k norm": {"rotary": "cells", "qk_norm": True, "rotary_base": 50.0, "mlp_kind": "swiglu"},
    "rotary of a grid": {"rotary": "cells", "rotary_grid": 9, "qkv_bias": "none", "positions": "none"},
    "centers with biases": {"rotary": "centers", "rotary_layout": "halves", "registers": 1, "positions": "none"},
    "partial biases": {"qkv_bias": "qv", "norm_before": True, "embed_bias": False, "final_norm": "none"},
}


@pytest.mark.parametrize("name", mostly_slow(OURS, "norms of all kinds", "SwiGLU", "rotary and q/k norm"))
def test_write_ours(name: str, tmp_path: Path) -> None:
    """timm builds a folder of any combination that it has, and we read it back unchanged."""
    config = dataclasses.replace(VIT, **OURS[name])
    ours = randomize(build(config))
    save(ours, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "timm", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    x = images(config.image_size)
    with torch.no_grad():
        assert relative(theirs(x), ours(x)) <= 2e-5
    back = load(tmp_path / "timm")
    assert back.config == config
    same(back.state_dict(), ours.state_dict())


@pytest.mark.parametrize(
    "fields",
    [
        {"pool": "token_mean"},
        {"norm_before": True},  # timm leaves the bias of patches out then
        {"embed_bias": False},
        {"registers": 2},  # without positions, where the class token has one
        {"rotary": "cells", "rotary_layout": "halves"},
        {"rotary": "centers"},
        {"rotary": "cells", "gelu": "tanh"},
        {"mlp_kind": "swiglu", "norm_eps": 1e-5},
        {"norm_eps": 1e-12},
    ],
)
def test_what_timm_does_not_have_is_refused(fields: dict[str, Any], tmp_path: Path) -> None:
    save(build(dataclasses.replace(VIT, **fields)), tmp_path / "ours")
    with pytest.raises(UserError, match="timm cannot express"):
        convert(tmp_path / "ours", tmp_path / "timm", "timm")


# ---- a file alone


def test_a_file_alone_is_known_by_its_tensors(tmp_path: Path) -> None:
    """DINOv3: rotary positions, epsilon and pooling follow from the family; the caller's come first."""
    theirs = peer("vit_small_patch16_dinov3", **{**SMALL, "num_heads": 1, "num_classes": 0})
    save_file(theirs.state_dict(), tmp_path / "a.safetensors")
    ours = load(tmp_path / "a.safetensors", image_size=64)
    x = images(64)
    with torch.no_grad():
        assert relative(ours(x), theirs(x)) <= 2e-5
        token = load(tmp_path / "a.safetensors", image_size=64, pool="token")
        tokens = theirs.forward_features(x)
        assert relative(token.features(x), tokens[:, 0]) <= 2e-5
        both = load(tmp_path / "a.safetensors", image_size=64, pool="token_mean")
        assert relative(both(x), torch.cat([tokens[:, 0], tokens[:, 5:].mean(1)], 1)) <= 2e-5
    without = load(tmp_path / "a.safetensors", image_size=64, rotary="none")
    assert isinstance(without, ViT)
    assert without.rotary is None


@pytest.mark.parametrize(
    ("name", "args", "part"),
    [
        pytest.param(
            *("eva02_enormous_patch14_clip_224", {"embed_dim": 1792, "mlp_ratio": 0.1}, "norm the end"),
            marks=pytest.mark.slow,
        ),
        ("vit_base_patch16_rpn_224", {}, "norm the end"),
        ("vit_small_patch16_rope_mixed_224", {}, "rope.freqs"),
        ("vit_pe_core_tiny_patch16_384", {}, "attn_pool.latent"),
        ("vit_pe_spatial_tiny_patch16_512", {}, "norm_pre.weight"),
        ("vit_so150m_patch16_reg4_map_256", {}, "reg_token"),
        ("aimv2_large_patch14_224", {}, "patch_embed.norm.weight"),
        ("deit_tiny_distilled_patch16_224", {}, "dist_token"),
        ("test_vit4", {}, "norm1.bias"),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_other_arithmetic_is_refused(name: str, args: dict[str, Any], part: str, named: bool, tmp_path: Path) -> None:
    """By its tensors, and by its name where a folder has one."""
    args = {**SMALL, "depth": 1, "num_heads": 8, **args}
    model = peer(name, **args)
    write_folder(model, name, {key: args[key] for key in ("img_size", "num_heads")}, tmp_path / "hub")
    if not named:
        (tmp_path / "hub" / "config.json").unlink()
    with pytest.raises(UserError, match=part) as error:
        load(tmp_path / "hub", heads=8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("rope_type", "mixed"),
        ("rope_type", ["cat"]),
        ("ref_feat_shape", [3, 4]),
        ("ref_feat_shape", "three"),
        ("ref_feat_shape", [1e400, 1e400]),
        ("rope_temperature", -1),
        ("rope_temperature", "hot"),
        ("rope_grid_offset", 1.0),
        ("use_post_norm", True),
        ("num_heads", 3),
        ("num_heads", [4]),
        ("global_pool", "map"),
        ("rope_jitter_coords", 2),
    ],
)
def test_hostile_configs_are_refused_in_one_line(key: str, value: Any, tmp_path: Path) -> None:
    args = {**SMALL, **EVA02}
    write_folder(peer("eva02_tiny_patch14_224", **args), "eva02_tiny_patch14_224", args, tmp_path / "hub")
    file = tmp_path / "hub" / "config.json"
    good = json.loads(file.read_text())
    load(tmp_path / "hub")
    file.write_text(json.dumps({**good, "model_args": {**good["model_args"], key: value}}))
    with pytest.raises(UserError) as error:
        load(tmp_path / "hub")
    assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["CLIP", "EVA-02 B", "DINOv3 S+", "RoPE-ViT", "DINOv2 with registers"])
def test_a_tensor_more_less_or_of_another_shape_is_refused(family: str, tmp_path: Path) -> None:
    name, more = FAMILIES[family]
    args = {**SMALL, **more, "depth": 1, "img_size": 32}
    model = peer(name, **args)
    weights = model.state_dict()
    write_folder(model, name, args, tmp_path / "hub")
    optional = ("head.", "blocks.0.ls", "reg_token", "blocks.0.attn.qkv.bias", "cls_token", "norm.", "pos_embed")
    for key in weights:
        variants = [{**weights, key: torch.zeros((*weights[key].shape, 2))}]
        if not key.startswith(optional):  # a model without some of these is another model, not a damaged one
            variants.append({other: x for other, x in weights.items() if other != key})
        for number, variant in enumerate(variants):
            save_file(variant, tmp_path / "hub" / "model.safetensors")
            with pytest.raises(UserError) as error:
                pytest.fail(f"{key} {number}: {load(tmp_path / 'hub').config}")
            assert "\n" not in str(error.value)
    save_file({**weights, "text.weight": torch.zeros(2)}, tmp_path / "hub" / "model.safetensors")
    with pytest.raises(UserError, match=r"text\.weight"):
        load(tmp_path / "hub")
