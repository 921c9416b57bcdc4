"""A last block that computes the class token alone, beside the model as it is."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import vitlab
from vitlab.kernels.class_token import use_class_token
from vitlab.models.variants import Model

SMALL: dict[str, Any] = {"image_size": (24, 32), "depth": 3, "width": 48, "heads": 3, "mlp": 80, "classes": 7}
SETTINGS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "one block": {"depth": 1},
    "prelogits": {"prelogits": 16},
    "relative positions": {"positions": "relative"},
    "positions in every layer": {"positions": "2d", "placement": "every"},
    "rotary, norms of queries and keys": {"rotary": "cells", "qk_norm": True},
    "registers, layer scale": {"registers": 3, "layer_scale": True},
    "stochastic depth": {"drop_path": 0.5},
    "patch dropout": {"patch_dropout": 0.5},
}


def make(**settings: Any) -> Model:
    torch.manual_seed(0)
    model = vitlab.create("Ti/8", **SMALL | settings).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return model


def outcome(model: Model, images: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Logits, and the gradient of every parameter, with the same draws each time."""
    torch.manual_seed(1)
    model.zero_grad()
    logits = model(images)
    (logits * target).sum().backward()
    return {"logits": logits.detach()} | {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_logits_and_gradients_are_the_models(settings: dict[str, Any]) -> None:
    """In float64, where the two differ by the order of sums alone; images of which all are used."""
    model = make(**settings)
    images, target = torch.randn(4, 3, 24, 32).double(), torch.randn(4, 7).double()
    expected = outcome(model, images, target)
    use_class_token(model)
    shapes: list[torch.Size] = []
    last = model.get_submodule(f"blocks.{settings.get('depth', 3) - 1}.mlp")
    last.register_forward_hook(lambda part, inputs, out: shapes.append(out.shape))
    found = outcome(model, images, target)
    assert shapes == [(4, 1, 48)]
    assert found.keys() == expected.keys()
    assert len(found) > 10
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10 * float(value.abs().max()), msg=name)


@pytest.mark.parametrize("pool", ["mean", "token_mean", "attention"])
def test_where_other_tokens_are_read_all_are_computed(pool: str) -> None:
    model = make(pool=pool)
    use_class_token(model)
    assert all("forward" not in vars(part) for part in model.modules())


def test_half_precision_is_as_near_to_float64() -> None:
    model, images, target = make(), torch.randn(32, 3, 24, 32), torch.randn(32, 7)
    expected = outcome(model, images.double(), target.double())
    own = copy.deepcopy(model)
    use_class_token(own)
    off = []
    for each in (model.bfloat16(), own.bfloat16()):
        found = outcome(each, images.bfloat16(), target.bfloat16())
        off.append(sum(float((found[n].double() - v).norm() / v.norm()) for n, v in expected.items() if v.norm() > 0))
    assert off[1] < 1.1 * off[0]


def test_a_copy_has_its_own_weights() -> None:
    model = make()
    use_class_token(model)
    images = torch.randn(2, 3, 24, 32).double()
    other, expected = copy.deepcopy(model), model(images)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    torch.testing.assert_close(other(images), expected, rtol=0, atol=0)
