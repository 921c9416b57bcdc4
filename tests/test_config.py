"""Configs: JSON there and back, typed settings, and the errors for wrong ones."""

import dataclasses
import json
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ResNetConfig, StemConfig, ViTConfig, as_size
from vitlab.models.names import LISTED, configure
from vitlab.settings import from_json, parse_settings, to_json

VIT: dict[str, Any] = {"image_size": (32, 48), "patch": 16, "depth": 2, "width": 12, "mlp": 20, "heads": 3}
CONFIGS: list[ViTConfig | ResNetConfig | StemConfig | Preprocess] = [
    ViTConfig(**VIT),
    ViTConfig(**(VIT | {"patch": 4}), stem=StemConfig((), 32)),
    ViTConfig(**(VIT | {"patch": 1}), stem=StemConfig((1, 2), 32, "variance", 1e-3, 1e-4)),
    ViTConfig(**VIT, classes=0, pool="mean", attention="axial", positions="2d", placement="every", gelu="tanh"),
    ViTConfig(**VIT, prelogits=5, norm_eps=1e-12, dropout=0.1, drop_path=0.25),
    ResNetConfig((33, 47), (1, 2, 3), 96, 10, "sigma", 1e-3, 1e-4),
    ResNetConfig((33, 47), (1, 2, 3), 96, attention="axial"),
    StemConfig((3, 4, 9)),
    Preprocess((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "bicubic", "stretch", 1.0),
]


def refused(call: Any, *words: str) -> str:
    """The message of the error, which has all these words and is one line."""
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for word in words:
        assert word in text
    return text


# ---- JSON


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: type(c).__name__)
def test_round_trip(config: Any) -> None:
    data = to_json(config)
    text = json.dumps(data)
    assert json.loads(text) == data  # nothing but what JSON has: no tuples, at any depth
    again = from_json(type(config), json.loads(text))
    assert again == config
    assert hash(again) == hash(config)
    assert to_json(again) == data


@pytest.mark.parametrize("name", LISTED)
def test_round_trip_of_the_variants(name: str) -> None:
    config = configure(name, {})
    assert from_json(type(config), json.loads(json.dumps(to_json(config)))) == config


@given(
    grid=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    patch=st.integers(1, 32),
    heads=st.integers(1, 8),
    head=st.integers(1, 16),
    dropout=st.floats(0, 1, exclude_max=True),
)
def test_any_legal_config(grid: tuple[int, int], patch: int, heads: int, head: int, dropout: float) -> None:
    sides = grid[0] * patch, grid[1] * patch
    config = ViTConfig(sides, patch, 1, heads * head, 4, heads, dropout=dropout)
    assert config.grid == grid
    assert config.length == grid[0] * grid[1] + 1
    assert from_json(ViTConfig, json.loads(json.dumps(to_json(config)))) == config


def test_configs_are_frozen() -> None:
    for config in CONFIGS:
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.width = 3  # type: ignore[misc, union-attr]


# ---- keys and types


@pytest.mark.parametrize(
    ("wrong", "right"), [("dropot", "dropout"), ("image-size", "image_size"), ("head", "heads"), ("class", "classes")]
)
def test_wrong_key_names_the_nearest(wrong: str, right: str) -> None:
    refused(lambda: from_json(ViTConfig, VIT | {wrong: 1}), f"'{wrong}'", f"did you mean '{right}'?")
    refused(lambda: parse_settings([f"{wrong}=1"], typing.get_type_hints(ViTConfig)), f"'{wrong}'", f"'{right}'")


def test_wrong_key_like_no_other_lists_them_all() -> None:
    text = refused(lambda: from_json(Preprocess, {"qqqqq": 1}), "'qqqqq'")
    assert all(field.name in text for field in dataclasses.fields(Preprocess))


def test_wrong_key_inside_the_stem() -> None:
    data = to_json(CONFIGS[2])
    data["stem"]["stagez"] = data["stem"].pop("stages")
    refused(lambda: from_json(ViTConfig, data), "'stagez'", "'stages'")


def test_missing_keys() -> None:
    data = {key: value for key, value in VIT.items() if key not in ("depth", "heads")}
    refused(lambda: from_json(ViTConfig, data), "ViTConfig", "depth", "heads")


