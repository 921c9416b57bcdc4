"""Cross-validated heads against scikit-learn's logistic regression on the same folds."""

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from vitlab.evaluation.cross_validation import cross_validate, deal_folds
from vitlab.evaluation.extract import Features

RNG = np.random.default_rng(0)
LABELS = np.repeat(np.arange(4), (30, 25, 20, 15))
CENTERS = RNG.normal(size=(4, 6))
VALUES = (CENTERS[LABELS] + RNG.normal(size=(90, 6))).astype(np.float32)


def test_every_class_is_dealt_out_evenly() -> None:
    fold = deal_folds(LABELS)
    for k in range(4):
        counts = np.bincount(fold[k == LABELS], minlength=5)
        assert counts.max() - counts.min() <= 1
    assert np.array_equal(fold, deal_folds(LABELS))


def test_logits_are_those_of_fits_without_the_image() -> None:
    found = cross_validate(Features(VALUES, LABELS), 4, [0.05])
    fold = deal_folds(LABELS)
    expected = np.empty((90, 4))
    for held in range(5):  # scikit-learn's C depends on the number of rows, which differs between folds
        aside = fold == held
        model = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (0.05 * (~aside).sum()), tol=1e-8))
        model.fit(VALUES[~aside], LABELS[~aside])
        expected[aside] = model.decision_function(VALUES[aside])
    centered = found.logits - found.logits.mean(1, keepdims=True)
    np.testing.assert_allclose(centered, expected - expected.mean(1, keepdims=True), atol=5e-3)


def test_the_penalty_with_the_most_hits_is_chosen() -> None:
    penalties = [1.0, 0.1, 1e-3]
    found = cross_validate(Features(VALUES, LABELS), 4, penalties)
    hits = []
    for l2 in penalties:
        model = make_pipeline(StandardScaler(), LogisticRegression(C=1 / (l2 * 72)))
        guesses = cross_val_predict(model, VALUES, LABELS, cv=PredefinedSplit(deal_folds(LABELS)))
        hits.append(int((guesses == LABELS).sum()))
    assert [trial.hits for trial in found.tried] == hits
    assert found.l2 == penalties[int(np.argmax(hits))]
    assert found.accuracy == max(hits) / 90


def test_a_class_of_one_image_is_no_error() -> None:
    labels = np.append(LABELS, 4)
    values = np.vstack([VALUES, np.full((1, 6), 9, np.float32)])
    found = cross_validate(Features(values, labels), 5, [0.1])
    assert np.isfinite(found.logits).all()
    assert found.logits[-1].argmax() != 4  # no fit without it has seen the class
