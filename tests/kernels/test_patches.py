"""The patch projection as a dense layer is the convolution."""

import copy
import functools

import pytest
import torch
from torch import Tensor, nn

import vitlab
from vitlab.kernels.install import use_kernels
from vitlab.kernels.patches import is_patch_projection, project_patches
from vitlab.models.vit import ViT


@pytest.mark.parametrize(("size", "bias"), [((48, 32), True), ((50, 33), True), ((16, 16), False)])
def test_values_and_gradients_are_the_convolutions(size: tuple[int, int], bias: bool) -> None:
    """Also of images that a multiple of the patch does not cover, and of some that are not contiguous."""
    layer = nn.Conv2d(3, 24, 16, stride=16, bias=bias).double()
    images = torch.randn(2, *size, 3, dtype=torch.float64).permute(0, 3, 1, 2).requires_grad_()
    found, expected = project_patches(layer, images), layer(images)
    torch.testing.assert_close(found, expected)
    tensors = [images, *layer.parameters()]
    dy = torch.randn_like(expected)
    for own, other in zip(*(torch.autograd.grad(y, tensors, dy) for y in (found, expected)), strict=True):
        torch.testing.assert_close(own, other)


def test_a_model_sees_the_same_tokens() -> None:
    model = vitlab.create("Ti/8", image_size=(32, 16), depth=1, classes=3).double()
    assert isinstance(model, ViT)
    images = torch.randn(2, 3, 32, 16, dtype=torch.float64)
    before = model.patches(images)
    model.embed.forward = functools.partial(project_patches, model.embed)  # type: ignore[method-assign]
    found = model.patches(images)
    assert found.is_contiguous()
    torch.testing.assert_close(found, before)


def test_other_convolutions_are_none() -> None:
    assert is_patch_projection(nn.Conv2d(3, 8, 4, stride=4))
    others = [
        nn.Conv2d(3, 8, 4, stride=2),
        nn.Conv2d(3, 8, 1),
        nn.Conv2d(3, 8, 4, stride=4, padding=1),
        nn.Linear(3, 8),
    ]
    assert not any(is_patch_projection(layer) for layer in others)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_errors_in_bf16_are_not_above_the_convolutions() -> None:
    model = vitlab.create("Ti/16", image_size=64, depth=1, classes=3).cuda()
    assert isinstance(model, ViT)
    images = torch.randn(8, 3, 64, 64, device="cuda")
    dy = torch.randn(8, 16, model.config.width, device="cuda")
    exact = gradient(copy.deepcopy(model).double(), images.double(), dy.double())
    plain = gradient(model, images, dy)
    use_kernels(model, compiled=False)
    fast = gradient(model, images, dy)
    errors = [float((found.double() - exact).norm() / exact.norm()) for found in (plain, fast)]
    assert errors[1] <= 1.1 * errors[0]


def gradient(model: ViT, images: Tensor, dy: Tensor) -> Tensor:
    with torch.autocast("cuda", torch.bfloat16, enabled=images.dtype != torch.float64):
        y = model.patches(images)
    return torch.autograd.grad(y, model.embed.weight, dy.to(y.dtype))[0]
