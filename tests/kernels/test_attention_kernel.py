"""The attention kernels compute attention and its gradient, and stay out of the way where they cannot."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import run_interpreted
from torch import Tensor

import vitlab
from vitlab.kernels.compiling import compile_in_place
from vitlab.kernels.install import is_plain, use_attention, use_dropout, use_kernels
from vitlab.models.vit import Attention

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
FLOAT32 = 2e-6  # relative error; eps is 1.2e-7, and sums are of up to 256 products


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """What interpreted_attention.py prints."""
    return run_interpreted("interpreted_attention.py")


@pytest.mark.slow  # Triton interpreted, as the next one
def test_values_and_gradients_are_float64s(interpreted: Any) -> None:
    """At odd sizes, with any strides."""
    errors = {f"{shape} {name}": e for shape, row in interpreted["shapes"].items() for name, e in row.items()}
    assert len(errors) == 24
    assert not {name: e for name, e in errors.items() if not e < FLOAT32}
    for own, plain in interpreted["large logits"].values():  # exponents of hundreds have large errors in float32 too
        assert own < 3 * plain


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_a_models_gradients_are_float64s(interpreted: Any, mode: str) -> None:
    """Compiled it is one graph, without a break."""
    errors = interpreted["layers"][mode]
    assert len(errors) > 30
    assert max(errors.values()) < 1e-5


def test_without_a_gpu_a_model_stays_as_it_is() -> None:
    model = vitlab.create("Ti/16", image_size=32, depth=1, dropout=0.1)
    use_kernels(model, compiled=True)
    assert all("forward" not in vars(part) for part in model.modules())


@pytest.mark.slow  # imports Triton
def test_where_a_kernel_does_not_run_a_line_says_so_and_torch_computes(caplog: pytest.LogCaptureFixture) -> None:
    """Triton has no driver for a CPU: its launch fails, as one does that needs more shared memory than a GPU has."""
    pytest.importorskip("triton")
    model = vitlab.create("Ti/16", image_size=32, depth=2, width=32, heads=2, mlp=32, dropout=0.1)
    for use in (use_attention, use_dropout):
        use(model, torch.device("cpu"))
    assert all("forward" not in vars(part) for part in model.modules())
    assert [r.getMessage().split()[0] for r in caplog.records] == ["attention", "dropout"]
    model(torch.randn(1, 3, 32, 32)).sum().backward()


def test_layers_that_change_queries_and_keys_are_left_out() -> None:
    for settings, plain in (({}, True), ({"qk_norm": True}, False), ({"positions": "relative"}, False)):
        model = vitlab.create("Ti/16", image_size=32, depth=1, **settings)
        assert [is_plain(part) for part in model.modules() if isinstance(part, Attention)] == [plain]


# ---- the kernels themselves


def reference(qkv: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    x = qkv.double().requires_grad_()
    q, k, v = x.permute(2, 0, 3, 1, 4)
    y = ((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)
    return y.detach(), torch.autograd.grad(y, x, dy.double())[0]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("cudnn", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 197, 12, 64), (2, 5, 2, 32), (2, 65, 6, 48), (1, 256, 2, 64), (2, 64, 3, 64)])
def test_errors_are_not_above_the_plain_paths(
    shape: tuple[int, int, int, int], dtype: torch.dtype, cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vitlab.kernels.attention import attend

    images, tokens, heads, width = shape
    qkv = torch.randn(images, tokens, 3, heads, width, device="cuda", dtype=dtype).requires_grad_()
    dy = torch.randn(images, tokens, heads, width, device="cuda", dtype=dtype)
    y, gradient = reference(qkv.detach(), dy)
    monkeypatch.setattr(torch.backends.cuda, "cudnn_sdp_enabled", lambda: cudnn)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    plain = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    own = attend(qkv)
    assert error(own, y) <= 1.1 * error(plain, y)
    found, usual = (torch.autograd.grad(out, qkv, dy)[0] for out in (own, plain))
    assert error(found, gradient) <= 1.1 * error(usual, gradient)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_with_kernels_is_the_model(compiled: bool) -> None:
    """Its gradients are as near to float64's as the plain model's, at two sizes, of which one is too long."""
    torch.manual_seed(0)
    for size in (64, 272):  # 17 and 290 tokens
        model = vitlab.create("Ti/16", image_size=size, depth=2, classes=5).cuda()
        torch.nn.init.normal_(model.head.weight)  # type: ignore[union-attr]
        images = torch.randn(32, 3, size, size, device="cuda")  # of fewer, chance decides whose error is larger
        exact = gradients(model.double(), images.double(), half=False)
        plain = gradients(model.float(), images, half=True)
        use_kernels(model, compiled=compiled)
        if compiled:
            compile_in_place(model)
        fast = gradients(model, images, half=True)
        assert error(fast, exact) <= 1.15 * error(plain, exact)


def gradients(model: torch.nn.Module, images: Tensor, *, half: bool) -> Tensor:
    model.zero_grad()
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        loss = model(images).double().square().mean()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
