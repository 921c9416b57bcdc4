"""Models with every tensor random, ours and other libraries', and the comparison of their logits."""

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from vitlab.models.config import ViTConfig
from vitlab.models.positions import Table
from vitlab.models.variants import Model
from vitlab.models.vit import ViT

M = TypeVar("M", bound=nn.Module)


def randomize(model: M, dtype: torch.dtype = torch.float32, seed: int = 0) -> M:
    """Every tensor random, so that no zero hides a mistake; activations and logits stay of order one."""
    generator = torch.Generator().manual_seed(seed)
    model = model.to(dtype).eval()
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim > 1 and name.endswith("weight"):
            noise = noise / math.sqrt(tensor[0].numel())
        elif name.endswith("norm3.weight"):  # the end of a residual branch: small, as in trained networks
            noise = 0.3 * noise
        elif name.endswith("weight"):
            noise = 1 + 0.2 * noise
        else:
            noise = 0.3 * noise
        tensor.copy_(noise)
    return model


def empty(make: Callable[[], M]) -> M:
    """A model without its initialization, which takes long."""
    with torch.device("meta"):
        return make().to_empty(device="cpu")


def head_of(model: Model) -> nn.Linear:
    assert model.head is not None
    return model.head


def table_of(model: Model) -> Tensor:
    """The position table of a ViT that has one."""
    assert isinstance(model, ViT)
    assert isinstance(model.positions, Table)
    return model.positions.table


def vit_config(model: Model) -> ViTConfig:
    assert isinstance(model, ViT)
    return model.config


def images(size: int | tuple[int, int], dtype: torch.dtype = torch.float32) -> Tensor:
    height, width = (size, size) if isinstance(size, int) else size
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 3, height, width, generator=generator, dtype=torch.float64).to(dtype)


def agree(a: Tensor, b: Tensor) -> None:
    """The same logits, up to rounding."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    assert 0.1 < a.std() < 10  # of order one, so that a difference is visible
    assert (a - b).abs().max() <= (2e-5 if a.dtype == torch.float32 else 1e-10)
