"""Fixtures: random weights without zeros and ones that would hide a mistake, and the command line in this process."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol, TypeVar

import pytest
import torch
from torch import Tensor, nn

import vitlab
from vitlab.cli import main
from vitlab.weights import box

M = TypeVar("M", bound=nn.Module)
ADDED = (
    "token",
    "registers",
    "positions",
    "relative",
    "probe",
)  # tables whose rows are added or compared, not multiplied


def fill(model: M, seed: int = 0) -> M:
    """Draw every parameter and floating-point buffer at random, at a scale that keeps activations near one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, tensor: Tensor) -> None:
        noise = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        dense = tensor.ndim > 1 and not any(part in ADDED for part in name.split("."))
        scale = max(1, tensor[0].numel()) ** -0.5 if dense else 0.5
        center = 1.0 if tensor.ndim == 1 and name.endswith("weight") else 0.0  # the scales of norms
        tensor.copy_(center + scale * noise)

    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if tensor.is_floating_point() and "rotary" not in name:  # cosines and sines are no weights
                draw(name, tensor)
    return model


class Randomize(Protocol):
    def __call__(self, model: M, seed: int = 0) -> M: ...


@pytest.fixture
def randomize() -> Randomize:
    return fill


@pytest.fixture(autouse=True, scope="session")
def own_state(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the list of trusted runs and the cache apart from the developer's own."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    os.environ["VITLAB_DATA"] = str(tmp_path_factory.mktemp("cache"))


def pytest_xdist_auto_num_workers() -> int:
    """One more than there are cores, since many tests wait; each takes about a gigabyte."""
    return min(1 + (os.cpu_count() or 1), 5)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is long is slow, too."""
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker("slow")


def pytest_sessionfinish() -> None:
    """Servers that several files share end with the session: pytest-xdist's workers run no exit handlers."""
    if "servers" in sys.modules:
        sys.modules["servers"].SHARED.close()


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Each test starts alike. On a CPU without bf16, the first product in bf16 makes torch leave oneDNN for good."""
    torch.manual_seed(0)
    yield
    torch.backends.mkldnn.set_flags(True)


# ---- the command line, in this process

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Run `vitlab WORDS` in this process; returns the exit code, stdout and stderr."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitlab", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return int(str(stop.value.code)), printed.out, printed.err

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run folder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("small") / "run"
    vitlab.save(vitlab.create("Ti/4", image_size=8, depth=1, width=24, heads=2, mlp=48, classes=10), folder)
    return folder


# ---- the model in the box


@pytest.fixture
def no_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the package without weights in the box."""
    monkeypatch.setattr(box, "FOLDER", tmp_path / "no box")


@pytest.fixture
def boxed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small model in the place of the one in the box."""
    model = fill(vitlab.create("Ti/8", image_size=32, depth=2, width=32, heads=2, mlp=64, classes=3))
    vitlab.save(model.half(), tmp_path / "packaged", labels=["acorn", "goose", "umbrella"])
    monkeypatch.setattr(box, "FOLDER", tmp_path / "packaged")
    return tmp_path / "packaged"
