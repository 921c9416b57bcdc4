"""An MLP in 8 bits: exact where 8 bits are enough, near float64 elsewhere, and the kernel that rounds."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import run_interpreted
from torch import Tensor

import vitlab
from vitlab.kernels import fp8_rounding
from vitlab.kernels.compiling import compile_in_place
from vitlab.kernels.fp8 import MARGIN, Float8Linear, Maxima, has_float8, use_float8
from vitlab.kernels.fp8_mlp import use_mlps
from vitlab.kernels.fp8_rounding import plain_round, round_gelu, round_turned, try_rounding
from vitlab.models.vit import MLP, ViT


def mlp(width: int = 32, hidden: int = 48, **settings: object) -> tuple[MLP, ViT]:
    """An MLP of a model whose layers are in 8 bits, with the products that are tested."""
    about = {"image_size": 16, "depth": 1, "width": width, "heads": 2, "mlp": hidden, "classes": 3} | settings
    model = vitlab.create("Ti/16", **about).to(torch.bfloat16)
    assert isinstance(model, ViT)
    use_float8(model)
    use_mlps(model)
    part = model.get_submodule("blocks.0.mlp")
    assert isinstance(part, MLP)
    return part, model


def exact(part: MLP, x: Tensor, dy: Tensor) -> list[Tensor]:
    """The output and all gradients in float64."""
    tensors = [x, part.up.weight, part.up.bias, part.down.weight, part.down.bias]
    x, up, a, down, b = (t.detach().double().requires_grad_() for t in tensors)
    y = F.linear(F.gelu(F.linear(x, up, a)), down, b)
    return [y.detach(), *torch.autograd.grad(y, [x, up, a, down, b], dy.double())]


def own(part: MLP, x: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = part(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters(part)], dy)]


def parameters(part: MLP) -> list[Tensor]:
    return [part.up.weight, part.up.bias, part.down.weight, part.down.bias]


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def test_values_and_gradients_are_within_the_formats_rounding() -> None:
    """A fraction of 3 bits rounds by up to 1/16, one of 2 bits by up to 1/8; an error of a sum is smaller."""
    part, _ = mlp(64, 128)
    x, dy = torch.randn(4, 20, 64).bfloat16(), torch.randn(4, 20, 64).bfloat16() / 1000
    found, wanted = own(part, x, dy), exact(part, x, dy)
    errors = [error(a, b) for a, b in zip(found, wanted, strict=True)]
    assert max(errors[:1]) < 1 / 16, errors
    assert max(errors) < 1 / 8, errors
    assert min(errors[:5]) > 0.005, errors  # they are in 8 bits
    assert errors[5] < 0.01, errors  # the gradient of the last bias is a sum of what was given


def test_it_is_as_near_as_layer_by_layer() -> None:
    part, _ = mlp(64, 128)
    x, dy = torch.randn(160, 64).bfloat16(), torch.randn(160, 64).bfloat16() / 1000
    fused, wanted = own(part, x, dy), exact(part, x, dy)
    del part.forward
    apart = own(part, x, dy)
    for place in (0, 1):  # the output and the gradient of the input; those of the weights are in 16 bits there
        assert error(fused[place], wanted[place]) < 1.2 * error(apart[place], wanted[place])


def test_scales_follow_what_is_seen_and_no_outlier_ruins_them() -> None:
    part, _ = mlp()
    layers = [layer for layer in (part.up, part.down) if isinstance(layer, Float8Linear)]
    for layer in layers:
        layer.maxima.data = torch.ones(3)
    maxima = Maxima(layers)
    x = torch.full((16, 32), 1.5).bfloat16()
    x[3, 4] = torch.inf
    part(x).backward(torch.full((16, 32), 0.25).bfloat16())
    maxima.note()
    maxima.update()
    assert layers[0].maxima[0].item() == MARGIN
    assert layers[1].maxima[1].item() == pytest.approx(0.9)  # 0.25 was below
    assert all(bool(layer.maxima.isfinite().all()) for layer in layers)


def test_rows_that_16_does_not_divide_and_dropout_go_layer_by_layer() -> None:
    part, _ = mlp(dropout=0.5)
    x = torch.randn(17, 32).bfloat16()
    assert part.eval()(x).shape == (17, 32)
    assert bool((part.train()(x[:16]) == 0).any())
    tanh, _ = mlp(gelu="tanh")
    assert "forward" not in vars(tanh)


def test_gelu_alone_is_the_same() -> None:
    x, scale = torch.randn(20, 30).bfloat16(), torch.tensor(0.02)
    assert torch.equal(round_gelu(x, scale).float(), plain_round(x, None, scale, "gelu", False)[0].float())


@pytest.mark.slow
def test_the_kernel_in_the_interpreter() -> None:
    everything = run_interpreted("interpreted_rounding.py")
    assert everything.pop("bytes")["turned"]
    for name, found in everything.items():
        assert found["apart"] < 1e-3, name  # of 448
        assert found["clamped"] == 0, name
        assert found["sums"] < 1e-3, name
        assert found["most"] < 1e-5, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    try_rounding(torch.device("cuda"))

    def wrong(*words: Any) -> tuple[Tensor, ...]:
        rounded, turned, sums, most = plain_round(*words)
        turned = turned.clone()
        turned[5] = 0
        return rounded, turned, sums, most

    monkeypatch.setattr(fp8_rounding, "triton_round", wrong)
    with pytest.raises(ValueError, match="wrong"):
        try_rounding(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("what", "gradient"), [("plain", False), ("gelu", False), ("plain", True), ("slope", True)])
@pytest.mark.parametrize("shape", [(256, 128), (400, 768), (16, 48)])
def test_the_kernel_on_a_gpu(shape: tuple[int, int], gradient: bool, what: str) -> None:
    if not has_float8(torch.device("cuda")):
        pytest.skip("needs a GPU with numbers of 8 bits")
    x, u = (3 * torch.randn(*shape).bfloat16() for _ in range(2))
    scale = torch.tensor(0.02)
    wanted = plain_round(x, u, scale, what, gradient)
    found = [t.cpu() for t in round_turned(x.cuda(), u.cuda(), scale.cuda(), what, gradient)]
    other = found[0].float() != wanted[0].float()
    assert float(other.float().mean()) < 0.02  # halves between two numbers, and the far tail of the slope
    assert torch.equal(found[1].float(), found[0].float().t())
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(found[3], wanted[3], rtol=1e-5, atol=1e-6)
    if what == "gelu":
        assert torch.equal(round_gelu(x.cuda(), scale.cuda()).cpu().float(), found[0].float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compiled", [False, True])
def test_the_mlp_on_a_gpu(compiled: bool) -> None:
    if not has_float8(torch.device("cuda")):
        pytest.skip("needs a GPU with products in 8 bits")
    part, _ = mlp(256, 1024)
    x, dy = torch.randn(8, 50, 256).bfloat16(), torch.randn(8, 50, 256).bfloat16() / 1000
    wanted, emulated = exact(part, x, dy), own(part, x, dy)
    model = mlp(256, 1024)[0]
    model.load_state_dict(part.state_dict())
    model.cuda()
    for layer in (model.up, model.down):
        assert isinstance(layer, Float8Linear)
        layer.native = True
    if compiled:
        compile_in_place(model)
    found = own(model, x.cuda(), dy.cuda())
    for number, (a, b, c) in enumerate(zip(found, emulated, wanted, strict=True)):
        assert error(a.cpu(), c) < 1.1 * error(b, c) + 1e-3, number
