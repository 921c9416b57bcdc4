"""Probes: logistic regression against scikit-learn and its own optimality, neighbors against loops."""

import inspect
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

import vitlab
from vitlab.cli.fewshot import fewshot
from vitlab.cli.options import parse_amount
from vitlab.cli.probe import probe
from vitlab.data.balance import class_weights
from vitlab.data.open import open_data
from vitlab.errors import UserError
from vitlab.evaluation import probe as module
from vitlab.evaluation.extract import Features, extract
from vitlab.evaluation.fewshot import few_shot
from vitlab.evaluation.neighbors import NEIGHBORS, TEMPERATURE, knn, nearest
from vitlab.evaluation.probe import linear_probe, logistic, objective, split_for_sweep


def blobs(n: int, seed: int = 0, width: int = 12, classes: int = 5, spread: float = 1.5) -> Features:
    """Classes that overlap, in features of very different scales."""
    centers = np.random.default_rng(99).standard_normal((classes, width))
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % classes)
    x = centers[labels] + spread * rng.standard_normal((n, width))
    return Features((x * np.geomspace(0.01, 100, width) + 5).astype(np.float32), labels)


def scaled(x: NDArray[np.float32], by: NDArray[np.float32]) -> NDArray[np.float64]:
    plain = by.astype(np.float64)
    return (x - plain.mean(0)) / (plain.std(0) + 1e-5)


# ---- the linear probe


@pytest.mark.parametrize("l2", [1e-4, 1e-2, 1.0])
def test_equals_scikit_learns_logistic_regression(l2: float) -> None:
    """Their objective is ours times C n: C = 1 / (n l2)."""
    train, test = blobs(400), blobs(300, seed=1)
    x = scaled(train.values, train.values)
    theirs = LogisticRegression(C=1 / (400 * l2), tol=1e-10, max_iter=20_000).fit(x, train.labels)
    ours = logistic(train.values, train.labels, 5, l2)
    assert ours.converged
    assert_allclose(ours.weights[:-1].T, theirs.coef_, atol=2e-4 * np.abs(theirs.coef_).max())
    likely = ours.scores(test.values).softmax(1)
    assert_allclose(likely, theirs.predict_proba(scaled(test.values, train.values)), atol=1e-4)


def test_weights_are_those_of_scikit_learns_balanced_classes() -> None:
    train, test = blobs(400), blobs(300, seed=1)
    uneven = np.sort(np.concatenate([np.flatnonzero(train.labels != 2), np.flatnonzero(train.labels == 2)[:9]]))
    values, labels = train.values[uneven], train.labels[uneven]
    x = scaled(values, values)
    theirs = LogisticRegression(C=1 / (len(x) * 1e-2), class_weight="balanced", tol=1e-10, max_iter=20_000)
    theirs.fit(x, labels)
    for chunk in (4096, 33):
        ours = logistic(values, labels, 5, 1e-2, weights=class_weights(np.bincount(labels))[labels], chunk=chunk)
        assert ours.converged
        assert_allclose(ours.weights[:-1].T, theirs.coef_, atol=2e-4 * np.abs(theirs.coef_).max())
        likely = ours.scores(test.values).softmax(1)
        assert_allclose(likely, theirs.predict_proba(scaled(test.values, values)), atol=1e-4)
    plain = logistic(values, labels, 5, 1e-2)
    assert (plain.guesses(test.values) == 2).sum() < (ours.guesses(test.values) == 2).sum()


def test_the_objective_and_its_gradient_are_those_of_autograd() -> None:
    train = blobs(50)
    fitted = logistic(train.values, train.labels, 5, 0.1)
    x, y = torch.from_numpy(train.values), torch.from_numpy(train.labels)
    w = torch.randn(13, 5, dtype=torch.float64, requires_grad=True)
    z = torch.from_numpy(scaled(train.values, train.values)) @ w[:-1] + w[-1]
    f = torch.nn.functional.cross_entropy(z, y) + 0.1 / 2 * w[:-1].square().sum()
    f.backward()
    assert w.grad is not None
    for chunk in (7, 50, 4096):
        loss, gradient = objective(x, y, fitted.standardizer, w.detach(), 0.1, chunk)
        assert_allclose(loss / 50, f.detach(), rtol=1e-12)
        assert_allclose(gradient / 50, w.grad, rtol=1e-9, atol=1e-12)


