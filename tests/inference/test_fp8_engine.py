"""Finished models in 8 bits: exact where 8 bits are enough, with scales from images, checked against float32."""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Randomize
from torch import Tensor, nn

import vitlab
from vitlab.errors import UserError
from vitlab.evaluation.piece_cache import model_key
from vitlab.export.scales_file import find_scales, scales_path
from vitlab.inference import calibration, effects
from vitlab.inference.calibration import (
    agreement,
    calibrate,
    check_hardware,
    check_model,
    largest_inputs,
    largest_value,
    logits_of,
    pick_rest,
)
from vitlab.inference.effects import Plan
from vitlab.inference.engine import TOLERANCE, Engine
from vitlab.inference.fp8 import StaticFloat8, float8_layers, use_scales
from vitlab.inference.graphs import working_copy
from vitlab.inference.scales import Scales, read_scales, weights_key
from vitlab.kernels.fp8 import E4M3, has_float8
from vitlab.models.variants import Model

Command = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")


@pytest.fixture
def small(randomize: Randomize) -> Model:
    return randomize(vitlab.create("Ti/8", image_size=32, depth=2, width=32, heads=2, mlp=64, classes=3)).eval()


def photos(count: int) -> Tensor:
    return torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)


def scales_of(model: Model, part: str = "") -> Scales:
    maxima = largest_inputs(model, photos(8), CPU)
    chosen = {name: value for name, value in maxima.items() if part in name}
    return Scales(weights_key(model), chosen, 1.0, 8, True, 8, len(chosen) / 8, closer=0.0, again=0.0, rest="float16")


def scales_of_all(model: Model, maxima: dict[str, float]) -> Scales:
    return Scales(weights_key(model), maxima, 1.0, 8, True, len(maxima), 1.0, closer=0.0, again=0.0, rest="float16")


# ---- a layer


def test_small_integers_are_exact() -> None:
    """With weights up to 7 and a largest input of 448, both scales are powers of two, and all has a place in 8 bits."""
    layer = nn.Linear(32, 16)
    layer.weight.data = torch.randint(-7, 8, (16, 32)).float()
    layer.weight.data[0, 0] = 7
    layer.bias.data = torch.randint(-4, 5, (16,)).float()
    x = torch.randint(-8, 9, (3, 5, 32)).float()
    expected = x.double() @ layer.weight.double().t() + layer.bias.double()
    assert torch.equal(StaticFloat8(layer, 448.0)(x).double(), expected.bfloat16().double())


def test_other_numbers_are_within_the_formats_rounding() -> None:
    """A fraction of 3 bits rounds by up to 1/16; errors of a sum are smaller. What is beyond the largest saturates."""
    layer, x = nn.Linear(64, 48, bias=False), torch.randn(40, 64)
    exact = x.double() @ layer.weight.detach().double().t()
    found = StaticFloat8(layer, float(x.abs().max()))(x).double()
    assert 0.005 < float((found - exact).norm() / exact.norm()) < 1 / 16
    beyond = StaticFloat8(layer, 1.0)
    assert torch.equal(beyond(100 * torch.ones(1, 64)), beyond(torch.ones(1, 64)))


def test_layers_that_see_the_class_token_alone_stay() -> None:
    """Three of the last block, where nothing else is read."""
    for pool, count in (("token", 5), ("token_mean", 8), ("mean", 8)):
        model = vitlab.create("Ti/8", image_size=32, depth=2, width=32, heads=2, mlp=64, classes=3, pool=pool)
        assert len(float8_layers(model)) == count


def test_logits_are_in_float32(small: Model) -> None:
    """Of the features that the rounded layers give; bf16 has 8 bits, so that its logits repeat."""
    x, scales = torch.randn(3, 3, 32, 32), scales_of(small)
    features, found = (Engine(small, what, CPU, scales=scales)(x) for what in ("features", "logits"))
    exact = features.double() @ small.head.weight.double().t() + small.head.bias.double()  # type: ignore[union-attr]
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    assert float((found - found.bfloat16()).abs().max()) > 0


def test_layers_of_the_blocks_are_replaced(small: Model) -> None:
    names = [f"blocks.0.{layer}" for layer in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]
    names.append("blocks.1.attention.qkv")
    assert list(float8_layers(small)) == names
    use_scales(small, small, scales_of(small, ".mlp."))
    kinds = {name for name, part in small.named_modules() if isinstance(part, StaticFloat8)}
    assert kinds == {name for name in names if ".mlp." in name}
    assert not float8_layers(vitlab.create("Ti/8", image_size=32, depth=1, width=24, heads=2, mlp=40, classes=3))


