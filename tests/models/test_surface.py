"""What every model can do, whatever it is made of."""

import copy
import dataclasses
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, QUICK, family, mostly_slow
from torch import Tensor, nn

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, ResNetConfig, StemConfig, ViTConfig
from vitlab.models.resnet import fixed_kernels
from vitlab.models.vit import DropPath

SMALL, OTHER = (32, 48), (48, 32)


def small(**settings: Any) -> ViTConfig:
    base: dict[str, Any] = {"image_size": SMALL, "patch": 16, "depth": 2, "width": 24, "mlp": 32, "heads": 2}
    return ViTConfig(**(base | {"classes": 5} | settings))


CONFIGS: dict[str, ModelConfig] = {
    "plain": small(prelogits=6),
    "every": small(placement="every"),
    "none": small(positions="none", pool="mean"),
    "2d": small(positions="2d", placement="every"),
    "2d, mean": small(positions="2d", placement="shared", pool="mean"),
    "relative": small(positions="relative"),
    "sinusoidal": small(positions="sinusoidal", placement="shared", gelu="tanh"),
    "sincos2d": small(positions="sincos2d"),
    "attention pool": small(pool="attention"),
    "axial": small(attention="axial", pool="mean"),
    "hybrid": small(stem=StemConfig((1, 1, 1), width=32), patch=1, depth=1),
    "root": small(stem=StemConfig((), width=32), patch=4, depth=1),
    "BiT": ResNetConfig(SMALL, (1, 1), width=32, classes=5),
    "AxialResNet": ResNetConfig(SMALL, (1, 1), width=32, classes=5, attention="axial"),
    **{name: family(name) for name in FAMILIES},
}
each = pytest.mark.parametrize("name", mostly_slow(CONFIGS, *(CONFIGS.keys() - FAMILIES.keys()), *QUICK))
# tracing takes seconds for each: the plain model in every run of the tests, the others in the slow ones
each_traced = pytest.mark.parametrize(
    "name", [name if name == "plain" else pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS]
)
Fill = Callable[..., Any]


def images_for(model: Any, batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, *model.config.image_size)


@each
def test_forward_and_backward_at_two_sizes(name: str, randomize: Fill) -> None:
    model = randomize(vitlab.build(CONFIGS[name]))
    for size in (SMALL, OTHER, (64, 64)):
        images = images_for(model.resize(size)).requires_grad_()
        model.zero_grad()
        logits = model(images)
        assert logits.shape == (2, 5)
        (logits.square().sum() + model.tokens(images).square().sum()).backward()  # the class token is not all
        for part, parameter in [*model.named_parameters(), ("images", images)]:
            assert parameter.grad is not None, part
            assert parameter.grad.isfinite().all(), part
            assert parameter.grad.any() or parameter.numel() == 0, part


@each
def test_shapes_and_the_way_to_the_logits(name: str, randomize: Fill) -> None:
    model = randomize(vitlab.build(CONFIGS[name])).eval()
    images = images_for(model, 3)
    tokens, features = model.tokens(images), model.features(images)
    channels = model.config.width if isinstance(model.config, ViTConfig) else model.config.channels
    assert tokens.shape == (3, model.config.length, channels)
    assert features.shape == (3, model.head.in_features)
    torch.testing.assert_close(model(images), model.head(features), rtol=0, atol=0)


@each
def test_each_image_by_itself(name: str, randomize: Fill) -> None:
    model = randomize(vitlab.build(CONFIGS[name])).double().eval()
    images = images_for(model, 3).double()
    alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(model(images), alone, rtol=1e-10, atol=1e-10)
    assert (alone[0] - alone[1]).abs().max() > 1e-3


@each
def test_no_images(name: str) -> None:
    model = vitlab.build(CONFIGS[name]).eval()
    assert model(images_for(model, 0)).shape == (0, 5)


@each
def test_no_head(name: str, randomize: Fill) -> None:
    model = randomize(vitlab.build(dataclasses.replace(CONFIGS[name], classes=0))).eval()
    images = images_for(model)
    assert model.head is None
    torch.testing.assert_close(model(images), model.features(images), rtol=0, atol=0)


@pytest.mark.slow
@each_traced
def test_compile(name: str, randomize: Fill) -> None:
    """One graph, the same numbers, the same gradients."""
    torch._dynamo.reset()
    model = randomize(vitlab.build(CONFIGS[name]))
    compiled: Any = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    images = images_for(model)
    for run in (model, compiled):
        run(images).square().sum().backward()
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), compiled.parameters(), strict=True):
        assert (theirs.grad - ours.grad).norm() <= 1e-3 * ours.grad.norm() + 1e-4


@pytest.mark.slow
def test_compile_with_dropout(randomize: Fill) -> None:
    """Chance and all in one graph, forwards and backwards."""
    torch._dynamo.reset()
    model = randomize(vitlab.build(small(dropout=0.2, drop_path=0.2)))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    images = images_for(model)
    first, again = compiled(images), compiled(images)
    assert not torch.equal(first, again)
    first.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
