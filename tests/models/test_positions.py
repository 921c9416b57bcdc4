"""Positions: their values, their meaning and how they change resolution."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import mostly_slow
from scipy.ndimage import zoom
from torch import Tensor

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.positions import Table
from vitlab.models.variants import Model
from vitlab.models.vit import ViT

Fill = Callable[..., Any]


def table_of(model: Model) -> Tensor:
    assert isinstance(model, ViT)
    assert isinstance(model.positions, Table)
    return model.positions.table


GRIDS = [
    *[((3, 5), (7, 4)), ((3, 5), (2, 9)), ((4, 4), (11, 6)), ((8, 6), (3, 2)), ((5, 3), (5, 4))],
    *[((1, 4), (3, 6)), ((4, 1), (6, 3)), ((1, 1), (3, 2)), ((3, 4), (1, 1)), ((2, 5), (1, 5))],
]
either = pytest.mark.parametrize(("old", "new"), GRIDS)


def small(grid: tuple[int, int] = (3, 5), **settings: Any) -> ViTConfig:
    """Patches of 2 pixels, so a grid of 3x5 is an image of 6x10."""
    base: dict[str, Any] = {"patch": 2, "depth": 3, "width": 8, "mlp": 8, "heads": 2, "classes": 3}
    return ViTConfig(**(base | {"image_size": (2 * grid[0], 2 * grid[1])} | settings))


def resized(config: ViTConfig, new: tuple[int, int], randomize: Fill, mode: str = "bilinear") -> list[dict[str, Any]]:
    """The weights before and after."""
    model = randomize(vitlab.build(config)).double()
    before = {name: value.clone().numpy() for name, value in model.state_dict().items()}
    model.resize((2 * new[0], 2 * new[1]), mode=mode)
    assert model.config.grid == new
    model(torch.randn(2, 3, 2 * new[0], 2 * new[1], dtype=torch.float64))
    return [before, {name: value.numpy() for name, value in model.state_dict().items()}]


def zoomed(grid: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(h, w, D) by scipy, as the authors do it."""
    out = zoom(grid, (size[0] / grid.shape[0], size[1] / grid.shape[1], 1), order=1)
    assert out.shape == (*size, grid.shape[2])
    return out


