"""A module as an ONNX file, written by torch's exporter, with labels and preprocessing as metadata.

The input is `images`, float32 (batch, 3, height, width), normalized; the output is `logits`, float32 (batch, K).
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitlab import __version__
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.variants import Model
from vitlab.settings import to_json

OPSET = 20  # the first with GELU as one operation
LARGEST = 2_000_000_000  # bytes of weights in one file; the format's limit is 2 GiB


def check_packages() -> None:
    """Raise UserError if a package that exporting needs is missing."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"exporting to ONNX needs {error.name}: pip install 'vitlab[export]'") from None


def stride_of(model: Model) -> int:
    """The number that the sides of an image must be multiples of."""
    return model.config.stride if isinstance(model.config, ViTConfig) else 1


def example_input(model: Model, any_size: bool) -> tuple[torch.Tensor, dict[int, Any]]:
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
    with quiet(), torch.no_grad():
        program = torch.onnx.export(
            module,
            (images,),
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=["logits" if model.config.classes else "features"],
            dynamic_shapes=(shapes,),
            verbose=False,
        )
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
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    del proto.metadata_props[:]
    proto.doc_string = ""


# ---- files: weights beyond one file's limit are in a second one beside it


def save(proto: Any, path: Path, weights: Path) -> None:
    """Write to `path`; where the weights are too large for it they go to `weights`, which the file refers to."""
    import onnx

    if sum(len(tensor.raw_data) for tensor in proto.graph.initializer) <= LARGEST:
        path.write_bytes(proto.SerializeToString())
    else:
        onnx.save(proto, path, save_as_external_data=True, location=weights.name, size_threshold=1024)


@contextmanager
def weights_file(target: Path) -> Iterator[Path]:
    """The path of the second file; it is removed where the block raises."""
    path = target.with_name(f"{target.name}.data")
    if path.exists():
        raise UserError(f"{path} exists; remove it or name another place")
    try:
        yield path
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def total_size(*paths: Path) -> int:
    """The bytes of those that exist."""
    return sum(path.stat().st_size for path in paths if path.exists())


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' warnings; errors are raised anyway."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
