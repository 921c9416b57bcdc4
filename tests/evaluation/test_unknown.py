"""Refusing unknown images: densities by scipy, the best test where it is known, the promised rate, and real photos."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal
from sklearn.covariance import ledoit_wolf
from sklearn.metrics import roc_auc_score

import vitlab
from vitlab.data.open import find_splits
from vitlab.data.source import Subset
from vitlab.errors import UserError
from vitlab.evaluation import unknown as module
from vitlab.evaluation.cross_validation import deal_folds
from vitlab.evaluation.extract import Features, extract
from vitlab.evaluation.unknown import FOLDS, auroc, covariance, fit_classes, out_of_fold
from vitlab.models.unknown import FAR, Unknown, held_out_limit

D, CLASSES = 6, 40
SHARED = Path(os.environ.get("VITLAB_SHARED", Path(__file__).parents[3] / "shared"))


class World:
    """Gaussian classes around Gaussian means, and images of them and of classes that nobody has seen."""

    def __init__(self, seed: int = 0, spread: float = 2.0) -> None:
        self.rng = np.random.default_rng(seed)
        a, b = self.rng.normal(size=(2, D, D))
        self.within, self.between = a @ a.T / D + 0.2 * np.eye(D), spread**2 * b @ b.T / D
        self.center = self.rng.normal(size=D)
        self.means = self.new_means(CLASSES)

    def new_means(self, count: int) -> np.ndarray:
        return self.rng.multivariate_normal(self.center, self.between, count)

    def images(self, means: np.ndarray, each: int) -> Features:
        noise = self.rng.multivariate_normal(np.zeros(D), self.within, len(means) * each)
        labels = np.repeat(np.arange(len(means)), each)
        return Features((means[labels] + noise).astype(np.float32), labels)


def fit_unknown(*given: Any, **settings: Any) -> Unknown:
    found = module.fit_unknown(*given, **settings)
    assert found is not None
    return found


def by_scipy(
    features: np.ndarray, train: Features, center: np.ndarray, within: np.ndarray, between: np.ndarray
) -> np.ndarray:
    """The strangeness from full covariances: posterior of each class's mean, predictive densities, no projection."""
    rows = []
    for k in np.unique(train.labels):
        x = train.values[train.labels == k].astype(np.float64)
        posterior = np.linalg.inv(np.linalg.pinv(between) + len(x) * np.linalg.inv(within))
        mean = center + posterior @ np.linalg.inv(within) @ (x - center).sum(0)
        rows.append(multivariate_normal(mean, within + posterior).logpdf(features))
    total = within + between
    strange = [multivariate_normal(center, scale * total).logpdf(features) for scale in (1, *FAR)]
    return np.asarray(logsumexp(strange, 0) - np.max(rows, 0))


def test_the_strangeness_is_that_of_full_covariances() -> None:
    world = World()
    images = world.images(world.means, 8)
    train = Features(images.values[:-3], images.labels[:-3])  # unequal classes
    fitted = fit_classes(train.values, train.labels)
    back = np.linalg.inv(fitted.projection.double().numpy())
    within = back.T @ back
    between = back.T @ np.diag(fitted.spread.double().numpy()) @ back
    center = fitted.center.double().numpy()
    features = np.concatenate([world.images(world.means, 2).values, 30 * world.rng.normal(size=(20, D))])
    expected = by_scipy(features, train, center, within, between)
    found = fitted.strangeness(torch.from_numpy(features.astype(np.float32))).numpy()
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-3)


def test_the_fit_finds_the_covariances_of_the_world() -> None:
    world = World(3)
    train = world.images(world.new_means(3000), 10)
    fitted = fit_classes(train.values, train.labels)
    back = np.linalg.inv(fitted.projection.double().numpy())
    found = back.T @ back, back.T @ np.diag(fitted.spread.double().numpy()) @ back
    for got, truth in zip(found, (world.within, world.between), strict=True):
        assert np.linalg.norm(got - truth) < 0.06 * np.linalg.norm(truth)
    assert np.linalg.norm(fitted.center.numpy() - world.center) < 0.2


