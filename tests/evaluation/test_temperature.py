"""Temperature scaling: the minimum of the log loss, by scipy; the right scale, where it is known; saved and applied."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Randomize
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax, softmax

import vitlab
from vitlab.data.source import ArraySource
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import evaluate, score
from vitlab.evaluation.scores import calibration
from vitlab.evaluation.temperature import fit_temperature
from vitlab.inference.onnx_file import metadata
from vitlab.models.config import Preprocess
from vitlab.prediction import Classifier

RNG = np.random.default_rng


def draw(n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Logits, and labels drawn from their softmax: perfectly calibrated."""
    rng = RNG(seed)
    logits = rng.normal(0, 2, (n, k))
    labels = (softmax(logits, 1).cumsum(1) > rng.random((n, 1))).argmax(1)
    return logits, labels


def test_of_labels_that_are_all_wrong_or_all_right_it_is_within_its_limits() -> None:
    """A model with such a temperature can be saved and loaded."""
    logits = np.eye(3)[[0, 1, 2] * 400] * 1e-6
    assert 1 / 100 <= fit_temperature(logits, np.array([0, 1, 2] * 400)).value < 1
    assert fit_temperature(1e9 * logits, np.array([1, 2, 0] * 400)).value == 100


@pytest.mark.parametrize(("n", "k"), [(7, 3), (200, 5), (1000, 37)])
def test_it_has_the_least_log_loss_by_scipy(n: int, k: int) -> None:
    logits, labels = draw(n, k)
    logits = 3 * logits.astype(np.float32)

    def loss(log_t: float) -> float:
        likely = log_softmax(logits.astype(np.float64) / np.exp(log_t), 1)
        one_more = likely.mean() / n  # one image more, of every class alike
        return -float(likely[np.arange(n), labels].mean() + one_more)

    best = minimize_scalar(loss, bounds=(-4, 4), method="bounded", options={"xatol": 1e-10})
    assert np.log(fit_temperature(logits, labels).value) == pytest.approx(best.x, abs=1e-6)


@pytest.mark.parametrize("scale", [0.2, 1.0, 8.0])
def test_it_finds_the_scale_of_logits_that_were_right(scale: float) -> None:
    logits, labels = draw(8000, 10)
    found = fit_temperature(scale * logits, labels)
    assert found.value == pytest.approx(scale, rel=0.03)
    assert found.before == pytest.approx(calibration(softmax(scale * logits, 1), labels).error)
    assert found.after < 0.015
    if scale != 1:
        assert found.before > 0.05


def test_ten_images_that_are_all_right_do_not_make_it_certain() -> None:
    labels = np.arange(10) % 5
    logits = 4 * np.eye(5)[labels]
    found = fit_temperature(logits, labels)
    # the closed form: softmax of (4 b, 0, 0, 0, 0) is 1 - e + e / 5 with e = 1 / 11
    p = 1 - 4 / 55
    assert found.value == pytest.approx(4 / np.log(4 * p / (1 - p)))
    assert softmax(logits / found.value, 1).max() == pytest.approx(p)
    never = fit_temperature(-40 * np.eye(5)[labels], labels)  # wrong in everything: no temperature helps
    assert never.value == pytest.approx(100)
    with pytest.raises(UserError, match="no images"):
        fit_temperature(np.zeros((0, 3)), np.zeros(0, np.int64))


def test_an_evaluation_shows_the_error_before_and_after() -> None:
    logits, labels = draw(2000, 6)
    logits = (5 * logits).astype(np.float32)
    names, files = tuple("abcdef"), ("",) * 2000
    plain, scaled = (score(logits, labels, names, "", files, temperature=t) for t in (1.0, 5.0))
    assert plain.error_before is None
    assert scaled.error_before == plain.calibration_error.value
    assert scaled.calibration_error.value == pytest.approx(calibration(softmax(logits / 5, 1), labels).error, abs=1e-4)
    assert scaled.calibration_error.value < 0.05 < plain.calibration_error.value
    assert scaled.top1 == plain.top1
    assert scaled.to_json()["calibration_error_before"] == plain.calibration_error.value


# ---- with a model


@pytest.fixture
def run(tmp_path: Path, randomize: Randomize) -> Path:
    model = randomize(vitlab.create("Ti/8", image_size=16, depth=1, width=32, mlp=64, heads=2, classes=5))
    model.card = replace(model.card, preprocess=Preprocess(crop=1.0), labels=tuple("abcde"), temperature=2.5)
    vitlab.save(model, tmp_path / "run")
    return tmp_path / "run"


def test_it_is_in_every_probability(run: Path) -> None:
    pixels = RNG(0).integers(0, 256, (20, 16, 16, 3), np.uint8)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
    logits = vitlab.load(run)(images / 127.5 - 1).detach().double().numpy()
    expected = softmax(logits / 2.5, 1)
    classifier = Classifier(run, "cpu")
    np.testing.assert_allclose(classifier.probabilities(images), expected, atol=1e-6)
    np.testing.assert_allclose(classifier.logits(images), logits, atol=1e-5)
    source = ArraySource("set", pixels, np.arange(20) % 5, tuple("abcde"))
    found = evaluate(vitlab.load(run), source, device="cpu", workers=0)
    assert found.temperature == 2.5
    np.testing.assert_allclose(found.confidence, expected.max(1), atol=1e-5)


def test_it_travels_with_the_weights(run: Path, tmp_path: Path) -> None:
    assert json.loads((run / "config.json").read_text())["temperature"] == 2.5
    assert json.loads(metadata(vitlab.load(run), False)["temperature"]) == 2.5
    files = {"again": "vitlab", "m.safetensors": "timm", "folder": "timm", "m.npz": "google", "hub": "huggingface"}
    for target, to in files.items():
        vitlab.convert(run, tmp_path / target, to, gelu="tanh" if to == "google" else "exact")
        assert vitlab.load(tmp_path / target).card.temperature == 2.5
    assert vitlab.load(run, classes=3).card.temperature == 1  # another head is not calibrated


@pytest.mark.parametrize("value", [0, -1, 1e9, "2", None, True, 10**400, [2]], ids=lambda value: str(value)[:9])
def test_a_file_with_another_temperature_is_one_error(run: Path, value: object) -> None:
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"temperature": value}))
    with pytest.raises(UserError, match="temperature") as caught:
        vitlab.load(run)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_a_temperature_out_of_range_is_not_saved(tmp_path: Path) -> None:
    model = vitlab.create("Ti/8", image_size=16, depth=1, width=32, mlp=64, heads=2, classes=5)
    model.card = replace(model.card, temperature=0.0)
    with pytest.raises(UserError, match="temperature must be"):
        vitlab.save(model, tmp_path / "run")
