"""Close calls of a model in 8 bits are computed again in 16: which ones, and what it brings."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import Randomize
from torch import Tensor

import vitlab
from vitlab.inference.calibration import LEAST, agreement, calibrate, largest_inputs, logits_of
from vitlab.inference.engine import TOLERANCE, Engine
from vitlab.inference.scales import Scales, weights_key
from vitlab.kernels.fp8 import E4M3, has_float8
from vitlab.models.variants import Model
from vitlab.prediction.classifier import Classifier

CPU = torch.device("cpu")


@pytest.fixture
def small(randomize: Randomize) -> Model:
    return randomize(vitlab.create("Ti/8", image_size=32, depth=2, width=32, heads=2, mlp=64, classes=5)).eval()


def scales_of(model: Model) -> Scales:
    """All layers, and nothing is looked at again."""
    maxima = largest_inputs(model, torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8), CPU)
    return Scales(weights_key(model), maxima, 1.0, 8, True, 5, 1.0, closer=0.0, again=0.0, rest="bfloat16")


def apart(logits: Tensor) -> np.ndarray:
    """How far the best of each row is above the next, by numpy."""
    ordered = np.sort(logits.double().numpy(), axis=1)
    return np.asarray(ordered[:, -1] - ordered[:, -2])


def test_close_calls_are_in_16_bits(small: Model) -> None:
    """As those in which nothing is in 8 bits; the other images, and models without close calls, stay as they are."""
    x, scales = torch.randn(40, 3, 32, 32), scales_of(small)
    quick, none = (Engine(small, "logits", CPU, scales=one)(x) for one in (scales, replace(scales, maxima={})))
    limit = float(np.median(apart(quick)))
    close, far = np.flatnonzero(apart(quick) < limit), np.flatnonzero(apart(quick) >= limit)
    looked = Engine(small, "logits", CPU, scales=replace(scales, closer=limit))(x)
    torch.testing.assert_close(looked[close], none[close], rtol=0.02, atol=0.02)  # another batch rounds differently
    assert torch.equal(looked[far], quick[far])
    assert not torch.allclose(quick[close], none[close], rtol=0.02, atol=0.02)
    assert torch.equal(Engine(small, "logits", CPU, scales=replace(scales, closer=1e-9))(x), quick)
    all_of_them = Engine(small, "logits", CPU, scales=replace(scales, closer=1e9))(x)
    torch.testing.assert_close(all_of_them, none, rtol=0.02, atol=0.02)


def test_an_answer_does_not_depend_on_the_batch(small: Model) -> None:
    x, scales = torch.randn(40, 3, 32, 32), scales_of(small)
    limit = float(np.median(apart(Engine(small, "logits", CPU, scales=scales)(x))))
    engine = Engine(small, "logits", CPU, scales=replace(scales, closer=limit))
    one_by_one = torch.cat([engine(image) for image in x.split(1)])
    torch.testing.assert_close(one_by_one, engine(x), rtol=0.02, atol=0.02)


def test_features_and_predictions_are_of_the_same_images(small: Model) -> None:
    """Where the values are features, where logits and distances follow, and from bytes in the host's memory."""
    x, scales = torch.randn(30, 3, 32, 32), scales_of(small)
    scales = replace(scales, closer=float(np.median(apart(Engine(small, "logits", CPU, scales=scales)(x)))))
    features, logits = (Engine(small, what, CPU, scales=scales)(x) for what in ("features", "logits"))
    exact = features.double() @ small.head.weight.double().t() + small.head.bias.double()  # type: ignore[union-attr]
    torch.testing.assert_close(logits.double(), exact, rtol=1e-5, atol=1e-5)
    pixels = torch.randint(0, 256, (30, 3, 32, 32), dtype=torch.uint8)
    quick = Engine(small, "logits", CPU, preprocess=small.card.preprocess, scales=replace(scales, closer=0.0))(pixels)
    classifier = Classifier(small, "cpu", scales=replace(scales, closer=float(np.median(apart(quick)))))
    logits = classifier.logits(pixels)
    assert 10 < int((logits == quick).all(1).sum()) < 20
    torch.testing.assert_close(classifier.start(list(pixels))().probabilities, logits.softmax(1))