def test_it_is_nearly_as_good_as_knowing_the_world() -> None:
    """By Neyman and Pearson no test beats the likelihood ratio under the true covariances and means."""
    world = World(3)
    train, known = world.images(world.means, 15), world.images(world.means, 60)
    unknown = world.images(world.new_means(300), 8)
    fitted = fit_unknown(train)
    truth = [by_scipy(x.values, train, world.center, world.within, world.between) for x in (known, unknown)]
    ours = [fitted.strangeness(torch.from_numpy(x.values)).double().numpy() for x in (known, unknown)]
    best = auroc(*truth)
    assert 0.75 < best < 0.99
    assert best - 0.015 < auroc(*ours) < best + 0.003
    far = world.rng.normal(size=(200, D)) * 40
    distances = fitted.distances(torch.from_numpy(far.astype(np.float32)))
    assert float((distances > 1).double().mean()) > 0.98


def test_images_a_little_outside_are_strange() -> None:
    """Near a class in the directions in which classes differ, and twice as spread: the best test is the distance."""
    rng, wide = np.random.default_rng(0), 60
    means = np.zeros((20, wide))
    means[:, :6] = 3 * rng.normal(size=(20, 6))

    def draw(each: int, variance: float) -> np.ndarray:
        noise = np.sqrt(variance) * rng.normal(size=(20, each, wide))
        return np.asarray((means[:, None] + noise).reshape(-1, wide), np.float32)

    fitted = fit_unknown(Features(draw(15, 1), np.repeat(np.arange(20), 15)))
    known, outside = draw(30, 1), draw(30, 2)
    best = [((x[:, None] - means) ** 2).sum(2).min(1) for x in (known, outside)]
    ours = [fitted.strangeness(torch.from_numpy(x)).double().numpy() for x in (known, outside)]
    assert 0.99 < auroc(*best) < 1
    assert auroc(*ours) > auroc(*best) - 0.04


@pytest.mark.parametrize(("way", "rate"), [("held out", 0.05), ("out of fold", 0.1)])
def test_the_promise_holds(way: str, rate: float) -> None:
    """In the mean of many worlds the share of refused images of the classes is the promised one."""
    shares, aside = [], 3
    for seed in range(15):
        world = World(seed)
        train, held_out = world.images(world.means, 8), world.images(world.means, aside)
        fitted = fit_unknown(train, held_out if way == "held out" else None, rate)
        new = torch.from_numpy(world.images(world.means, 20).values)
        shares.append(float((fitted.distances(new) > 1).double().mean()))
    error = np.std(shares) / np.sqrt(len(shares))
    assert np.mean(shares) == pytest.approx(rate, abs=4 * error + (0 if way == "held out" else 0.15 * rate))
    assert np.mean(shares) < rate + 4 * error  # folds have fewer images, so out of fold errs to the safe side


def test_the_limit_is_a_quantile_of_a_new_image() -> None:
    values = torch.arange(1.0, 101)
    assert held_out_limit(values, 0.05) == pytest.approx(95.95)  # 101 * 0.95
    assert held_out_limit(values[:19], 0.05) == 19  # the first number of images that can promise 5 %
    assert held_out_limit(values[:18], 0.05) == float("inf")
    assert held_out_limit(values[:9], 0.1) == 9
    assert held_out_limit(values[:0], 0.5) == float("inf")


def test_the_scale_of_distances() -> None:
    """The limit is at 1, and at 5 % the median of held-out images at 0."""
    world = World(2)
    held_out = world.images(world.means, 25)
    fitted = fit_unknown(world.images(world.means, 8), held_out)
    found = fitted.distances(torch.from_numpy(held_out.values)).numpy()
    assert np.median(found) == pytest.approx(0, abs=0.02)
    assert np.quantile(found, 0.95, method="weibull") == pytest.approx(1, abs=1e-5)  # of m + 1 ranks
    loose = replace(fitted, rate=0.3).distances(torch.from_numpy(held_out.values)).numpy()
    assert (np.argsort(loose) == np.argsort(found)).all()
    assert (loose > 1).mean() == pytest.approx(0.3, abs=0.002)


# ---- its parts


@pytest.mark.parametrize("shape", [(5, 12), (60, 12), (4000, 12)])
def test_the_covariance_is_scikit_learns(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape) @ rng.normal(size=(12, 12))
    x -= x.mean(0)
    np.testing.assert_allclose(covariance(x), ledoit_wolf(x, assume_centered=True)[0], rtol=1e-9, atol=1e-12)


