"""A model that is shown images of another size for a while: as after a resize, but with the parameters it has."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ResNetConfig, ViTConfig
from vitlab.models.names import configure
from vitlab.models.positions import stretch, stretch_matrix
from vitlab.models.shown import show

Fill = Callable[..., Any]
FULL, SMALL = (32, 48), (24, 32)
BASE: dict[str, Any] = {"image_size": FULL, "patch": 8, "depth": 2, "width": 24, "mlp": 40, "heads": 2, "classes": 5}
CONFIGS: dict[str, ModelConfig] = {
    "1d": ViTConfig(**BASE),
    "1d at every layer": ViTConfig(**BASE, placement="every"),
    "2d": ViTConfig(**BASE, positions="2d", registers=2),
    "2d, shared": ViTConfig(**BASE, positions="2d", placement="shared"),
    "sincos2d": ViTConfig(**BASE, positions="sincos2d", pool="mean"),
    "rotary": ViTConfig(**BASE, positions="none", rotary="cells"),
    "rotary centers": ViTConfig(**BASE, rotary="centers", rotary_layout="halves"),
    "axial": ViTConfig(**BASE, attention="axial", pool="mean"),
    "hybrid": configure("R+Ti/16", {"image_size": (96, 128), "depth": 1, "width": 24, "mlp": 40, "heads": 2}),
    "ResNet": ResNetConfig(image_size=(64, 96), stages=(1, 1), width=32, classes=5),
}


def images(size: tuple[int, int]) -> Tensor:
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_those_of_a_resized_copy(name: str, randomize: Fill) -> None:
    """And back at its own size nothing has changed, to the bit; the parameters are the same objects all the time."""
    model = randomize(vitlab.build(CONFIGS[name])).double().eval()
    full = model.config.image_size
    small = {"hybrid": (64, 96), "ResNet": (32, 64)}.get(name, SMALL)
    resized = copy.deepcopy(model).resize(small)
    before, parameters, config = model(images(full).double()), list(model.parameters()), model.config
    show(model, small)
    with torch.no_grad():
        torch.testing.assert_close(model(images(small).double()), resized(images(small).double()), rtol=1e-9, atol=1e-9)
    with pytest.raises(UserError, match="this model takes images of"):
        model(images(full).double())
    show(model, full)
    assert torch.equal(model(images(full).double()), before)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert model.config == config
    show(model, small)  # a resize is for good, whatever was shown before
    torch.testing.assert_close(model.resize(small)(images(small).double()), resized(images(small).double()))


def test_positions_learn_through_the_resampling(randomize: Fill) -> None:
    """Their gradient is that of the resampled table, spread by the weights of the interpolation: numerically too."""
    model = randomize(vitlab.build(CONFIGS["1d"])).double()
    show(model, SMALL)
    assert model.positions is not None
    table = model.positions.table

    def loss() -> Tensor:
        return model(images(SMALL).double()).square().sum()

    loss().backward()
    assert (table.grad.abs().sum(-1) > 0).all()  # 4 x 6 cells as 3 x 4: each has a part
    direction = torch.randn(table.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            table.add_(direction, alpha=sign * 1e-5)
            ends.append(loss())
            table.sub_(direction, alpha=sign * 1e-5)
    numeric = (ends[0] - ends[1]) / 2e-5
    torch.testing.assert_close((table.grad * direction).sum(), numeric, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("new", [(3, 4), (8, 12), (1, 6)])
def test_the_matrix_is_bilinear_interpolation(new: tuple[int, int]) -> None:
    """With corners aligned, by torch's own; where autocast is on, too."""
    table = torch.randn(4, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = stretch_matrix((4, 6), new, table.device, table.dtype)
    expected = torch.nn.functional.interpolate(table.permute(2, 0, 1)[None], new, mode="bilinear", align_corners=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = stretch(table.flatten(0, 1), matrix)
    torch.testing.assert_close(found, expected[0].permute(1, 2, 0).flatten(0, 1), rtol=1e-12, atol=1e-12)


def test_what_cannot_be_shown_is_one_line() -> None:
    relative = vitlab.create("Ti/8", image_size=32, depth=1, positions="relative")
    with pytest.raises(UserError, match=r"^relative positions .* leave small_size$"):
        show(relative, (24, 24))
    axial = ResNetConfig(image_size=(32, 32), stages=(1,), width=32, attention="axial")
    with pytest.raises(UserError, match=r"^a ResNet's axial attention .* leave small_size$"):
        show(vitlab.build(axial), (24, 24))
    with pytest.raises(UserError, match="do not divide an image of 20x20: use 16 or 24 for 20"):
        show(vitlab.create("Ti/8", image_size=32, depth=1), (20, 20))


def test_patch_dropout_keeps_a_share_of_what_is_shown(randomize: Fill) -> None:
    model = randomize(vitlab.build(ViTConfig(**BASE, patch_dropout=0.5)))
    seen: list[int] = []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[1]))
    for size in (FULL, SMALL):
        show(model, size)
        model(images(size))
    assert seen == [1 + 12, 1 + 6]
