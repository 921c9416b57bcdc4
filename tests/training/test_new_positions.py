"""new_positions: fine-tuning at another size with positions that are learned anew."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import SMALL, few_digits, train_small

import vitlab
from vitlab.errors import UserError
from vitlab.finetuning.plan import make_plan
from vitlab.models.variants import Model
from vitlab.training.recipe import Recipe, change
from vitlab.training.setup import initial_model

TUNED = change(SMALL, model="Ti/4", image_size=(16, 24), mixup=0.0, new_positions=True)


def weights(folder: Path, **settings: Any) -> Recipe:
    """A recipe that starts from weights of 8 x 8 pixels; their positions lie far from what a draw can give."""
    settings = {"image_size": (8, 8), "depth": 2, "width": 16, "mlp": 32, "heads": 2, "classes": 10} | settings
    model = vitlab.create("Ti/4", **settings)
    for table in tables(model).values():
        torch.nn.init.constant_(table, 7.0)
    vitlab.save(model, folder)
    return change(TUNED, weights=str(folder), model_settings={})


def tables(model: Model) -> dict[str, torch.nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if "positions" in name or "relative" in name}


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"positions": "2d"},
        {"positions": "relative"},
        {"placement": "every"},
        {"pool": "mean", "attention": "axial"},
    ],
)
def test_positions_are_drawn_anew_at_the_new_grid_and_all_else_is_the_weights(
    kind: dict[str, str], tmp_path: Path
) -> None:
    recipe = weights(tmp_path, **kind)
    fresh, _ = initial_model(recipe, few_digits())
    resampled, _ = initial_model(change(recipe, new_positions=False), few_digits())
    assert {name: p.shape for name, p in tables(fresh).items()} == {n: p.shape for n, p in tables(resampled).items()}
    values = torch.cat([p.detach().flatten() for p in tables(fresh).values()])
    assert values.std().item() == pytest.approx(0.02, rel=5 / math.sqrt(2 * len(values)))  # five deviations
    assert abs(values.mean().item()) < 5 * 0.02 / math.sqrt(len(values))
    assert all(torch.allclose(p, torch.tensor(7.0)) for p in tables(resampled).values())
    others = fresh.state_dict().keys() - tables(fresh).keys()
    same = [
        torch.equal(fresh.state_dict()[name], resampled.state_dict()[name]) for name in others if "head" not in name
    ]
    assert same
    assert all(same)


def test_the_draw_follows_from_the_seed(tmp_path: Path) -> None:
    recipe = weights(tmp_path)
    first, again, other = (
        initial_model(change(recipe, seed=seed), few_digits())[0].state_dict()["positions.table"] for seed in (5, 5, 6)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_they_learn(tmp_path: Path) -> None:
    recipe = weights(tmp_path / "weights", dropout=0.1)
    train_small(tmp_path / "run", recipe=recipe, steps=2, warmup=0)
    before, after = (
        x.state_dict()["positions.table"]
        for x in (initial_model(recipe, few_digits())[0], vitlab.load(tmp_path / "run"))
    )
    assert before.shape == after.shape == (1, 25, 16)  # of 16 x 24 pixels
    assert (before != after).any(-1).all()


@pytest.mark.parametrize(
    "kind", [{"positions": "sincos2d"}, {"positions": "none"}, {"rotary": "cells", "positions": "none"}]
)
def test_a_model_that_learns_no_positions_is_refused(kind: dict[str, str], tmp_path: Path) -> None:
    recipe = weights(tmp_path, **kind)
    with pytest.raises(UserError, match="learns no positions"):
        initial_model(recipe, few_digits())


def test_what_has_nothing_to_learn_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="without weights"):
        initial_model(TUNED, few_digits())
    with pytest.raises(UserError, match="freeze=body"):
        change(TUNED, freeze="body")
    with pytest.raises(UserError, match="lora=2"):
        change(TUNED, lora=2)
    weights(tmp_path)
    with pytest.raises(UserError, match="--paper"):
        make_plan("digits", str(tmp_path), ["new_positions=true", "device=cpu"], None)
