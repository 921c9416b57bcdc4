"""Attention distance against closed forms, and against loops over pixels in numpy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from torch import Tensor

import vitlab
from vitlab.analysis.distance import (
    MEMORY,
    batch_size,
    cell_distances,
    depth_trend,
    mean_distance,
    query_distances,
    rank_correlation,
)
from vitlab.errors import UserError
from vitlab.models.config import StemConfig, ViTConfig
from vitlab.models.names import configure

TI16 = Path(__file__).parents[3] / "shared" / "weights" / "vit_tiny_patch16_224.safetensors"
GRIDS = [(4, 4), (2, 5), (5, 2), (1, 6), (1, 1)]


def config_of(grid: tuple[int, int], patch: int = 4, **settings: Any) -> ViTConfig:
    base = {"depth": 2, "width": 12, "mlp": 12, "heads": 3, "classes": 2, "pool": "mean"} | settings
    return ViTConfig(image_size=(grid[0] * patch, grid[1] * patch), patch=patch, **base)  # type: ignore[arg-type]


def with_class_token(weights: Tensor) -> Tensor:
    """The same attention among patches, a third of it diverted to a class token with even attention."""
    n = len(weights) + 1
    full = torch.full((n, n), 1 / n, dtype=weights.dtype)
    full[1:, 0], full[1:, 1:] = 1 / 3, weights * 2 / 3
    return full


def both_ways(grid: tuple[int, int], weights: Tensor, patch: int = 4) -> list[Tensor]:
    """Distances (hw,) without and with a class token: it must make no difference."""
    plain = query_distances(weights[None, None], config_of(grid, patch))
    token = query_distances(with_class_token(weights)[None, None], config_of(grid, patch, pool="token"))
    return [plain[0, 0], token[0, 0]]


@pytest.mark.parametrize("grid", GRIDS)
def test_attention_to_itself_has_distance_zero(grid: tuple[int, int]) -> None:
    for got in both_ways(grid, torch.eye(grid[0] * grid[1], dtype=torch.float64)):
        assert got.tolist() == [0.0] * (grid[0] * grid[1])


@pytest.mark.parametrize("grid", [(4, 4), (2, 5), (5, 2), (1, 6)])
@pytest.mark.parametrize("patch", [1, 4, 16])
def test_one_step_to_the_right(grid: tuple[int, int], patch: int) -> None:
    """A patch of the last column starts again at the first, w - 1 patches back."""
    h, w = grid
    weights = torch.zeros(h * w, h * w, dtype=torch.float64)
    for y in range(h):
        for x in range(w):
            weights[y * w + x, y * w + (x + 1) % w] = 1
    expected = patch * ((w - 1) * 1 + (w - 1)) / w
    for got in both_ways(grid, weights, patch):
        assert got.mean().item() == pytest.approx(expected, abs=1e-12)
        assert set(got.tolist()) == {patch * 1.0, patch * (w - 1.0)}


@pytest.mark.parametrize("grid", GRIDS)
def test_even_attention(grid: tuple[int, int]) -> None:
    """The mean distance of two random cells; along a line of n cells that is (n*n - 1) / (3n)."""
    h, w = grid
    n = h * w
    mean = sum(math.hypot(i // w - j // w, i % w - j % w) for i in range(n) for j in range(n)) / n**2
    if h == 1:
        assert mean == pytest.approx((w * w - 1) / (3 * w))
    for got in both_ways(grid, torch.full((n, n), 1 / n, dtype=torch.float64), patch=8):
        assert got.mean().item() == pytest.approx(8 * mean, abs=1e-12)


def test_cells_differ_by_row_and_column() -> None:
    """On 2 x 5 cells the first and the sixth are neighbors, the first and the fifth are not."""
    far = cell_distances((2, 5), 16)
    assert far[0, 5] == 16
    assert far[0, 4] == 64
    assert far[0, 9] == pytest.approx(16 * math.sqrt(17))


def looped(weights: np.ndarray, c: ViTConfig) -> float:
    """One head's mean distance, a pair of patches at a time, centers in pixels."""
    lead, (h, w), found = int(c.token), c.grid, []
    centers = [((y + 0.5) * c.stride, (x + 0.5) * c.stride) for y in range(h) for x in range(w)]
    for i, here in enumerate(centers):
        row = weights[lead + i, lead:]
        found.append(sum(p / row.sum() * math.dist(here, there) for p, there in zip(row, centers, strict=True)))
    return float(np.mean(found))


