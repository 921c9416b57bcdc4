"""Run by test_attention_kernel.py with TRITON_INTERPRET=1: errors of the kernels in float32 against float64, as JSON.

Triton decides when a kernel is defined whether it is interpreted, so this needs a process of its own.
"""

import json
from collections.abc import Callable

import torch
from torch import Tensor

import vitlab
from vitlab.kernels import attention as kernels
from vitlab.kernels.install import use_attention

SHAPES = ((2, 5, 2, 32), (1, 197, 1, 64), (2, 65, 1, 48), (1, 64, 2, 16), (1, 256, 1, 64), (3, 1, 1, 64))


def reference(qkv: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In float64: values (B, N, H, K), sums (B, H, N) and the gradient."""
    x = qkv.double().requires_grad_()
    q, k, v = x.permute(2, 0, 3, 1, 4)
    logits = q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5
    y = (logits.softmax(-1) @ v).transpose(1, 2)
    return y.detach(), logits.logsumexp(-1).detach(), torch.autograd.grad(y, x, dy.double())[0]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected).norm() / expected.norm())


def strided(x: Tensor) -> Tensor:
    """The same numbers, with gaps between rows and the heads before the tokens in memory."""
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 8), float("nan")).transpose(1, -2).contiguous().transpose(1, -2)
    wide[..., : x.shape[-1]] = x
    return wide[..., : x.shape[-1]]


def backwards(x: Tensor) -> Tensor:
    """The same numbers, with channels that are not neighbors in memory."""
    return x.transpose(1, -1).contiguous().transpose(1, -1)


def errors(shape: tuple[int, int, int, int], arrange: Callable[[Tensor], Tensor] = Tensor.clone) -> dict[str, float]:
    images, tokens, heads, width = shape
    qkv, dy = torch.randn(images, tokens, 3, heads, width), torch.randn(images, tokens, heads, width)
    y, sums, gradient = reference(qkv, dy)
    x = arrange(qkv).requires_grad_()
    out = kernels.attend(x)
    found = torch.autograd.grad(out, x, arrange(dy))[0]
    lse = kernels.triton_forward(x.detach(), kernels.FORWARD)[1]
    return {"values": error(out, y), "gradient": error(found, gradient), "sums": error(lse, sums)}


def large_logits() -> dict[str, list[float]]:
    """Logits below -100, down to -600, of the kernel and of plain float32."""
    qkv, dy = torch.randn(1, 40, 3, 1, 32), torch.randn(1, 40, 1, 32)
    qkv[:, :, 0], qkv[:, :, 1] = qkv[:, :, 0].abs() * 10, -qkv[:, :, 1].abs() * 10
    y, _, gradient = reference(qkv, dy)
    x = qkv.requires_grad_()
    q, k, v = x.permute(2, 0, 3, 1, 4)
    plain = ((q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)
    outs = kernels.attend(x), plain
    gradients = [torch.autograd.grad(out, x, dy)[0] for out in outs]
    return {"values": [error(out, y) for out in outs], "gradient": [error(found, gradient) for found in gradients]}


def layer_errors(*, compiled: bool) -> dict[str, float]:
    """A model's gradients in float32 with the kernel in every layer, against the plain model's in float64."""
    plain = vitlab.create("Ti/8", image_size=32, depth=2, width=64, heads=2, mlp=32, classes=3, qkv_bias="qv")
    for p in plain.parameters():
        torch.nn.init.normal_(p, std=0.1)
    images = torch.randn(2, 3, 32, 32)
    model = vitlab.build(plain.config)
    model.load_state_dict(plain.state_dict())
    use_attention(model, torch.device("cpu"))
    assert sum("forward" in vars(layer) for layer in model.modules()) == 2
    plain.double()(images.double()).square().sum().backward()
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    model(images).square().sum().backward()
    both = zip(model.named_parameters(), plain.parameters(), strict=True)
    return {name: error(p.grad, q.grad) for (name, p), q in both if p.grad is not None and q.grad is not None}


if __name__ == "__main__":
    torch.manual_seed(0)
    kernels.is_supported = lambda qkv: True  # on a CPU it is not, but for the interpreter
    found = {"x".join(map(str, shape)): errors(shape) for shape in SHAPES}
    found |= {arrange.__name__: errors(SHAPES[0], arrange) for arrange in (strided, backwards)}
    layers = {"eager": layer_errors(compiled=False), "compiled": layer_errors(compiled=True)}
    print(json.dumps({"shapes": found, "large logits": large_logits(), "layers": layers}))
