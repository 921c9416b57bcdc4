"""Products in 8 bits: exact where 8 bits are enough, near float64 elsewhere, with scales that follow what they see."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitlab
from vitlab.kernels.fp8 import FORGET, MARGIN, Float8Linear, Maxima, has_float8, multiply, quantize, use_float8

SCALE_1 = (448 / MARGIN, 57344 / MARGIN, 448 / MARGIN)  # maxima at which a number is stored as itself


def layer(inputs: int = 32, outputs: int = 16, maxima: tuple[float, ...] | None = None) -> Float8Linear:
    found = Float8Linear(nn.Linear(inputs, outputs).to(torch.bfloat16))
    if maxima is not None:
        found.maxima.data = torch.tensor(maxima)
    return found


def integers(*shape: int, most: int = 4) -> Tensor:
    return torch.randint(-most, most + 1, shape).to(torch.bfloat16)


def test_small_integers_are_exact() -> None:
    """All up to 8 have a place in both formats, so the results are those of float64, rounded once."""
    part = layer(maxima=SCALE_1)
    part.weight.data, part.bias.data = integers(16, 32, most=8), integers(16)
    x, dy = integers(3, 5, 32, most=8).requires_grad_(), integers(3, 5, 16)
    y = part(x)
    dx, dw, db = torch.autograd.grad(y, [x, part.weight, part.bias], dy)
    w = part.weight.double()
    flat, rows = x.detach().double().flatten(0, 1), dy.double().flatten(0, 1)
    assert torch.equal(y, (x.double() @ w.t() + part.bias.double()).bfloat16())
    assert torch.equal(dx, (dy.double() @ w).bfloat16())
    assert torch.equal(dw, (rows.t() @ flat).bfloat16())
    assert torch.equal(db, rows.sum(0).bfloat16())


def test_other_numbers_are_within_the_formats_rounding() -> None:
    """A fraction of 3 bits rounds by up to 1/16, one of 2 bits by up to 1/8; errors of a sum are smaller."""
    part = layer(64, 48)
    x = torch.randn(40, 64).bfloat16().requires_grad_()
    dy = torch.randn(40, 48).bfloat16() / 1000
    y = part(x)
    dx = torch.autograd.grad(y, x, dy)[0]
    y = y.detach()
    exact = x.detach().double() @ part.weight.detach().double().t() + part.bias.detach().double()
    assert 0.005 < float((y - exact).norm() / exact.norm()) < 1 / 16
    assert 0.01 < float((dx - dy.double() @ part.weight.detach().double()).norm() / dx.double().norm()) < 1 / 8


def test_scales_follow_what_is_seen() -> None:
    part = layer(maxima=(1.0, 1.0, 1.0))
    part.weight.data.fill_(0.25)
    maxima = Maxima([part])
    step(maxima, (part, 0.5, 0.125))
    torch.testing.assert_close(part.maxima.data, torch.full((3,), FORGET))  # 0.5, 0.125 and 0.25 were below
    assert part.maxima.grad is None
    step(maxima, (part, 2.0, 0.0))
    # 2.0 is beyond 0.9 * MARGIN, at which it saturates, so it takes another step
    assert part.maxima[0].item() == pytest.approx(FORGET * MARGIN, rel=1 / 16)
    step(maxima, (part, 2.0, 0.0))
    assert part.maxima[0].item() == pytest.approx(2.0, rel=1 / 16)


def test_the_largest_of_all_passes_of_a_step_counts() -> None:
    """In any order, also where another layer was not used; and nothing of a step stays for the next one."""
    first, other = (layer(maxima=(1.0, 1.0, 1.0)) for _ in range(2))
    maxima = Maxima([first, other])
    step(maxima, (first, 0.5, 1.75), (first, 1.5, 0.25), (first, 0.25, 0.5))
    assert first.maxima[:2].tolist() == pytest.approx([1.5, 1.75], rel=1 / 8)
    assert other.maxima.tolist() == [1.0, 1.0, 1.0]
    before = first.maxima[:2].tolist()
    step(maxima, (first, 0.5, 0.5), (other, 1.5, 0.5))
    assert first.maxima[:2].tolist() == pytest.approx([FORGET * x for x in before])
    assert other.maxima[0].item() == pytest.approx(1.5, rel=1 / 16)


def step(maxima: Maxima, *passes: tuple[Float8Linear, float, float]) -> None:
    """Passes of a layer on values and gradients that are all the same number, then the end of the step."""
    for part, value, gradient in passes:
        x = torch.full((16, 32), value, dtype=torch.bfloat16)
        part(x).backward(torch.full((16, 16), gradient, dtype=torch.bfloat16))
        maxima.note()
    maxima.update()


def test_a_models_mlps_are_replaced_and_nothing_else() -> None:
    model = vitlab.create("Ti/16", image_size=32, depth=2, width=32, heads=2, mlp=48, classes=3)
    names = [name for name, _ in model.named_parameters()]
    found = use_float8(model)
    assert list(found) == [f"blocks.{i}.mlp.{part}" for i in range(2) for part in ("up", "down")]
    assert [name for name, _ in model.named_parameters() if not name.endswith("maxima")] == names
    odd = vitlab.create("Ti/16", image_size=32, depth=1, width=24, heads=2, mlp=48, classes=3)
    assert not use_float8(odd)  # 24 is no multiple of 16


def test_no_gradient_goes_through_a_frozen_body() -> None:
    model = vitlab.create("Ti/16", image_size=32, depth=2, width=32, heads=2, mlp=48, classes=3)
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith(("blocks.1", "head")))
    assert list(use_float8(model)) == ["blocks.1.mlp.up", "blocks.1.mlp.down"]
    seen: list[bool] = []
    model.get_submodule("blocks.0").register_forward_hook(lambda *args: seen.append(args[2].requires_grad))
    model(torch.randn(1, 3, 32, 32))
    assert seen == [False]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_the_gpus_product_is_the_emulated_one(kind: torch.dtype) -> None:
    if not has_float8(torch.device("cuda")):
        pytest.skip("needs a GPU with products in 8 bits")
    one: dict[str, Any] = {"device": "cuda"}
    scales = torch.tensor(0.01, **one), torch.tensor(0.002, **one)
    a = quantize(torch.randn(77, 64, **one), scales[0], kind)
    b = quantize(torch.randn(48, 64, **one) / 8, scales[1], torch.float8_e4m3fn).t()
    bias = torch.randn(48, **one).bfloat16()
    own, emulated = (multiply(a, b, *scales, bias, native) for native in (True, False))
    assert float((own.float() - emulated.float()).norm() / emulated.float().norm()) < 4e-3