def test_auroc_is_scikit_learns() -> None:
    rng = np.random.default_rng(0)
    known, strange = rng.integers(0, 9, 200).astype(float), rng.integers(3, 12, 90).astype(float)  # with ties
    truth = np.repeat([0, 1], [200, 90])
    assert auroc(known, strange) == pytest.approx(roc_auc_score(truth, np.concatenate([known, strange])))


def test_folds_spread_over_each_class_and_leave_their_images_out() -> None:
    labels = np.repeat([0, 1, 2, 3], [40, 25, 2, 1])
    fold = deal_folds(labels, FOLDS)
    for k in range(2):
        counts = np.bincount(fold[labels == k], minlength=module.FOLDS)
        assert counts.max() - counts.min() <= 1
    seen: list[int] = []

    def fit(values: np.ndarray, own: np.ndarray) -> module.Strangeness:
        rows = set(values[:, 0].astype(int).tolist())

        def strange(others: np.ndarray) -> np.ndarray:
            assert not rows & set(others[:, 0].astype(int).tolist())
            seen.extend(others[:, 0].astype(int).tolist())
            return others[:, 0].astype(np.float64)

        return strange

    data = Features(np.arange(68, dtype=np.float32)[:, None], labels)
    assert sorted(out_of_fold(fit, data)) == list(range(67)) == sorted(seen)  # the last is alone in its class


def test_what_cannot_be_fitted_is_none() -> None:
    world = World()
    train = world.images(world.means, 5)
    assert module.fit_unknown(world.images(world.means, 1)) is None
    assert module.fit_unknown(train, world.images(world.means[:18], 1)) is None  # too few to promise 5 %
    assert module.fit_unknown(train, world.images(world.means[:19], 1)) is not None
    same = Features(np.repeat(world.means, 5, 0).astype(np.float32), np.repeat(np.arange(len(world.means)), 5))
    assert module.fit_unknown(same) is None
    for rate in (0.0, 1.0, -1.0):
        with pytest.raises(UserError, match="share of false refusals"):
            fit_unknown(world.images(world.means, 3), rate=rate)


def test_large_sets_are_drawn_from(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    train = world.images(world.means, 20)
    monkeypatch.setattr(module, "MOST", 200)
    assert float(fit_unknown(train).counts.sum()) == 200
    assert (fit_unknown(train).counts == fit_unknown(train).counts).all()


# ---- real weights and photos


@pytest.fixture(scope="module")
def photos() -> dict[str, Features]:
    """Features of 12 training and 8 test photos of 25 breeds, and of 200 photos of flowers."""
    weights = SHARED / "weights" / "vit_tiny_patch16_224.safetensors"
    if not weights.exists() or not (SHARED / "data" / "pets").exists():
        pytest.skip(f"photos and weights are not in {SHARED}; set VITLAB_SHARED to the folder that has them")
    model, found = vitlab.load(weights), {}
    for name, split, classes, each in (("pets", "train", 25, 12), ("pets", "test", 25, 8), ("flowers", "test", 50, 4)):
        source = find_splits(str(SHARED / "data" / name))[0][split]
        rows = np.concatenate([np.flatnonzero(source.labels == k)[:each] for k in range(classes)])
        found[f"{name} {split}"] = extract(model, Subset(source, rows), device="cpu", workers=0)
    return found


@pytest.mark.slow
def test_real_photos_of_another_kind_and_breeds_left_out(photos: dict[str, Features]) -> None:
    train, test, flowers = photos["pets train"], photos["pets test"], photos["flowers test"]

    def strangeness(fitted: Unknown, features: Features) -> np.ndarray:
        return fitted.strangeness(torch.from_numpy(features.values)).double().numpy()

    every = fit_unknown(train)
    assert auroc(strangeness(every, test), strangeness(every, flowers)) >= 0.95
    assert float((every.distances(torch.from_numpy(test.values)) > 1).double().mean()) < 0.1
    known_train, known = train.labels < 18, test.labels < 18
    some = fit_unknown(Features(train.values[known_train], train.labels[known_train]))
    parts = [Features(test.values[rows], test.labels[rows]) for rows in (known, ~known)]
    assert auroc(*(strangeness(some, part) for part in parts)) >= 0.8