WRONG_TYPES = [
    ({"depth": "12"}, "depth must be an integer"),
    ({"depth": 12.0}, "depth must be an integer"),
    ({"depth": True}, "depth must be an integer"),
    ({"depth": None}, "depth must be an integer"),
    ({"dropout": "0.1"}, "dropout must be a number"),
    ({"dropout": True}, "dropout must be a number"),
    ({"image_size": 32}, "image_size must be"),
    ({"image_size": [32]}, "image_size must be"),
    ({"image_size": [32, 32, 3]}, "image_size must be"),
    ({"image_size": [32.0, 32]}, "image_size must be"),
    ({"image_size": "32x32"}, "image_size must be"),
    ({"pool": "max"}, "pool must be 'token', 'mean', 'attention' or 'token_mean', not 'max'"),
    ({"pool": ["token"]}, "pool must be"),
    ({"stem": [3, 4, 9]}, "stem must be"),
    ({"stem": {"stages": [0]}}, "at least one unit"),
    ({"stem": {"stages": 3}}, "stages must be a list of integers"),
    ({"stem": {"stages": [1], "width": 48}}, "multiple of its 32"),
]


@pytest.mark.parametrize(("wrong", "word"), WRONG_TYPES)
def test_wrong_types(wrong: dict[str, Any], word: str) -> None:
    refused(lambda: from_json(ViTConfig, VIT | wrong), word)
    refused(lambda: ViTConfig(**(VIT | wrong)), word)


def test_whole_numbers_are_numbers() -> None:
    config = ViTConfig(**VIT, dropout=0)
    assert type(config.dropout) is float
    assert ViTConfig(**(VIT | {"image_size": [32, 48]})).image_size == (32, 48)


# ---- values

WRONG_VALUES = [
    ({"heads": 5}, "5 heads do not divide the width 12; 3, 4 or 6 would"),
    ({"heads": 0}, "heads must be at least 1"),
    ({"depth": 0}, "depth must be at least 1"),
    ({"patch": 0}, "patch must be at least 1"),
    ({"width": -12}, "width must be at least 1"),
    ({"classes": -1}, "classes must be at least 0"),
    ({"prelogits": -1}, "prelogits must be at least 0"),
    ({"dropout": -0.1}, "dropout must be at least 0"),
    ({"dropout": 1}, "below 1"),
    ({"dropout": float("nan")}, "dropout must be"),
    ({"drop_path": 1.5}, "drop_path must be"),
    ({"norm_eps": -1e-6}, "norm_eps must be"),
    ({"norm_eps": float("nan")}, "norm_eps must be"),
    ({"image_size": (40, 48)}, "32 or 48 for 40"),
    ({"image_size": (32, 8)}, "16 for 8"),
    ({"image_size": (0, 48)}, "positive"),
    ({"image_size": (16, 1 << 20)}, "image_size must be at most 8192"),
    ({"depth": 10**9}, "depth must be at least 1 and at most 1,000, not 1,000,000,000"),
    ({"classes": 10**9}, "and at most 1,000,000"),
    ({"mlp": 10**9}, "and at most"),
    ({"width": 12 * 10**9}, "and at most"),
    ({"prelogits": 10**9}, "and at most"),
    ({"stem": {"stages": [1, 1], "width": 32}}, "128"),
]


