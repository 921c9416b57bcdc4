"""What runs a model fastest on a CPU: torch as it is, torch compiled, or ONNX Runtime, by a short measurement."""

import logging
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from vitlab.inference.fused import fuse
from vitlab.inference.onnx_file import OnnxFile, to_proto
from vitlab.inference.traced import traceable
from vitlab.inference.values import ValuesOf, What
from vitlab.kernels.compiling import compiled
from vitlab.models.variants import Model
from vitlab.text import brief
from vitlab.weights import load, save

log = logging.getLogger("vitlab")

Run = Callable[[Tensor], Tensor]
ROUNDS = 7
WORTH = 1.03  # times as fast as torch as it is, below which a measurement may be chance
NEEDED = ("onnx", "onnxruntime", "onnxscript")


@dataclass(frozen=True)
class Candidate:
    """A way to run the model beside torch as it is."""

    name: str
    make: Callable[[], Run]
    any_batch: bool  # or the one that it was made for


@dataclass(frozen=True)
class Found:
    """The fastest way, for the batch that was measured or for any."""

    name: str
    run: Run
    any_batch: bool


def fastest(
    ways: Iterator[Candidate],
    around: Callable[[Run], Run],
    images: Tensor,
    plain: Run,
    agrees: Callable[[Run, Tensor], bool],
) -> Found | None:
    """The fastest way to compute the values of such images; None where that is the plain path.

    `around` adds what comes before and after the model.
    """
    runs, any_batch = {"eager": plain}, {}
    for way in ways:
        try:
            run = around(way.make())
            if agrees(run, images):  # and compiles it
                runs[way.name], any_batch[way.name] = run, way.any_batch
        except Exception as error:  # a compiler or an exporter that fails here is no reason to stop
            log.debug("%s cannot run this model: %s", way.name, brief(error))
    seconds = measure(runs, images) if len(runs) > 1 else {"eager": 0.0}
    best = min(seconds, key=lambda name: seconds[name])
    shown = ", ".join(f"{name} {1000 * took / len(images):.3g}" for name, took in seconds.items())
    log.debug("milliseconds per image: %s", shown)
    return None if seconds["eager"] <= WORTH * seconds[best] else Found(best, runs[best], any_batch[best])


def candidates(model: Model, what: What, *, thorough: bool) -> Iterator[Candidate]:
    """What there is on this machine beside torch as it is; if thorough, also what takes a minute to compile."""
    if next(model.parameters()).dtype != torch.float32:
        return
    if has_onnx():
        yield Candidate("ONNX Runtime", lambda: onnx_runtime(model, what), any_batch=True)
    if thorough and shutil.which("g++") is not None:
        yield Candidate("compiled", lambda: compiled(ValuesOf(model, what)), any_batch=False)


def has_onnx() -> bool:
    return all(find_spec(name) is not None for name in NEEDED)


def onnx_runtime(model: Model, what: What) -> Run:
    """The model in ONNX Runtime, for any batch; its file is removed once it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        write_onnx(model, what, Path(folder))
        return onnx_in(Path(folder)).runner()


def onnx_in(folder: Path) -> OnnxFile:
    return OnnxFile(folder / "model.onnx", folder / "model.onnx.data")


def write_onnx(model: Model, what: What, folder: Path) -> None:
    onnx_in(folder).save(to_proto(ValuesOf(fuse(traceable(model)), what), model, False))


# ---- while the model answers


def onnx_runtime_apart(model: Model, what: What, stop: threading.Event) -> Run:
    """The same, exported by a process of its own: an exporter changes torch for the time it takes."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(model, folder / "model")
        words = f"from vitlab.inference.processor import export_saved; export_saved({str(folder)!r}, {what!r})"
        with (folder / "errors").open("w+b") as errors:
            nothing = subprocess.DEVNULL
            with subprocess.Popen([sys.executable, "-c", words], stdin=nothing, stdout=nothing, stderr=errors) as child:
                while child.poll() is None and not stop.wait(0.1):
                    pass
                child.kill()
            errors.seek(0)
            if child.returncode:
                raise RuntimeError(
                    errors.read().decode(errors="replace").strip().rpartition("\n")[2] or "it was stopped"
                )
        return onnx_in(folder).runner()


def export_saved(folder: str, what: What) -> None:
    """In that process: write the model that is in the folder there as an ONNX file."""
    write_onnx(load(Path(folder) / "model"), what, Path(folder))


@torch.inference_mode()
def measure(runs: dict[str, Run], images: Tensor) -> dict[str, float]:
    """Seconds of each, the least of rounds in which they take turns: other work on the machine only ever adds."""
    took: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            run(images)
            took[name].append(time.perf_counter() - began)
    return {name: min(times) for name, times in took.items()}
