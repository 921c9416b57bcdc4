"""Few-shot: against numpy's solve and scikit-learn's Ridge on the same matrix, limits, chance, and errors."""

import json
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray
from PIL import Image
from sklearn.linear_model import Ridge as SklearnRidge

import vitlab
from vitlab.data.open import open_data
from vitlab.errors import UserError
from vitlab.evaluation.extract import Features, extract
from vitlab.evaluation.features import features_folder
from vitlab.evaluation.fewshot import Ridge, few_shot, fit, support

WIDE, TALL = (20, 50), (300, 50)
PENALTIES = (1e-3, 1.0, 1024.0, 1e6)


def random_set(n: int, width: int, classes: int = 4, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features with means and scales of their own, and labels of every class."""
    rng = np.random.default_rng(seed)
    features = rng.standard_normal((n, width)) * rng.uniform(0.01, 30, width) + rng.uniform(-50, 50, width)
    return features.astype(np.float32), rng.permutation(np.arange(n) % classes)


def augmented(features: NDArray[np.float32]) -> NDArray[np.float64]:
    """The matrix X of the module's docstring."""
    x = features.astype(np.float64)
    x = (x - x.mean(0)) / (x.std(0) + 1e-5)
    return np.concatenate([x, np.full((len(x), 1), 100.0)], 1)


def targets(labels: NDArray[np.int64], classes: int = 4) -> NDArray[np.float64]:
    return 2 * np.eye(classes)[labels] - 1


def close(found: NDArray[np.float64], true: NDArray[np.floating], tolerance: float = 1e-6) -> None:
    assert np.abs(found - true).max() <= tolerance * np.abs(true).max()


@pytest.mark.parametrize("shape", [WIDE, TALL, (50, 50), (51, 50), (3, 7)])
def test_equals_numpys_solve_and_scikit_learns_ridge(shape: tuple[int, int]) -> None:
    features, labels = random_set(*shape)
    ridge = fit(features, labels, 4)
    assert len(ridge.eigenvalues) == min(shape[0], shape[1] + 1)
    x, y = augmented(features), targets(labels)
    for l2 in PENALTIES:
        close(ridge.weights(l2), np.linalg.solve(x.T @ x + l2 * np.eye(shape[1] + 1), x.T @ y))
        theirs = SklearnRidge(alpha=l2, fit_intercept=False, solver="svd").fit(x, y)
        close(ridge.weights(l2), theirs.coef_.T)


@pytest.mark.parametrize("shape", [WIDE, TALL])
def test_as_l2_grows_l2_times_w_becomes_xty(shape: tuple[int, int]) -> None:
    features, labels = random_set(*shape)
    ridge = fit(features, labels, 4)
    x, y = augmented(features), targets(labels)
    errors = [np.abs(l2 * ridge.weights(l2) - x.T @ y).max() / np.abs(x.T @ y).max() for l2 in (1e8, 1e10, 1e12)]
    assert errors[0] > 10 * errors[1] > 100 * errors[2]
    assert errors[2] < 1e-5


@pytest.mark.parametrize("shape", [WIDE, TALL])
def test_chunks_change_nothing(shape: tuple[int, int]) -> None:
    features, labels = random_set(*shape)
    unchunked, chunked = fit(features, labels, 4), fit(features, labels, 4, chunk=7)
    test, _ = random_set(90, 50, seed=1)
    for l2 in PENALTIES:
        close(chunked.weights(l2), unchunked.weights(l2), 1e-9)
    assert_array_equal(chunked.guesses(test, PENALTIES, chunk=11), unchunked.guesses(test, PENALTIES))


def test_one_decomposition_serves_every_l2_and_the_test_is_scaled_by_the_support() -> None:
    train, labels = random_set(*TALL)
    test, truth = random_set(90, 50, seed=1)
    sets = Features(train, labels), Features(test, truth)
    together = list(few_shot(*sets, shots=[5, None], l2=PENALTIES, seeds=2))
    apart = [next(few_shot(*sets, shots=[shots], l2=[l2], seeds=2)) for shots in (5, None) for l2 in PENALTIES]
    assert together == apart
    mean, deviation = train.astype(np.float64).mean(0), train.astype(np.float64).std(0) + 1e-5
    x = np.concatenate([(test - mean) / deviation, np.full((90, 1), 100.0)], 1)
    own = augmented(train)
    w = np.linalg.solve(own.T @ own + 1024 * np.eye(51), own.T @ targets(labels))
    assert together[6].l2 == 1024
    assert together[6].hits == (int(((x @ w).argmax(1) == truth).sum()),)


def test_labels_without_meaning_give_chance() -> None:
    """Hits of a guess are binomial; five deviations are exceeded once in two million."""
    classes, images = 10, 4000
    train, labels = random_set(1000, 30, classes)
    test, truth = random_set(images, 30, classes, seed=1)
    chance, deviation = 1 / classes, math.sqrt(1 / classes * (1 - 1 / classes) / images)
    for result in few_shot(Features(train, labels), Features(test, truth), shots=[5, None], l2=[1, 1024], seeds=2):
        assert all(abs(accuracy - chance) < 5 * deviation for accuracy in result.accuracies)


def test_separate_classes_are_learned_and_permuted_labels_are_not() -> None:
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((5, 20)) * 4
    labels, truth = np.arange(500) % 5, np.arange(1000) % 5
    train = (centers[labels] + rng.standard_normal((500, 20))).astype(np.float32)
    test = (centers[truth] + rng.standard_normal((1000, 20))).astype(np.float32)
    (real,) = few_shot(Features(train, labels), Features(test, truth), shots=[10])
    (fake,) = few_shot(Features(train, rng.permutation(labels)), Features(test, rng.permutation(truth)), shots=[10])
    assert real.mean > 0.97
    assert abs(fake.mean - 0.2) < 5 * math.sqrt(0.2 * 0.8 / 1000)
    assert real.std == pytest.approx(np.std(real.accuracies, ddof=1))


def test_a_constant_feature_is_harmless() -> None:
    features, labels = random_set(*TALL)
    flat = np.concatenate([features, np.full((300, 1), 7, np.float32)], 1)
    assert_allclose(fit(flat, labels, 4).weights(1024)[:50], fit(features, labels, 4).weights(1024)[:50], atol=1e-12)


# ---- the draw


def test_the_support_is_balanced_nested_and_seeded() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(6), 40))
    five, ten = support(labels, 5, 0), support(labels, 10, 0)
    assert_array_equal(np.bincount(labels[five]), [5] * 6)
    assert set(five) < set(ten)
    assert_array_equal(five, support(labels, 5, 0))
    assert set(five) != set(support(labels, 5, 1))


