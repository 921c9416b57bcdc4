"""Rollout against closed forms and a loop in numpy; the map over the patches."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import vitlab
from vitlab.analysis.rollout import rollout, to_grid
from vitlab.errors import UserError


def model_of(image_size: tuple[int, int], **settings: Any) -> Any:
    return vitlab.create("Ti/8", depth=1, width=12, heads=3, mlp=12, classes=2, image_size=image_size, **settings)


def random_maps(layers: int, batch: int, heads: int, tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(batch, heads, tokens, tokens, dtype=dtype).mul(3).softmax(-1) for _ in range(layers)]


@pytest.mark.parametrize("layers", [1, 2, 5, 12])
@pytest.mark.parametrize("tokens", [1, 4, 17])
def test_even_attention(layers: int, tokens: int) -> None:
    """Each step is half identity, half U, and U is its own square."""
    even = torch.full((tokens, tokens), 1 / tokens, dtype=torch.float64)
    got = rollout([even.expand(2, 3, -1, -1)] * layers)
    kept = 0.5**layers
    expected = (1 - kept) * even + kept * torch.eye(tokens, dtype=torch.float64)
    torch.testing.assert_close(got, expected.expand(2, -1, -1), rtol=0, atol=1e-14)


def test_attention_to_oneself() -> None:
    eye = torch.eye(6, dtype=torch.float64)
    got = rollout([eye.expand(1, 2, -1, -1)] * 7)
    assert torch.equal(got[0], eye)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_against_a_plain_loop(dtype: torch.dtype) -> None:
    maps = random_maps(4, 2, 3, 7, dtype)
    got = rollout(maps)
    for image in range(2):
        through = np.eye(7)
        for one in maps:
            step = np.zeros((7, 7))
            for head in range(3):
                step += one[image, head].double().numpy() / 3
            step += np.eye(7)
            for row in step:
                row /= row.sum()
            through = step @ through  # the next layer mixes what the layers before it made
        np.testing.assert_allclose(got[image].double().numpy(), through, rtol=0, atol=1e-6)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]))


def test_later_layers_multiply_on_the_left() -> None:
    """Token 0 takes from 1 first, then 2 from 0: what 2 gets of 1 came through 0. The other order gives nothing."""
    first, second = torch.eye(3), torch.eye(3)
    first[0], second[2] = torch.tensor([0.0, 1, 0]), torch.tensor([1.0, 0, 0])
    got = rollout([first[None, None], second[None, None]])[0]
    assert got[2].tolist() == [0.25, 0.25, 0.5]
    assert rollout([second[None, None], first[None, None]])[0, 2, 1] == 0


def test_no_layers() -> None:
    with pytest.raises(UserError, match="at least one layer"):
        rollout([])


@pytest.mark.parametrize("size", [(24, 24), (16, 40), (40, 16), (8, 8)])
@pytest.mark.parametrize("pool", ["token", "mean", "attention"])
def test_maps_sum_to_one(size: tuple[int, int], pool: str) -> None:
    model = model_of(size, pool=pool)
    (maps,) = random_maps(1, 2, 3, model.config.length)
    grids = to_grid(model, maps)
    assert grids.shape == (2, 3, *model.config.grid)
    torch.testing.assert_close(grids.sum((-2, -1)), torch.ones(2, 3, dtype=torch.float64))
    assert (grids >= 0).all()


def test_the_class_tokens_row_in_raster_order() -> None:
    model = model_of((16, 24))
    rows = torch.zeros(7, 7)
    rows[0] = torch.tensor([4.0, 1, 2, 3, 0, 0, 4])  # its attention to itself is left out
    rows[1:] = 9  # what the others do does not matter
    assert to_grid(model, rows).mul(10).round().tolist() == [[1, 2, 3], [0, 0, 4]]


def test_without_a_class_token_all_rows_count() -> None:
    model = model_of((16, 16), pool="mean")
    rows = torch.eye(4)
    rows[1] = torch.tensor([1.0, 0, 0, 0])
    assert to_grid(model, rows).tolist() == [[0.5, 0], [0.25, 0.25]]


def test_a_class_token_that_attends_to_itself_alone() -> None:
    model = model_of((16, 24))
    got = to_grid(model, torch.eye(7))
    assert got.sum() == pytest.approx(1)
    assert got.unique().numel() == 1
