"""A last block that computes the class token alone, beside the model as it is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import vitlab
from vitlab.kernels.class_token import use_class_token
from vitlab.kernels.compiling import compile_in_place
from vitlab.kernels.install import use_kernels
from vitlab.models.variants import Model
from vitlab.training.lora import add_updates
from vitlab.training.working_copy import WorkingCopy

SMALL: dict[str, Any] = {"image_size": (24, 32), "depth": 3, "width": 48, "heads": 3, "mlp": 80, "classes": 7}
SETTINGS: dict[str, dict[str, Any]] = {
    "the paper's": {},
    "one block": {"depth": 1},
    "prelogits": {"prelogits": 16},
    "biases of queries and values": {"qkv_bias": "qv"},
    "no biases": {"qkv_bias": "none"},
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


@pytest.mark.parametrize(
    "settings", [{"pool": "mean"}, {"pool": "token_mean"}, {"pool": "attention"}, {"positions": "relative"}]
)
def test_where_other_tokens_are_read_all_are_computed(settings: dict[str, Any]) -> None:
    model = make(**settings)
    use_class_token(model)
    assert all("forward" not in vars(part) for part in model.modules())


def test_low_rank_updates_are_part_of_the_queries() -> None:
    model = make()
    add_updates(model, 2, 4.0, seed=0)
    model.double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2)
    images, target = torch.randn(4, 3, 24, 32).double(), torch.randn(4, 7).double()
    expected = outcome(model, images, target)
    use_class_token(model)
    found = outcome(model, images, target)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10 * float(value.abs().max()), msg=name)


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


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["bfloat16", "fp8"])
def test_gradients_of_the_compiled_model_are_those_of_the_plain_one(precision: str) -> None:
    """At the paper's size, with all that a run has; smaller ones do not show what `compiling.py` names."""
    torch.manual_seed(0)
    model = vitlab.create("B/16", depth=4, classes=1000, dropout=0.0).cuda()
    torch.nn.init.normal_(model.get_parameter("head.weight"), std=0.01)
    images, classes = torch.randn(128, 3, 224, 224, device="cuda"), torch.arange(128, device="cuda")

    def gradients(part: torch.nn.Module, move: Callable[[], None]) -> dict[str, Tensor]:
        with torch.autocast("cuda", torch.bfloat16):
            logits = part(images)
        torch.nn.functional.cross_entropy(logits.float(), classes).backward()
        move()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        return found

    expected = gradients(model, lambda: None)
    working = WorkingCopy(model, float8=precision == "fp8")
    use_kernels(working.module, compiled=True)
    use_class_token(working.module)
    compile_in_place(working.module)
    found = gradients(working.module, working.move_gradients)
    off = {name: float((found[name] - value).norm() / value.norm()) for name, value in expected.items()}
    assert max(off.values()) < (0.3 if precision == "fp8" else 0.05), off
