"""int8: the arithmetic of bytes, balancing of channels, and predictions of how quantization changes margins."""

import copy
import itertools
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import fill
from families import FAMILIES
from onnx import TensorProto, helper, numpy_helper
from scipy.stats import norm
from torch import Tensor, nn

import vitlab
from vitlab.export.int8 import search
from vitlab.export.qdq import quantize_layers
from vitlab.export.quantize import (
    REACH,
    Scale,
    Way,
    balance,
    calibrate,
    count_float_layers,
    dense_layers,
    fake_quantize_weight,
    fill_biases,
    find_ways,
    make_scale,
    margin_changes,
    rank_layers,
    record_ranges,
)
from vitlab.inference.traced import traceable
from vitlab.models.config import Preprocess
from vitlab.models.vit import Block, ViT

HOW = Preprocess()


def small(**settings: Any) -> ViT:
    model = vitlab.create("Ti/8", image_size=16, classes=5, depth=2, width=32, mlp=64, heads=2, **settings)
    graph = traceable(fill(model))
    assert isinstance(graph, ViT)
    return graph


def random_pixels(n: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, 3, 16, 16), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def floats(pixels: Tensor) -> Tensor:
    return pixels.float() / 127.5 - 1  # what HOW does


# ---- bytes


def test_a_scale_rounds_as_bytes_do() -> None:
    x = np.random.default_rng(0).normal(0, 2, 1000).astype(np.float32)
    scale = make_scale(torch.tensor([-1.0, -0.5]), torch.tensor([0.3, 3.0]))
    assert scale.step == pytest.approx(4 / 255)
    assert scale.zero == 64  # 1 / (4 / 255), rounded
    stored = np.clip(np.rint(x / np.float32(scale.step)) + scale.zero, 0, 255).astype(np.uint8)
    expected = (stored.astype(np.float64) - scale.zero) * scale.step
    np.testing.assert_allclose(scale.fake_quantize(torch.from_numpy(x)).numpy(), expected, atol=1e-6)
    assert scale.fake_quantize(torch.zeros(1)).item() == 0


def test_a_scale_of_nothing_but_positive_numbers_starts_at_zero() -> None:
    scale = make_scale(torch.tensor([1.0]), torch.tensor([2.55]))
    assert scale.step == pytest.approx(0.01)
    assert scale.zero == 0


@pytest.mark.parametrize("fused", [False, True])
def test_the_quantized_graph_computes_integer_products(fused: bool) -> None:
    rng = np.random.default_rng(1)
    weight = rng.normal(0, 1, (6, 4)).astype(np.float32)
    weight[:, 2] = 0  # an output that is never used
    bias = rng.normal(0, 1, 4).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"]), helper.make_node("Add", ["y", "blocks.0.mlp.up.bias"], ["z"])],
        "one layer",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 6])],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "blocks.0.mlp.up.bias")],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    scale = Scale(0.02, 100)
    new = quantize_layers(proto, {"blocks.0.mlp.up": scale}, fused=fused)
    assert {tensor.name for tensor in proto.graph.initializer} == {"w", "blocks.0.mlp.up.bias"}  # a copy
    assert "w" not in {tensor.name for tensor in new.graph.initializer}
    onnx.checker.check_model(new, full_check=True)
    x = rng.normal(0, 1, (9, 6)).astype(np.float32)
    got = onnxruntime.InferenceSession(new.SerializeToString()).run(None, {"x": x})[0]
    stored = np.clip(np.rint(x / np.float32(0.02)) + 100, 0, 255).astype(np.int64) - 100
    steps = np.maximum(np.abs(weight).max(0), 1e-6).astype(np.float64) / 127
    product = stored @ np.rint(weight / steps.astype(np.float32)).astype(np.int64)
    units = np.float64(np.float32(0.02)) * steps
    added = bias if fused else np.rint(bias / units) * units  # for any runtime the bias is an integer too
    np.testing.assert_allclose(got, product * units + added, atol=1e-5)


def test_a_missing_layer_is_an_error() -> None:
    graph = helper.make_graph([], "nothing", [], [])
    with pytest.raises(RuntimeError, match=r"did not write blocks\.3\.mlp\.up as a product"):
        quantize_layers(helper.make_model(graph), {"blocks.3.mlp.up": Scale(1.0, 0)})


# ---- balance


SETTINGS: list[dict[str, Any]] = [{}, {"attention": "axial"}, {"pool": "attention", "positions": "relative"}]


