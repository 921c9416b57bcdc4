"""Attention weights against the blocks' outputs and against a plain computation in float64."""

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, QUICK, family, mostly_slow
from torch import Tensor, nn

import vitlab
from vitlab.analysis.attention import each_attention
from vitlab.errors import UserError
from vitlab.models.config import ResNetConfig, StemConfig, ViTConfig
from vitlab.models.vit import Attention

Fill = Callable[..., Any]


def small(**settings: Any) -> ViTConfig:
    base: dict[str, Any] = {"image_size": (12, 20), "patch": 4, "depth": 2, "width": 12, "mlp": 20, "heads": 3}
    return ViTConfig(**(base | {"classes": 5, "dropout": 0.2, "drop_path": 0.2} | settings))


CONFIGS = {
    "plain": small(),
    "mean": small(pool="mean", positions="2d"),
    "attention pool": small(pool="attention", image_size=(20, 12)),
    "relative": small(positions="relative"),
    "relative, no token": small(positions="relative", pool="mean"),
    "axial": small(attention="axial", pool="mean"),
    "axial, tall": small(attention="axial", pool="attention", image_size=(20, 12)),
    "axial, one row": small(attention="axial", pool="mean", image_size=(4, 20)),
    "hybrid": small(stem=StemConfig((), 32), patch=1),
    "one patch": small(image_size=(4, 4), pool="mean"),
    **{name: family(name, dropout=0.2, drop_path=0.2) for name in FAMILIES},
}
each = pytest.mark.parametrize("name", mostly_slow(CONFIGS, *(CONFIGS.keys() - FAMILIES.keys()), *QUICK))


def prepare(name: str, randomize: Fill) -> tuple[Any, Tensor]:
    model = randomize(vitlab.build(CONFIGS[name])).double()
    return model, torch.randn(2, 3, *model.config.image_size, dtype=torch.float64)


def record_layers(model: Any, images: Tensor) -> list[tuple[Attention, np.ndarray, np.ndarray]]:
    """Per attention layer its module, input and output, both (B, N, D) in raster order."""
    seen: list[tuple[Attention, np.ndarray, np.ndarray]] = []
    layers = [m for m in model.modules() if isinstance(m, Attention)]

    def flat(x: Tensor) -> np.ndarray:
        if x.ndim == 4:  # an axial block: columns come as (B, w, h, D)
            x = x.transpose(1, 2) if len(seen) % 2 else x
            x = x.flatten(1, 2)
        return x.detach().numpy().copy()

    def catch(m: Any, inputs: tuple[Tensor], y: Tensor) -> None:
        seen.append((m, flat(inputs[0]), flat(y)))

    hooks = [layer.register_forward_hook(catch) for layer in layers]
    with torch.no_grad():
        copy.copy(model).eval()(images)
    for hook in hooks:
        hook.remove()
    return seen


def numbers(layer: nn.Linear) -> tuple[np.ndarray, np.ndarray]:
    bias = np.zeros(layer.out_features) if layer.bias is None else layer.bias.detach().numpy()
    return layer.weight.detach().numpy(), bias


def layer_norm(norm: nn.Module, x: np.ndarray) -> np.ndarray:
    """Of the last axis; the values as they are where a model has no norm there."""
    if isinstance(norm, nn.Identity):
        return x
    assert isinstance(norm, nn.LayerNorm)
    scaled = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + norm.eps)
    return scaled * norm.weight.detach().numpy() + norm.bias.detach().numpy()


