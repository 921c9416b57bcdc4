"""Predictions in bf16 on CPUs that multiply in it."""

import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Randomize
from PIL import Image

import vitlab
from vitlab.errors import UserError
from vitlab.inference.engine import Engine
from vitlab.inference.half import find_half, multiplies_bf16
from vitlab.inference.scales import Scales
from vitlab.models.guest import Guest, GuestConfig
from vitlab.models.variants import Model

Command = Callable[..., tuple[int, str, str]]
CPU = torch.device("cpu")
HAS = "vitlab.inference.half.multiplies_bf16"


@pytest.fixture(params=["Ti/8", "R+Ti/16", "R50x1"])
def model(request: pytest.FixtureRequest, randomize: Randomize) -> Model:
    smaller = {} if request.param == "R50x1" else {"depth": 2, "width": 64, "heads": 2, "mlp": 128}
    return randomize(vitlab.create(request.param, image_size=64, classes=5, **smaller)).eval()


def in_bf16(model: Model, monkeypatch: pytest.MonkeyPatch) -> Scales:
    monkeypatch.setattr(HAS, lambda: True)  # any CPU gives the numbers, most of them slowly
    scales = find_half(model, CPU)
    assert scales is not None
    return scales


@pytest.mark.skipif(platform.machine() != "x86_64", reason="asks /proc/cpuinfo for Intel's and AMD's names")
def test_what_is_measured_is_what_the_processor_says() -> None:
    flags = set(Path("/proc/cpuinfo").read_text().split("flags", 1)[1].partition("\n")[0].split())
    if "amx_bf16" in flags:
        assert multiplies_bf16()
    elif not flags & {"avx512_bf16", "avx_ne_convert"}:
        assert not multiplies_bf16()


def test_values_are_rounded_to_bf16_and_no_further(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside float64: off by bf16's rounding, which is 2^-9 of a value, and by more than float32's."""
    x = torch.randn(1, 3, 64, 64)
    engine = Engine(model, "logits", CPU, scales=in_bf16(model, monkeypatch))
    assert not engine.prepare(1)  # there is nothing faster, and nothing is warned of
    found = engine(x).double()
    expected = model.double()(x.double()).detach()
    off = float((found - expected).abs().max() / expected.abs().max())
    assert 1e-5 < off < 0.05


def test_what_has_no_use_of_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    small = vitlab.create("Ti/8", image_size=32, depth=1, width=32, heads=2, mlp=64, classes=5)
    monkeypatch.setattr(HAS, lambda: False)
    with pytest.raises(UserError, match="the device cpu is not faster in bf16 than in float32"):
        find_half(small, CPU)
    with pytest.raises(UserError, match="in float64"):
        find_half(small.double(), CPU)
    guest = Guest(torch.nn.Flatten(), torch.nn.Linear(12, 5), GuestConfig("x", (2, 2), 12, 5), small.card)
    with pytest.raises(UserError, match="is a guest"):
        find_half(guest, CPU)


@pytest.mark.parametrize("here", [True, False])
def test_by_the_command_line(here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(HAS, lambda: here)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (80, 80, 3), dtype=np.uint8)).save(tmp_path / "a.png")
    words = ["predict", str(tmp_path / "a.png"), "--device", "cpu", "--json"]
    assert command(*words)[0] == 0
    code, out, err = command(*words, "--precision", "bf16")
    assert (code, out.count("\n")) == ((0, 1) if here else (1, 0))
    assert ("is not faster in bf16" in err) is not here