@pytest.mark.parametrize(
    "settings", [*SETTINGS, *(FAMILIES[name] for name in ("CLIP", "DINOv3", "EVA-02", "DeiT III"))]
)
def test_calibration_changes_nothing_but_ranges(settings: dict[str, object]) -> None:
    graph = small(**settings)
    before = copy.deepcopy(graph)
    scales, _ = calibrate(graph, random_pixels(20), HOW)
    assert len(scales) == len(dense_layers(graph)) == (16 if "attention" in settings else 8)
    new = floats(random_pixels(8, seed=1))
    with torch.no_grad():
        np.testing.assert_allclose(graph(new).numpy(), before(new).numpy(), atol=1e-5)
    for name, (low, high) in record_ranges(graph, random_pixels(20), HOW).items():
        full, step = make_scale(low, high), scales[name].step
        reach = step / full.step
        assert min(REACH) - 1e-4 <= reach <= 1 + 1e-4
        assert step * -scales[name].zero == pytest.approx(reach * min(0, float(low.min())), abs=step)


def layer_error(graph: ViT, name: str, scale: Scale, pixels: Tensor) -> float:
    """The mean square of what quantizing a layer changes at its output."""
    caught: list[tuple[Tensor, Tensor]] = []
    layer = dense_layers(graph)[name]
    hook = layer.register_forward_hook(lambda _, args, out: caught.append((args[0], out)))
    with torch.no_grad():
        graph(floats(pixels))
        hook.remove()
        x, out = caught[0]
        new = nn.functional.linear(scale.fake_quantize(x), fake_quantize_weight(layer.weight), layer.bias)
        return float((new - out).pow(2).mean())


@pytest.mark.parametrize(
    "name", ["blocks.0.attention.qkv", "blocks.0.attention.out", "blocks.1.mlp.up", "blocks.1.mlp.down"]
)
def test_balancing_reduces_the_error_from_one_large_channel(name: str) -> None:
    graph = small()
    block = graph.blocks[int(name[7])]
    assert isinstance(block, Block)
    with torch.no_grad():
        if name.endswith("out"):  # large values
            block.attention.qkv.weight[2 * 32 + 5] *= 100
        elif name.endswith("down"):
            block.mlp.up.weight[5] *= 100
        else:
            (block.norm1 if name.endswith("qkv") else block.norm2).weight[5] *= 100
        dense_layers(graph)[name].weight[:, 5] /= 100
    pixels = random_pixels(20)
    low, high = record_ranges(graph, pixels, HOW)[name]
    unbalanced = layer_error(graph, name, make_scale(low, high), pixels)
    scales, _ = calibrate(graph, pixels, HOW)
    assert layer_error(graph, name, scales[name], pixels) < unbalanced / 10


def test_channel_factors_are_bounded() -> None:
    graph = small()
    block = graph.blocks[0]
    assert isinstance(block, Block)
    with torch.no_grad():
        block.norm1.weight[3] = 0
        block.norm1.bias[3] = 0  # this channel is always zero
    ways = find_ways(graph, record_ranges(graph, random_pixels(8), HOW))
    for way in itertools.chain.from_iterable(ways.values()):
        assert (way.divisor >= 0.01).all()
        assert (way.divisor <= 100).all()
    balance(graph, {name: found[0].divisor for name, found in ways.items()})
    assert all(torch.isfinite(parameter).all() for parameter in graph.parameters())


# ---- choice


def test_margin_changes_are_predicted() -> None:
    graph, pixels = small(), random_pixels(24)
    scales, _ = calibrate(graph, pixels, HOW)
    plain = {name: [Way(torch.ones(()), scale)] for name, scale in scales.items()}
    predicted = {name: change[0] for name, change in margin_changes(graph, plain, pixels, HOW).items()}
    with torch.no_grad():
        logits = graph(floats(pixels))
        best, second = logits.topk(2).indices.unbind(1)
        row = torch.arange(24)
        for name, layer in dense_layers(graph).items():
            kept = layer.weight.clone()
            layer.weight.copy_(fake_quantize_weight(kept))
            hook = layer.register_forward_pre_hook(lambda _, args, scale=scales[name]: (scale.fake_quantize(args[0]),))
            new = graph(floats(pixels))
            hook.remove()
            layer.weight.copy_(kept)
            change = (new[row, best] - new[row, second]) - (logits[row, best] - logits[row, second])
            assert np.corrcoef(change, predicted[name])[0, 1] > 0.95, name
            assert float(change.std() / predicted[name].std()) == pytest.approx(1, abs=0.2)