def cubic(grid: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """(h, w, D) by cubic convolution with a = -0.75 on pixel centers, edges repeated."""
    a = -0.75

    def weight(d: float) -> float:
        d = abs(d)
        if d <= 1:
            return (a + 2) * d**3 - (a + 3) * d**2 + 1
        return a * d**3 - 5 * a * d**2 + 8 * a * d - 4 * a if d < 2 else 0.0

    for axis, length in enumerate(size):
        old = grid.shape[axis]
        lines = []
        for i in range(length):
            center = (i + 0.5) * old / length - 0.5
            taps = range(math.floor(center) - 1, math.floor(center) + 3)
            lines.append(sum(weight(center - t) * grid.take(min(max(t, 0), old - 1), axis) for t in taps))
        grid = np.stack(lines, axis)
    return grid


WAYS = {"bilinear": zoomed, "bicubic": cubic}
modes = pytest.mark.parametrize("mode", WAYS)


def close(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-12)


@modes
@either
@pytest.mark.parametrize("pool", mostly_slow(["token", "mean"], "token"))
@pytest.mark.parametrize(
    ("kind", "place"),
    [("1d", "stem"), ("1d", "every"), ("1d", "shared"), ("sinusoidal", "shared"), ("sincos2d", "stem")],
)
def test_resize_table(kind: str, place: str, pool: str, old: Any, new: Any, mode: str, randomize: Fill) -> None:
    before, after = resized(small(old, positions=kind, placement=place, pool=pool), new, randomize, mode)
    tables = before["positions.table"], after["positions.table"]
    assert len(tables[0]) == len(tables[1]) == (3 if place == "every" else 1)
    lead = int(pool == "token")
    for was, now in zip(*tables, strict=True):
        assert np.array_equal(was[:lead], now[:lead])
        close(now[lead:], WAYS[mode](was[lead:].reshape(*old, 8), new).reshape(-1, 8))


@modes
@either
@pytest.mark.parametrize("place", mostly_slow(["stem", "every", "shared"], "every"))
def test_resize_axes(place: str, old: Any, new: Any, mode: str, randomize: Fill) -> None:
    before, after = resized(small(old, positions="2d", placement=place), new, randomize, mode)
    assert np.array_equal(before["positions.token"], after["positions.token"])
    for axis, name in enumerate(["positions.rows", "positions.columns"]):
        assert len(before[name]) == len(after[name]) == (3 if place == "every" else 1)
        for was, now in zip(before[name], after[name], strict=True):
            close(now, WAYS[mode](was[:, None], (new[axis], 1))[:, 0])


@modes
@either
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_resize_offsets(pool: str, old: Any, new: Any, mode: str, randomize: Fill) -> None:
    before, after = resized(small(old, positions="relative", pool=pool), new, randomize, mode)
    for layer in range(3):
        name = f"blocks.{layer}.attention.relative"
        assert np.array_equal(before[f"{name}.token"], after[f"{name}.token"])
        size = 2 * new[0] - 1, 2 * new[1] - 1
        close(after[f"{name}.offsets"], WAYS[mode](before[f"{name}.offsets"], size))


KINDS = [
    ("none", "stem"),
    ("1d", "every"),
    ("2d", "every"),
    ("relative", "stem"),
    ("sinusoidal", "stem"),
    ("sincos2d", "stem"),
]
kinds = pytest.mark.parametrize(("kind", "place"), KINDS)


@kinds
def test_resize_leaves_the_rest(kind: str, place: str, randomize: Fill) -> None:
    before, after = resized(small(positions=kind, placement=place), (6, 2), randomize)
    assert before.keys() == after.keys()
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert all("positions" in name or "relative" in name for name in moved)
    assert bool(moved) == (kind != "none")


@modes
@kinds
def test_same_size_changes_nothing(kind: str, place: str, mode: str, randomize: Fill) -> None:
    before, after = resized(small(positions=kind, placement=place), (3, 5), randomize, mode)
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("through", [(9, 7), (2, 2), (7, 3)])
def test_a_ramp_survives_there_and_back(through: tuple[int, int]) -> None:
    model = vitlab.build(small((4, 6))).double()
    y, x = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
    slopes = torch.randn(3, 1, 8, dtype=torch.float64)
    ramp = slopes[0] * y.reshape(-1, 1) + slopes[1] * x.reshape(-1, 1) + slopes[2]
    with torch.no_grad():
        table_of(model)[0, 1:] = ramp
    model.resize((2 * through[0], 2 * through[1])).resize((8, 12))
    torch.testing.assert_close(table_of(model)[0, 1:].detach(), ramp, rtol=1e-12, atol=1e-12)


def test_resized_offsets_keep_their_center(randomize: Fill) -> None:
    """No offset stays no offset, in the corners the farthest stay the farthest."""
    before, after = resized(small(positions="relative"), (6, 4), randomize)
    was, now = (w["blocks.0.attention.relative.offsets"] for w in (before, after))
    close(now[5, 3], was[2, 4])
    close(now[[0, 0, -1, -1], [0, -1, 0, -1]], was[[0, 0, -1, -1], [0, -1, 0, -1]])


@kinds
def test_resized_positions_still_learn(kind: str, place: str) -> None:
    model = vitlab.build(small(positions=kind, placement=place, classes=0)).resize((8, 6))
    model(torch.randn(2, 3, 8, 6)).square().sum().backward()
    assert all(p.is_leaf and p.grad is not None for p in model.parameters())


@kinds
def test_frozen_positions_stay_frozen(kind: str, place: str) -> None:
    model = vitlab.build(small(positions=kind, placement=place)).requires_grad_(False).resize((8, 6))
    assert not any(p.requires_grad for p in model.parameters())


def test_offsets_of_an_axial_resnet_are_resampled_along_their_axis() -> None:
    """The farthest offsets stay the farthest; whatever has the same cells keeps its rows, and convolutions stay."""
    model = vitlab.build(ResNetConfig((32, 48), (1, 1), width=32, attention="axial"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert model.resize((32, 48)).get_parameter("root.weight") is dict(model.named_parameters())["root.weight"]
    model.resize((32, 80))
    columns = {"stages.0.0": (12, 20), "stages.1.0": (12, 20)}  # cells of a row: both attend before the map is halved
    for unit, (old, new) in columns.items():
        name = f"{unit}.conv2.rows.relative.offsets"
        found, places = model.get_parameter(name).detach()[0].numpy(), np.linspace(-(old - 1), old - 1, 2 * new - 1)
        expected = [np.interp(places, range(-(old - 1), old), row) for row in before.pop(name)[0].T.numpy()]
        np.testing.assert_allclose(found.T, expected, atol=1e-6)
    for name, old_value in before.items():
        assert torch.equal(model.get_parameter(name), old_value), name


@pytest.mark.parametrize("config", [*(small(positions=kind) for kind, _ in KINDS), ResNetConfig((8, 8), (1,))])
def test_unknown_mode(config: ModelConfig) -> None:
    with pytest.raises(UserError, match="'bilinear' or 'bicubic', not 'nearest'"):
        vitlab.build(config).resize(12, mode="nearest")  # type: ignore[arg-type]


# ---- values


@pytest.mark.parametrize("width", [8, 7])
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_sinusoids(width: int, pool: str) -> None:
    c = small((6, 5), positions="sinusoidal", width=width, heads=1, pool=pool)
    model = vitlab.build(c)
    assert "positions.table" not in dict(model.named_parameters())
    table = model.state_dict()["positions.table"]
    assert table.shape == (1, c.length, width)
    for place in range(c.length):
        for channel in range(width):
            angle = place / 10000 ** (2 * (channel // 2) / width)
            expected = math.cos(angle) if channel % 2 else math.sin(angle)
            assert table[0, place, channel].item() == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("width", "pool"), [(16, "mean"), (16, "token"), (4, "mean")])
def test_sines_and_cosines_of_columns_and_rows(width: int, pool: str) -> None:
    model = vitlab.build(small((3, 5), positions="sincos2d", width=width, heads=1, pool=pool))
    table = model.state_dict()["positions.table"][0].double().numpy()
    assert "positions.table" not in dict(model.named_parameters())
    quarter = width // 4
    rate = np.array([10000.0 ** -(i / (quarter - 1)) if quarter > 1 else 1.0 for i in range(quarter)])
    cells = [
        np.concatenate([np.sin(x * rate), np.cos(x * rate), np.sin(y * rate), np.cos(y * rate)])
        for y in range(3)
        for x in range(5)
    ]
    token = [np.zeros(width)] if pool == "token" else []
    np.testing.assert_allclose(table, [*token, *cells], rtol=0, atol=1e-7)


def test_one_table_per_layer_or_one_for_all() -> None:
    shapes = {place: small(placement=place) for place in ("stem", "every", "shared")}
    tables = {place: len(table_of(vitlab.build(c))) for place, c in shapes.items()}
    assert tables == {"stem": 1, "every": 3, "shared": 1}


def relative_logits(model: Any) -> Tensor:
    """With all queries alike and all keys alike, only the offsets distinguish two logits of a row."""
    with torch.no_grad():
        for block in model.blocks:
            block.attention.qkv.weight.zero_()
    maps = vitlab.attention(model, torch.randn(1, 3, *model.config.image_size, dtype=torch.float64))
    logs = maps[0][0].log()  # (H, N, N)
    return logs - torch.diagonal(logs, dim1=1, dim2=2)[..., None]


@pytest.mark.parametrize("pool", ["token", "mean"])
@pytest.mark.parametrize("grid", [(3, 4), (4, 2), (1, 5), (5, 1)])
def test_relative_sees_only_the_difference(grid: tuple[int, int], pool: str, randomize: Fill) -> None:
    model = randomize(vitlab.build(small(grid, positions="relative", pool=pool))).double()
    lead = int(pool == "token")
    logits = relative_logits(model)[:, lead:, lead:]
    seen: dict[tuple[int, int], list[Tensor]] = {}
    cells = [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    for i, (y, x) in enumerate(cells):
        for j, (down, across) in enumerate(cells):
            seen.setdefault((y - down, x - across), []).append(logits[:, i, j])
    assert len(seen) == (2 * grid[0] - 1) * (2 * grid[1] - 1)
    for same in seen.values():
        torch.testing.assert_close(torch.stack(same), same[0].expand(len(same), -1), rtol=0, atol=1e-12)
    firsts = torch.stack([same[0][0] for same in seen.values()]).sort().values
    assert firsts.diff().min() > 1e-9  # and every difference has a value of its own


def test_relative_class_token(randomize: Fill) -> None:
    """It sees every patch alike, and every patch sees it alike."""
    model = randomize(vitlab.build(small(positions="relative"))).double()
    logits = relative_logits(model)
    assert logits[:, 0, 1:].diff(dim=-1).abs().max() < 1e-12
    assert logits[:, 1:, 0].diff(dim=-1).abs().max() < 1e-12
    assert (logits[:, 0, 1] - logits[:, 1, 0]).abs().min() > 1e-6


@kinds
def test_only_positions_know_the_order(kind: str, place: str, randomize: Fill) -> None:
    """Patches in another order: the features change if and only if there are positions."""
    model = randomize(vitlab.build(small((1, 6), positions=kind, placement=place, classes=0))).double().eval()
    images = torch.randn(2, 3, 2, 12, dtype=torch.float64)
    order = [3, 0, 5, 1, 4, 2]
    shuffled = torch.cat([images[..., 2 * i : 2 * i + 2] for i in order], -1)
    apart = (model(images) - model(shuffled)).abs().max()
    assert apart < 1e-12 if kind == "none" else apart > 1e-3


# ---- what makes no sense

MEANINGLESS = [
    ({"positions": "none", "placement": "every"}, "nothing to place"),
    ({"positions": "none", "placement": "shared"}, "nothing to place"),
    ({"positions": "relative", "placement": "every"}, "every attention layer already"),
    ({"positions": "relative", "placement": "shared"}, "every attention layer already"),
    ({"positions": "sinusoidal", "placement": "every"}, "'shared'"),
    ({"positions": "sincos2d", "placement": "every"}, "'shared'"),
    ({"positions": "sincos2d", "width": 6, "heads": 2}, "4 divides"),
    ({"positions": "relative", "attention": "axial", "pool": "mean"}, "another kind"),
    ({"positions": "2d", "width": 7, "heads": 1}, "7 is odd"),
    ({"attention": "axial"}, "pool='mean'"),
    ({"positions": "3d"}, "'1d'"),
    ({"placement": "first"}, "'stem'"),
]


@pytest.mark.parametrize(("settings", "fix"), MEANINGLESS)
def test_meaningless(settings: dict[str, Any], fix: str) -> None:
    with pytest.raises(UserError) as caught:
        small(**settings)
    assert fix in str(caught.value)
    assert "\n" not in str(caught.value)
