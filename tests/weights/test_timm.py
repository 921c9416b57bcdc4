"""timm's models loaded here and ours there: the same logits, the same bits."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from peers import agree, empty, images, randomize
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ResNetConfig, StemConfig, ViTConfig
from vitlab.models.meta import meta_model
from vitlab.models.variants import build
from vitlab.models.vit import MLP
from vitlab.weights import convert, load, save
from vitlab.weights.formats.base import FormatDefaults, RawCheckpoint
from vitlab.weights.formats.table import check_tensors
from vitlab.weights.formats.timm import read, recognizes
from vitlab.weights.tensors import TensorFile

SMALL = {"depth": 2, "embed_dim": 64, "num_heads": 2, "img_size": 64, "num_classes": 11}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("vit_tiny_patch16_224", {"depth": 3}),
    ("vit_small_patch32_224", {"depth": 2}),
    ("vit_base_patch16_224", {"img_size": 64, "depth": 2}),
    ("vit_base_patch32_224", {"depth": 1}),
    ("vit_base_patch16_224", {**SMALL, "num_heads": 1, "mlp_ratio": 2.3, "patch_size": 8}),
    ("vit_base_patch16_224", {**SMALL, "embed_dim": 128, "num_classes": 0}),
    ("vit_base_patch16_gap_224", {**SMALL, "num_heads": 1}),
    ("vit_base_patch16_siglip_224", {**SMALL, "num_heads": 1}),
    ("vit_tiny_r_s16_p8_224", {"depth": 2}),
    ("vit_small_r26_s32_224", {"depth": 1, "img_size": 64}),
    ("vit_base_r50_s16_224", {"depth": 1, "img_size": 64}),
    ("resnetv2_50x1_bit", {"num_classes": 11}),
]


def slow_hybrids(cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    """The cases, those with several ResNet stages or of full width among the slow tests: they take seconds each."""
    return [
        pytest.param(*case, marks=pytest.mark.slow) if re.search("_r26_|_r50_|_small_|base_patch32", case[0]) else case
        for case in cases
    ]


def peer(name: str, **args: Any) -> Any:
    return empty(lambda: timm.create_model(name, **args))


TYPES = [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("name", "args"), slow_hybrids(CASES))
def test_load_theirs(name: str, args: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    theirs = randomize(peer(name, **args), dtype)
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    ours = load(tmp_path / "theirs.safetensors", image_size=64 if name.startswith("resnet") else None)
    x = images(ours.config.image_size, dtype)
    with torch.no_grad():
        agree(ours(x), theirs(x))


@pytest.mark.parametrize(
    ("name", "args"), [*slow_hybrids(CASES[4:-1]), pytest.param(*CASES[-1], marks=pytest.mark.slow)]
)
def test_round_trip_is_bit_identical(name: str, args: dict[str, Any], tmp_path: Path) -> None:
    theirs = randomize(peer(name, **args)).state_dict()
    torch.save(theirs, tmp_path / "theirs.pth")
    heads = {"heads": args["num_heads"]} if "num_heads" in args else {}
    convert(tmp_path / "theirs.pth", tmp_path / "ours", "vitlab", **heads)
    convert(tmp_path / "ours", tmp_path / "back.safetensors", "timm")
    back = load_file(tmp_path / "back.safetensors")
    assert back.keys() == theirs.keys()
    assert all(torch.equal(back[key], theirs[key]) for key in theirs)


VIT = ViTConfig(image_size=(48, 32), patch=8, depth=2, width=96, mlp=200, heads=3, classes=7)
STEM = StemConfig((2, 2, 2, 2), standardize="variance", standardize_eps=1e-8, norm_eps=1e-5)
OURS: dict[str, Any] = {
    "odd size": VIT,
    "no head": dataclasses.replace(VIT, classes=0),
    "tanh": dataclasses.replace(VIT, gelu="tanh", heads=8),
    "mean": dataclasses.replace(VIT, pool="mean"),
    "attention": dataclasses.replace(VIT, pool="attention"),
    "no positions": dataclasses.replace(VIT, positions="none"),
    "root": dataclasses.replace(VIT, stem=dataclasses.replace(STEM, stages=()), patch=4),
}
LARGE: dict[str, Any] = {
    "stem": dataclasses.replace(VIT, stem=STEM, patch=1, image_size=(64, 96)),
    "bit": ResNetConfig((64, 64), (3, 4, 6, 3), classes=7, standardize_eps=1e-8),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [*OURS, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_write_ours(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """timm builds a folder that we wrote without further arguments, and we read it back unchanged."""
    config = (OURS | LARGE)[name]
    ours = randomize(build(config), dtype)
    save(ours, tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "timm", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).to(dtype)
    weights = load_file(tmp_path / "timm" / "model.safetensors")
    theirs.load_state_dict(weights, strict=True)  # pretrained=True fills in float32
    x = images(config.image_size, dtype)
    with torch.no_grad():
        agree(theirs.eval()(x), ours(x))
    assert load(tmp_path / "timm").config == config


def test_a_folder_from_timm(tmp_path: Path) -> None:
    """What timm itself writes for the hub: preprocessing, class names and unusual settings are read."""
    theirs = randomize(peer("vit_base_patch32_siglip_256", depth=2, num_classes=3))
    labels = ["cat", "dog", "eel"]
    theirs.pretrained_cfg |= {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_mode": "squash"}
    args = {"depth": 2}
    config = {"num_classes": 3, "label_names": labels}
    timm.models.save_for_hf(theirs, str(tmp_path), model_config=config, model_args=args, safe_serialization=True)
    ours = load(tmp_path)
    assert ours.card.labels == ("cat", "dog", "eel")
    assert ours.card.preprocess == Preprocess((0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", "stretch", 0.9)
    x = images(256)
    with torch.no_grad():
        agree(ours(x), theirs(x))  # this architecture has the tanh GELU, which only its name implies


def no_tensor(name: str) -> Tensor:
    raise AssertionError(f"{name} was read")


def loads_with_same_math(name: str) -> bool:
    """Whether an architecture loads; if so, heads, GELU and epsilons, known by its name alone, must be timm's."""
    one: dict[str, Any] = (
        {} if name.startswith("resnet") or "sapiens2" in name else {"depth": 1}
    )  # these have no such argument
    with torch.device("meta"):
        theirs: Any = timm.create_model(name, **one)
    shapes = {key: tuple(x.shape) for key, x in theirs.state_dict().items()}
    cfg = {"pretrained_cfg": {"input_size": list(theirs.pretrained_cfg["input_size"])}}
    source = RawCheckpoint(name, TensorFile(Path(name), shapes, no_tensor), {"architecture": name, **cfg}, {})
    if not recognizes(source):
        return False
    try:
        parsed = read(source, FormatDefaults(), None)
        check_tensors(parsed.table, meta_model(parsed.config).state_dict(), source.tensors)
    except UserError:
        return False
    config = parsed.config
    if isinstance(config, ResNetConfig):
        assert {m.eps for m in theirs.modules() if isinstance(m, nn.GroupNorm)} == {config.norm_eps}
        return True
    assert config.heads == theirs.blocks[0].attn.num_heads, name
    assert {m.eps for m in theirs.modules() if isinstance(m, nn.LayerNorm)} == {config.norm_eps}, name
    z = torch.linspace(-3, 3, 7)
    gelu = MLP(dataclasses.replace(config, width=64, heads=1, mlp=8, mlp_kind="gelu")).gelu
    assert torch.equal(theirs.blocks[0].mlp.act(z), nn.functional.silu(z) if config.mlp_kind == "swiglu" else gelu(z))
    assert {"token": "token", "avg": "mean", "map": "attention"}[theirs.global_pool] == config.pool, name
    assert same_rotary(config, getattr(theirs, "rope", None)), name
    return True


