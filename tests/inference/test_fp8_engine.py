"""Finished models in 8 bits: exact where 8 bits are enough, with scales from images, checked against float32."""

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
from vitlab.inference import calibration
from vitlab.inference.calibration import best_classes, calibrate, check_hardware, check_model, largest_inputs
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
    return Scales(weights_key(model), chosen, 1.0, 8, separate=True)


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


def test_layers_of_the_blocks_are_replaced(small: Model) -> None:
    names = [
        f"blocks.{i}.{layer}" for i in (0, 1) for layer in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ]
    assert list(float8_layers(small)) == names
    use_scales(small, scales_of(small, ".mlp."))
    kinds = {name for name, part in small.named_modules() if isinstance(part, StaticFloat8)}
    assert kinds == {name for name in names if ".mlp." in name}
    assert not float8_layers(vitlab.create("Ti/8", image_size=32, depth=1, width=24, heads=2, mlp=40, classes=3))


# ---- calibration


def test_ranges_are_the_largest_inputs(small: Model) -> None:
    """Of the first layer: its norm's output, over all batches."""
    pixels, seen = photos(70), list[Tensor]()
    found = largest_inputs(small, pixels, CPU)
    small.blocks[0].norm1.register_forward_hook(lambda *args: seen.append(args[2].abs().max()))  # type: ignore[union-attr, index]
    with torch.no_grad():
        small(pixels / 255 * 2 - 1)
    assert found["blocks.0.attention.qkv"] == pytest.approx(float(max(seen)), rel=1e-5)
    assert not any(part._forward_hooks for name, part in small.named_modules() if name in found)


def test_all_layers_then_the_mlps_then_nothing(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ranges, measured = photos(8), photos(64)
    maxima = largest_inputs(small, ranges, CPU)
    key, best = weights_key(small), best_classes(small, measured, CPU)
    assert torch.equal(best, small(measured / 255 * 2 - 1).argmax(1))  # in float32
    shares = []
    for part in ("", ".mlp."):
        scales = Scales(key, {name: value for name, value in maxima.items() if part in name}, 1.0, 64, separate=True)
        shares.append(float((best_classes(small, measured, CPU, scales) == best).double().mean()))
    monkeypatch.setattr(calibration, "LEAST", shares[0])
    found = calibrate(small, ranges, measured, CPU, separate=True)
    assert (found.maxima, found.agreement, found.images) == (maxima, shares[0], 64)
    monkeypatch.setattr(calibration, "LEAST", 1.01)
    with pytest.raises(UserError, match=r"fp8 is refused.*with all layers and .* with the MLPs alone of 64 images"):
        calibrate(small, ranges, measured, CPU, separate=True)
    own = iter([best, (best + 1) % 3, best])  # float32's; all others with all layers; the same with the MLPs
    monkeypatch.setattr(calibration, "LEAST", 0.99)
    monkeypatch.setattr(calibration, "best_classes", lambda *_: next(own))
    assert set(calibrate(small, ranges, measured, CPU, separate=True).maxima) == {n for n in maxima if ".mlp." in n}


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
    scales = Scales("", largest_inputs(model, pixels[:128], CPU), 1.0, 128, separate=True)
    exact, rounded = (best_classes(model, unseen, CPU, one) for one in (None, scales))
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
    replaced = working_copy(small, half=True)
    use_scales(replaced, scales)
    with torch.no_grad():
        exact = small(x).double()
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(engine(x), replaced(x))
    off = float((engine(x).double() - exact).norm() / exact.norm())
    assert 0.001 < off < 0.2
    assert not engine.prepare(3)  # nothing is faster on a CPU
    small.load_state_dict({name: 2 * tensor for name, tensor in small.state_dict().items()})
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(engine(x), small(x))


def test_values_in_8_bits_have_a_key_of_their_own(small: Model) -> None:
    scales = scales_of(small)
    keys = {model_key(small, "features", half=half) for half in (True, False)}
    keys |= {model_key(small, "features", half=True, scales=one) for one in (scales, scales_of(small, ".mlp."))}
    assert len(keys) == 4


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


@pytest.mark.parametrize(
    "change", [{"maxima": {"blocks.0.mlp.up": -1.0}}, {"maxima": 3}, {"more": 1}, {"weights": None}]
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
        (["--precision", "int4"], "--precision must be auto, fp8 or int8, not 'int4'"),
        (["--calibrate", "photos"], "--calibrate goes with --precision fp8 or int8"),
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