def test_the_way_that_changes_margins_least_is_taken() -> None:
    """By measuring every way of a layer in the complete model, in place of estimating it."""
    graph, pixels = small(), random_pixels(48)
    scales, changes = calibrate(copy.deepcopy(graph), pixels, HOW)
    fill_biases(graph)
    ways = find_ways(graph, record_ranges(graph, pixels, HOW))
    with torch.no_grad():
        logits = graph(floats(pixels))
        best, second = logits.topk(2).indices.unbind(1)
        row, spread = torch.arange(48), {}
        for name, layer in dense_layers(graph).items():
            for i, way in enumerate(ways[name]):
                hook = layer.register_forward_hook(lambda dense, args, _, way=way: way.output(dense, args[0]))
                new = graph(floats(pixels)) - logits
                hook.remove()
                spread[name, i] = float((new[row, best] - new[row, second]).double().square().mean())
    for name, found in ways.items():
        taken = next(i for i, way in enumerate(found) if way.scale == scales[name])
        least = min(spread[name, i] for i in range(len(found)))
        assert spread[name, taken] < 1.3 * least, name
        assert float(changes[name].double().square().mean()) == pytest.approx(spread[name, taken], rel=0.4)
    assert any(scales[name] != found[0].scale for name, found in ways.items())


def test_layers_are_ranked_by_variance_per_weight() -> None:
    changes = {"a": torch.tensor([2.0, -2.0]), "b": torch.tensor([3.0, 3.0]), "c": torch.tensor([1.0, -1.0])}
    got = rank_layers(changes, {"a": 10, "b": 100, "c": 1})
    assert list(got.items()) == [("c", 1.0), ("a", 4.0), ("b", 9.0)]


def test_as_many_layers_stay_float_as_the_margins_need() -> None:
    variance = {"a": 4.0, "b": 1.0, "c": 0.25}
    margins = torch.tensor([0.5, 1.0, 3.0])
    for left in range(3):
        rest = sum(list(variance.values())[left:])
        expected = norm.cdf(margins.numpy() / rest**0.5).mean()
        assert count_float_layers(variance, margins, expected - 1e-6) == left
        assert count_float_layers(variance, margins, expected + 1e-6) == left + 1


@pytest.mark.parametrize("off", [1.0, 1.5, 3.0])
def test_the_search_allows_for_an_estimate_that_is_off(off: float) -> None:
    """Agreement that is worse than expected by a factor: found in few tries, and not with many layers too many."""
    variance = {str(i): 2 * 0.8**i for i in range(48)}
    logits = 5 * torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
    best, second = logits.topk(2).values.unbind(1)

    def share(count: int) -> float:
        left = sum(list(variance.values())[count:])
        return 1 - off * (1 - float(norm.cdf((best - second).numpy() / left**0.5).mean()))

    tried: list[int] = []

    def measure(floats: tuple[str, ...]) -> tuple[float, float]:
        tried.append(len(floats))
        return share(len(floats)), 0.0

    least = share(12)
    floats, found, _ = search(measure, variance, logits, least, wanted=0.0)
    assert found >= least
    assert len(tried) <= 3
    assert list(variance)[: len(floats)] == list(floats)
    assert 12 <= len(floats) <= 20
    assert len(search(measure, variance, logits, share(0), wanted=0.9999)[0]) == 48 // 8  # so many are cheap


def test_a_few_more_layers_stay_float_for_the_agreement_that_is_wanted() -> None:
    """Where what is measured is enough but less than wanted, though the estimate had promised it."""
    variance = {str(i): 1e-9 for i in range(48)}  # so small that no layer is expected to matter
    logits = 5 * torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
    tried: list[int] = []

    def measure(floats: tuple[str, ...]) -> tuple[float, float]:
        tried.append(len(floats))
        return 0.975 + gain * len(floats), 0.0

    for gain, counts in ((0.002, [0, 4]), (0.001, [0, 4, 6]), (0.0, [0, 4, 6])):
        tried.clear()
        floats, share, _ = search(measure, variance, logits, 0.96, wanted=0.98)
        assert tried == counts
        assert len(floats) == counts[-1]
        assert share == pytest.approx(0.975 + gain * counts[-1])
    tried.clear()
    assert search(measure, variance, logits, 0.96, wanted=0.97)[0] == ()
