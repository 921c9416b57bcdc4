"""Scores against scikit-learn, scipy and plain loops."""

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binomtest
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support, top_k_accuracy_score
from timing import assert_below

from vitlab.errors import UserError
from vitlab.evaluation.evaluate import score
from vitlab.evaluation.result import PAIRS
from vitlab.evaluation.scores import (
    Rate,
    calibration,
    calibration_interval,
    confusion,
    rate,
    top_hits,
    wilson,
)


def drawn(n: int, k: int, seed: int = 0, sharpness: float = 1.0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Logits, and labels drawn from their softmax; with another sharpness the logits are over- or underconfident."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, k)) * 2
    labels = (logits + rng.gumbel(size=(n, k))).argmax(1)
    return (logits * sharpness).astype(np.float32), labels


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    odds = np.exp(logits.astype(np.float64))
    return odds / odds.sum(1, keepdims=True)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 7), st.data())
def test_confusion_and_rates_are_scikit_learns(k: int, data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, k - 1), st.integers(0, k - 1)), min_size=1, max_size=40))
    labels, guesses = np.array(pairs).T
    matrix = confusion(guesses, labels, k)
    assert (matrix == confusion_matrix(labels, guesses, labels=range(k))).all()
    names = tuple(f"c{i}" for i in range(k))
    logits = np.eye(k, dtype=np.float32)[guesses]
    result = score(logits, labels, names, "", ("",) * len(pairs))
    mistakes = Counter((f"c{label}", f"c{guess}") for label, guess in pairs if label != guess)
    most = sorted(mistakes.items(), key=lambda each: (-each[1], each[0]))  # of equals, in the order of classes
    assert result.confused == [(*pair, count) for pair, count in most[:PAIRS]]
    rows = sorted(result.class_table(), key=lambda row: row["number"])
    precision, recall, _, support = precision_recall_fscore_support(
        labels, guesses, labels=range(k), zero_division=np.nan
    )
    for i, row in enumerate(rows):
        assert (row["class"], row["images"]) == (f"c{i}", support[i])
        assert row["correct"] == sum(label == guess == i for label, guess in pairs)
        for name, expected in (("precision", precision[i]), ("recall", recall[i])):
            assert (row[name] is None) == np.isnan(expected)
            assert row[name] is None or row[name] == pytest.approx(expected)


@pytest.mark.parametrize("k", [1, 2, 5])
def test_top_hits_are_scikit_learns(k: int) -> None:
    logits, labels = drawn(500, 9)
    expected = top_k_accuracy_score(labels, logits, k=k, labels=range(9))
    assert top_hits(logits, labels, k).mean() == pytest.approx(expected)


def test_more_places_than_classes_always_hit() -> None:
    logits, labels = drawn(10, 3)
    assert top_hits(logits, labels, 5).all()


# ---- calibration


def plain_error(odds: NDArray[np.float64], labels: NDArray[np.int64], bins: int) -> float:
    total = 0.0
    for b in range(bins):
        inside = [i for i, row in enumerate(odds) if b / bins < row.max() <= (b + 1) / bins]
        if inside:
            confidence = sum(odds[i].max() for i in inside) / len(inside)
            right = sum(odds[i].argmax() == labels[i] for i in inside) / len(inside)
            total += len(inside) / len(odds) * abs(confidence - right)
    return total


@pytest.mark.parametrize("bins", [1, 10, 15])
@pytest.mark.parametrize("k", [2, 10])
def test_calibration_error_is_the_plain_loops(k: int, bins: int) -> None:
    logits, labels = drawn(300, k, sharpness=2.0)
    odds = softmax(logits)
    found = calibration(odds, labels, bins)
    assert found.error == pytest.approx(plain_error(odds, labels, bins), abs=1e-12)
    assert found.count.sum() == 300
    assert np.isnan(found.accuracy[found.count == 0]).all()
    full = found.count > 0
    gap = np.abs(found.accuracy - found.confidence)[full]
    assert (found.count[full] * gap).sum() / 300 == pytest.approx(found.error)


def test_bins_have_their_upper_edge() -> None:
    odds = np.array([[0.5, 0.5], [0.6, 0.4], [0.7, 0.3], [1.0, 0.0]])
    assert calibration(odds, np.zeros(4, np.int64), 10).count.tolist() == [0, 0, 0, 0, 1, 1, 1, 0, 0, 1]


def test_the_interval_of_the_calibration_error_is_that_of_resampled_images() -> None:
    """Counts of cells against drawing the images themselves, reflected about the error."""
    logits, labels = drawn(400, 6, sharpness=2.5)
    odds = softmax(logits)
    rng = np.random.default_rng(1)
    again = [calibration(odds[i], labels[i]).error for i in rng.integers(0, 400, (1500, 400))]
    low, high = np.quantile(again, [0.025, 0.975])
    error = calibration(odds, labels).error
    assert calibration_interval(odds, labels) == pytest.approx((2 * error - high, 2 * error - low), abs=0.006)


def test_the_interval_of_the_calibration_error_covers() -> None:
    """The true error of an overconfident model, from very many images, in most intervals from few."""
    logits, labels = drawn(200_000, 5, sharpness=2.0)
    odds = softmax(logits)
    truth = calibration(odds, labels).error
    rng = np.random.default_rng(0)
    covered = 0
    for chosen in rng.integers(0, len(labels), (60, 500)):
        low, high = calibration_interval(odds[chosen], labels[chosen], draws=300)
        covered += low <= truth <= high
    assert covered >= 48  # of 60; 57 are expected of a perfect interval


# ---- intervals of proportions


@pytest.mark.parametrize("n", [1, 2, 10, 599, 50_000])
def test_wilson_intervals_are_scipys(n: int) -> None:
    hits = np.unique([0, 1, n // 3, n // 2, n - 1, n])
    for right, (low, high) in zip(hits.tolist(), wilson(hits, np.full(len(hits), n)), strict=True):
        expected = binomtest(right, n).proportion_ci(0.95, method="wilson")
        assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-12)
        assert 0 <= low <= right / n <= high <= 1
        assert rate(right, n) == Rate(right / n, low, high)


def test_wilson_intervals_cover() -> None:
    rng = np.random.default_rng(3)
    for n, true in ((300, 0.8), (20, 0.95)):
        bounds = wilson(rng.binomial(n, true, 2000), np.full(2000, n))
        covered = ((bounds[:, 0] <= true) & (bounds[:, 1] >= true)).mean()
        assert 0.91 < covered < 0.98


def test_rates_over_no_images_have_no_interval() -> None:
    bounds = wilson(np.array([0, 5, 10]), np.array([0, 10, 10]))
    assert np.isnan(bounds[0]).all()
    assert bounds[1].tolist() == pytest.approx([0.2366, 0.7634], abs=1e-4)
    assert bounds[2].tolist() == pytest.approx([0.7225, 1.0], abs=1e-4)


def test_no_images_are_an_error() -> None:
    with pytest.raises(UserError, match="no images"):
        rate(0, 0)
    with pytest.raises(UserError, match="no images"):
        calibration(np.zeros((0, 3)), np.zeros(0, np.int64))


def test_fifty_thousand_images_are_quick() -> None:
    logits, labels = drawn(50_000, 20)
    odds = softmax(logits)

    def attempt() -> float:
        began = time.process_time()
        calibration_interval(odds, labels)
        wilson(np.full(1000, 40), np.full(1000, 50))
        return time.process_time() - began

    assert_below(8, attempt)