# ---- calibration


@pytest.mark.parametrize("pool", ["token", "mean"])
def test_an_mlp_in_8_bits_is_its_layers(pool: str) -> None:
    """GELU and rounding at once leave out a rounding to 16 bits: nearer to float64 than apart, or as near."""
    model = vitlab.create("Ti/8", image_size=32, depth=2, width=64, heads=2, mlp=128, classes=3, pool=pool)
    exact, x = copy.deepcopy(model).double(), torch.randn(4, 17 if pool == "token" else 16, 64)
    use_scales(model, model, scales_of(model, ".mlp."))
    part, own = (each.get_submodule("blocks.0.mlp") for each in (model, exact))
    assert "forward" in vars(part)
    with torch.no_grad():
        wanted, together = own(x.double()), part(x.bfloat16()).double()
        del part.forward
        apart = part(x.bfloat16()).double()
    assert 1e-4 < float((together - apart).norm() / wanted.norm()) < 0.03
    assert float((together - wanted).norm()) < 1.1 * float((apart - wanted).norm())


def test_ranges_are_the_largest_inputs(small: Model) -> None:
    """Of the first layer: its norm's output, over all batches."""
    pixels, seen = photos(70), list[Tensor]()
    found = largest_inputs(small, pixels, CPU)
    small.blocks[0].norm1.register_forward_hook(lambda *args: seen.append(args[2].abs().max()))  # type: ignore[union-attr, index]
    with torch.no_grad():
        small(pixels / 255 * 2 - 1)
    assert found["blocks.0.attention.qkv"] == pytest.approx(float(max(seen)), rel=1e-5)
    assert not any(part._forward_hooks for name, part in small.named_modules() if name in found)


