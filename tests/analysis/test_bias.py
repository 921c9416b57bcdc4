"""Agreement under shifts, shuffles and without positions: against closed forms and models that must not care."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import vitlab
from vitlab.analysis.bias import measure_bias, shuffle_tiles, tile_orders, without_positions
from vitlab.data.loader import Batch
from vitlab.errors import UserError
from vitlab.models.config import ResNetConfig
from vitlab.models.variants import Model

SIDE, COUNT = 16, 12


def make(name: str = "Ti/4", **settings: Any) -> Model:
    """A model with random weights large enough that everything in it has an effect."""
    settings = {"image_size": SIDE, "classes": 7} | ({} if name == "R50x1" else SHAPE) | settings
    torch.manual_seed(0)
    model = vitlab.create(name, **settings)
    for name, p in model.named_parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=1.0 if "positions" in name or "relative" in name else 0.3)
    return model.eval().double()


SHAPE = {"depth": 2, "width": 24, "mlp": 48, "heads": 2}


def images(count: int = COUNT) -> Tensor:
    return torch.rand(count, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 2 - 1


def batches(all_images: Tensor, size: int = 5, labels: Tensor | None = None) -> Iterator[Batch]:
    index = torch.arange(len(all_images))
    labels = torch.zeros(len(index), dtype=torch.long) if labels is None else labels
    for part in index.split(size):
        yield Batch(all_images[part], labels[part], torch.zeros(len(part), 7), part)


# ---- tiles


def test_tiles_go_where_the_order_puts_them() -> None:
    pictures = torch.arange(2 * 3 * 8 * 12).reshape(2, 3, 8, 12)
    order = torch.from_numpy(np.stack([np.random.default_rng(i).permutation(6) for i in range(2)]))
    mixed = shuffle_tiles(pictures, 4, order)
    for b in range(2):
        for t, (row, column) in enumerate(np.ndindex(2, 3)):
            y, x = divmod(int(order[b, t]), 3)
            found = mixed[b, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(found, pictures[b, :, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4])


def orders_of(index: list[int], side: int = 4, seed: int = 0) -> Tensor:
    (batch,) = batches(images(len(index)), size=len(index))
    return tile_orders(dataclasses.replace(batch, index=torch.tensor(index)), side, seed)


def test_orders_are_the_images_own() -> None:
    orders = orders_of([3, 8, 3], seed=1)
    assert torch.equal(orders[0], orders[2])
    assert not torch.equal(orders[0], orders[1])
    assert not torch.equal(orders, orders_of([3, 8, 3], seed=2))
    assert (orders.sort(1).values == torch.arange(16)).all()


# ---- models that must not care


class MeanColor(nn.Module):
    """Classes by the mean color alone."""

    positions = rotary = None

    def forward(self, pictures: Tensor) -> Tensor:
        return pictures.mean((2, 3)) @ torch.randn(3, 7, generator=torch.Generator().manual_seed(2)).double()


def test_a_mean_color_stays_whatever_moves() -> None:
    found = measure_bias(MeanColor(), batches(images()), (1, 3, 8), (2, 8))  # type: ignore[arg-type]
    assert (found.images, found.unplaced) == (COUNT, 1.0)
    np.testing.assert_array_equal(found.shifted, 1.0)
    np.testing.assert_array_equal(found.shuffled, 1.0)


class Corner(nn.Module):
    """Class 1 where the first pixel is the brightest of the image, else 0: nothing stays."""

    positions = rotary = None

    def forward(self, pictures: Tensor) -> Tensor:
        first = pictures[:, 0, 0, 0] >= pictures[:, 0].amax((1, 2))
        return torch.stack([~first, first], 1).double()


def test_shares_are_counted_by_hand() -> None:
    """Four of six images have their brightest pixel in the corner; that of a fifth comes there by a shift."""
    pictures = torch.zeros(6, 3, SIDE, SIDE, dtype=torch.float64)
    pictures[:4, :, 0, 0] = 1
    pictures[4, :, 0, 3] = 1  # comes to the corner by three pixels to the left
    pictures[5, :, 7, 7] = 1
    labels = torch.tensor([1, 1, 0, 0, 0, 1])
    found = measure_bias(Corner(), batches(pictures, labels=labels), (3, 16), ())  # type: ignore[arg-type]
    assert found.accuracy == pytest.approx(3 / 6)  # the first two and the fifth
    # by 3: the four change in all directions, the fifth in one of four, the sixth never; by 16 all are as they were
    np.testing.assert_allclose(found.shifted, [(0 + 3 / 4 + 1) / 6, 1.0])


@pytest.mark.parametrize("positions", ["none", "1d", "2d", "relative", "sincos2d"])
def test_without_positions_a_mean_over_patches_ignores_their_order(positions: str) -> None:
    """Exactly the closed form: equivariant blocks, an invariant mean. Shuffled within patches, it is another image."""
    model = make(positions=positions, pool="mean")
    blind, pictures = without_positions(model), images()
    mixed, finer = (shuffle_tiles(pictures, side, orders_of([*range(COUNT)], side)) for side in (4, 2))
    with torch.no_grad():
        torch.testing.assert_close(blind(mixed), blind(pictures), rtol=1e-9, atol=1e-9)
        assert not torch.allclose(blind(finer), blind(pictures), rtol=1e-2)
        placed = torch.allclose(model(mixed), model(pictures), rtol=1e-2)
    assert placed == (positions == "none")
    found = measure_bias(blind, batches(pictures), (4, 8), (4,))
    np.testing.assert_array_equal([*found.shifted, *found.shuffled, found.unplaced], 1.0)  # complete patches
    learned = measure_bias(model, batches(pictures), (1,), (2, 4))
    assert (learned.unplaced == 1) == (positions == "none")
    assert learned.shuffled[0] < 1


def test_every_layers_positions_are_taken_and_the_class_tokens_stay() -> None:
    model = make(placement="every")
    blind = without_positions(model)
    table, old = blind.state_dict()["positions.table"], model.state_dict()["positions.table"]
    assert torch.equal(table[:, 0], old[:, 0])
    torch.testing.assert_close(table[:, 1:], old[:, 1:].mean(1, keepdim=True).expand(-1, 16, -1))
    assert not torch.equal(table, old)  # a copy: the model keeps its own


def test_a_resnet_has_no_positions_and_rotary_ones_stay() -> None:
    model = make("R50x1", image_size=32)
    assert without_positions(model) is model
    with pytest.raises(UserError, match="rotary"):
        without_positions(make(rotary="cells", positions="none"))


def test_positions_of_an_axial_resnet_are_taken() -> None:
    """Without them, attention along rows does not care about the order of the columns."""
    model = vitlab.build(ResNetConfig((16, 16), (1,), width=32, classes=3, attention="axial")).double()
    nn.init.normal_(model.get_parameter("stages.0.0.conv2.rows.relative.offsets"))
    blind, placed = (m.get_submodule("stages.0.0.conv2.rows") for m in (without_positions(model), model))
    x, order = torch.randn(2, 32, 4, 4, dtype=torch.float64), torch.tensor([2, 0, 3, 1])
    with torch.no_grad():
        torch.testing.assert_close(blind(x[..., order]), blind(x)[..., order])
        assert not torch.allclose(placed(x[..., order]), placed(x)[..., order], rtol=1e-2)


def test_a_hybrid_is_measured() -> None:
    model = make("R+Ti/16", image_size=64)
    pictures = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    assert 0 <= measure_bias(model, batches(pictures), (1,), (32,)).shifted[0] <= 1


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(UserError, match="tiles of 5 pixels"):
        measure_bias(make(), batches(images()), (), (5,))
    with pytest.raises(UserError, match="at least one image"):
        measure_bias(make(), [], (1,), ())
