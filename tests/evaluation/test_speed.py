"""How fast a model is: what the clock sees, and which batch is chosen."""

import time
from collections.abc import Callable

import pytest
import torch

import vitlab
from vitlab.errors import UserError
from vitlab.evaluation import speed
from vitlab.evaluation.speed import QUICK, call_seconds, peak_speed
from vitlab.models.variants import Model

CPU = torch.device("cpu")


def small() -> Model:
    return vitlab.create("Ti/16", image_size=32, depth=1, width=24, mlp=48, heads=2, classes=3)


def test_the_median_call_is_timed() -> None:
    """A slow call among the others does not count, nor do those that warm up."""
    calls: list[float] = []

    def call() -> None:
        calls.append(0.2 if len(calls) in (0, 4) else 0.005)
        time.sleep(calls[-1])

    found = call_seconds(call, CPU, seconds=0.25)
    assert 0.005 <= found < 0.1


def fake_times(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> list[int]:
    """A clock that a batch decides; returns the batches that are tried."""
    tried: list[int] = []
    monkeypatch.setattr(speed, "make_call", lambda model, device, batch: batch)

    def timed(batch: int, device: torch.device, _: float) -> float:
        tried.append(batch)
        return seconds(batch)

    monkeypatch.setattr(speed, "call_seconds", timed)
    return tried


def test_the_fastest_batch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes 8 ms and 1 ms an image up to 16 of them, then 4 ms an image."""
    tried = fake_times(monkeypatch, lambda n: 0.008 + 0.001 * n if n <= 16 else 0.004 * n)
    found, batch = peak_speed(small(), CPU)
    assert batch == 16
    assert found == pytest.approx(16 / 0.024)
    assert tried == [1, 2, 4, 8, 16, 32, 16]  # up to the largest of a CPU; the fastest again, for longer


def test_one_size_that_is_timed_badly_does_not_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = fake_times(monkeypatch, lambda n: 0.1 if n == 4 else 0.008 + 0.001 * n if n <= 16 else 0.004 * n)
    assert peak_speed(small(), CPU, most=512)[1] == 16
    assert tried == [1, 2, 4, 8, 16, 32, 64, 16]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_memory_ends_the_search(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(batch: int) -> float:
        if batch > 4:
            raise error
        return 0.001

    fake_times(monkeypatch, seconds)
    found, batch = peak_speed(small(), CPU)
    assert batch == 4
    assert found == pytest.approx(4000)
    fake_times(monkeypatch, lambda batch: seconds(99))
    with pytest.raises(UserError, match="one image of this model does not fit"):
        peak_speed(small(), CPU)


def test_other_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(batch: int) -> float:
        raise RuntimeError("a bug")

    fake_times(monkeypatch, broken)
    with pytest.raises(RuntimeError, match="a bug"):
        peak_speed(small(), CPU)


def test_a_real_model_is_left_as_it_was() -> None:
    model = small()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found, batch = peak_speed(model, CPU, **QUICK)
    assert found > 0
    assert batch in (1, 2, 4)
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    found, batch = peak_speed(small(), torch.device("cuda", 0), seconds=0.1)
    assert found > 1000
    assert batch > 1
