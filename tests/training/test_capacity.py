"""The largest batch that fits: a bounded search, and a count against one that is made by hand."""

import pytest
import torch

from vitlab.cost import cost
from vitlab.models.config import ModelConfig
from vitlab.models.names import configure
from vitlab.models.variants import build
from vitlab.training import capacity
from vitlab.training.capacity import count_batch, largest_batch, search

SHAPE = {"depth": 2, "width": 32, "mlp": 64, "heads": 2}


@pytest.mark.parametrize("true", [0, 1, 2, 3, 15, 16, 17, 31, 100, 1000, 1023, 1024, 5000, 16_384])
def test_the_search_is_near_and_short(true: int) -> None:
    """At most a sixteenth too small, never too large, in few tries of which none is above the limit."""
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= true

    found = search(fits, 1024)
    reach = min(true, 1024)
    assert found <= reach < found + max(1, found // 16) + 1
    assert max(tried) <= 1024
    assert len(tried) == len(set(tried)) <= 16


@pytest.mark.parametrize("true", [1, 7, 100, 1000, 5000])
def test_a_good_guess_needs_few_tries_and_a_bad_one_does_no_harm(true: int) -> None:
    for guess in (0, 1, true // 3, round(0.97 * true), true, round(1.04 * true), 3 * true, 10**6):
        tried: list[int] = []

        def fits(size: int, tried: list[int] = tried) -> bool:
            tried.append(size)
            return size <= true

        found = search(fits, 4096, guess)
        assert found <= min(true, 4096) < found + max(1, found // 16) + 1
        assert len(tried) == len(set(tried)) <= (3 if 0.96 < guess / true < 1.05 else 24)
        assert max(tried) <= 4096


def test_small_numbers_are_exact() -> None:
    assert [search(n.__ge__, 1024) for n in range(32)] == list(range(32))


def config(name: str, size: int) -> ModelConfig:
    return configure(name, {"image_size": size, "classes": 10, **(SHAPE if "/" in name else {})})


def test_a_count_fits_and_one_more_does_not() -> None:
    one = config("Ti/16", 64)
    parts = cost(lambda: build(one))
    state = 16 * sum(p.numel() for p in build(one).parameters())  # weights, gradients, two moments: float32
    memory = state + 7 * 2 * parts.activation_bytes  # counted in bf16, computed in float32
    assert [count_batch(one, memory + extra, 1000) for extra in (-1, 0)] == [6, 7]
    assert count_batch(one, state / 2, 1000) == 0
    assert count_batch(one, 1e15, 1000) == 1000


@pytest.mark.slow
def test_larger_images_and_models_leave_room_for_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "free_bytes", lambda device: 2**30)
    cpu = torch.device("cpu")
    found = [largest_batch(config("R50x1", size), cpu, most=10**6) for size in (32, 64)]
    assert found[0] > 3 * found[1] > 0  # four times the pixels
    assert largest_batch(config("R50x1", 32), cpu, most=5) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_holds_what_is_found() -> None:
    """And twice as many are too many, where the limit of memory is a low one."""
    device = torch.device("cuda", 0)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2e9 / total, device)
    try:
        one = configure("R50x1", {"image_size": 128})
        found = largest_batch(one, device)
        model = build(one).to(device).train()
        assert 8 < found < capacity.MOST
        model = build(one).to(device).train()
        assert not capacity.fits(model, device, 2 * found)
        assert capacity.fits(model, device, found)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_small_batches_tell_what_fits_on_a_gpu() -> None:
    """Where another program has all but 8 GB of it."""
    device, one = torch.device("cuda", 0), configure("R50x1", {"image_size": 128})
    torch.cuda.empty_cache()
    others = torch.empty(max(0, torch.cuda.mem_get_info(device)[0] - 8 * 10**9), dtype=torch.uint8, device=device)
    guess = capacity.expect(build(one).to(device).train(), device, capacity.MOST)
    assert 0.8 < guess / largest_batch(one, device) < 1.2
    del others
    torch.cuda.empty_cache()