def turn(c: ViTConfig, x: np.ndarray) -> np.ndarray:
    """Rotary positions of (tokens, head width): complex numbers times exp(i angle); the first tokens stay."""
    if c.rotary == "none":
        return x
    k = c.width // c.heads
    first, second = (
        (slice(0, k // 2), slice(k // 2, k)) if c.rotary_layout == "halves" else (slice(0, k, 2), slice(1, k, 2))
    )
    rate = c.rotary_base ** -(np.arange(k // 4) / (k // 4))
    out = x.copy()
    for n in range(c.grid[0] * c.grid[1]):
        cell, side = np.array(divmod(n, c.grid[1])), np.array(c.grid)
        scaled = cell / side * c.rotary_grid if c.rotary_grid else cell
        place = scaled if c.rotary == "cells" else 2 * np.pi * ((2 * cell + 1) / side - 1)
        row = x[n + c.prefix]
        turned = (row[first] + 1j * row[second]) * np.exp(1j * (place[:, None] * rate).ravel())
        out[n + c.prefix, first], out[n + c.prefix, second] = turned.real, turned.imag
    return out


def project(layer: Attention, c: ViTConfig, x: np.ndarray) -> list[np.ndarray]:
    """Queries, keys and values of tokens (N, D), each (N, D): biases, norms of heads and turns by hand."""
    matrix, shift = numbers(layer.qkv)
    if layer.qv_bias is not None:
        q, v = np.split(layer.qv_bias.detach().numpy(), 2)
        shift = np.concatenate([q, np.zeros_like(q), v])
    queries, keys, values = np.split(x @ matrix.T + shift, 3, axis=1)
    k = c.width // c.heads
    for rows, norm in ((queries, layer.q_norm), (keys, layer.k_norm)):
        for head in range(c.heads):
            part = slice(head * k, (head + 1) * k)
            rows[:, part] = turn(c, layer_norm(norm, rows[:, part]))
    return [queries, keys, values]


@each
def test_shapes_and_sums(name: str, randomize: Fill) -> None:
    model, images = prepare(name, randomize)
    c = model.config
    maps = vitlab.attention(model, images)
    assert len(maps) == (2 * c.depth if c.attention == "axial" else c.depth)
    cells = c.grid[0] * c.grid[1] + c.token + c.registers  # the class token and registers have rows and columns
    for one in maps:
        assert one.shape == (2, c.heads, cells, cells)
        assert not one.requires_grad
        assert (one >= 0).all()
        torch.testing.assert_close(one.sum(-1), torch.ones_like(one[..., 0]), rtol=0, atol=1e-12)


@each
def test_times_the_values_is_the_output(name: str, randomize: Fill) -> None:
    model, images = prepare(name, randomize)
    model.eval()
    c, maps = model.config, vitlab.attention(model, images)
    layers = record_layers(model, images)
    assert len(layers) == len(maps)
    k = c.width // c.heads
    for (layer, x, y), weights in zip(layers, maps, strict=True):
        out, bias = numbers(layer.out)
        for image in range(2):
            values = project(layer, c, x[image])[2]
            heads = [weights[image, h].numpy() @ values[:, h * k : (h + 1) * k] for h in range(c.heads)]
            joined = layer_norm(layer.norm, np.concatenate(heads, 1))
            np.testing.assert_allclose(joined @ out.T + bias, y[image], rtol=1e-10, atol=1e-11)


def offset(layer: Attention, c: ViTConfig, i: int, j: int) -> np.ndarray | float:
    """The embedding of key j's place seen from query i."""
    if layer.relative is None:
        return 0.0
    offsets, token = layer.relative.offsets.detach().numpy(), layer.relative.token.detach().numpy()
    if c.token and 0 in (i, j):
        return token[0 if i == j else 1 if i == 0 else 2]
    (yi, xi), (yj, xj) = divmod(i - c.token, c.grid[1]), divmod(j - c.token, c.grid[1])
    return offsets[yi - yj + c.grid[0] - 1, xi - xj + c.grid[1] - 1]


def attends(c: ViTConfig, layer: int, i: int, j: int) -> bool:
    """Whether query i may attend to key j: along rows in even layers of an axial model, along columns in odd ones."""
    (yi, xi), (yj, xj) = divmod(i, c.grid[1]), divmod(j, c.grid[1])
    return c.attention == "full" or (xi == xj if layer % 2 else yi == yj)


@each
def test_values(name: str, randomize: Fill) -> None:
    """exp(q k / sqrt(K)) over its sum, one query at a time."""
    model, images = prepare(name, randomize)
    model.eval()
    c, maps = model.config, vitlab.attention(model, images)
    k = c.width // c.heads
    for number, (layer, x, _) in enumerate(record_layers(model, images)):
        q, keys, _ = project(layer, c, x[1])
        for head in range(c.heads):
            part = slice(head * k, (head + 1) * k)
            for i in range(len(q)):
                powers = np.zeros(len(q))
                for j in range(len(q)):
                    if attends(c, number, i, j):
                        powers[j] = np.exp(q[i, part] @ (keys[j] + offset(layer, c, i, j))[part] / k**0.5)
                got = maps[number][1, head, i].numpy()
                np.testing.assert_allclose(got, powers / powers.sum(), rtol=1e-10, atol=1e-14)


@each
@pytest.mark.parametrize("training", [True, False])
def test_leaves_the_model_as_it_was(name: str, training: bool, randomize: Fill) -> None:
    model, images = prepare(name, randomize)
    model.train(training)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    first, again = vitlab.attention(model, images), vitlab.attention(model, images)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))  # no dropout, even while training
    assert all(module.training == training for module in model.modules())
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("training", [True, False])
def test_leaves_each_part_in_its_mode(training: bool, randomize: Fill) -> None:
    """One part frozen while the rest trains, or the other way round."""
    model, images = prepare("hybrid", randomize)
    model.train(training)
    model.stem.train(not training)
    modes = [module.training for module in model.modules()]
    vitlab.attention(model, images)
    assert [module.training for module in model.modules()] == modes


def test_a_failure_leaves_no_hooks(randomize: Fill) -> None:
    model, images = prepare("plain", randomize)
    with pytest.raises(UserError, match="resize"):
        vitlab.attention(model, images[..., :8])
    assert model.training
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def compiled_outside(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compiled_by_block(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="eager")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("how", [compiled_outside, compiled_in_place, compiled_by_block])
@pytest.mark.parametrize("name", mostly_slow(["plain", "axial"], "plain"))
def test_compiled_models(name: str, how: Callable[[Any], Any], randomize: Fill) -> None:
    torch._dynamo.reset()
    model, images = prepare(name, randomize)
    model.eval()
    expected, logits = vitlab.attention(model, images), model(images)
    compiled = how(copy.deepcopy(model))
    for _ in range(2):
        with torch.no_grad():  # as attention() runs it, so that the graph made here is found again there
            torch.testing.assert_close(compiled(images), logits)
        for got, one in zip(vitlab.attention(compiled, images), expected, strict=True):
            torch.testing.assert_close(got, one)


def test_another_thread_may_run_the_model_meanwhile(randomize: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compile: a stance would be the process's."""
    model, images = prepare("plain", randomize)
    expected, eager = vitlab.attention(model, images), model.forward

    def interrupted(x: Tensor) -> Tensor:
        y = eager(x)
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=eager, args=(torch.zeros_like(x),))  # passes the same hooks
            other.start()
            other.join()
        return y

    monkeypatch.setattr(model, "forward", interrupted)
    monkeypatch.setattr(torch.compiler, "set_stance", None)
    for got, one in zip(vitlab.attention(model, images), expected, strict=True):
        assert torch.equal(got, one)


@pytest.mark.parametrize("name", ["plain", "relative", "axial"])
@pytest.mark.parametrize("way", ["weights", "autocast"])
def test_low_precision(name: str, way: str, randomize: Fill) -> None:
    """Weights come in float32 at least, and their rows still sum to 1."""
    model, images = prepare(name, randomize)
    expected = vitlab.attention(model, images)
    kept = torch.bfloat16 if way == "weights" else torch.float32
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        maps = vitlab.attention(model.to(kept), images.to(kept))
    for got, one in zip(maps, expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]), rtol=0, atol=1e-5)
        assert (got - one).abs().max() < 0.1


def test_after_resize(randomize: Fill) -> None:
    for name in ("relative", "axial"):
        model, _ = prepare(name, randomize)
        model.resize((8, 16))
        maps = vitlab.attention(model, torch.randn(1, 3, 8, 16, dtype=torch.float64))
        assert {one.shape[-1] for one in maps} == {8 + model.config.token}


def test_other_models_are_an_error() -> None:
    resnet = vitlab.build(ResNetConfig((32, 32), (1,), width=32))
    with pytest.raises(UserError, match="ResNet; patches, tokens and attention"):
        vitlab.attention(resnet, torch.zeros(1, 3, 32, 32))
    with pytest.raises(UserError, match="vitlab model, not Linear"):
        vitlab.attention(nn.Linear(2, 2), torch.zeros(1, 2))  # type: ignore[arg-type]


@each
def test_a_layer_at_a_time(name: str, randomize: Fill) -> None:
    """The same weights, without gradients, and a layer is gone when the next one comes."""
    model, images = prepare(name, randomize)
    expected = vitlab.attention(model, images)
    maps = each_attention(model, images)
    before: weakref.ref[Tensor] | None = None
    for layer in expected:
        found = next(maps)
        assert torch.equal(found, layer)
        assert not found.requires_grad
        assert before is None or before() is None
        before = weakref.ref(found)
        del found
    assert next(maps, None) is None
