"""Average precision, F1 and thresholds of multi-label models against scikit-learn and plain loops."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve

from vitlab.evaluation.multi_label import (
    EVEN,
    average_precisions,
    choose_thresholds,
    count_logits,
    f1,
    rounded_precisions,
)


def draw(n: int = 400, classes: int = 6, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits that say something about the truth, with equal ones among them."""
    random = np.random.default_rng(seed)
    truth = random.random((n, classes)) < np.linspace(0.02, 0.7, classes)
    logits = random.normal(size=(n, classes)) * 3 + 2 * truth - 1
    logits[: n // 2] = np.round(logits[: n // 2])
    return logits.astype(np.float32), truth


def test_average_precision_is_scikit_learns() -> None:
    logits, truth = draw()
    expected = average_precision_score(truth, logits, average=None)
    assert average_precisions(logits, truth) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(average_precisions(logits[:, :1], np.zeros((400, 1), bool))).all()


def test_counts_add_up_and_give_the_precision_of_rounded_logits() -> None:
    logits, truth = draw()
    logits[0], logits[1] = 40, -40  # beyond the counted range
    parts = [slice(0, 100), slice(100, 130), slice(130, 400)]
    counts = sum(count_logits(torch.from_numpy(logits[p]), torch.from_numpy(truth[p])).double() for p in parts)
    rounded = np.clip(np.round(logits * 8), -128, 128)
    found = rounded_precisions(np.asarray(counts))
    assert found == pytest.approx(average_precision_score(truth, rounded, average=None), abs=1e-12)


def test_thresholds_have_the_highest_f1_of_all() -> None:
    logits, truth = draw()
    rounded = np.round(logits * 8) / 8
    counts = count_logits(torch.from_numpy(logits), torch.from_numpy(truth)).double().numpy()
    for k, threshold in enumerate(choose_thresholds(counts)):
        cut = np.log(threshold / (1 - threshold))
        precision, recall, _ = precision_recall_curve(truth[:, k], rounded[:, k])
        best = (2 * precision * recall / np.maximum(1e-12, precision + recall)).max()
        assert f1_score(truth[:, k], rounded[:, k] >= cut) == pytest.approx(best, abs=1e-9)


def test_a_threshold_is_in_the_middle_of_a_gap_and_even_without_images() -> None:
    logits = torch.tensor([[-2.0, -2.0], [-1.0, 0.0], [3.0, 1.0], [4.0, 2.0]])
    truth = torch.tensor([[False, False], [False, False], [True, False], [True, False]])
    first, second = choose_thresholds(count_logits(logits, truth).double().numpy())
    assert np.log(first / (1 - first)) == pytest.approx(1.0, abs=0.07)  # between -1 and 3
    assert second == EVEN


def test_f1_is_scikit_learns() -> None:
    logits, truth = draw()
    guess = logits > 0.5
    hits, guessed, images = (truth & guess).sum(0), guess.sum(0), truth.sum(0)
    assert f1(hits, guessed, images) == pytest.approx(f1_score(truth, guess, average=None), abs=1e-12)
    assert f1(hits.sum(), guessed.sum(), images.sum()) == pytest.approx(f1_score(truth, guess, average="micro"))
    assert np.isnan(f1(np.array([0]), np.array([0]), np.array([0])))[0]
