"""The class map against plain computations in float64; what it leaves as it was; threads; errors."""

import copy
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, QUICK, family, mostly_slow
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import Tensor, nn

import vitlab
from vitlab.analysis.class_map import class_map
from vitlab.analysis.held import encode_until, held_logits
from vitlab.data.transforms import eval_image
from vitlab.errors import UserError
from vitlab.models.config import ResNetConfig, StemConfig, ViTConfig

Fill = Callable[..., Any]
SHARED = Path(os.environ.get("VITLAB_SHARED", Path(__file__).parents[3] / "shared"))
WEIGHTS = SHARED / "weights" / "vit_tiny_patch16_224.safetensors"


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
    **{name: family(name, dropout=0.2, drop_path=0.2) for name in FAMILIES},
}
NAMES = mostly_slow(CONFIGS, *(CONFIGS.keys() - FAMILIES.keys()), *QUICK)
each = pytest.mark.parametrize("name", NAMES)
each_vit = pytest.mark.parametrize("name", [name for name in NAMES if name != "ResNet"])


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
    torch.testing.assert_close(class_map(model, images, labels_of(model)), first)  # some processors round by alignment
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


# ---- the parts of tokens


@pytest.mark.parametrize("start", [0, 1])
@each_vit
def test_holding_keeps_the_logits(name: str, start: int, randomize: Fill) -> None:
    model, images = prepare(name, randomize)
    tokens = encode_until(model, model.patches(images), start)
    torch.testing.assert_close(held_logits(model, tokens, start), model(images), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("start", [0, 1])
@each_vit
def test_parts_sum_to_the_logit(name: str, start: int, randomize: Fill) -> None:
    """Without biases and positions nothing is left over: token times gradient over all tokens is the logit."""
    model, images = prepare(name, randomize)
    for key, parameter in model.named_parameters():
        if key.endswith("bias") or key.startswith("positions"):
            nn.init.zeros_(parameter)
    tokens = encode_until(model, model.patches(images), start).detach().requires_grad_()
    logits = held_logits(model, tokens, start)
    for label in range(model.config.classes):
        (gradient,) = torch.autograd.grad(logits[:, label].sum(), tokens, retain_graph=True)
        torch.testing.assert_close((tokens * gradient).sum((1, 2)), logits[:, label], rtol=1e-9, atol=1e-10)


class Frozen:
    """A block in numpy, whose attention, norms' scales and GELU's slopes stay those of the first input."""

    def __init__(self, block: Any) -> None:
        self.block, self.step = block, 0
        self.kept: list[np.ndarray] = []

    def keep(self, value: np.ndarray) -> np.ndarray:
        """The value that was computed here for the first input."""
        if self.step == len(self.kept):
            self.kept.append(value)
        self.step += 1
        return self.kept[self.step - 1]

    def norm(self, norm: Any, x: np.ndarray) -> np.ndarray:
        centered = x - x.mean(1, keepdims=True)
        scale = self.keep(1 / np.sqrt((centered**2).mean(1, keepdims=True) + norm.eps))
        return centered * scale * norm.weight.detach().numpy() + norm.bias.detach().numpy()

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.step = 0
        attention, mlp = self.block.attention, self.block.mlp
        qkv = dense(attention.qkv, self.norm(self.block.norm1, x))
        width = x.shape[1]
        side = width // attention.heads
        mixed = np.zeros_like(x)
        for head in range(attention.heads):
            q, k, v = (qkv[:, part * width + head * side :][:, :side] for part in range(3))
            powers = np.exp(q @ k.T / side**0.5)
            weights = self.keep(powers / powers.sum(1, keepdims=True))
            mixed[:, head * side : (head + 1) * side] = weights @ v
        x = x + dense(attention.out, mixed)
        y = dense(mlp.up, self.norm(self.block.norm2, x))
        slopes = self.keep(np.vectorize(lambda t: 0.5 * (1 + math.erf(t / math.sqrt(2))))(y))
        return x + dense(mlp.down, y * slopes)


def dense(layer: Any, x: np.ndarray) -> np.ndarray:
    return np.asarray(x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy())


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_a_patch_has_what_is_lost_with_a_gray_token(pool: str, randomize: Fill) -> None:
    """In numpy: the same sums and products with one token of a gray image, all that depends on tokens held."""
    model = randomize(vitlab.build(small(pool=pool, depth=4))).double().eval()
    images = torch.randn(1, 3, 12, 20, dtype=torch.float64)
    start = 1  # a third of the way
    both = torch.cat([images, torch.zeros_like(images)])
    before, gray = encode_until(model, model.patches(both), start).detach().numpy()
    blocks, final = [Frozen(block) for block in model.blocks[start:]], Frozen(None)

    def logit(x: np.ndarray, label: int) -> float:
        for block in blocks:
            x = block(x)
        final.step = 0
        x = final.norm(model.norm, x)
        return float(dense(model.head, x[:1] if pool == "token" else x.mean(0, keepdims=True))[0, label])

    for label in (0, 4):
        lost = []
        full = logit(before, label)
        for j in range(int(pool == "token"), len(before)):
            changed = before.copy()
            changed[j] = gray[j]
            lost.append(full - logit(changed, label))
        got = class_map(model, images, label)
        np.testing.assert_allclose(got.flatten(), np.maximum(lost, 0), rtol=1e-9, atol=1e-11)


def test_a_resnets_cells(randomize: Fill) -> None:
    """The class activation map: each cell of the final map, less gray, times the class's row of the head."""
    model, images = prepare("ResNet", randomize)
    cells = (model.tokens(images) - model.tokens(torch.zeros_like(images))).detach().numpy()
    expected = cells @ model.head.weight[2].detach().numpy() / cells.shape[1]
    got = class_map(model, images, 2).flatten(1)
    np.testing.assert_allclose(got, np.maximum(expected, 0), rtol=1e-9, atol=1e-12)


@each
def test_a_gray_image_has_no_evidence(name: str, randomize: Fill) -> None:
    model, images = prepare(name, randomize)
    assert class_map(model, torch.zeros_like(images), labels_of(model)).max() < 1e-12


# ---- as a server uses it


def test_threads_share_a_model(randomize: Fill) -> None:
    model, images = prepare("plain", randomize)
    expected = [class_map(model, images, label) for label in range(5)]
    with ThreadPoolExecutor(5) as pool:
        for _ in range(20):
            found = list(pool.map(lambda label: class_map(model, images, label), range(5)))
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("how", ["weights", "autocast"])
def test_low_precision(how: str, randomize: Fill) -> None:
    model, images = prepare("plain", randomize)
    expected = class_map(model, images, 1)
    kept = torch.bfloat16 if how == "weights" else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        got = class_map(model.to(kept), images.to(kept), 1)
    assert (got - expected).abs().max() < (0.1 if how == "weights" else 1e-5) * expected.max()


def test_compiled(randomize: Fill) -> None:
    torch._dynamo.reset()
    model, images = prepare("plain", randomize)
    expected = class_map(model, images, 1)
    compiled: Any = torch.compile(model, backend="eager")
    torch.testing.assert_close(class_map(compiled, images, 1), expected)


def test_errors(randomize: Fill) -> None:
    model, images = prepare("plain", randomize)
    with pytest.raises(UserError, match="there is no class 5; this model has 5, from 0 to 4"):
        class_map(model, images, 5)
    with pytest.raises(UserError, match="there is no class -1"):
        class_map(model, images, torch.tensor([0, -1, 2]))
    with pytest.raises(UserError, match=r"one for each image, not torch.int64 of shape \(2,\)"):
        class_map(model, images, torch.tensor([0, 1]))
    with pytest.raises(UserError, match=r"not torch\.float32"):
        class_map(model, images, torch.tensor(1.0))
    with pytest.raises(UserError, match="resize"):
        class_map(model, images[..., :8], 0)
    with pytest.raises(UserError, match="has no head"):
        class_map(vitlab.build(small(classes=0)), images.float(), 0)
    with pytest.raises(UserError, match="vitlab model, not Linear"):
        class_map(nn.Linear(2, 2), images, 0)  # type: ignore[arg-type]


# ---- on photos


def test_asks_for_one_of_two_photos() -> None:
    """Side by side: the evidence for a palace is in one half, that for a daisy in the other."""
    if not WEIGHTS.exists():
        pytest.skip(f"there is no {WEIGHTS}; set VITLAB_SHARED to the folder that has weights/")
    model: Any = vitlab.load(WEIGHTS)
    photos = [Image.fromarray(photo) for photo in load_sample_images().images]  # a pavilion and a dahlia
    images = [eval_image(photo, (224, 224), model.card.preprocess) for photo in photos]
    pair = torch.cat([image[:, :, 56:168] for image in images], -1)[None]
    palace, daisy = class_map(model, pair.expand(2, -1, -1, -1), torch.tensor([698, 985]))
    assert palace[:, :7].sum() > 0.7 * palace.sum()
    assert daisy[:, 7:].sum() > 0.7 * daisy.sum()
