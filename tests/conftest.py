"""Shared by the tests: weights in which nothing is zero, one or small enough to hide a mistake."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

ADDED = ("token", "positions", "relative", "probe")  # tables, whose rows are added or compared, not multiplied with


def fill(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and floating-point buffer drawn anew, at a scale that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, tensor: Tensor) -> None:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        dense = tensor.ndim > 1 and not any(part in ADDED for part in name.split("."))
        scale = max(1, tensor[0].numel()) ** -0.5 if dense else 0.5
        centre = 1.0 if tensor.ndim == 1 and name.endswith("weight") else 0.0  # the scales of norms
        tensor.copy_(centre + scale * noise)

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point():
                draw(name, tensor)
    return model


@pytest.fixture
def randomise() -> Callable[..., nn.Module]:
    return fill


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