def test_compile_then_resize(randomize: Fill) -> None:
    torch._dynamo.reset()
    model = randomize(vitlab.build(small(positions="relative", depth=1))).eval()
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(images_for(model))
    model.resize(OTHER)
    images = images_for(model)
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
    with pytest.raises(UserError, match="resize"):
        model(torch.randn(2, 3, *SMALL))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler, and there is no g++")
def test_inductor(randomize: Fill) -> None:
    torch._dynamo.reset()
    model = randomize(vitlab.build(small(depth=1))).eval()
    images = images_for(model)
    with torch.no_grad():
        compiled: Any = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@each_traced
def test_export(name: str, randomize: Fill) -> None:
    """With any number of images."""
    model = randomize(vitlab.build(CONFIGS[name])).eval()
    program = torch.export.export(
        model, (images_for(model),), dynamic_shapes={"images": {0: torch.export.Dim("batch")}}
    )
    exported = program.module()
    for batch in (1, 2, 5):
        images = images_for(model, batch)
        torch.testing.assert_close(exported(images), model(images), rtol=1e-4, atol=1e-4)


@each
def test_deepcopy(name: str, randomize: Fill) -> None:
    model = randomize(vitlab.build(CONFIGS[name])).resize(OTHER).eval()
    twin = copy.deepcopy(model)
    images = images_for(model)
    before = model(images)
    torch.testing.assert_close(twin(images), before, rtol=0, atol=0)
    randomize(twin, seed=1)
    twin.resize(SMALL)
    torch.testing.assert_close(model(images), before, rtol=0, atol=0)  # nothing is shared
    assert model.config.image_size == OTHER


@pytest.mark.parametrize("name", ["hybrid", "BiT", "AxialResNet"])
def test_kernels_are_fixed_in_eval_mode_alone(name: str, randomize: Fill) -> None:
    """The same values to the bit; training sees weights that change, and so does everything afterwards."""
    model = randomize(vitlab.build(CONFIGS[name])).eval()
    images = images_for(model)
    with torch.no_grad():
        before = model(images)
        with fixed_kernels(model):
            assert torch.equal(model(images), before)
            randomize(model, seed=1)
            other = randomize(vitlab.build(CONFIGS[name]), seed=1)
            assert torch.equal(model.train()(images), other(images))
        assert torch.equal(model.eval()(images), other.eval()(images))
        assert not torch.equal(model(images), before)


@each
@pytest.mark.parametrize("resized", [False, True])
def test_state_dict_round_trip(name: str, resized: bool, randomize: Fill) -> None:
    model = randomize(vitlab.build(CONFIGS[name])).eval()
    if resized:
        model.resize(OTHER)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    twin = vitlab.build(model.config).eval()
    twin.load_state_dict(state, strict=True)
    images = images_for(model)
    torch.testing.assert_close(twin(images), model(images), rtol=0, atol=0)


@each
def test_autocast(name: str, randomize: Fill) -> None:
    model = randomize(vitlab.build(CONFIGS[name]))
    images = images_for(model)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
        logits.float().square().sum().backward()
    expected = model(images)
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in model.parameters())


@each
def test_half_precision_weights(name: str, randomize: Fill) -> None:
    model = randomize(vitlab.build(CONFIGS[name])).eval()
    images = images_for(model)
    expected = model(images)
    logits = model.bfloat16()(images.bfloat16())
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


# ---- dropout and stochastic depth


def test_randomness_is_for_training(randomize: Fill) -> None:
    for name in ("plain", "attention pool", "axial"):
        config = CONFIGS[name]
        assert isinstance(config, ViTConfig)
        quiet = randomize(vitlab.build(config)).eval()
        noisy = randomize(vitlab.build(dataclasses.replace(config, dropout=0.4, drop_path=0.4)))
        images = images_for(quiet)
        torch.testing.assert_close(noisy.eval()(images), quiet(images), rtol=0, atol=0)
        noisy.train()
        assert not torch.equal(noisy(images), noisy(images))
        quiet.train()
        torch.testing.assert_close(quiet(images), quiet(images), rtol=0, atol=0)


def test_dropout_places() -> None:
    """After the positions, after the attention's output, after both layers of each MLP; nowhere else."""
    model = vitlab.build(small(dropout=0.25))
    places = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    parts = [f"blocks.{i}.{part}.dropout" for i in range(2) for part in ("attention", "mlp")]
    assert places == dict.fromkeys(["dropout", *parts], 0.25)
    calls: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(lambda _, inputs, output, name=name: calls.append(name))
    model(images_for(model))
    assert sorted(calls) == sorted(["dropout", *parts, *(p for p in parts if "mlp" in p)])