def test_the_draw_of_a_class_depends_on_no_other_class() -> None:
    labels = np.repeat(np.arange(3), 20)
    alone = support(labels[20:], 4, 7) + 20
    assert_array_equal(alone, [i for i in support(labels, 4, 7) if i >= 20])


def test_every_image_is_drawn_equally_often() -> None:
    labels = np.repeat([0, 1], 10)
    drawn = np.bincount(np.concatenate([support(labels, 3, seed) for seed in range(2000)]), minlength=20)
    assert np.abs(drawn - 600).max() < 5 * math.sqrt(2000 * 0.3 * 0.7)


# ---- errors and notes


def test_classes_that_do_not_match() -> None:
    features, labels = random_set(40, 6)
    names = ("ant", "bee", "cat", "dog")
    everything = Features(features, labels)
    few = Features(features[labels != 1], labels[labels != 1])
    with pytest.raises(UserError, match=r"test images have class 'bee', which no training image has"):
        list(few_shot(few, everything, shots=[1], classes=names))
    with pytest.raises(
        UserError, match=r"class 'ant' has 10 of the 11 training images that 11 shots need; .* at most 10"
    ):
        list(few_shot(everything, everything, shots=[1, 11], classes=names))
    (result,) = few_shot(everything, few, shots=[None], classes=names)
    assert result.images == 30
    ridge = fit(features, labels, 4)
    assert result.hits[0] == (ridge.guesses(few.values, [1024.0])[0] == few.labels).sum()


