"""Components against scikit-learn, similarities against a loop; similarity of real positions falls with distance."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

import vitlab
from vitlab.analysis.embeddings import patch_filters, position_similarity, position_trend
from vitlab.errors import UserError
from vitlab.models.config import StemConfig, ViTConfig

TI16 = Path(__file__).parents[3] / "shared" / "weights" / "vit_tiny_patch16_224.safetensors"


def small(**settings: Any) -> Any:
    base: dict[str, Any] = {"depth": 2, "width": 24, "heads": 3, "mlp": 12, "classes": 2, "image_size": (24, 40)}
    return vitlab.create("Ti/8", **(base | settings))


def test_components_are_scikit_learns(randomize: Any) -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")
    model = randomize(small(width=48, image_size=8))
    found = patch_filters(model)
    weight = model.embed.weight.detach().double().numpy()  # (D, 3, P, P)
    pca = decomposition.PCA(28, svd_solver="full").fit(weight.reshape(48, -1))
    assert found.filters.shape == (28, 8, 8, 3)
    assert not found.stem
    np.testing.assert_allclose(found.shares, pca.explained_variance_ratio_, rtol=1e-5)
    for mine, theirs in zip(found.filters, pca.components_, strict=True):
        theirs = theirs.reshape(3, 8, 8).transpose(1, 2, 0)
        largest = theirs.ravel()[np.abs(theirs).argmax()]
        np.testing.assert_allclose(mine, theirs * np.sign(largest), atol=1e-5)


def test_as_many_components_as_there_are() -> None:
    model = vitlab.build(ViTConfig((4, 4), 2, 1, 6, 6, 1, classes=2))
    found = patch_filters(model)  # type: ignore[arg-type]
    assert len(found.filters) == len(found.shares) == 6
    assert found.shares.sum() == pytest.approx(1)


def test_a_hybrids_pixels_are_its_stems(randomize: Any) -> None:
    model = randomize(vitlab.build(ViTConfig((32, 32), 1, 1, 12, 12, 3, classes=2, stem=StemConfig((1,), 32))))
    found = patch_filters(model)
    assert found.stem
    assert found.filters.shape == (32, 7, 7, 3)
    assert len(found.shares) == 0
    flat = found.filters.reshape(32, -1)
    np.testing.assert_allclose(np.linalg.norm(flat, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(flat.mean(1), 0, atol=1e-6)  # the stem standardizes its filters
    raw = model.stem.root.weight.detach().numpy()[3].transpose(1, 2, 0)
    assert np.corrcoef(raw.ravel(), flat[3])[0, 1] == pytest.approx(1)


@pytest.mark.parametrize("positions", ["1d", "2d", "sinusoidal", "sincos2d"])
@pytest.mark.parametrize("pool", ["token", "mean"])
def test_similarity_against_a_loop(positions: str, pool: str) -> None:
    model = small(positions=positions, pool=pool)
    got = position_similarity(model)
    assert got.shape == (3, 5, 3, 5)
    table = model.positions(0).detach().double().numpy()[int(pool == "token") :]
    for y in range(3):
        for x in range(5):
            for i in range(3):
                for j in range(5):
                    a, b = table[y * 5 + x], table[i * 5 + j]
                    cosine = a @ b / math.sqrt((a @ a) * (b @ b))
                    assert got[y, x, i, j] == pytest.approx(cosine, abs=1e-6)


def test_each_layer_may_have_its_own_table() -> None:
    model = small(placement="every")
    first, second = position_similarity(model), position_similarity(model, 1)
    assert not np.allclose(first, second)
    np.testing.assert_allclose(np.einsum("yxyx->yx", second), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "message"), [("none", "positions='none'"), ("relative", "are in the attention layers")]
)
def test_models_without_a_table_are_an_error(kind: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        position_similarity(small(positions=kind))


def test_not_for_a_resnet() -> None:
    resnet: Any = vitlab.create("R50x1", classes=2, image_size=32)
    for function in (patch_filters, position_similarity):
        with pytest.raises(UserError, match="ResNet"):
            function(resnet)


def test_trend_of_positions_is_scipys() -> None:
    model = small()
    got = position_similarity(model)
    distances, similarities = [], []
    for i in range(15):
        for j in range(15):
            if i != j:
                distances.append(math.hypot(i // 5 - j // 5, i % 5 - j % 5))
                similarities.append(got[i // 5, i % 5, j // 5, j % 5])
    expected = scipy.stats.spearmanr(distances, similarities).statistic
    assert position_trend(got) == pytest.approx(expected, abs=1e-3)  # float32 makes a tie of each pair here and there


def test_smooth_positions_have_a_strong_trend() -> None:
    """In a table of smooth bumps only near positions are similar."""
    model = small(image_size=(24, 40), width=24, pool="mean")
    y, x = np.divmod(np.arange(15), 5)
    places = np.stack([np.exp(-((y - a) ** 2 + (x - b) ** 2) / 4) for a in range(4) for b in range(6)], 1)
    model.positions.table.data[0] = torch.from_numpy(places).float()
    assert position_trend(position_similarity(model)) < -0.9


@pytest.mark.skipif(not TI16.exists(), reason="the public Ti/16 weights are not here")
def test_similarity_of_the_real_ti16_falls_with_distance() -> None:
    similarity = position_similarity(vitlab.load(TI16))  # type: ignore[arg-type]
    y, x = np.divmod(np.arange(196), 14)
    distance = np.hypot(y[:, None] - y, x[:, None] - x)
    pairs = np.triu_indices(196, 1)
    trend = scipy.stats.spearmanr(similarity.reshape(196, 196)[pairs], distance[pairs]).statistic
    assert trend < -0.5
    assert position_trend(similarity) == pytest.approx(trend, abs=1e-6)