def test_graphs_for_close_calls(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for a few, one for as many as are usual; small batches have no large ones."""
    engine = Engine(small, "logits", CPU, scales=replace(scales_of(small), closer=1.0, again=0.13))
    assert engine.exact is not None
    made: list[tuple[Engine, int]] = []

    def make(self: Engine, batch: int, *, thorough: bool) -> tuple[int, str, Callable[[Tensor], Tensor]]:
        made.append((self, batch))
        return batch, "made", self.plain

    monkeypatch.setattr(Engine, "make", make)
    for batch in (256, 1, 4, 64):
        assert engine.prepare(batch)
    assert [batch for one, batch in made if one is engine] == [256, 1, 4, 64]
    assert [batch for one, batch in made if one is engine.exact] == [1, 8, 40, 16]
    assert engine.exact.stop is engine.stop
    assert not Engine(small, "logits", CPU, scales=scales_of(small)).second_sizes(256)
    engine.scales = replace(scales_of(small), closer=1.0, again=0.0)  # a file may hold anything
    assert engine.second_sizes(256) == [1, 8]


@pytest.mark.parametrize("closest", [0, 5, 16, 23])
def test_as_many_as_are_usual_are_computed_before_they_are_counted(small: Model, closest: int) -> None:
    """However many there are, close calls are computed again, and others stay as they are, to the bit."""
    x, scales = torch.randn(40, 3, 32, 32), scales_of(small)
    quick = Engine(small, "logits", CPU, scales=scales)(x)
    distances = np.sort(apart(quick))
    scales = replace(scales, closer=float(distances[closest - 1 : closest + 1].mean()) if closest else 1e-9, again=0.4)
    engine = Engine(small, "logits", CPU, scales=scales)
    assert engine.exact is not None
    sizes: list[int] = []

    def graph(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return exact(images)

    exact, engine.exact.fast = engine.exact.plain, {16: graph}
    found, close = engine(x), apart(quick) < scales.closer
    assert sizes == [16]
    assert int(close.sum()) == closest
    expected = Engine(small, "logits", CPU, scales=replace(scales, again=0.0))(x)
    torch.testing.assert_close(found[close], expected[close], rtol=0.02, atol=0.02)
    assert torch.equal(found[~close], quick[~close])
    assert not closest or not torch.allclose(found[close], quick[close], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_second_look_keeps_the_classes_that_8_bits_change() -> None:
    """Digits on a model that hardly tells them apart: 8 bits change more than one in a hundred, and it is kept."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.tensor(found.images / 16 * 255).round().to(torch.uint8)[:, None].expand(-1, 3, -1, -1).contiguous()
    model = train(pixels[:700], torch.tensor(found.target)[:700], range(40))
    scales = calibrate(model, pixels[700:828], pixels[828:1300], CPU, separate=True)
    assert scales.agreement >= LEAST
    assert len(scales.maxima) > 3
    assert "of the images, the closest calls, once more in 16 bits; the best class is float32's on" in scales.describe()
    unseen = pixels[1300:]
    exact = logits_of(model, unseen, CPU)
    looked, quick = (agreement(exact, logits_of(model, unseen, CPU, s)) for s in (scales, replace(scales, closer=0.0)))
    assert quick < looked
    assert looked > 0.98  # 497 images


def train(pixels: Tensor, labels: Tensor, steps: Sequence[int]) -> Model:
    model = vitlab.create("Ti/8", image_size=8, patch=2, depth=2, width=48, heads=3, mlp=96, classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in steps:
        rows = (torch.arange(64) * 7 + 64 * step) % len(pixels)
        loss = torch.nn.functional.cross_entropy(model(pixels[rows] / 255 * 2 - 1), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_second_look_on_a_gpu(small: Model) -> None:
    """Graphs of full batches and of those that are filled up, from the device and from the host, give eager values."""
    device = torch.device("cuda", 0)
    if not has_float8(device):
        pytest.skip("needs a GPU with products in 8 bits")
    scales = scales_of(small)
    pixels = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    small, before = small.to(device), small.card.preprocess
    quick = Engine(small, "logits", device, preprocess=before, scales=scales)(pixels.to(device)).cpu()
    scales = replace(scales, closer=float(np.quantile(apart(quick), 0.2)), again=0.2)
    plain, engine = (Engine(small, "logits", device, preprocess=before, scales=scales) for _ in range(2))
    assert engine.prepare(64)
    assert engine.exact is not None
    assert list(engine.exact.fast) == [1, 8, 16]
    for count in (64, 40):
        expected = plain(pixels[:count].to(device)).cpu()
        for found in (engine(pixels[:count].to(device)).cpu(), engine.start(list(pixels[:count]))()):
            assert (found - expected).abs().max() < TOLERANCE[E4M3] * expected.abs().max()