def test_labels_need_not_be_dense() -> None:
    features, labels = random_set(60, 6)
    apart = np.array([3, 7, 20, 21])
    dense, sparse = Features(features, labels), Features(features, apart[labels])
    (a,), (b,) = few_shot(dense, dense, shots=[None]), few_shot(sparse, sparse, shots=[None])
    assert a == b


@pytest.mark.parametrize(("l2", "seeds"), [((0.0,), 1), ((-1.0,), 1), ((1.0,), 0)])
def test_settings_must_be_positive(l2: tuple[float, ...], seeds: int) -> None:
    everything = Features(*random_set(40, 6))
    with pytest.raises(UserError, match="must be positive"):
        list(few_shot(everything, everything, shots=[1], l2=l2, seeds=seeds))


def test_memory_stays_within_the_documented_bound(tmp_path: Path) -> None:
    """The features on disk, 20 MB; beside them no more than the docstring states."""
    n, width, classes, chunk = 80_000, 64, 10, 1000
    features = np.memmap(tmp_path / "features", np.float32, "w+", shape=(n, width))
    features[:] = np.random.default_rng(0).standard_normal((n, width), np.float32)
    labels = np.arange(n) % classes
    tracemalloc.start()
    ridge: Ridge = fit(features, labels, classes, chunk=chunk)
    ridge.guesses(features, [1024.0], chunk=chunk)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stated = 6 * (width + 1) ** 2 + 4 * (width + 1) * classes + chunk * (3 * width + classes + 3) + 10 * n
    assert peak < 8 * stated
    assert 8 * stated < features.nbytes


# ---- the command


Command = Callable[..., tuple[int, str, str]]


def test_the_command_on_digits(model: Path, tmp_path: Path, command: Command, caplog: pytest.LogCaptureFixture) -> None:
    target = tmp_path / "fewshot.json"
    options = ["--shots", "1,5,all", "--l2", "1,2^10", "--json", str(target)]
    code, out, err = command("fewshot", str(model), "digits", *options)
    assert code == 0, err
    results = json.loads(target.read_text())
    assert results["images"] == {"train": 1198, "test": 599}
    assert [(r["shots"], r["l2"]) for r in results["results"]] == [(s, p) for s in (1, 5, "all") for p in (1, 1024)]
    assert [len(r["hits"]) for r in results["results"]] == [3, 3, 3, 3, 1, 1]
    data, net = open_data("digits"), vitlab.load(model)
    train, test = extract(net, data.train), extract(net, data.test)
    for result, known in zip(few_shot(train, test, shots=[1, 5, None], l2=[1, 1024]), results["results"], strict=True):
        assert list(result.hits) == known["hits"]
        assert f"{result.mean:.2%}" + ("" if result.std is None else f" ± {result.std:.2%}") in out
    assert results["results"][-1]["accuracy"] > 0.5  # the features of an untrained model separate digits
    kept = features_folder(str(model))
    assert kept is not None
    assert f"features are kept in {kept}" in out
    assert not (model / "features").exists()
    assert len(list(kept.glob("*.safetensors"))) == 5 + 3
    caplog.set_level(logging.DEBUG, "vitlab")
    code, out, err = command("fewshot", str(model), "digits", "--shots", "5", "--seeds", "1")
    assert (code, "one draw" in out) == (0, True)
    assert f"train features: 1198 of 1198 images are in {kept} already" in caplog.text


@pytest.mark.parametrize("verb", ["fewshot --shots 1", pytest.param("probe --l2 1 --k 1", marks=pytest.mark.slow)])
def test_the_models_folder_is_only_read(
    verb: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    name, *options = verb.split()
    before = {path: path.stat().st_mtime_ns for path in (model, *model.iterdir())}
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    code, out, err = command(name, str(model / "model.safetensors"), "digits", *options)
    assert code == 0, err
    assert len(list((tmp_path / "cache" / "features").glob("model.safetensors-*/*.safetensors"))) == 5 + 3
    command(name, str(model), "digits", *options, "--keep", str(tmp_path / "kept"))
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 5 + 3
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "file" / "cache"))  # nothing can be kept: it works all the same
    code, out, err = command(name, str(model), "digits", *options)
    assert code == 0, err
    assert "features are not kept (--keep FOLDER keeps them)" in out
    assert {path: path.stat().st_mtime_ns for path in (model, *model.iterdir())} == before


