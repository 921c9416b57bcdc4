"""Schedules, decay masks, clipping, averaging: against closed forms and plain loops."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

import vitlab
from vitlab.models.resnet import ResNet
from vitlab.models.vit import ViT
from vitlab.training.masked import MaskedPatches
from vitlab.training.optim import (
    Average,
    Decay,
    clip_gradients,
    is_decayed,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)


@pytest.mark.parametrize("warmup", [0, 1, 7, 50])
@pytest.mark.parametrize("decay", ["linear", "cosine", "constant", "wsd"])
def test_rate_at_every_step(decay: Decay, warmup: int) -> None:
    base, steps = 3e-3, 173
    for step in range(steps):
        if step < warmup:
            expected = base * step / warmup
        elif decay == "linear":
            expected = base * (steps - step) / (steps - warmup)
        elif decay == "cosine":
            expected = base * math.cos(math.pi / 2 * (step - warmup) / (steps - warmup)) ** 2
        elif decay == "wsd":  # a straight line over the last fifth of the steps after the warm-up
            expected = float(np.interp(step, [steps - (steps - warmup) / 5, steps], [base, 0]))
        else:
            expected = base
        found = learning_rate(step, base=base, steps=steps, warmup=warmup, decay=decay)
        assert found == pytest.approx(expected, rel=1e-12)


def test_linear_decay_to_a_rate_of_its_own() -> None:
    """A straight line from the base, after the warm-up, to the end, which the step after the last would have."""
    for step in range(10, 110):
        found = learning_rate(step, base=8e-4, steps=110, warmup=10, decay="linear", end=1e-5)
        assert found == pytest.approx(np.interp(step, [10, 110], [8e-4, 1e-5]), rel=1e-12)
        late = learning_rate(step, base=8e-4, steps=110, warmup=10, decay="wsd", end=1e-5)
        assert late == pytest.approx(np.interp(step, [90, 110], [8e-4, 1e-5]), rel=1e-12)
    for decay in ("cosine", "constant"):
        assert learning_rate(50, base=1.0, steps=90, warmup=10, decay=decay, end=0.5) == learning_rate(
            50, base=1.0, steps=90, warmup=10, decay=decay
        )


def test_rate_agrees_with_torch_schedulers() -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    for step in range(40):
        found = learning_rate(step, base=0.5, steps=40, warmup=0, decay="cosine")
        assert found == pytest.approx(schedule.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        schedule.step()


SMALL = {"depth": 2, "width": 64, "mlp": 64, "heads": 4, "classes": 3, "image_size": 32}


def masked() -> MaskedPatches:
    model = vitlab.create("Ti/16", **SMALL)
    assert isinstance(model, ViT)
    return MaskedPatches(model, 512)


KINDS: dict[str, Callable[[], nn.Module]] = {
    "token": lambda: vitlab.create("Ti/16", **SMALL, prelogits=8),
    "2d every": lambda: vitlab.create("Ti/16", **SMALL, positions="2d", placement="every"),
    "relative": lambda: vitlab.create("Ti/16", **SMALL, positions="relative"),
    "sinusoidal": lambda: vitlab.create("Ti/16", **SMALL, positions="sinusoidal"),
    "attention pool": lambda: vitlab.create("Ti/16", **SMALL, pool="attention"),
    "axial": lambda: vitlab.create("Ti/16", **SMALL, attention="axial"),
    "hybrid": lambda: vitlab.create("R26+S/32", **SMALL),
    "resnet": lambda: vitlab.create("R50x1", classes=3, image_size=32),
    "masked": masked,
}


@pytest.mark.parametrize("kind", KINDS)
def test_only_kernels_decay(kind: str) -> None:
    model = KINDS[kind]()
    kernels = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert kernels
    for name, parameter in model.named_parameters():
        assert is_decayed(name, parameter) == (id(parameter) in kernels), name


def test_decay_changes_kernels_and_nothing_else() -> None:
    """With zero gradients a step is decay alone: kernels shrink by 1 - lr * decay, all else stays bit for bit."""
    model = vitlab.create("Ti/16", **SMALL, positions="relative")
    for p in model.parameters():
        nn.init.normal_(p)
        p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer(model, "adamw", weight_decay=0.3, betas=(0.9, 0.999), momentum=0.0)
    set_learning_rate(optimizer, 0.1)
    optimizer.step()
    for name, p in model.named_parameters():
        if name.endswith("weight") and "norm" not in name:
            torch.testing.assert_close(p, before[name] * (1 - 0.1 * 0.3))
        else:
            assert torch.equal(p, before[name]), name


def test_clip_scales_to_the_norm() -> None:
    torch.manual_seed(0)
    layers = [nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(7)), nn.Parameter(torch.randn(2))]
    for p in layers[:2]:
        p.grad = torch.randn_like(p)
    own = [p.grad.clone() for p in layers[:2] if p.grad is not None]
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in own))
    assert float(clip_gradients(layers, 0.0)) == pytest.approx(norm, rel=1e-6)
    assert all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(layers, own, strict=False))
    assert float(clip_gradients(layers, 1.0)) == pytest.approx(norm, rel=1e-6)
    for p, g in zip(layers, own, strict=False):
        torch.testing.assert_close(p.grad, g / norm, rtol=1e-5, atol=0)


def test_average_is_the_recursion_and_gives_the_weights_back() -> None:
    layer = nn.Linear(4, 3)
    average = Average(layer, decay=0.5)
    slow = {name: p.detach().double().clone() for name, p in layer.named_parameters()}
    for step in range(30):
        for p in layer.parameters():
            nn.init.normal_(p)
        average.update(step)
        d = min(0.5, (1 + step) / (10 + step))
        slow = {name: d * slow[name] + (1 - d) * p.detach().double() for name, p in layer.named_parameters()}
    own = {name: p.detach().clone() for name, p in layer.named_parameters()}
    with average.swap_in():
        for name, p in layer.named_parameters():
            torch.testing.assert_close(p.double(), slow[name], rtol=1e-5, atol=1e-6)
    assert all(torch.equal(p, own[name]) for name, p in layer.named_parameters())


def test_kinds_cover_the_families() -> None:
    families = {type(make()) for make in KINDS.values()}
    assert families == {ViT, ResNet, MaskedPatches}