@pytest.mark.slow
def test_as_many_layers_as_keep_the_classes(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them, if nothing is asked for; not the one that matters, if the first block adds next to nothing and the
    second makes a class token of the others.
    """
    for name, parameter in small.blocks[0].named_parameters():  # type: ignore[union-attr, index]
        if name.startswith(("attention.out", "mlp.down")):
            parameter.data.mul_(1e-3)
    ranges, measured = photos(8), photos(100)
    maxima = largest_inputs(small, ranges, CPU)
    with torch.no_grad():  # random images look alike: let the head see how they differ
        small.head.bias -= small(measured / 255 * 2 - 1).mean(0)  # type: ignore[union-attr]
    exact = logits_of(small, measured, CPU)
    torch.testing.assert_close(exact, small(measured / 255 * 2 - 1))  # in float32
    monkeypatch.setattr(calibration, "LEAST", 0.0)
    found = calibrate(small, ranges, measured, CPU, separate=True)
    all_of_them = agreement(exact, logits_of(small, measured, CPU, scales_of_all(small, maxima)))
    assert (found.maxima, found.agreement, found.images) == (maxima, all_of_them, 100)
    assert (found.layers, found.work, found.again) == (5, 1.0, 0.0)
    alone = agreement(exact, logits_of(small, measured, CPU, scales_of_all(small, {})))
    assert alone > 0.985 > all_of_them
    monkeypatch.setattr(calibration, "LEAST", 0.985)
    monkeypatch.setattr(effects, "AGAIN", 100.0)  # a second look is dear
    found = calibrate(small, ranges, measured, CPU, separate=True)
    assert found.maxima
    assert "blocks.1.attention.qkv" not in found.maxima
    assert found.again == 0
    assert found.agreement >= 0.985
    sizes = {name: layer.weight.numel() for name, layer in float8_layers(small).items()}
    assert found.work == pytest.approx(sum(sizes[name] for name in found.maxima) / sum(sizes.values()))
    assert f"fp8: {len(found.maxima)} of 5 dense layers in 8 bits, {found.work:.0%} of their work" in found.describe()


def test_float16_where_its_range_has_room(small: Model) -> None:
    """The largest value is that of the tokens; with a bias of 10,000 on one of their channels there is no room."""
    pixels = photos(4)
    with torch.no_grad():
        before, largest = largest_value(small, pixels, CPU), float(small.tokens(pixels / 255 * 2 - 1).abs().max())
        assert before >= largest
        assert pick_rest(small, pixels, CPU) == "float16"
        dict(small.named_parameters())["embed.bias"][3] = 1e4
    assert largest_value(small, pixels, CPU) > 5e3
    assert pick_rest(small, pixels, CPU) == "bfloat16"
    found = calibrate(small, pixels, pixels, CPU, separate=False)
    engine = Engine(small, "logits", CPU, scales=found)
    assert (found.rest, engine.half_dtype) == ("bfloat16", torch.bfloat16)


def test_models_are_refused_whose_classes_change(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "LEAST", 1.01)
    none = r"must be float32's on 101% of 4 images, and no choice of layers is expected to keep it; float16 alone has"
    with pytest.raises(UserError, match=none):
        calibrate(small, photos(4), photos(4), CPU, separate=True)
    hopeful = Plan(tuple(largest_inputs(small, photos(4), CPU))[:2], 0.0, 0.0, 0.9)
    monkeypatch.setattr(calibration, "fastest_plan", lambda *_: hopeful)
    with pytest.raises(UserError, match=r"and it is on \d+\.00% with 2 of 5 layers in 8 bits; float16 alone has"):
        calibrate(small, photos(4), photos(4), CPU, separate=True)


@pytest.mark.slow
def test_a_trained_model_keeps_its_accuracy() -> None:
    """Digits, learned in a few seconds: on images it has not seen, few best classes change, and not for the worse."""
    from sklearn.datasets import load_digits

    found = load_digits()
    pixels = torch.tensor(found.images / 16 * 255).round().to(torch.uint8)[:, None].expand(-1, 3, -1, -1)
    labels = torch.tensor(found.target)
    model = vitlab.create("Ti/8", image_size=8, patch=2, depth=2, width=48, heads=3, mlp=96, classes=10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for step in range(120):
        rows = (torch.arange(64) * 7 + 64 * step) % 1200
        loss = nn.functional.cross_entropy(model(pixels[rows] / 255 * 2 - 1), labels[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    unseen, truth = pixels[1200:], labels[1200:]
    scales = scales_of_all(model, largest_inputs(model, pixels[:128], CPU))
    exact, rounded = (logits_of(model, unseen, CPU, one).argmax(1) for one in (None, scales))
    assert float((exact == truth).double().mean()) > 0.7
    assert float((exact == rounded).double().mean()) > 0.95
    assert abs(float((exact == truth).double().mean() - (rounded == truth).double().mean())) < 0.02


@pytest.mark.parametrize(
    ("settings", "why"), [({"classes": 0}, "fewer than two"), ({"width": 24, "heads": 2, "mlp": 40}, "multiples of 16")]
)
def test_models_that_cannot_be_in_8_bits(settings: dict[str, int], why: str) -> None:
    usual = {"image_size": 32, "depth": 1, "width": 32, "heads": 2, "mlp": 64, "classes": 3}
    with pytest.raises(UserError, match=why):
        check_model(vitlab.create("Ti/8", **(usual | settings)))


def test_multi_label_models_and_resnets_are_refused(small: Model) -> None:
    small.card = dataclasses.replace(small.card, thresholds=(0.5, 0.5, 0.5))
    with pytest.raises(UserError, match="multi-label"):
        check_model(small)
    with pytest.raises(UserError, match="dense layers of transformers"):
        check_model(vitlab.create("R50x1", image_size=32, stages=(1,)))


# ---- the engine


def test_the_engine_computes_in_8_bits_until_the_model_changes(small: Model) -> None:
    """Emulated here: the values of a model whose layers were replaced by hand."""
    scales, x = scales_of(small), torch.randn(3, 3, 32, 32)
    engine = Engine(small, "logits", CPU, scales=scales)
    replaced = working_copy(small, half=True, dtype=torch.float16)
    use_scales(replaced, small, scales)
    with torch.no_grad():
        exact = small(x).double()
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(engine(x), replaced(x))
    off = float((engine(x).double() - exact).norm() / exact.norm())
    assert 0.001 < off < 0.2
    assert not engine.prepare(3)  # nothing is faster on a CPU
    small.load_state_dict({name: 2 * tensor for name, tensor in small.state_dict().items()})
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        assert torch.equal(engine(x), small(x))


def test_values_in_8_bits_have_a_key_of_their_own(small: Model) -> None:
    scales = scales_of(small)
    keys = {model_key(small, "features", half=half) for half in (True, False)}
    others = scales_of(small, ".mlp."), dataclasses.replace(scales, closer=0.1)
    keys |= {model_key(small, "features", half=True, scales=one) for one in (scales, *others)}
    assert len(keys) == 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_8_bits_on_a_gpu(small: Model) -> None:
    """The graph gives what its layers give eagerly, and both what is emulated on a CPU, but for rounding."""
    device = torch.device("cuda", 0)
    if not has_float8(device):
        pytest.skip("needs a GPU with products in 8 bits")
    scales, x = scales_of(small), torch.randn(4, 3, 32, 32)
    emulated = Engine(small, "logits", CPU, scales=scales)(x).double()
    engine = Engine(small.to(device), "logits", device, scales=scales)
    assert engine.prepare(4)
    for found in (engine(x.to(device)), engine.plain(x.to(device))):
        assert (found.cpu().double() - emulated).abs().max() < TOLERANCE[E4M3] * emulated.abs().max()


# ---- files and the command line


def test_scales_are_kept_with_the_key_of_the_weights(
    small: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vitlab.export.scales_file.check_hardware", lambda device: None)
    run, scales = str(tmp_path), scales_of(small)
    with pytest.raises(UserError, match="add --calibrate"):
        find_scales(run, small, None, CPU)
    scales.write(tmp_path / "fp8.json")
    assert find_scales(run, small, None, CPU) == scales
    small.head.weight.data.add_(1)  # type: ignore[union-attr]
    with pytest.raises(UserError, match="of other weights"):
        find_scales(run, small, None, CPU)
    (tmp_path / "w.safetensors").touch()
    assert scales_path(str(tmp_path / "w.safetensors")) == tmp_path / "w.safetensors.fp8.json"
    assert scales_path("google/vit-base-patch16-224") is None


@pytest.mark.parametrize(("width", "warned"), [(256, True), (768, False)])
def test_narrow_models_are_told_that_16_bits_are_faster(
    randomize: Randomize, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int, warned: bool
) -> None:
    monkeypatch.setattr("vitlab.export.scales_file.check_hardware", lambda device: None)
    model = randomize(vitlab.create("Ti/16", image_size=32, depth=1, width=width, heads=4, mlp=64, classes=5))
    scales_of(model).write(tmp_path / "fp8.json")
    lines: list[str] = []
    monkeypatch.setattr("vitlab.export.scales_file.log.warning", lambda line, *words: lines.append(line % words))
    find_scales(str(tmp_path), model, None, CPU)
    assert [f"one of width {width} is faster without" in line for line in lines] == [True] * warned


@pytest.mark.parametrize(
    "change",
    [
        {"maxima": {"blocks.0.mlp.up": -1.0}},
        {"maxima": 3},
        {"more": 1},
        {"weights": None},
        {"work": 2.0},
        {"work": "1"},
        {"again": -0.1},
        {"closer": None},
        {"closer": -1.0},
        {"layers": "8"},
        {"rest": "float64"},
    ],
)
def test_damaged_files_are_one_line(change: dict[str, object], small: Model, tmp_path: Path) -> None:
    path = tmp_path / "fp8.json"
    found = {**vars(scales_of(small)), **change}
    path.write_text(json.dumps({key: value for key, value in found.items() if value is not None}))
    with pytest.raises(UserError, match="calibrate again"):
        read_scales(path)


def test_other_hardware_is_refused() -> None:
    with pytest.raises(UserError, match="the device cpu has no products in 8 bits; leave --precision out"):
        check_hardware(CPU)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--precision", "fp8", "--device", "cpu"], "fp8, and the device cpu has no products in 8 bits"),
        (["--precision", "int4"], "--precision must be auto, bf16, fp8 or int8, not 'int4'"),
        (["--calibrate", "photos"], "--calibrate goes with --precision fp8 or int8"),
        (["--precision", "bf16", "--calibrate", "photos"], "--calibrate goes with --precision fp8 or int8"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], message: str, small: Model, tmp_path: Path, command: Command
) -> None:
    vitlab.save(small, tmp_path / "run")
    (tmp_path / "a.png").touch()
    for verb in (
        ["predict", str(tmp_path / "run"), str(tmp_path / "a.png")],
        ["embed", str(tmp_path / "run"), "d", "o.parquet"],
    ):
        code, out, err = command(*verb, *words)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert message in err
