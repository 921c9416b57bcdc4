"""Names, sizes and parameter counts of the model family."""

import dataclasses

import pytest
import torch

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import StemConfig, ViTConfig
from vitlab.models.meta import Uninitialized
from vitlab.models.names import LISTED, SIZES, STAGES, configure, name_of
from vitlab.models.variants import Model

# At 224 px with 1000 classes. ViT and hybrids: the published counts. ResNets: see `resnet_parameters`.
COUNTS = {
    "Ti/16": 5_717_416,
    "S/16": 22_050_664,
    "B/16": 86_567_656,
    "B/32": 88_224_232,
    "L/16": 304_326_632,
    "L/32": 306_535_400,
    "H/14": 632_045_800,
    "g/14": 1_012_611_432,
    "R50+B/16": 98_659_112,
    "R+Ti/16": 6_337_704,
}


def parameters(model: Model) -> int:
    return sum(p.numel() for p in model.parameters())


def make(name: str, **settings: object) -> Model:
    with torch.device("meta"), Uninitialized():
        return vitlab.create(name, **settings)


@pytest.mark.parametrize("name", LISTED)
def test_parameter_count(name: str) -> None:
    assert parameters(make(name)) == expected(name)


def expected(name: str) -> int:
    """The published count, or the sum over the layers as the paper describes them."""
    if name in COUNTS:
        return COUNTS[name]
    if "x" in name:
        depth, factor = name[1:].split("x")
        return resnet_parameters(STAGES[int(depth)], int(factor))
    stem, _, plain = name.rpartition("+")
    size, patch = plain.split("/")
    return vit_parameters(size, int(patch), STEM_STAGES[stem, int(patch)] if stem else None)


STEM_STAGES = {("R26", 32): (2, 2, 2, 2), ("R50", 32): (3, 4, 6, 3), ("R50", 16): (3, 4, 9)}


def vit_parameters(size: str, stride: int, stages: tuple[int, ...] | None) -> int:
    layers, width, mlp, _ = SIZES[size]
    block = 4 * width * (width + 1) + width * mlp + mlp + mlp * width + width + 4 * width
    embed = 3 * stride**2 * width + width
    if stages is not None:
        embed = stem_parameters(stages) + 64 * 4 * 2 ** (len(stages) - 1) * width + width
    tokens = (224 // stride) ** 2 + 1
    return embed + (tokens + 1) * width + layers * block + 2 * width + 1000 * (width + 1)


def stem_parameters(stages: tuple[int, ...]) -> int:
    total, cin = 7 * 7 * 3 * 64 + 2 * 64, 64
    for i, units in enumerate(stages):
        mid, out = 64 * 2**i, 256 * 2**i
        for unit in range(units):
            total += cin * mid + 9 * mid * mid + mid * out + 2 * (mid + mid + out)
            total += cin * out + 2 * out if unit == 0 else 0
            cin = out
    return total


def resnet_parameters(stages: tuple[int, ...], factor: int) -> int:
    base = 64 * factor
    total, cin = 7 * 7 * 3 * base, base
    for i, units in enumerate(stages):
        mid, out = base * 2**i, 4 * base * 2**i
        for unit in range(units):
            total += cin * mid + 9 * mid * mid + mid * out + 2 * (cin + mid + mid)
            total += cin * out if unit == 0 else 0
            cin = out
    return total + 2 * cin + 1000 * (cin + 1)


def test_every_published_count_is_listed() -> None:
    assert set(COUNTS) <= set(LISTED)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("patch", [7, 8, 28])
def test_any_size_with_any_patch(size: str, patch: int) -> None:
    model = make(f"{size}/{patch}")
    assert model.config.length == (224 // patch) ** 2 + 1
    assert parameters(model) == vit_parameters(size, patch, None)


@pytest.mark.parametrize(
    ("name", "grid"), [("R50+B/16", (14, 20)), ("R50+B/32", (7, 10)), ("R26+S/16", (14, 20)), ("R+Ti/16", (7, 10))]
)
def test_hybrid_grid(name: str, grid: tuple[int, int]) -> None:
    assert make(name, image_size=(224, 320)).config.grid == grid


def test_stem_of_r50_with_patch_16_moves_stage_four_into_three() -> None:
    config = make("R50+L/16").config
    assert isinstance(config, vitlab.models.config.ViTConfig)
    assert config.stem is not None
    assert config.stem.stages == (3, 4, 9)


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("Q/16", {}, ["'Q'", "Ti, S, B, L, H or g"]),
        ("b/16", {}, ["'b'", "Ti, S, B, L, H or g"]),
        ("B16", {}, ["'B16'", "size/patch"]),
        ("B/0", {}, ["patch must be at least 1"]),
        ("R34x1", {}, ["R34x1", "50, 101, 152 or 200"]),
        ("R50x0", {}, ["R50x0"]),
        ("R18+B/16", {}, ["'R18'", "R, R26 or R50"]),
        ("R50+B/14", {}, ["16 or 32", "not 14"]),
        ("B/15", {}, ["224x224", "210 or 225"]),
        ("B/16", {"image_size": (224, 250)}, ["224x250", "240 or 256"]),
        ("B/16", {"heads": 7}, ["7 heads", "768"]),
        ("B/16", {"dropout": -0.1}, ["dropout", "-0.1"]),
        ("B/16", {"drop_path": 1.0}, ["drop_path", "1.0"]),
        ("B/16", {"classes": -1}, ["classes", "-1"]),
        ("B/16", {"pool": "max"}, ["pool", "'token', 'mean', 'attention' or 'token_mean'", "'max'"]),
        ("B/16", {"image_size": 0}, ["image_size", "positive"]),
        ("B/16", {"image_size": (1, 2, 3)}, ["image_size", "(height, width)"]),
        ("B/16", {"attention": "axial", "pool": "token"}, ["axial", "class token", "pool='mean'"]),
        ("R50x1", {"pool": "mean"}, ["R50x1 is a ResNet", "'pool'"]),
        ("R50x1", {"width": 64}, ["R50x1 is a ResNet", "'width'"]),
        ("R50x1", {"attention": "full"}, ["attention", "'none' or 'axial'", "'full'"]),
    ],
)
def test_bad_names_and_settings_get_one_sentence(name: str, settings: dict[str, object], words: list[str]) -> None:
    with pytest.raises(vitlab.UserError) as error:
        make(name, **settings)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_misspelt_setting_is_refused() -> None:
    with pytest.raises(UserError, match="'dropot'; did you mean 'dropout'"):
        vitlab.create("Ti/16", dropot=0.1)


@pytest.mark.parametrize("name", [*LISTED, "Ti/8", "H/16"])
def test_a_config_knows_its_name(name: str) -> None:
    config = configure(name, {"image_size": 96 * 7, "classes": 3})
    assert name_of(config) == name


def test_a_shape_of_ones_own_has_no_name() -> None:
    assert name_of(configure("B/16", {"depth": 3})) is None
    assert name_of(dataclasses.replace(configure("R50x1", {}), width=96)) is None
    hybrid = configure("R50+B/16", {})
    assert isinstance(hybrid, ViTConfig)
    assert name_of(dataclasses.replace(hybrid, stem=StemConfig((1, 1, 1)))) is None