@pytest.mark.parametrize(("wrong", "word"), WRONG_VALUES)
def test_wrong_values(wrong: dict[str, Any], word: str) -> None:
    refused(lambda: from_json(ViTConfig, VIT | wrong), word)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"stages": ()}, "at least one stage"),
        ({"stages": (1, 0)}, "at least one unit"),
        ({"stages": (10**9,)}, "at most 10 stages and 1000 units"),
        ({"stages": (1,) * 64}, "at most 10 stages"),
        ({"width": 32 * 10**9}, "width must be at most"),
        ({"classes": 10**9}, "and at most"),
        ({"width": 40}, "32"),
        ({"width": 0}, "32"),
        ({"classes": -2}, "classes"),
        ({"norm_eps": -1.0}, "norm_eps"),
        ({"image_size": (0, 4)}, "positive"),
        ({"attention": "full"}, "attention must be 'none' or 'axial'"),
        ({"attention": "axial", "stages": (100,), "image_size": (8192, 8)}, "too many cells for axial attention"),
    ],
)
def test_wrong_resnets(wrong: dict[str, Any], word: str) -> None:
    refused(lambda: ResNetConfig(**({"image_size": (32, 32), "stages": (1,)} | wrong)), word)


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"std": (0.5, 0.0, 0.5)}, "std must be at least 0.0001"),
        ({"std": (0.5, -1, 0.5)}, "std must be at least 0.0001"),
        ({"std": (0.5, float("nan"), 0.5)}, "std must be"),
        ({"mean": (0.5, 0.5)}, "mean must be a list of"),
        ({"mean": 0.5}, "mean must be a list of"),
        ({"mean": ("a", "b", "c")}, "mean must be"),
        ({"crop": 0}, "crop must be at least 0.1"),
        ({"crop": 1.1}, "at most 1"),
        ({"crop": 1e-4}, "crop must be at least 0.1 and at most 1, not 0.0001"),
        ({"std": (0.5, 1e-30, 0.5)}, "std must be at least 0.0001 and at most 255"),
        ({"mean": (0.5, float("nan"), 0.5)}, "mean must be at least -255 and at most 255"),
        ({"mean": (0.5, 1e30, 0.5)}, "mean must be at least -255 and at most 255"),
        ({"crop": float("nan")}, "crop must be"),
        ({"fit": "pad"}, "'crop' or 'stretch'"),
        ({"interpolation": "area"}, "'nearest', 'bilinear', 'bicubic' or 'lanczos'"),
    ],
)
def test_wrong_preprocessing(wrong: dict[str, Any], word: str) -> None:
    refused(lambda: Preprocess(**wrong), word)


def test_sizes() -> None:
    assert as_size(7) == (7, 7)
    assert as_size([3, 4]) == as_size((3, 4)) == (3, 4)
    for wrong in (True, 1.5, "224", (1,), (1, 2, 3), (1.0, 2), None, (True, 2)):
        refused(lambda wrong=wrong: as_size(wrong), "integer or (height, width)")
    for wrong in (0, -1, (0, 4), (4, -1)):
        refused(lambda wrong=wrong: as_size(wrong), "positive")


# ---- key=value

SETTINGS = [
    ("image_size=384", (384, 384)),
    ("image_size=224x320", (224, 320)),
    ("image_size=224,320", (224, 320)),
    ("positions=none", "none"),
    ("dropout=0.1", 0.1),
    ("dropout=0", 0.0),
    ("norm_eps=1e-12", 1e-12),
    ("classes=0", 0),
    ("pool=mean", "mean"),
    ("stem=none", None),
]


@pytest.mark.parametrize(("pair", "value"), SETTINGS)
def test_settings(pair: str, value: Any) -> None:
    got = parse_settings([pair], typing.get_type_hints(ViTConfig))
    assert got == {pair.split("=")[0]: value}
    assert type(next(iter(got.values()))) is type(value)


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        ("stages=3,4,6,3", (3, 4, 6, 3)),
        ("stages=2", (2,)),
        ("mean=0.5", (0.5, 0.5, 0.5)),
        ("mean=0.4,0.5,0.6", (0.4, 0.5, 0.6)),
        ("crop=1", 1.0),
    ],
)
def test_settings_of_other_configs(pair: str, value: Any) -> None:
    hints = typing.get_type_hints(ResNetConfig) | typing.get_type_hints(Preprocess)
    assert list(parse_settings([pair], hints).values()) == [value]


@pytest.mark.parametrize(
    ("pair", "word"),
    [
        ("dropout=abc", "dropout must be a number, not 'abc'"),
        ("dropot=0.1", "did you mean 'dropout'?"),
        ("dropout", "key=value"),
        ("dropout=", "dropout must be a number"),
        ("depth=1.5", "depth must be an integer, not '1.5'"),
        ("image_size=big", "image_size must be"),
        ("image_size=", "image_size must be"),
        ("image_size=1x2x3", "image_size must be"),
        ("pool=max", "'token', 'mean', 'attention' or 'token_mean'"),
        ("positions=None", "'none'"),
        ("=3", "setting ''"),
    ],
)
def test_wrong_settings(pair: str, word: str) -> None:
    refused(lambda: parse_settings([pair], typing.get_type_hints(ViTConfig)), word)


def test_later_settings_win() -> None:
    hints = typing.get_type_hints(ViTConfig)
    assert parse_settings(["dropout=0.1", "depth=3", "dropout=0.2"], hints) == {"dropout": 0.2, "depth": 3}
