"""Dropout by bits: the rate, the factor, independence, the gradient, and the same draws from the same seed."""

import pytest
import torch
from interpreter import run_interpreted
from torch import nn


@pytest.mark.slow
def test_elements_are_dropped_at_random_and_again_in_the_gradient() -> None:
    found = run_interpreted("interpreted_dropout.py")
    count = 20 * 501 * 8
    assert found["rate"] == pytest.approx(0.1, abs=4 * (0.09 / count) ** 0.5)  # four deviations
    assert found["rates"] == pytest.approx([0.1] * 8, abs=4 * (0.09 * 8 / count) ** 0.5)
    assert found["correlation"] < 5 * (8 / count) ** 0.5
    assert abs(found["neighbors"]) < 5 / count**0.5
    scale = 65536 / (65536 - 6554)
    assert found["scale"] == pytest.approx(scale, rel=1e-5)
    assert found["gradient where dropped"] == 0
    assert found["gradient where kept"] == pytest.approx([scale, scale], rel=1e-6)
    assert found["repeats"]
    assert found["differs"] == pytest.approx(2 * 0.1 * 0.9, abs=0.02)
    assert found["evaluation"]
    assert found["all"] == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_the_gradient_has_the_mask_of_the_values(compiled: bool) -> None:
    from vitlab.kernels.dropout import drop

    layer = nn.Dropout(0.25)
    run = torch.compile(drop, dynamic=False, fullgraph=True) if compiled else drop
    x = (1 + torch.rand(64, 197, 768, device="cuda")).bfloat16().requires_grad_()  # no zeros of its own
    torch.manual_seed(1)
    y = run(layer, x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert float((y == 0).float().mean()) == pytest.approx(0.25, abs=1e-3)
    assert bool(((gradient == 0) == (y == 0)).all())
    torch.manual_seed(1)
    assert bool((run(layer, x) == y).all())
