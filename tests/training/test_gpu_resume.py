"""On a GPU: a run that was killed and resumed equals the uninterrupted one to the bit; and memory that runs out."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import assert_same_run, records, train_small
from test_resume import Killed

from vitlab.training.trainer import Trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SETTINGS: dict[str, Any] = {
    "device": "cuda",
    "precision": "bfloat16",
    "steps": 24,
    "micro": 32,
    "batch": 32,
    "checkpoint_every": 5,
    "evaluate_every": 12,
    "width": 64,
    "mlp": 128,
}


@contextmanager
def killed_inside(step: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The run dies in a step, once its batch is there: a recorded step cannot be interrupted later."""
    plain = Trainer.next_batch

    def next_batch(self: Trainer, now: int, part: int) -> Any:
        batch = plain(self, now, part)
        if now == step:
            raise Killed
        return batch

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "next_batch", next_batch)
        with pytest.raises(Killed):
            yield


@pytest.fixture(autouse=True)
def free_memory() -> Iterator[None]:
    """Memory as before, whatever a test does."""
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.compiler.reset()
    torch.cuda.empty_cache()


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_killed_and_resumed_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: str, cuda_graph: bool, precision: str
) -> None:
    settings = {**SETTINGS, "compile": compiled, "cuda_graph": cuda_graph, "precision": precision}
    train_small(tmp_path / "plain", **settings)
    for i, step in enumerate((3, 11, 17)):  # before the first checkpoint, between two, while a recording is replayed
        with killed_inside(step, monkeypatch):
            train_small(tmp_path / "cut", resume=i > 0, **settings)
    train_small(tmp_path / "cut", resume=True, **settings)
    losses = [record["loss"] for record in records(tmp_path / "cut") if "loss" in record]
    assert len(losses) == 24
    assert_same_run(tmp_path / "plain", tmp_path / "cut")


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["no", "yes"])
def test_out_of_memory_shrinks_and_continues(tmp_path: Path, compiled: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A share of the GPU that a batch of 4096 does not fit in, and a smaller one does."""
    size = {"image_size": (32, 32), "depth": 4, "width": 192, "mlp": 768, "heads": 3}
    settings: dict[str, Any] = {
        **SETTINGS,
        **size,
        "steps": 20,
        "batch": 4096,
        "micro": 4096,
        "compile": compiled,
        "resident": True,
    }
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (3 << 30) / total))
    train_small(tmp_path / "run", **settings)
    assert "out of memory with micro-batches of 4096 images; continuing with" in capsys.readouterr().err.replace(
        "\n", " "
    )
    steps = [record["step"] for record in records(tmp_path / "run") if "loss" in record]
    assert steps == list(range(1, 21))
    assert (tmp_path / "run" / "model.safetensors").exists()
