"""What runs a model fastest on a CPU: torch as it is, torch compiled, or ONNX Runtime, by a short measurement."""

import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from vitlab.inference.onnx_file import OnnxFile, to_proto
from vitlab.inference.traced import traceable
from vitlab.models.variants import Model
from vitlab.text import brief

log = logging.getLogger("vitlab")

Run = Callable[[Tensor], Tensor]
ROUNDS = 5
WORTH = 1.03  # times as fast as torch as it is, below which a measurement may be chance


class ValuesOf(nn.Module):
    """A model's features or logits, as the module that is traced."""

    def __init__(self, model: Model, what: str) -> None:
        super().__init__()
        self.model, self.what = model, what

    def forward(self, images: Tensor) -> Tensor:
        return self.model.features(images) if self.what == "features" else self.model(images)


def fastest(
    model: Model, what: str, images: Tensor, plain: Run, agrees: Callable[[Run, Tensor], bool]
) -> tuple[str, Run] | None:
    """The name and the call of what is fastest for such images; None where that is the plain path."""
    runs = {"eager": plain}
    for name, make in candidates(model, what):
        try:
            run = make()
            if agrees(run, images):  # and compiles it
                runs[name] = run
        except Exception as error:  # a compiler or an exporter that fails here is no reason to stop
            log.debug("%s cannot run this model: %s", name, brief(error))
    seconds = measure(runs, images)
    best = min(seconds, key=lambda name: seconds[name])
    shown = ", ".join(f"{name} {1000 * took / len(images):.3g}" for name, took in seconds.items())
    log.debug("milliseconds per image: %s", shown)
    return None if seconds["eager"] < WORTH * seconds[best] else (best, runs[best])


def candidates(model: Model, what: str) -> Iterator[tuple[str, Callable[[], Run]]]:
    """What there is on this machine beside torch as it is."""
    if next(model.parameters()).dtype != torch.float32:
        return
    if all(find_spec(name) is not None for name in ("onnx", "onnxruntime", "onnxscript")):
        yield "ONNX Runtime", lambda: onnx_runtime(model, what)
    if shutil.which("g++") is not None:
        yield "compiled", lambda: torch.compile(ValuesOf(model, what), dynamic=False)


def onnx_runtime(model: Model, what: str) -> Run:
    """The model in ONNX Runtime, for any batch; its file is removed once it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        file = OnnxFile(Path(folder) / "model.onnx", Path(folder) / "model.onnx.data")
        file.save(to_proto(ValuesOf(traceable(model), what), model, False))
        return file.runner()


@torch.inference_mode()
def measure(runs: dict[str, Run], images: Tensor) -> dict[str, float]:
    """Seconds of each, the median of rounds in which they take turns."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            run(images)
            took[name].append(time.perf_counter() - began)
    return {name: statistics.median(times) for name, times in took.items()}
