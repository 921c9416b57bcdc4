"""The class map against plain computations in float64; what it leaves as it was; threads; errors."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import vitlab
from vitlab.analysis.class_map import class_map, log_odds
from vitlab.models.config import ResNetConfig, StemConfig, ViTConfig

Fill = Callable[..., Any]


def small(**settings: Any) -> ViTConfig:
    base: dict[str, Any] = {"image_size": (12, 20), "patch": 4, "depth": 2, "width": 12, "mlp": 20, "heads": 3}
    return ViTConfig(**(base | {"classes": 5, "dropout": 0.2, "drop_path": 0.2} | settings))


CONFIGS: dict[str, ViTConfig | ResNetConfig] = {
    "plain": small(),
    "tall, every layer's positions": small(image_size=(20, 12), positions="2d", placement="every"),
    "relative": small(positions="relative"),
    "pre-logits": small(prelogits=7),
    "hybrid": small(stem=StemConfig((), 32), patch=1),
    "mean": small(pool="mean"),
    "attention pool": small(pool="attention"),
    "axial": small(attention="axial", pool="mean"),
    "one class": small(classes=1),
    "ResNet": ResNetConfig((33, 64), (1, 1), width=32, classes=5),
}
each = pytest.mark.parametrize("name", CONFIGS)


def prepare(name: str, randomize: Fill) -> tuple[Any, Tensor]:
    model = randomize(vitlab.build(CONFIGS[name])).double().eval()
    return model, torch.randn(3, 3, *model.config.image_size, dtype=torch.float64)


def labels_of(model: Any) -> Tensor:
    return torch.tensor([1, 0, 3]) % model.config.classes


@each
def test_shape_and_sign(name: str, randomize: Fill) -> None:
    model, images = prepare(name, randomize)
    maps = class_map(model, images, labels_of(model))
    assert maps.shape == (3, *model.config.grid)
    assert (maps >= 0).all()
    assert maps.any()
    assert not maps.requires_grad


@each
def test_images_do_not_mix(name: str, randomize: Fill) -> None:
    model, images = prepare(name, randomize)
    labels = labels_of(model)
    maps = class_map(model, images, labels)
    for i in range(3):
        torch.testing.assert_close(class_map(model, images[i : i + 1], int(labels[i])), maps[i : i + 1])


def test_log_odds() -> None:
    logits = torch.randn(4, 6, dtype=torch.float64)
    labels = torch.tensor([0, 5, 2, 2])
    p = np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(1, keepdims=True)
    p = p[np.arange(4), labels]
    np.testing.assert_allclose(log_odds(logits, labels, False), np.log(p / (1 - p)), rtol=1e-12)
    assert torch.equal(log_odds(logits, labels, True), logits[torch.arange(4), labels])


@each
def test_leaves_the_model_as_it_was(name: str, randomize: Fill) -> None:
    model, images = prepare(name, randomize)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    logits = model(images)
    first = class_map(model, images, labels_of(model))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert images.grad is None
    assert not images.requires_grad
    assert torch.equal(model(images), logits)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model.requires_grad_(False)
    assert torch.equal(class_map(model, images, labels_of(model)), first)
    assert not any(p.requires_grad for p in model.parameters())


@each
def test_in_any_mode_of_the_caller(name: str, randomize: Fill) -> None:
    """Without gradients, in inference mode with weights and images that were made in it, while training."""
    model, images = prepare(name, randomize)
    expected = class_map(model, images, labels_of(model))
    with torch.no_grad():
        assert torch.equal(class_map(model, images, labels_of(model)), expected)
    with torch.inference_mode():
        frozen = copy.deepcopy(model)
        assert next(frozen.parameters()).is_inference()
        torch.testing.assert_close(class_map(frozen, images.clone(), labels_of(model)), expected)
    model.train()
    torch.testing.assert_close(class_map(model, images, labels_of(model)), expected)
    assert all(module.training for module in model.modules())
