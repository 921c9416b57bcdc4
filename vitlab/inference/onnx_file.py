"""A module as an ONNX file, written by torch's exporter, with labels and preprocessing as metadata.

The input is `images`, float32 (batch, 3, height, width), normalized; the output is `logits`, float32 (batch, K).
"""

import importlib
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from vitlab import __version__
from vitlab.errors import UserError
from vitlab.files import atomic_path, unfinished
from vitlab.models.config import ViTConfig
from vitlab.models.variants import Model
from vitlab.settings import to_json

Runner = Callable[[Tensor], Tensor]  # images (b, 3, height, width) to logits (b, K)
OPSET = 20  # the first with GELU as one operation
LARGEST = 2_000_000_000  # bytes of weights in one file; the format's limit is 2 GiB


def check_packages() -> None:
    """Raise UserError if a package that exporting needs is missing."""
    try:
        for name in ("onnx", "onnxruntime", "onnxscript"):
            importlib.import_module(name)
    except ImportError as error:
        raise UserError(f"exporting to ONNX needs {error.name}: pip install 'vitlab[export]'") from None


def stride_of(model: Model) -> int:
    """The number that the sides of an image must be multiples of."""
    return model.config.stride if isinstance(model.config, ViTConfig) else 1


def example_input(model: Model, any_size: bool) -> tuple[Tensor, dict[int, Any]]:
    """Images to trace with, and their dynamic dimensions. Tracing would make sizes of 0 and 1 constant."""
    shapes: dict[int, Any] = {0: torch.export.Dim("batch")}
    height, width = model.config.image_size
    if any_size:
        stride = stride_of(model)
        shapes |= {2: stride * torch.export.Dim("rows"), 3: stride * torch.export.Dim("columns")}
        least = max(64, 2 * stride)  # so that a ResNet's last map has a few cells
        height, width = max(height, least) + stride, max(width, least) + 2 * stride
    return torch.zeros(2, 3, height, width), shapes


def to_proto(module: nn.Module, model: Model, any_size: bool) -> Any:
    """`module`, which computes what `model` does, as an onnx.ModelProto."""
    images, shapes = example_input(model, any_size)
    options: dict[str, Any] = {"opset_version": OPSET, "dynamic_shapes": (shapes,), "verbose": False}
    options |= {"input_names": ["images"], "output_names": ["logits" if model.config.classes else "features"]}
    with exporting():
        program = torch.onnx.export(module, (images,), dynamo=True, **options)
    if program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    proto = program.model_proto
    remove_notes(proto)
    proto.producer_name, proto.producer_version = "vitlab", __version__
    for key, value in metadata(model, any_size).items():
        proto.metadata_props.add(key=key, value=value)
    return proto


def metadata(model: Model, any_size: bool) -> dict[str, str]:
    """What a program needs to use the model; lists and objects as JSON."""
    entries: dict[str, object] = {
        "labels": model.card.labels,
        "multi_label": model.card.thresholds is not None,
        "thresholds": model.card.thresholds,
        "temperature": model.card.temperature,
        "image_size": model.config.image_size,
        "any_size": any_size,
        "stride": stride_of(model),
        **to_json(model.card.preprocess),
        "model": to_json(model.config),
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in entries.items()}


def remove_notes(proto: Any) -> None:
    """Remove the exporter's notes, which contain paths of this machine and are as long as the graph."""
    graph = proto.graph
    for part in (proto, graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""


@contextmanager
def exporting() -> Iterator[None]:
    """Show a spinner on the standard error, and silence the exporters' warnings; errors are raised anyway."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with Console(stderr=True).status("exporting ..."), warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


# ---- files


@dataclass(frozen=True)
class OnnxFile:
    """An ONNX file; weights that are too large for it are in a second one beside it."""

    path: Path
    weights: Path

    def save(self, proto: Any) -> None:
        import onnx

        self.weights.unlink(missing_ok=True)
        if sum(len(tensor.raw_data) for tensor in proto.graph.initializer) <= LARGEST:
            self.path.write_bytes(proto.SerializeToString())
        else:
            onnx.save(proto, self.path, save_as_external_data=True, location=self.weights.name, size_threshold=1024)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.path, self.weights) if path.exists())

    def runner(self) -> Runner:
        return open_session(str(self.path))


def open_session(file: str | bytes) -> Runner:
    """A file, or its content, in ONNX Runtime on the CPU, on as many threads as torch uses."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images: torch.from_numpy(session.run(None, {name: images.numpy()})[0])


@contextmanager
def new_file(target: Path) -> Iterator[OnnxFile]:
    """A temporary file that is renamed to `target` at the end; nothing is left where the block raises."""
    weights = target.with_name(f"{target.name}.data")  # never renamed, since the file refers to it by name
    with atomic_path(target, folder=False) as path:
        if weights.exists():
            raise UserError(f"{weights} exists; remove it or name another place")
        unfinished.add(weights)
        try:
            yield OnnxFile(path, weights)
        except BaseException:
            weights.unlink(missing_ok=True)
            raise
        finally:
            unfinished.discard(weights)