@pytest.mark.parametrize("place", ["dropout", "blocks.1.attention.dropout", "blocks.0.mlp.dropout"])
def test_dropout_rate(place: str, randomize: Fill) -> None:
    rate, zeros, means = 0.3, [], []
    model = randomize(vitlab.build(small(dropout=rate)))

    def watch(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        live = inputs[0] != 0
        zeros.append((output == 0)[live])
        means.append((output / inputs[0])[live])

    model.get_submodule(place).register_forward_hook(watch)
    model(images_for(model, 64))
    dropped, ratio = torch.cat(zeros).double(), torch.cat(means).double()
    error = 5 * (rate * (1 - rate) / len(dropped)) ** 0.5  # five standard errors of a share
    assert abs(dropped.mean() - rate) < error
    assert abs(ratio.mean() - 1) < error / (1 - rate)


@pytest.mark.parametrize("shape", [(20000, 3, 4), (20000, 2, 2, 4)])
def test_drop_path_leaves_out_whole_images(shape: tuple[int, ...]) -> None:
    rate = 0.3
    layer, x = DropPath(rate), torch.rand(shape) + 0.5
    y = layer(x)
    gone = (y == 0).flatten(1)
    assert torch.equal(gone.all(1), gone.any(1))
    error = 5 * (rate * (1 - rate) / len(x)) ** 0.5
    assert abs(gone[:, 0].double().mean() - rate) < error
    kept = ~gone[:, 0]
    torch.testing.assert_close(y[kept], x[kept] / (1 - rate))
    assert torch.equal(layer.eval()(x), x)


def test_drop_path_grows_with_depth(randomize: Fill) -> None:
    """Linearly, from nothing at the first layer to the full rate at the last; both branches."""
    model = randomize(vitlab.build(small(depth=4, drop_path=0.6)))
    passed: dict[int, list[Tensor]] = {layer: [] for layer in range(4)}
    for layer, part in enumerate(model.blocks):
        part.drop_path.register_forward_hook(
            lambda _, i, y, layer=layer: passed[layer].append((y == 0).flatten(1).all(1))
        )
    model(images_for(model, 3000))
    for layer, gone in passed.items():
        assert len(gone) == 2
        rate = 0.6 * layer / 3
        for branch in gone:
            assert abs(branch.double().mean() - rate) <= 5 * (rate * (1 - rate) / 3000) ** 0.5
        assert layer == 0 or not torch.equal(*gone)


# ---- images a model cannot take


def one_sentence(error: BaseException) -> str:
    text = str(error)
    assert "\n" not in text
    assert text
    return text


@each
def test_wrong_size_names_resize(name: str) -> None:
    model = vitlab.build(CONFIGS[name])
    with pytest.raises(UserError) as caught:
        model(torch.randn(1, 3, *OTHER))
    text = one_sentence(caught.value)
    assert "32x48" in text
    assert "48x32" in text
    assert "model.resize((48, 32))" in text


WRONG = {
    "grey": (torch.zeros(1, 1, *SMALL), "RGB"),
    "alpha": (torch.zeros(1, 4, *SMALL), "RGB"),
    "channels last": (torch.zeros(1, *SMALL, 3), "RGB"),
    "no batch": (torch.zeros(3, *SMALL), "RGB"),
    "bytes": (torch.zeros(1, 3, *SMALL, dtype=torch.uint8), "uint8"),
    "integers": (torch.zeros(1, 3, *SMALL, dtype=torch.int64), "int64"),
    "double": (torch.zeros(1, 3, *SMALL, dtype=torch.float64), "float64"),
    "half": (torch.zeros(1, 3, *SMALL, dtype=torch.float16), "float16"),
}


@pytest.mark.parametrize("name", ["plain", "hybrid", "BiT"])
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("method", ["forward", "tokens", "features"])
def test_wrong_images(name: str, wrong: str, method: str) -> None:
    images, word = WRONG[wrong]
    with pytest.raises(UserError) as caught:
        getattr(vitlab.build(CONFIGS[name]), method)(images)
    assert word in one_sentence(caught.value)


def test_double_images_under_autocast() -> None:
    """Autocast narrows float32 but leaves float64 alone."""
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(UserError, match="float64"):
        vitlab.build(CONFIGS["plain"])(WRONG["double"][0])


@pytest.mark.parametrize("images", [np.zeros((1, 3, *SMALL), np.float32), [[0.0]], None])
def test_not_a_tensor(images: Any) -> None:
    with pytest.raises(UserError, match="tensor"):
        vitlab.build(CONFIGS["plain"])(images)


@each
def test_impossible_resize_changes_nothing(name: str) -> None:
    model = vitlab.build(CONFIGS[name])
    for size in (0, -32, (32,), (32, 32, 32), "32", 2.5):
        with pytest.raises(UserError) as caught:
            model.resize(size)  # type: ignore[arg-type]
        assert "image_size" in one_sentence(caught.value)
    if isinstance(CONFIGS[name], ViTConfig):
        with pytest.raises(UserError, match="32 or 48"):
            model.resize((32, 40))
    assert model.config == CONFIGS[name]
    model(images_for(model))


def test_images_on_another_device() -> None:
    model = vitlab.create("Ti/16", image_size=16, depth=1)
    with pytest.raises(vitlab.UserError, match="images are on meta and the model is on cpu"):
        model(torch.empty(1, 3, 16, 16, device="meta"))


def test_resizing_to_the_same_size_keeps_the_parameters() -> None:
    model = vitlab.create("Ti/16", image_size=16, depth=1)
    before = list(model.parameters())
    assert all(a is b for a, b in zip(before, model.resize(16).parameters(), strict=True))
