"""The review of a data set: against plain loops, on Gaussians with wrong labels, and on photos with known copies."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose
from numpy.typing import NDArray
from PIL import Image
from scipy.special import log_softmax
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict

from vitlab.data.review_file import Finding
from vitlab.data.rng import Floats, Ints
from vitlab.data.source import ArraySource, Subset
from vitlab.evaluation import review as module
from vitlab.evaluation.extract import Features
from vitlab.evaluation.piece_cache import Values
from vitlab.evaluation.review import (
    COPY,
    LABEL,
    OUTLIER,
    TWO_LABELS,
    TWO_SPLITS,
    Part,
    class_cosines,
    doubt,
    make_part,
    review,
    review_test,
)

CLASSES = tuple("abcdefgh")


def gaussians(n: int = 400, seed: int = 0, apart: float = 1.2) -> tuple[Values, Ints]:
    rng = np.random.default_rng(seed)
    labels = np.arange(n) % 8
    centers = np.random.default_rng(9).standard_normal((8, 16))
    return (apart * centers[labels] + rng.standard_normal((n, 16)) + 1).astype(np.float32), labels


def held_out_logits(values: Values, labels: Ints) -> Values:
    model = LogisticRegression(C=0.1)
    found: Values = cross_val_predict(model, values, labels, cv=5, method="decision_function").astype(np.float32)
    return found


def noise(n: int, labels: Ints, seed: int = 0) -> ArraySource:
    """Pictures that have nothing in common."""
    pixels = np.random.default_rng(seed).integers(0, 256, (n, 6, 6, 3), dtype=np.uint8).repeat(4, 1).repeat(4, 2)
    return ArraySource(f"noise{seed}", pixels, labels, CLASSES)


def test_doubt_is_the_log_odds_of_the_best_other_class() -> None:
    logits = np.random.default_rng(0).standard_normal((30, 8)).astype(np.float32) * 3
    labels = np.arange(30) % 8
    found, guess = doubt(logits, labels)
    likely = log_softmax(logits.astype(np.float64), 1)
    for i, own in enumerate(labels):
        others = [k for k in range(8) if k != own]
        best = max(others, key=lambda k: likely[i, k])
        assert guess[i] == best
        assert_allclose(found[i], likely[i, best] - likely[i, own], atol=1e-6)


def test_wrong_labels_are_ranked_first() -> None:
    values, labels = gaussians()
    rng = np.random.default_rng(1)
    wrong = rng.choice(400, 20, replace=False)
    given = labels.copy()
    given[wrong] = (labels[wrong] + rng.integers(1, 8, 20)) % 8
    source = noise(400, given)
    found = review([Part("train", source, values, held_out_logits(values, given))], CLASSES)
    listed = [finding for finding in found if finding.problem == LABEL]
    assert len(listed) <= 40
    assert sorted((f.score for f in listed), reverse=True) == [f.score for f in listed]
    places = {source.name(i): i for i in range(400)}
    first = [places[f.path] for f in listed]
    assert len(set(first) & set(wrong.tolist())) >= 0.6 * 20
    right = [f.suggested == CLASSES[labels[i]] for f, i in zip(listed, first, strict=True) if i in wrong]
    assert np.mean(right) > 0.8
    assert all(f.label == CLASSES[given[i]] and f.decision == "" for f, i in zip(listed, first, strict=True))


def test_outliers_are_unlike_every_class() -> None:
    """They resemble each other, and have labels of their own."""
    values, labels = gaussians(apart=2.5)
    rng = np.random.default_rng(2)
    strange = (8 * rng.standard_normal(16) + 0.2 * rng.standard_normal((5, 16))).astype(np.float32)
    both, given = np.concatenate([values, strange]), np.concatenate([labels, np.arange(5)])
    found = review([Part("train", noise(405, given), both, None)], CLASSES)
    names = {f"noise0 {i}" for i in range(400, 405)}
    outliers = [finding.path for finding in found if finding.problem == OUTLIER]
    assert names <= set(outliers)
    assert len(outliers) < 20


def test_the_cosine_to_the_nearest_class_is_that_of_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    values, labels = gaussians(50)
    labels[labels == 7] = 0
    labels[7] = 7  # a class of one image
    monkeypatch.setattr(module, "CHUNK", 7)
    plain = values.astype(np.float64) - values.astype(np.float64).mean(0)
    for i, found in enumerate(class_cosines(values, labels, 8)):
        cosines = []
        for k in range(8):
            rows = plain[(labels == k) & (np.arange(50) != i)]
            if len(rows):
                mean = rows.mean(0)
                cosines.append(mean @ plain[i] / np.linalg.norm(mean) / np.linalg.norm(plain[i]))
        assert_allclose(found, max(cosines), atol=1e-5)


# ---- copies


def photos(count: int = 12) -> list[Image.Image]:
    """Pictures with the coarse and fine structure of photos, half of it shared by all."""
    rng = np.random.default_rng(3)

    def layer(side: int) -> NDArray[np.float64]:
        coarse = Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8))
        return np.asarray(coarse.resize((128, 96), Image.Resampling.BICUBIC)).astype(np.float64)

    shared = layer(5)
    pixels = [0.5 * shared + 0.3 * layer(6) + 0.2 * layer(20) for _ in range(count)]
    return [Image.fromarray(each.astype(np.uint8)) for each in pixels]


def as_jpeg(image: Image.Image, quality: int) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(file)


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "equal": lambda image: image,
    "recompressed": lambda image: as_jpeg(image, 40),
    "smaller": lambda image: image.resize((57, 43)),
    "cropped": lambda image: image.crop((3, 4, 124, 95)),
    "reflected": lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


class Pictures(ArraySource):
    """Images of any size."""

    def __init__(self, title: str, images: list[Image.Image], labels: list[int]) -> None:
        super().__init__(title, np.zeros((len(images), 1), np.uint8), np.array(labels), CLASSES)
        self.images = images

    def image(self, index: int, shrink: object = None) -> Image.Image:
        return self.images[index]


@pytest.mark.parametrize("change", CHANGES)
def test_copies_are_found_and_other_photos_are_not(change: str) -> None:
    """Features that propose every pair, so that the pictures themselves decide."""
    images = photos(7)
    copies = [CHANGES[change](images[i]) for i in (0, 1, 2)]
    train = Pictures("train", [*images, copies[0], copies[1]], [0] * 7 + [0, 1])
    test = Pictures("test", [copies[2], photos(8)[7]], [0, 0])
    values = (5 + 0.01 * np.random.default_rng(0).standard_normal((11, 8))).astype(np.float32)
    parts = [Part("train", train, values[:9], None), Part("test", test, values[9:], None)]
    images_ = module.Reviewed(parts, CLASSES)
    cosines, near = images_.neighbors(10)
    pairs = {(i, j) for i, j, _ in module.find_copies(images_, cosines, near)}
    assert pairs == {(0, 7), (1, 8), (2, 9)}
    found = [finding for pair in sorted(pairs) for finding in images_.copy_findings(*pair, 1.0)]
    assert found == [
        Finding("train 7", "train", "a", "", COPY, 1.0, "train 0"),
        Finding("train 1", "train", "a", "b", TWO_LABELS, 1.0, "train 8"),
        Finding("train 8", "train", "b", "a", TWO_LABELS, 1.0, "train 1"),
        Finding("train 2", "train", "a", "", TWO_SPLITS, 1.0, "test 0"),
    ]


def test_copies_of_test_images_are_found_in_other_splits_alone() -> None:
    images, near = photos(9), np.random.default_rng(0).standard_normal((10, 8)).astype(np.float32)
    near[4], near[7], near[8] = near[0], near[2], near[6]
    train = Part("train", Pictures("train", [*images[:4], images[0]], [0] * 5), near[:5], None)  # a copy of its own
    held = Part("validation", Pictures("held", images[4:6], [1, 1]), near[5:7], None)
    tests = Pictures("test", [CHANGES["smaller"](images[2]), images[5], images[8]], [0, 0, 0])
    found = review_test([train, held], Part("test", tests, near[7:], None), CLASSES)
    assert {(f.path, f.problem, f.other) for f in found} == {
        ("train 2", TWO_SPLITS, "test 0"),
        ("held 1", TWO_LABELS, "test 1"),
        ("test 1", TWO_LABELS, "held 1"),
    }


def test_neighbors_are_those_of_a_loop() -> None:
    values, labels = gaussians(40)
    values[5] = values[6] = values[7] = values[8]  # more equal ones than neighbors
    parts = [
        Part("train", noise(25, labels[:25]), values[:25], None),
        Part("test", noise(15, labels[25:], 1), values[25:], None),
    ]
    images = module.Reviewed(parts, CLASSES)
    cosines, near = images.neighbors(2)
    unit = values / np.linalg.norm(values, axis=1, keepdims=True)
    table: Floats = (unit @ unit.T).astype(np.float64)
    np.fill_diagonal(table, -2)
    assert_allclose(cosines, -np.sort(-table, 1)[:, :2], atol=1e-6)
    assert_allclose(table[np.arange(40)[:, None], near], cosines, atol=1e-6)
    assert images.name(30) == "noise1 5"


def test_a_part_has_the_images_that_could_be_read() -> None:
    values, labels = gaussians(6)
    part = make_part(
        "train", noise(6, labels), Features(values[[0, 2, 5]], labels[[0, 2, 5]], np.array([0, 2, 5])), None
    )
    assert [part.source.name(i) for i in range(3)] == ["noise0 0", "noise0 2", "noise0 5"]
    assert part.source.labels.tolist() == labels[[0, 2, 5]].tolist()


def test_very_few_images() -> None:
    for n in (1, 2, 3):
        values, labels = gaussians(n)
        assert review([Part("train", noise(n, labels), values, np.zeros((n, 8), np.float32))], CLASSES) == []


# ---- real photos

DATA = Path(__file__).parents[3] / "shared" / "data"
WEIGHTS = DATA.parent / "weights" / "vit_tiny_patch16_224.safetensors"


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "pets").exists() or not WEIGHTS.exists(), reason="needs the photos of pets and weights")
def test_wrong_labels_and_copies_of_real_photos() -> None:
    from vitlab.data.open import open_data
    from vitlab.evaluation.extract import extract
    from vitlab.weights import load

    train = open_data(str(DATA / "pets"), per_class=15).train
    chosen = Subset(train, np.flatnonzero(train.labels < 12))
    n, rng = len(chosen), np.random.default_rng(0)
    wrong = rng.choice(n, round(0.05 * n), replace=False)
    images = [chosen.image(i) for i in range(n)]
    labels = chosen.labels.copy()
    labels[wrong] = (labels[wrong] + rng.integers(1, 12, len(wrong))) % 12
    copies = {i: as_jpeg(images[i].crop((3, 2, images[i].width - 2, images[i].height - 3)), 70) for i in (3, 50, 99)}
    source = Pictures("pets", [*images, *copies.values()], [*labels.tolist(), *(int(labels[i]) for i in copies)])
    source.classes = chosen.classes[:12]
    values = extract(load(str(WEIGHTS)), source, device="cpu").values
    spread = (values - values.mean(0)) / values.std(0)
    found = review([Part("train", source, values, held_out_logits(spread, source.labels))], source.classes)
    first = {f.path for f in found if f.problem == LABEL}
    assert len(first) <= 0.1 * len(source) + 1
    assert len(first & {f"pets {i}" for i in wrong}) >= 0.6 * len(wrong)
    pairs = {(f.path, f.other) for f in found if f.problem == COPY}
    assert {(f"pets {n + place}", f"pets {i}") for place, i in enumerate(copies)} <= pairs
    assert len(pairs) <= len(copies) + 2  # the set has some copies of its own