def test_the_solution_is_the_minimum() -> None:
    """The problem is convex: any start ends at the same minimum, and every step from there increases the loss."""
    train = blobs(300)
    fresh = logistic(train.values, train.labels, 5, 1e-3)
    other = logistic(train.values, train.labels, 5, 1e-3, start=logistic(train.values, train.labels, 5, 1.0), chunk=31)
    assert_allclose(fresh.weights, other.weights, atol=2e-3)
    x, y = torch.from_numpy(train.values), torch.from_numpy(train.labels)
    least = objective(x, y, fresh.standardizer, fresh.weights, 1e-3, 4096)[0]
    for _ in range(20):
        step = 0.01 * torch.randn_like(fresh.weights)
        assert objective(x, y, fresh.standardizer, fresh.weights + step, 1e-3, 4096)[0] > least


def test_too_few_steps_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEPS", 10)
    train = blobs(300)
    short = logistic(train.values, train.labels, 5, 1e-4)
    assert short.steps <= 10
    assert not short.converged
    assert short.slope > module.TOLERANCE


def test_the_sweep_chooses_on_images_set_aside_and_refits_on_all() -> None:
    """By hand: fit each l2 to the rest, count hits on the images set aside, fit the best to everything."""
    train, test = blobs(200, spread=2.5), blobs(2000, seed=1, spread=2.5)
    seen, unseen = split_for_sweep(train, None)
    assert_array_equal(np.bincount(unseen.labels), [8] * 5)
    assert len(seen.labels) + len(unseen.labels) == 200
    rows = {row.tobytes() for row in seen.values} | {row.tobytes() for row in unseen.values}
    assert rows == {row.tobytes() for row in train.values}
    found = linear_probe(train, test, l2=[1e-4, 1e-2, 1.0])
    hits = {}
    for l2 in (1.0, 1e-2, 1e-4):
        by_hand = LogisticRegression(C=1 / (160 * l2), tol=1e-8, max_iter=5000)
        by_hand.fit(scaled(seen.values, seen.values), seen.labels)
        hits[l2] = int((by_hand.predict(scaled(unseen.values, seen.values)) == unseen.labels).sum())
    assert {tried.l2: tried.hits for tried in found.tried} == hits
    assert found.linear.l2 == max(hits, key=lambda l2: hits[l2])
    final = LogisticRegression(C=1 / (200 * found.linear.l2), tol=1e-8, max_iter=5000)
    final.fit(scaled(train.values, train.values), train.labels)
    right = final.predict(scaled(test.values, train.values)) == test.labels
    assert (found.hits, found.images) == (right.sum(), 2000)


def test_a_validation_split_is_used_and_one_l2_needs_none() -> None:
    train, test, validation = blobs(100), blobs(100, seed=1), blobs(70, seed=2)
    assert {tried.images for tried in linear_probe(train, test, validation, l2=[0.1, 1.0]).tried} == {70}
    single = linear_probe(train, test, l2=[0.1])
    assert single.tried == ()
    assert_array_equal(single.linear.weights, logistic(train.values, train.labels, 5, 0.1).weights)


def test_errors_of_the_linear_probe() -> None:
    lone = Features(np.eye(3, dtype=np.float32), np.arange(3))
    with pytest.raises(UserError, match="no class has two training images"):
        linear_probe(lone, lone)
    with pytest.raises(UserError, match="l2 must be positive"):
        linear_probe(lone, lone, l2=[0.0])


# ---- neighbors


def by_loop(train: Features, test: Features, k: int, temperature: float) -> list[int]:
    guesses = []
    for query in test.values.astype(np.float64):
        votes: dict[int, float] = {}
        cosines = [float(query @ row / np.linalg.norm(query) / np.linalg.norm(row)) for row in train.values]
        for i in sorted(range(len(cosines)), key=lambda i: -cosines[i])[:k]:
            votes[int(train.labels[i])] = votes.get(int(train.labels[i]), 0) + np.exp(cosines[i] / temperature)
        guesses.append(max(votes, key=lambda label: votes[label]))
    return guesses


