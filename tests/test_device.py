"""Names of devices: those that are there, and clear errors for the others."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vitlab.device import cpu_threads, few_threads, pick_device
from vitlab.errors import UserError
from vitlab.evaluation.extract import Features
from vitlab.evaluation.probe import logistic
from vitlab.evaluation.unknown import fit_unknown


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """As on a machine with two GPUs; the devices that are made current."""
    chosen: list[torch.device] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.set_device", chosen.append)
    return chosen


def test_the_gpu_that_is_asked_for(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    assert two_gpus == [torch.device("cuda", 1)]
    assert pick_device("cuda") == pick_device("auto") == torch.device("cuda", 0)
    with pytest.raises(UserError, match=r"no device 'cuda:2': cuda:0 to cuda:1 are here"):
        pick_device("cuda:2")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert pick_device("cuda") == torch.device("cuda", 1)
    with pytest.raises(UserError, match="one GPU for all processes; use device=cuda"):
        pick_device("cuda:0")


@pytest.mark.parametrize("name", ["abacus", "cuda:x", "cuda:-1", "cpu:1", "meta", "xla", ""])
def test_no_such_device(name: str) -> None:
    with pytest.raises(UserError, match=rf"there is no device '{name}'; write auto, cpu, cuda, cuda:1 or mps"):
        pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "words",
    [
        "predict RUN x.jpg --device cuda:1",
        "evaluate RUN digits --device cuda:1",
        "fewshot RUN digits --device cuda:1",
        "probe RUN digits --device cuda:1",
        "inspect RUN --device cuda:1 --out FOLDER/inside",
        "train digits device=cuda:1 --out FOLDER/run",
        "bench digits device=cuda:1",
        "finetune digits --weights RUN device=cuda:1 --out FOLDER/tuned",
        "serve RUN --device cuda:1 --port 0",
    ],
)
def test_every_verb_names_the_missing_gpu(
    words: str, model: Path, tmp_path: Path, command: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "x.jpg").write_bytes(b"")
    words = words.replace("RUN", str(model)).replace("FOLDER", str(tmp_path)).replace("x.jpg", str(tmp_path / "x.jpg"))
    code, _, err = command(*words.split())
    assert code == 1
    assert err == "error: device=cuda:1, and torch sees no GPU here; use device=auto\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_gpus_of_this_machine() -> None:
    count = torch.cuda.device_count()
    assert torch.ones(1, device=pick_device(f"cuda:{count - 1}")).device.index == count - 1
    assert torch.cuda.current_device() == count - 1
    with pytest.raises(UserError, match=f"there is no device 'cuda:{count}'"):
        pick_device(f"cuda:{count}")


def test_small_products_have_one_thread() -> None:
    """So have the fits of a head and of what refuses images, which are made of them."""
    features = Features(np.random.default_rng(0).normal(size=(40, 6)).astype(np.float32), np.arange(40) % 4)
    seen = set[int]()

    class Spy(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if "mm" in str(func) or "eigh" in str(func):
                seen.add(torch.get_num_threads())
            return func(*args, **(kwargs or {}))

    with cpu_threads(2):
        with Spy():  # type: ignore[no-untyped-call]
            logistic(features.values, features.labels, 4, 0.1)
            assert fit_unknown(features) is not None
        assert seen == {1}
        with few_threads(1e12):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 2
