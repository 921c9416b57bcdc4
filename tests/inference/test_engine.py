"""The engine gives the model's own values, whatever runs it."""

import copy
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import Randomize
from torch import Tensor

import vitlab
from vitlab.data.transforms import normalize
from vitlab.inference.engine import ANY, TOLERANCE, WAITS, Engine, buckets, divide
from vitlab.inference.graphs import working_copy
from vitlab.inference.payback import Payback
from vitlab.inference.processor import ROUNDS, Candidate, candidates, measure, onnx_runtime, onnx_runtime_apart
from vitlab.inference.values import ValuesOf
from vitlab.models.config import Preprocess
from vitlab.models.unknown import Unknown
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
        made = list(candidates(small, what, thorough=True))
        assert made[0].name == "ONNX Runtime"
        for way in made:
            assert engine.agrees(way.make(), images(4)), way.name


@pytest.mark.slow
def test_a_server_exports_in_another_process(small: Model) -> None:
    engine, stopped = Engine(small, "features", CPU), threading.Event()
    run = onnx_runtime_apart(small, "features", stopped)
    assert engine.agrees(run, images(3))
    stopped.set()
    with pytest.raises(RuntimeError, match="it was stopped"):
        onnx_runtime_apart(small, "features", stopped)


def test_what_differs_is_not_used(small: Model, caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(small, "features", CPU)
    x, largest = images(2), float(engine.plain(images(2)).abs().max())
    allowed = TOLERANCE[torch.float32] * largest
    assert engine.agrees(lambda x: engine.plain(x) + 0.9 * allowed, x)
    with caplog.at_level(logging.WARNING, "vitlab"):
        assert not engine.agrees(lambda x: engine.plain(x) + 1.1 * allowed, x)
        assert not engine.agrees(lambda x: engine.plain(x) * float("nan"), x)
    assert "is not used" in caplog.text


def test_small_values_are_compared_with_themselves(small: Model) -> None:
    """A share of the largest value, however small that is; and of the precision that computes."""
    x = images(2)
    with torch.no_grad():
        assert small.head is not None
        for p in small.head.parameters():
            p.mul_(1e-6)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        engine = Engine(small.to(dtype), "logits", CPU)
        off = 2 * TOLERANCE[dtype]
        assert engine.agrees(engine.plain, x)
        assert not engine.agrees(lambda x: engine.plain(x).double() * (1 + off), x)  # noqa: B023
    for p in small.head.parameters():
        p.data.zero_()
    assert engine.agrees(engine.plain, x)  # zeros are zeros


@pytest.fixture
def beside(small: Model, monkeypatch: pytest.MonkeyPatch) -> "Beside":
    return Beside(small, monkeypatch)


class Beside:
    """A model that is slow by itself, beside a fast way to the same values."""

    def __init__(self, model: Model, monkeypatch: pytest.MonkeyPatch, *, any_batch: bool = False) -> None:
        self.features, self.calls = model.features, list[int]()
        self.any_batch = any_batch
        monkeypatch.setattr(model, "features", self.slow)
        monkeypatch.setattr("vitlab.inference.processor.candidates", self.candidates)

    def candidates(self, model: Model, what: str, *, thorough: bool) -> Iterator[Candidate]:
        yield Candidate("fast", lambda: self.fast, self.any_batch)

    def fast(self, images: Tensor) -> Tensor:
        self.calls.append(len(images))
        return self.features(images)

    def slow(self, images: Tensor) -> Tensor:
        time.sleep(0.02)
        return self.features(images)


@pytest.mark.parametrize("any_batch", [False, True])
def test_the_fastest_is_used_for_its_batch_or_for_any(small: Model, beside: Beside, any_batch: bool) -> None:
    engine, x, beside.any_batch = Engine(small, "features", CPU), images(4), any_batch
    assert engine.prepare(4)
    assert engine.names == {ANY if any_batch else 4: "fast"}
    beside.calls.clear()
    with torch.no_grad():
        assert torch.equal(engine(x), beside.features(x))
        assert torch.equal(engine(x[:3]), beside.features(x[:3]))
    assert beside.calls == ([4, 3] if any_batch else [4])


@pytest.mark.parametrize("change", ["load", "resize"])
def test_a_changed_model_is_run_itself(change: str, small: Model, beside: Beside) -> None:
    engine = Engine(small, "features", CPU)
    assert engine.prepare(2)
    beside.calls.clear()
    engine(images(2))
    assert beside.calls == [2]
    if change == "load":
        small.load_state_dict({name: 2 * tensor for name, tensor in small.state_dict().items()})
    else:
        small.resize(16)
    size = 32 if change == "load" else 16
    assert torch.equal(engine(images(2)[..., :size, :size]), small.features(images(2)[..., :size, :size]))
    assert beside.calls == [2]


def test_a_thread_that_is_to_stop_ends_between_batches(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, made = Engine(small, "features", CPU), list[int]()
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    def make(batch: int, *, thorough: bool) -> None:
        made.append(batch)
        if batch == 4:
            try:
                raise torch.OutOfMemoryError("too large")
            finally:
                raise RuntimeError("capture failed")  # as a recording does
        engine.use(batch, "made", engine.plain)
        return

    def prepare_and_stop(batch: int) -> bool:
        engine.stop.set()
        return True

    monkeypatch.setattr(engine, "make", make)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    engine.compile_all([4, 8, 1, 2])  # 8 is not tried after 4; the first that fails otherwise is the last
    assert made == [4, 1]
    monkeypatch.setattr(engine, "prepare", prepare_and_stop)
    engine.compile_all([1, 2])
    assert engine.stop.is_set()
    assert made == [4, 1]


def test_what_cannot_be_made_leaves_the_plain_path(
    small: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object, **__: object) -> Any:
        raise RuntimeError("no compiler")

    found = iter([Candidate("broken", broken, any_batch=False)])
    monkeypatch.setattr("vitlab.inference.processor.candidates", lambda model, what, thorough: found)
    engine = Engine(small, "features", CPU)
    assert not engine.prepare(2)
    monkeypatch.setattr(engine, "make", broken)
    with caplog.at_level(logging.WARNING, "vitlab"):
        assert not engine.prepare(2)
    assert "runs eagerly" in caplog.text
    assert engine(images(2)).shape == (2, 32)


def test_measuring_takes_turns() -> None:
    order: list[str] = []
    seconds = measure({"a": lambda x: order.append("a") or x, "b": lambda x: order.append("b") or x}, images(1))  # type: ignore[func-returns-value]
    assert order == ["a", "b"] * ROUNDS
    assert set(seconds) == {"a", "b"}


@pytest.mark.parametrize(("total", "expected"), [(220, []), (221, [(8, False)]), (950, [(8, True)])])
def test_preparing_waits_for_a_job_that_is_long_enough(
    total: int, expected: list[tuple[int, bool]], small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five batches of 8 images, which take a second each, fewer than 180 more are not enough on a CPU."""
    prepared: list[tuple[int, bool]] = []
    monkeypatch.setattr(Engine, "prepare", lambda self, batch, thorough: prepared.append((batch, thorough)))
    payback = Payback(Engine(small, "logits", CPU), 8, total - 1)
    for seconds in (30.0, 8.0, 9.0, 8.0, 8.5, 8.0, 8.0):  # the first one is slow
        payback.count(8, seconds)
    assert prepared == expected


def test_a_job_that_slows_down_is_looked_at_again(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, in the background: by its fastest image, at every batch from the fifth on."""
    warmed: list[list[int]] = []
    monkeypatch.setattr(Engine, "warm_up", lambda self, batches: warmed.append(batches))
    engine = Engine(small, "logits", CPU)
    engine.device = torch.device("cuda", 0)
    payback = Payback(engine, 4, 100)
    for _ in range(4):
        payback.count(4, 4.0)
    assert warmed == []  # too early
    payback.count(4, 4.0)
    payback.count(4, 4.0)
    assert warmed == [[4]]


@pytest.mark.parametrize(
    ("most", "found"),
    [(1, [1]), (2, [1, 2]), (12, [1, 12, 2, 4, 8]), (256, [1, 256, 2, 4, 8, 16, 32, 64, 128])],
)
def test_buckets(most: int, found: list[int]) -> None:
    assert buckets(most) == found


@pytest.mark.parametrize(
    ("count", "ready", "parts"),
    [
        (5, [8, 1], [(8, 5)]),
        (5, [256, 1], []),  # 256 is much more work, and five by one are no faster than eager
        (5, [256, 4, 1], [(4, 4), (1, 1)]),
        (2, [16], []),  # mostly empty
        (3, [8], [(8, 3)]),  # which takes as long as one image
        (300, [1, 64, 256], [(256, 256), (64, 44)]),
        (4, [1, 256], [(1, 1)] * 4),
        (3, [], []),
        (0, [1, 2], []),
    ],
)
def test_a_batch_is_divided_over_what_is_ready(count: int, ready: list[int], parts: list[tuple[int, int]]) -> None:
    assert divide(count, ready) == parts


@pytest.mark.parametrize("name", ["Ti/8", "R50x1"])
def test_a_working_copy_is_near_mixed_precision(name: str, randomize: Randomize) -> None:
    """As near as the engine asks; the model itself stays as it is."""
    shape: dict[str, Any] = {"width": 32, "heads": 2, "mlp": 64, "depth": 2} if name == "Ti/8" else {"stages": (1,)}
    model = randomize(vitlab.create(name, image_size=32, classes=3, **shape)).eval()
    x, half = images(2), working_copy(model, half=True)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = model.features(x).float()
        assert (half.features(x) - expected).abs().max() < TOLERANCE[torch.bfloat16] * expected.abs().max()
    assert any(p.dtype == torch.bfloat16 for p in half.parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert not {id(p) for p in half.parameters()} & {id(p) for p in model.parameters()}


def test_a_quick_model_is_not_warmed_up_on_a_cpu(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "seconds", lambda self: WAITS / 2)  # as on a machine that does nothing else
    engine = Engine(small, "logits", CPU)
    engine.warm_up([1, 2])
    assert engine.warming is None
    engine.close()


def test_predictions_are_the_models(small: Model) -> None:
    """Through the classifier: probabilities of the model's own logits."""
    classifier = vitlab.Classifier(small, "cpu")
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        expected = small(pixels / 255 * 2 - 1)
    assert (classifier.logits(pixels) - expected).abs().max() < 1e-5


@pytest.fixture
def refusing(small: Model) -> Model:
    """It refuses, by classes around 0 and 1 in the space of its features."""
    means = torch.stack([torch.zeros(32), torch.ones(32)])
    rest = {"spread": torch.ones(32), "counts": torch.full((2,), 9.0), "held_out": torch.linspace(-9, 9, 99)}
    unknown = Unknown(torch.zeros(32), torch.eye(32), means=means, rate=0.05, **rest)
    small.card = dataclasses.replace(small.card, unknown=unknown)
    return small


def test_what_is_started_is_what_is_predicted(refusing: Model) -> None:
    """Several at once, with the channels of a pixel together, as decoders give them."""
    classifier, unknown = vitlab.Classifier(refusing, "cpu"), refusing.card.unknown
    pixels = torch.randint(0, 256, (5, 32, 32, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
    waiting = [classifier.start(list(part)) for part in pixels.split(2)]
    found = [one for wait in waiting for one in wait().each()]
    with torch.no_grad():
        features = refusing.features(pixels / 255 * 2 - 1)
        torch.testing.assert_close(torch.cat([one.probabilities for one in found]), refusing.head(features).softmax(1))  # type: ignore[misc]
    assert unknown is not None
    distances = torch.cat([one.distances for one in found if one.distances is not None])
    torch.testing.assert_close(distances, unknown.distances(features))


def test_bytes_are_normalized_as_everywhere(small: Model) -> None:
    """What is compiled does it by itself."""
    preprocess = Preprocess(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.25))
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        found = ValuesOf(small, "logits", preprocess)(pixels)
        torch.testing.assert_close(found, small(normalize(pixels, preprocess)))
        engine = Engine(small, "logits", CPU, preprocess=preprocess)
        assert torch.equal(engine(pixels), small(normalize(pixels, preprocess)))


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@on_gpu
def test_a_classifier_on_a_gpu_is_that_on_a_cpu(refusing: Model) -> None:
    """From bytes to probabilities and distances, in graphs, several under way at once and from two threads."""
    expected = vitlab.Classifier(copy.deepcopy(refusing), "cpu")
    classifier = vitlab.Classifier(refusing, "cuda")
    classifier.engine.warm_up([1, 4, 8])
    assert classifier.engine.warming is not None
    classifier.engine.warming.join()
    assert list(classifier.engine.fast) == [1, 4, 8]
    pixels = [torch.randint(0, 256, (32, 32, 3), dtype=torch.uint8).permute(2, 0, 1) for _ in range(64)]
    every = expected.scores(torch.stack(pixels)).distances
    assert every is not None
    largest = every.abs().max()  # single ones may be near zero

    def work(step: int) -> None:
        spans = [(first, min(64, first + step)) for first in range(0, 64, step)]
        waiting = [(a, b, classifier.start(pixels[a:b])) for a, b in spans]
        for a, b, wait in waiting:
            scores, own = wait(), expected.scores(torch.stack(pixels[a:b]))
            assert (scores.probabilities - own.probabilities).abs().max() < 0.05
            assert scores.distances is not None
            assert own.distances is not None
            assert (scores.distances - own.distances).abs().max() < 0.2 * largest

    with ThreadPoolExecutor(3) as threads:
        for done in [threads.submit(work, step) for step in (1, 3, 8, 20) * 3]:
            done.result(60)


@pytest.mark.gpu
@on_gpu
def test_a_graph_owns_its_workspace(small: Model) -> None:
    """Another graph is recorded, and all workspaces are freed and their memory overwritten: the first one stays."""
    device = torch.device("cuda", 0)
    engine = Engine(small.to(device), "features", device)
    assert engine.prepare(4)
    x = images(4).to(device)
    before = engine(x)
    other = torch.compile(torch.nn.Linear(64, 64).to(device), mode="reduce-overhead")
    with torch.inference_mode():
        for _ in range(4):
            other(torch.randn(8, 64, device=device))
    torch._C._cuda_clearCublasWorkspaces()
    filler = [torch.full((1 << 22,), float("nan"), device=device) for _ in range(64)]
    for _ in range(3):
        assert torch.equal(engine(x), before)
    assert all(bool(part.isnan().all()) for part in filler)


@pytest.mark.gpu
@on_gpu
def test_a_changed_model_is_run_itself_on_a_gpu(small: Model) -> None:
    device = torch.device("cuda", 0)
    engine = Engine(small.to(device), "features", device)
    assert engine.prepare(2)
    small.load_state_dict({name: 2 * tensor for name, tensor in small.state_dict().items()})
    x = images(2).to(device)
    assert torch.equal(engine(x), engine.plain(x))


@pytest.mark.gpu
@on_gpu
def test_graphs_on_a_gpu(small: Model) -> None:
    """Every batch up to the largest, filled up or not, and again after another; eager above it."""
    device = torch.device("cuda", 0)
    engine = Engine(small.to(device), "features", device)
    engine.warm_up([1, 4])
    assert engine.warming is not None
    engine.warming.join()
    assert list(engine.fast) == [1, 4]
    for number in (1, 3, 4, 2, 5, 1):  # 2 and 5 are divided
        x = images(number).to(device)
        expected = engine.plain(x).float()
        assert (engine(x).float() - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()


@pytest.mark.gpu
@on_gpu
def test_a_gpu_answers_while_it_compiles(small: Model) -> None:
    device = torch.device("cuda", 0)
    engine = Engine(small.to(device), "features", device)
    engine.warm_up([1, 2, 4])
    x = images(2).to(device)
    expected = engine.plain(x)
    while engine.warming is not None and engine.warming.is_alive():
        assert (engine(x) - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()
    assert len(engine.fast) == 3