def directions(n: int, seed: int) -> Features:
    """Overlapping classes seen from the origin, so that cosines separate them."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 6, n) * 3  # not dense
    x = np.random.default_rng(5).standard_normal((6, 8))[labels // 3] + rng.standard_normal((n, 8))
    return Features(x.astype(np.float32), labels)


def test_equals_a_plain_loop_and_scikit_learn() -> None:
    train, test = directions(150, 0), directions(80, 1)
    for temperature in (0.07, 1.0):
        found = list(knn(train, test, k=[1, 7, 150], temperature=temperature))
        assert [r.k for r in found] == [1, 7, 150]
        for r in found:
            assert r.hits == sum(np.array(by_loop(train, test, r.k, temperature)) == test.labels)
            theirs = KNeighborsClassifier(
                r.k, metric="cosine", weights=lambda distance, t=temperature: np.exp((1 - distance) / t)
            )
            theirs.fit(train.values.astype(np.float64), train.labels)
            assert r.hits == (theirs.predict(test.values.astype(np.float64)) == test.labels).sum()
    assert 20 < found[1].hits < 80


def test_blocks_and_chunks_change_nothing() -> None:
    train, test = directions(150, 0), directions(80, 1)
    cosines, index = nearest(train.values, test.values, 9)
    assert (cosines.diff(dim=1) <= 0).all()
    for block, chunk in ((4, 100), (150, 7), (149, 80), (20, 3)):  # also blocks with fewer images than neighbors
        some, places = nearest(train.values, test.values, 9, block=block, chunk=chunk)
        assert_allclose(some, cosines, atol=1e-6)
        assert_array_equal(places, index)


def test_a_small_temperature_does_not_overflow() -> None:
    train, test = directions(150, 0), directions(80, 1)
    (sharp,), (one,) = knn(train, test, k=[20], temperature=1e-6), knn(train, test, k=[1])
    assert sharp.hits == one.hits


@pytest.mark.parametrize(("k", "temperature"), [([0], 1.0), ([151], 1.0), ([5], 0.0)])
def test_errors_of_neighbors(k: list[int], temperature: float) -> None:
    with pytest.raises(UserError, match=r"k must be at least 1 and at most the 150|the temperature must be positive"):
        list(knn(directions(150, 0), directions(9, 1), k=k, temperature=temperature))


# ---- the commands

Command = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
def test_the_command_on_digits(model: Path, tmp_path: Path, command: Command) -> None:
    target = tmp_path / "probe.json"
    code, out, err = command("probe", str(model), "digits", "--l2", "1e-3,1e-2", "--k", "5,20", "--json", str(target))
    assert code == 0, err
    results = json.loads(target.read_text())
    data, net = open_data("digits"), vitlab.load(model)
    train, test = extract(net, data.train), extract(net, data.test)
    linear = linear_probe(train, test, l2=[1e-3, 1e-2])
    assert (results["linear"]["hits"], results["linear"]["images"]) == (linear.hits, 599)
    assert [r["hits"] for r in results["neighbors"]] == [r.hits for r in knn(train, test, k=[5, 20])]
    assert results["linear"]["converged"] is True
    assert results["linear"]["accuracy"] > 0.7
    assert f"{linear.accuracy:.2%}" in out
    assert f"note: the best l2, {linear.linear.l2:g}, is the last of the list" in out  # both ends of a list of two


def test_the_commands_defaults_are_the_functions() -> None:
    """They are written twice, so that --help does not import torch."""
    ours = {name: parameter.default for name, parameter in inspect.signature(probe).parameters.items()}
    assert tuple(map(float, ours["l2"].split(","))) == module.SWEEP
    assert tuple(map(int, ours["k"].split(","))) == NEIGHBORS
    assert ours["temperature"] == TEMPERATURE
    few = {name: parameter.default for name, parameter in inspect.signature(fewshot).parameters.items()}
    known = inspect.signature(few_shot).parameters
    assert tuple(map(int, few["shots"].split(","))) == known["shots"].default
    assert (parse_amount(few["l2"], "--l2"),) == known["l2"].default
    assert few["seeds"] == known["seeds"].default


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--k", "0"], "--k must be integers from 1 on"),
        (["--k", "1199"], "k must be at least 1 and at most the 1198 training images there are, not 1199"),
        (["--l2", "0"], "--l2 must be positive numbers"),
        (["--temperature", "0"], "the temperature must be positive, not 0"),
    ],
)
def test_bad_options_are_one_line(options: list[str], message: str, model: Path, command: Command) -> None:
    code, _, err = command("probe", str(model), "digits", *options)
    assert code == 1
    assert message in err
    assert err.count("\n") == 1