def same_rotary(config: ViTConfig, rope: Any) -> bool:
    """Whether the settings of rotary positions are timm's; a reference grid counts where there is one."""
    if rope is None:
        return config.rotary == "none"
    centers = type(rope).__name__ == "RotaryEmbeddingDinoV3"
    grid = getattr(rope, "ref_feat_shape", None) or (0, 0)
    kind = ("centers", "halves") if centers else ("cells", "pairs")
    theirs = (*kind, rope.temperature, (config.rotary_grid,) * 2)
    return theirs == (config.rotary, config.rotary_layout, config.rotary_base, tuple(grid))


KNOWN_BY_NAME = ("test_vit", "vit_base_patch16_gap_224", "vit_base_patch32_siglip_256", "vit_huge_patch14_224")


@pytest.mark.parametrize("name", KNOWN_BY_NAME)
def test_settings_known_by_name(name: str) -> None:
    assert loads_with_same_math(name)


@pytest.mark.slow
def test_every_architecture_loads_with_the_same_math_or_not_at_all() -> None:
    names = timm.list_models(["vit_*", "deit*", "resnetv2_*", "flexivit*", "test_vit*", "eva*", "beit3*"])
    loaded = {name for name in names if loads_with_same_math(name)}
    plain = set(timm.list_models(module="vision_transformer"))
    assert len(plain & loaded) >= 0.8 * len(plain)
    assert loaded.issuperset(timm.list_models(["deit3_*", "*dinov3*", "*dinov2*"]))


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("deit_tiny_distilled_patch16_224", "dist_token"),
        ("vit_relpos_small_patch16_224", "rel_pos"),
        ("vit_small_resnet26d_224", "patch_embed.backbone"),
        ("resnetv2_50", "running_mean"),
    ],
)
def test_other_architectures_are_refused_by_name(name: str, part: str, tmp_path: Path) -> None:
    theirs = peer(name, **({} if name.startswith("resnet") else {"depth": 1}))
    save_file(theirs.state_dict(), tmp_path / "theirs.safetensors")
    with pytest.raises(UserError, match=part):
        load(tmp_path / "theirs.safetensors")


def test_older_files_have_pre_logits(tmp_path: Path) -> None:
    theirs = randomize(peer("vit_base_patch16_224", **SMALL))
    layer = randomize(nn.Linear(64, 64))
    extra = {f"pre_logits.fc.{key}": x for key, x in layer.state_dict().items()}
    save_file(theirs.state_dict() | extra, tmp_path / "old.safetensors")
    ours = load(tmp_path / "old.safetensors", heads=2)
    x = images(64)
    with torch.no_grad():
        agree(ours(x), theirs.head(torch.tanh(layer(theirs.forward_head(theirs.forward_features(x), pre_logits=True)))))
    with pytest.raises(UserError, match="pre-logits"):
        convert(tmp_path / "old.safetensors", tmp_path / "new.safetensors", "timm")


def test_a_config_with_other_math_is_refused(tmp_path: Path) -> None:
    save(vitlab.create("Ti/16", image_size=32, classes=3, depth=1), tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "timm", "timm")
    file = tmp_path / "timm" / "config.json"
    good = json.loads(file.read_text())
    for key, value in {"act_layer": "silu", "qk_scale": 0.1, "global_pool": "max", "num_heads": "three"}.items():
        file.write_text(json.dumps({**good, "model_args": {**good["model_args"], key: value}}))
        with pytest.raises(UserError, match=str(value)):
            load(tmp_path / "timm")
