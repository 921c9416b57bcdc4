"""The switches of later families: what is refused, how many parameters each has, where tokens stand, how they turn."""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, family
from torch import Tensor

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.rotary import Rotary

Fill = Callable[..., Any]
BASE: dict[str, Any] = {
    "image_size": (32, 48),
    "patch": 8,
    "depth": 3,
    "width": 24,
    "mlp": 40,
    "heads": 2,
    "classes": 5,
}
N, D, MLP, L, CLASSES, K = 24, 24, 40, 3, 5, 12  # patches, width, hidden width, layers, classes, head width


def config(**settings: Any) -> ViTConfig:
    return ViTConfig(**(BASE | {"classes": CLASSES} | settings))


def parameters(c: ViTConfig) -> int:
    return sum(p.numel() for p in vitlab.build(c).parameters())


# ---- what is refused

REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "second class token": ({"extra_token": True}, ["pool='token'", "extra_token"]),
    "second class token, both": ({"extra_token": True, "pool": "token_mean"}, ["pool='token_mean'", "extra_token"]),
    "all without registers": ({"prefix_positions": "all"}, ["registers", "prefix_positions='token'"]),
    "none of nothing": ({"prefix_positions": "none", "pool": "mean"}, ["prefix_positions='none'", "there are none"]),
    "placed at every layer": ({"registers": 1, "placement": "every"}, ["placement='every'", "prefix_positions='all'"]),
    "placed, shared": ({"prefix_positions": "none", "placement": "shared"}, ["placement='shared'"]),
    "relative registers": ({"registers": 1, "positions": "relative"}, ["relative", "registers"]),
    "SwiGLU with a GELU": ({"mlp_kind": "swiglu", "gelu": "tanh"}, ["SwiGLU", "gelu"]),
    "SwiGLU in a pool": ({"mlp_kind": "swiglu", "pool": "attention"}, ["SwiGLU", "pool"]),
    "pre-logits of both": ({"pool": "token_mean", "prelogits": 8}, ["token_mean", "prelogits=0"]),
    "layout of nothing": ({"rotary_layout": "halves"}, ["rotary_layout", "set rotary"]),
    "base of nothing": ({"rotary_base": 100.0}, ["rotary_base", "set rotary"]),
    "grid of nothing": ({"rotary_grid": 14}, ["rotary_grid", "set rotary"]),
    "grid of centers": ({"rotary": "centers", "rotary_grid": 14}, ["centers", "rotary_grid"]),
    "axial rotary": ({"rotary": "cells", "attention": "axial", "pool": "mean"}, ["rotary", "full attention"]),
    "axial registers": ({"registers": 2, "attention": "axial", "pool": "mean"}, ["axial", "registers"]),
    "relative rotary": ({"rotary": "cells", "positions": "relative"}, ["relative and rotary", "one of them"]),
    "too many patches": (
        {"rotary": "cells", "image_size": (8192, 8192), "patch": 1},
        ["8192x8192", "too many patches"],
    ),
    "too many offsets": (
        {"positions": "relative", "image_size": (1024, 1024), "patch": 8},
        ["1024x1024", "too many patches"],
    ),
    "narrow heads": ({"rotary": "cells", "heads": 12}, ["rotary", "4 divides", "not 2"]),
    "too many registers": ({"registers": 1 << 20}, ["registers", "at most 1,024"]),
    "fewer than none": ({"registers": -1}, ["registers", "-1"]),
    "base of one": ({"rotary": "cells", "rotary_base": 1.0}, ["rotary_base"]),
    "no such norm": ({"final_norm": "rms"}, ["final_norm", "'rms'"]),
    "no such MLP": ({"mlp_kind": "geglu"}, ["mlp_kind", "'geglu'"]),
    "no such bias": ({"qkv_bias": "k"}, ["qkv_bias", "'k'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_one_line(name: str) -> None:
    settings, words = REFUSED[name]
    with pytest.raises(UserError) as caught:
        config(**settings)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_rotary_defaults_are_those_of_the_fields() -> None:
    """The check that rotary settings are unused compares with the fields' defaults."""
    defaults = {field.name: field.default for field in dataclasses.fields(ViTConfig)}
    assert config().rotary_fields == tuple(defaults[f"rotary_{name}"] for name in ("layout", "base", "grid"))


# ---- parameters

PLAIN = (3 * 64 + 1) * D + D + (N + 1) * D + L * (4 * D * (D + 1) + D * MLP + MLP + MLP * D + D + 4 * D) + 2 * D
PLAIN += CLASSES * (D + 1)
MORE: dict[str, tuple[dict[str, Any], int]] = {
    "nothing": ({}, 0),
    "registers": ({"registers": 4}, 4 * D),
    "registers with positions": ({"registers": 4, "prefix_positions": "all"}, 2 * 4 * D),
    "class token without a position": ({"prefix_positions": "none"}, -D),
    "mean": ({"pool": "mean"}, -2 * D),
    "mean, beside a class token": ({"pool": "mean", "extra_token": True}, 0),
    "token and mean": ({"pool": "token_mean"}, CLASSES * D),
    "token and mean, normed": ({"pool": "token_mean", "final_norm": "pooled"}, CLASSES * D + 2 * D),
    "patches without a bias": ({"embed_bias": False}, -D),
    "norm before": ({"norm_before": True}, 2 * D),
    "norm after pooling": ({"final_norm": "pooled"}, 0),
    "no norm": ({"final_norm": "none"}, -2 * D),
    "layer scale": ({"layer_scale": True}, L * 2 * D),
    "q and v biases": ({"qkv_bias": "qv"}, -L * D),
    "no biases": ({"qkv_bias": "none"}, -L * 3 * D),
    "q/k norm": ({"qk_norm": True}, L * 2 * 2 * K),
    "attention norm": ({"attention_norm": True}, L * 2 * D),
    "SwiGLU": ({"mlp_kind": "swiglu"}, L * (D * MLP + MLP)),
    "hidden norm": ({"mlp_norm": True}, L * 2 * MLP),
    "quick GELU": ({"gelu": "quick"}, 0),
    "rotary": ({"rotary": "cells", "rotary_grid": 14}, 0),
    "rotary alone": ({"rotary": "centers", "positions": "none"}, -(N + 1) * D),
}


@pytest.mark.parametrize("name", MORE)
def test_parameters_of_each_switch(name: str) -> None:
    settings, more = MORE[name]
    assert parameters(config(**settings)) == PLAIN + more


@pytest.mark.parametrize("name", MORE)
def test_a_switch_changes_what_the_model_computes(name: str, randomize: Fill) -> None:
    settings, _ = MORE[name]
    if name == "nothing" or name == "norm after pooling":  # a norm of one token before or after it is chosen
        return
    images = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        plain, other = (randomize(vitlab.build(c)).eval()(images) for c in (config(), config(**settings)))
    assert (plain - other).abs().max() > 1e-3


# ---- the tokens before the patches


@pytest.mark.parametrize("which", ["token", "all", "none"])
@pytest.mark.parametrize("token", [True, False])
def test_places_of_the_first_tokens(which: str, token: bool, randomize: Fill) -> None:
    """Class token, registers, patches, in this order; a row of the table for each that has a place."""
    if which == "none" and not token:
        pytest.skip("the same as 'token' without a class token")
    c = config(registers=3, prefix_positions=which, pool="token" if token else "mean")
    model: Any = randomize(vitlab.build(c)).double()
    x = torch.randn(2, N, D, dtype=torch.float64)
    with torch.no_grad():
        got, table = model.place(x), list(model.positions(0))
    expected = []
    for kind, vectors in [("token", model.token), ("register", model.registers), ("patch", None)]:
        rows = x if kind == "patch" else vectors.detach().expand(2, -1, -1) if vectors is not None else x[:, :0]
        has_place = kind == "patch" or which == "all" or (which, kind) == ("token", "token")
        expected += [rows[:, i] + table.pop(0) if has_place else rows[:, i] for i in range(rows.shape[1])]
    assert not table
    torch.testing.assert_close(got, torch.stack(expected, 1), rtol=0, atol=0)
    assert got.shape[1] == c.length == N + 3 + token


@pytest.mark.parametrize("name", FAMILIES)
def test_resize_keeps_all_but_the_grid(name: str, randomize: Fill) -> None:
    """There and back on a constant table is the same model; registers and the class token keep their rows."""
    model: Any = randomize(vitlab.build(family(name))).double().eval()
    c, before = model.config, {key: x.clone() for key, x in model.state_dict().items()}
    model.resize((64, 32))
    assert model.config.length == 8 + c.prefix
    assert model(torch.randn(1, 3, 64, 32).double()).shape == (1, 5)
    for key, x in model.state_dict().items():
        if key == "positions.table":
            assert torch.equal(x[:, : c.placed], before[key][:, : c.placed])
        else:
            assert torch.equal(x, before[key])
    if model.positions is None:  # nothing was resampled, so the way back is exact
        images = torch.randn(2, 3, *c.image_size).double()
        fresh: Any = vitlab.build(c).double().eval()
        fresh.load_state_dict(before)
        assert torch.equal(model.resize(c.image_size)(images), fresh(images))


# ---- rotary positions

KINDS: list[dict[str, Any]] = [
    {"rotary": "cells"},
    {"rotary": "cells", "rotary_grid": 3},
    {"rotary": "centers", "rotary_base": 100.0},
]
ROTARY = [{**kind, "rotary_layout": layout} for kind in KINDS for layout in ("pairs", "halves")]


@pytest.mark.parametrize("settings", ROTARY)
def test_products_depend_on_the_offset_alone(settings: dict[str, Any]) -> None:
    """One query and one key at all pairs of cells: equal products for equal offsets, others for others."""
    c = config(**settings, registers=2)
    (h, w), rotary = c.grid, Rotary(c).double()
    q, k = torch.randn(2, K, dtype=torch.float64)
    turned = [rotary(x.expand(1, 1, c.length, K))[0, 0, c.prefix :].unflatten(0, (h, w)) for x in (q, k)]
    found: dict[tuple[int, int], list[float]] = {}
    for y, x in [(y, x) for y in range(h) for x in range(w)]:
        for v, u in [(v, u) for v in range(h) for u in range(w)]:
            found.setdefault((v - y, u - x), []).append(float(turned[0][y, x] @ turned[1][v, u]))
    for products in found.values():
        assert max(products) - min(products) < 1e-12
    firsts = sorted(products[0] for products in found.values())
    assert min(b - a for a, b in itertools.pairwise(firsts)) > 1e-9
    assert found[0, 0][0] == pytest.approx(float(q @ k), abs=1e-12)


@pytest.mark.parametrize("settings", ROTARY)
def test_a_turn_is_a_rotation_of_pairs_of_channels(settings: dict[str, Any]) -> None:
    """Against complex numbers: channel pairs times exp(i * place * rate), a quarter of the channels for each axis."""
    c = config(**settings)
    rotary, x = Rotary(c).double(), torch.randn(2, 2, c.length, K, dtype=torch.float64)
    got = rotary(x)
    torch.testing.assert_close(got.norm(dim=-1), x.norm(dim=-1))
    halves = c.rotary_layout == "halves"

    def pairs(y: Tensor) -> Tensor:
        first, second = y.chunk(2, -1) if halves else (y[..., ::2], y[..., 1::2])
        return torch.complex(first, second)

    before, after = pairs(x[:, :, 1:]), pairs(got[:, :, 1:])
    (h, w), quarter = c.grid, K // 4
    for n in range(h * w):
        for axis, (cell, side) in enumerate([(n // w, h), (n % w, w)]):
            place = cell if not c.rotary_grid else cell * c.rotary_grid / side
            place = place if c.rotary == "cells" else 2 * math.pi * ((2 * cell + 1) / side - 1)
            for i in range(quarter):
                angle = place / c.rotary_base ** (i / quarter)
                turn = complex(math.cos(angle), math.sin(angle))
                channel = axis * quarter + i
                torch.testing.assert_close(after[:, :, n, channel], before[:, :, n, channel] * turn, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_class_token_and_registers_do_not_turn(pool: str) -> None:
    c = config(rotary="cells", registers=2, pool=pool)
    x = torch.randn(1, 2, c.length, K)
    got = Rotary(c)(x)
    assert torch.equal(got[:, :, : c.prefix], x[:, :, : c.prefix])
    turned = (got != x).any(-1)[0, 0, c.prefix :]
    assert turned.tolist() == [False] + [True] * (N - 1)  # the first cell is the origin


def test_tables_are_rounded_once() -> None:
    """A model in float64 has tables of float64, by way of half precision too."""
    c = config(rotary="centers")
    direct, around = Rotary(c).double(), Rotary(c).half().double()
    assert torch.equal(direct.cos, around.cos)
    torch.testing.assert_close(direct.cos**2 + direct.sin**2, torch.ones_like(direct.cos), rtol=0, atol=1e-15)
    assert not direct.state_dict()


def test_rotary_positions_follow_a_resize() -> None:
    model: Any = vitlab.build(config(rotary="centers")).double()
    model.resize((64, 16))
    fresh = Rotary(model.config).double()
    assert torch.equal(model.rotary.cos, fresh.cos)
    assert torch.equal(model.rotary.sin, fresh.sin)
