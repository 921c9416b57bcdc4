"""The engine gives the model's own values, whatever runs it."""

import logging
import time

import pytest
import torch
from conftest import Randomize
from torch import Tensor

import vitlab
from vitlab.inference.engine import TOLERANCE, Engine, Payback, buckets
from vitlab.inference.graphs import halved
from vitlab.inference.processor import candidates, measure, onnx_runtime
from vitlab.models.variants import Model

CPU = torch.device("cpu")


@pytest.fixture
def small(randomize: Randomize) -> Model:
    return randomize(vitlab.create("Ti/8", image_size=32, depth=2, width=32, heads=2, mlp=64, classes=3)).eval()


def images(number: int) -> Tensor:
    return torch.randn(number, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def test_the_plain_path_is_the_model(small: Model) -> None:
    x = images(3)
    with torch.no_grad():
        assert torch.equal(Engine(small, "features", CPU)(x), small.features(x))
        assert torch.equal(Engine(small, "logits", CPU)(x), small(x))
        small.double()
        assert torch.equal(Engine(small, "logits", CPU)(x), small(x.double()))


@pytest.mark.slow  # an export takes seconds
def test_onnx_runtime_gives_the_same(small: Model) -> None:
    engine = Engine(small, "features", CPU)
    run = onnx_runtime(small, "features")
    for number in (1, 5):  # any batch
        assert run(images(number)).shape == (number, 32)
        assert engine.agrees(run, images(number))
        assert (run(images(number)) - engine.plain(images(number))).abs().max() < 1e-5


@pytest.mark.slow
def test_everything_that_this_machine_has_gives_the_same(small: Model) -> None:
    for what in ("features", "logits"):
        engine = Engine(small, what, CPU)
        made = dict(candidates(small, what))
        assert "ONNX Runtime" in made
        for name, make in made.items():
            assert engine.agrees(make(), images(4)), name


def test_what_differs_is_not_used(small: Model, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(small, "features", CPU)
    x, largest = images(2), float(engine.plain(images(2)).abs().max())
    allowed = TOLERANCE[torch.float32] * max(1, largest)
    assert engine.agrees(lambda x: engine.plain(x) + 0.9 * allowed, x)
    with caplog.at_level(logging.WARNING, "vitlab"):
        assert not engine.agrees(lambda x: engine.plain(x) + 1.1 * allowed, x)
        assert not engine.agrees(lambda x: engine.plain(x) * float("nan"), x)
    assert "is not used" in caplog.text


def test_the_fastest_is_used_for_its_batch_alone(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is slow by itself, beside a fast way to the same values."""
    engine, features, x = Engine(small, "features", CPU), small.features, images(4)
    calls: list[int] = []

    def fast(images: Tensor) -> Tensor:
        calls.append(len(images))
        return features(images)

    def slow(images: Tensor) -> Tensor:
        time.sleep(0.05)
        return features(images)

    monkeypatch.setattr(small, "features", slow)
    monkeypatch.setattr("vitlab.inference.processor.candidates", lambda model, what: [("fast", lambda: fast)])
    assert engine.prepare(4)
    assert engine.names == {4: "fast"}
    calls.clear()
    with torch.no_grad():
        assert torch.equal(engine(x), features(x))
        assert torch.equal(engine(x[:3]), features(x[:3]))
    assert calls == [4]


def test_what_cannot_be_made_leaves_the_plain_path(
    small: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("vitlab.inference.processor.candidates", lambda model, what: [("broken", broken)])
    engine = Engine(small, "features", CPU)
    assert not engine.prepare(2)
    monkeypatch.setattr(engine, "make", lambda batch: broken())
    with caplog.at_level(logging.WARNING, "vitlab"):
        assert not engine.prepare(2)
    assert "runs eagerly" in caplog.text
    assert engine(images(2)).shape == (2, 32)


def test_measuring_takes_turns() -> None:
    order: list[str] = []
    seconds = measure({"a": lambda x: order.append("a") or x, "b": lambda x: order.append("b") or x}, images(1))  # type: ignore[func-returns-value]
    assert order == ["a", "b"] * 5
    assert set(seconds) == {"a", "b"}


@pytest.mark.parametrize(("total", "expected"), [(940, []), (941, [8])])
def test_preparing_waits_for_a_job_that_is_long_enough(
    total: int, expected: list[int], small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five batches of 8 images, which take a second each, 900 more are not enough on a CPU."""
    prepared: list[int] = []
    monkeypatch.setattr(Engine, "prepare", lambda self, batch: prepared.append(batch))
    payback = Payback(Engine(small, "logits", CPU), 8, total)
    for seconds in (30.0, 8.0, 9.0, 8.0, 8.5, 8.0, 8.0):  # the first one is slow
        payback.count(8, seconds)
    assert prepared == expected


@pytest.mark.parametrize(
    ("most", "found"),
    [(1, [1]), (2, [1, 2]), (16, [1, 16, 2, 4, 8]), (12, [1, 12, 2, 4, 8]), (256, [1, 256, 4, 16, 64])],
)
def test_buckets(most: int, found: list[int]) -> None:
    assert buckets(most) == found


def test_halved_layers_are_what_mixed_precision_casts(small: Model) -> None:
    x, half = images(2), halved(small)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(half.features(x), small.features(x))
    assert half.embed.weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    assert next(small.parameters()).dtype == torch.float32


def test_a_cpu_is_not_warmed_up(small: Model) -> None:
    engine = Engine(small, "logits", CPU)
    engine.warm_up([1, 2])
    assert engine.warming is None


def test_predictions_are_the_models(small: Model) -> None:
    """Through the classifier: probabilities of the model's own logits."""
    classifier = vitlab.Classifier(small, "cpu")
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        expected = small(pixels / 255 * 2 - 1)
    assert (classifier.logits(pixels) - expected).abs().max() < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graphs_on_a_gpu(small: Model) -> None:
    """Every batch up to the largest, filled up or not, and again after another; eager above it."""
    device = torch.device("cuda", 0)
    engine = Engine(small.to(device), "features", device)
    engine.warm_up([1, 4])
    assert engine.warming is not None
    engine.warming.join()
    assert list(engine.fast) == [1, 4]
    for number in (1, 3, 4, 2, 5, 1):
        x = images(number).to(device)
        expected = engine.plain(x).float()
        assert (engine(x).float() - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
    assert engine.find(5) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_answers_while_it_compiles(small: Model) -> None:
    device = torch.device("cuda", 0)
    engine = Engine(small.to(device), "features", device)
    engine.warm_up([1, 2, 4])
    x = images(2).to(device)
    expected = engine.plain(x)
    while engine.warming is not None and engine.warming.is_alive():
        assert (engine(x) - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
    assert len(engine.fast) == 3