MODELS = {
    "plain": config_of((3, 5), pool="token"),
    "no token": config_of((5, 3)),
    "axial": config_of((3, 5), attention="axial"),
    "hybrid": config_of((3, 5), patch=4, pool="token"),
    "relative": config_of((4, 4), pool="token", positions="relative"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_against_a_plain_loop(name: str, randomize: Any) -> None:
    c = MODELS[name]
    if name == "hybrid":  # one cell of the stem's map is 4 pixels
        c = ViTConfig((12, 20), 1, 2, 12, 12, 3, classes=2, stem=StemConfig((), 32))
        assert c.stride == 4
    model = randomize(vitlab.build(c))
    images = torch.randn(5, 3, *c.image_size)
    got = mean_distance(model, [images])
    maps = vitlab.attention(model, images)
    assert got.shape == (len(maps), c.heads)
    for layer, one in enumerate(maps):
        for head in range(c.heads):
            expected = np.mean([looped(one[i, head].double().numpy(), c) for i in range(5)])
            assert got[layer, head] == pytest.approx(expected, abs=1e-5)  # float32 weights, tens of pixels
    uneven = mean_distance(model, iter([images[:2], images[2:4], images[4:]]))
    np.testing.assert_allclose(uneven, got, rtol=1e-6)


def test_a_plain_loop_in_double_precision() -> None:
    c = config_of((4, 3), pool="token")
    weights = torch.randn(2, 3, 13, 13, dtype=torch.float64).mul(2).softmax(-1)
    got = query_distances(weights, c).mean(-1)
    for image in range(2):
        for head in range(3):
            assert got[image, head].item() == pytest.approx(looped(weights[image, head].numpy(), c), abs=1e-6)


def test_a_patch_that_attends_to_no_patch_is_left_out() -> None:
    weights = torch.eye(5)
    weights[1] = torch.tensor([1.0, 0, 0, 0, 0])  # the first patch attends to the class token alone
    weights[2] = torch.tensor([0.5, 0.5, 0, 0, 0])  # the second at the first, one step away
    got = query_distances(weights[None, None], config_of((2, 2), pool="token"))[0, 0]
    assert got.isnan().tolist() == [True, False, False, False]
    assert got[1:].tolist() == [4.0, 0.0, 0.0]


def test_no_images() -> None:
    with pytest.raises(UserError, match="at least one image"):
        mean_distance(vitlab.build(config_of((2, 2))), [])  # type: ignore[arg-type]


def test_batches_are_bounded_in_memory() -> None:
    for name, size in (("Ti/16", 224), ("L/16", 384), ("H/14", 518)):
        model = configure(name, {"image_size": size})
        assert isinstance(model, ViTConfig)
        layer = 4 * model.heads * model.length**2
        assert batch_size(model) == 1 or 3 * layer * batch_size(model) <= MEMORY
    assert isinstance(model, ViTConfig)
    assert batch_size(model) == 1  # of H/14 one image's layer alone is 120 MB


@pytest.mark.parametrize("ties", [False, True])
def test_rank_correlation_is_scipys(ties: bool) -> None:
    random = np.random.default_rng(0)
    a = random.normal(size=200)
    b = a + random.normal(size=200)
    if ties:
        a, b = a.round(), b.round(1)
    assert rank_correlation(a, b) == pytest.approx(scipy.stats.spearmanr(a, b).statistic, abs=1e-12)
    assert rank_correlation(a, -(b**3)) == pytest.approx(-rank_correlation(a, b))


def test_no_trend_in_a_constant() -> None:
    assert math.isnan(rank_correlation([1, 2, 3], [4, 4, 4]))
    assert math.isnan(depth_trend(np.ones((1, 3))))
    assert depth_trend(np.array([[1.0, 2], [3, 1], [9, 0]])) == pytest.approx(1)


@pytest.mark.skipif(not TI16.exists(), reason="the public Ti/16 weights are not here")
def test_the_real_ti16_looks_farther_with_depth() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    from PIL import Image

    from vitlab.data.transforms import eval_image

    model = vitlab.load(TI16)
    photos = [Image.fromarray(photo) for photo in sklearn.load_sample_images().images]
    photos += [photo.crop((left, 60, left + 260, 320)) for photo in photos for left in (0, 380)]
    images = torch.stack([eval_image(photo, (224, 224), model.card.preprocess) for photo in photos])
    distance = mean_distance(model, images.split(4))  # type: ignore[arg-type]
    trend = scipy.stats.spearmanr(np.arange(12), distance.mean(1)).statistic
    assert trend > 0.5
    assert depth_trend(distance) == pytest.approx(trend)
    assert distance[:4].max() > distance[:4].min() * 3  # the lowest layers have heads of both kinds