def test_the_folder_for_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VITLAB_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name in ("a/run", "b/run"):
        (tmp_path / name).mkdir(parents=True)
    folders = {features_folder(name) for name in ("a/run", "./a/run/", str(tmp_path / "a" / "run"))}
    folders |= {features_folder("b/run"), features_folder("google/vit-base-patch16-224")}
    names = sorted(folder.name.rpartition("-")[0] for folder in folders if folder is not None)
    assert names == ["run", "run", "vit-base-patch16-224"]
    assert {folder.parent for folder in folders if folder is not None} == {tmp_path / "cache" / "vitlab" / "features"}


def test_resized_images(model: Path, tmp_path: Path, command: Command) -> None:
    rng = np.random.default_rng(0)
    for split, label in ((split, label) for split in ("train", "test") for label in "ab"):
        (tmp_path / split / label).mkdir(parents=True)
        for i in range(8):
            pixels = rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / split / label / f"{i}.png")
    target = tmp_path / "x.json"
    options = ["--shots", "all", "--resize", "32", "--json", str(target), "--device", "cpu"]
    code, _, err = command("fewshot", str(model), str(tmp_path), *options)
    assert code == 0, err
    results, data, net = json.loads(target.read_text()), open_data(str(tmp_path)), vitlab.load(model)
    train, test = (extract(net, source, resize=32, device="cpu") for source in (data.train, data.test))
    expected = next(iter(few_shot(train, test, shots=[None])))
    assert (results["resize"], results["results"][0]["hits"]) == (32, list(expected.hits))
    code, _, err = command("fewshot", str(model), str(tmp_path), "--shots", "all", "--resize", "4")
    assert (code, "at least the model's size" in err) == (1, True)


def test_a_class_without_test_images_is_noted(model: Path, tmp_path: Path, command: Command) -> None:
    for split, labels in (("train", "abc"), ("test", "ab")):
        for label in labels:
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(3):
                image = Image.new("RGB", (8, 8), (80 * (ord(label) - 97), 5 * i, 9))
                image.save(tmp_path / split / label / f"{i}.png")
    target = tmp_path / "x.json"
    code, out, err = command("fewshot", str(model), str(tmp_path), "--shots", "3", "--json", str(target))
    assert code == 0, err
    assert "note: no test image is of class 'c'; accuracy is over the 6 images there are" in out
    assert json.loads(target.read_text())["results"][0]["images"] == 6
    shutil.rmtree(tmp_path / "train" / "b")
    code, out, err = command("fewshot", str(model), str(tmp_path), "--shots", "3")
    assert (code, out) == (1, "")
    assert "the test images have class 'b', which no training image has" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shots", "1,,5"], "--shots must be a list such as 1,5,10, not '1,,5'"),
        (["--shots", "0"], "--shots must be integers from 1 on"),
        (["--shots", "few"], "--shots must be integers from 1 on"),
        (["--l2", "2^x"], "--l2 must be positive numbers such as 1024, 2^10 or 1e-3, not '2^x'"),
        (["--l2", "-1"], "--l2 must be positive numbers"),
        (["--shots", "500"], "of the 500 training images that 500 shots need"),
        (["--json", "no/such/folder.json"], "--json no/such/folder.json cannot be written"),
        (["--device", "abacus"], "there is no device 'abacus'"),
    ],
)
def test_bad_options_are_one_line(options: list[str], message: str, model: Path, command: Command) -> None:
    code, _, err = command("fewshot", str(model), "digits", *options)
    assert code == 1
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_ctrl_c_prints_how_to_resume(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    vitlab.save(vitlab.create("Ti/4", image_size=32, classes=0), folder)
    words = [str(Path(sys.executable).with_name("vitlab")), "fewshot", str(folder), "digits"]
    accept = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=accept)
    deadline = time.monotonic() + 60
    kept = features_folder(str(folder))
    assert kept is not None
    while not list(kept.glob("*.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == f"stopped; the same command continues from {kept}"
    assert "Traceback" not in errors
