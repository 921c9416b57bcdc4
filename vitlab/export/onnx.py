"""A graph as an ONNX file: written by torch's exporter, with everything beside the weights that a consumer needs.

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
LARGEST = 2_000_000_000  # bytes of weights in one file, whose format ends at 2 GiB


def need_packages() -> None:
    """Say what to install before any work is done."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"exporting to ONNX needs {error.name}: pip install 'vitlab[export]'") from None


def stride_of(model: Model) -> int:
    """A side of an image must be a multiple of this."""
    return model.config.stride if isinstance(model.config, ViTConfig) else 1


def example(model: Model, any_size: bool) -> tuple[torch.Tensor, dict[int, Any]]:
    """Images to trace with, and which of their sides may change. The sizes 0 and 1 would be taken for fixed."""
    shapes: dict[int, Any] = {0: torch.export.Dim("batch")}
    height, width = model.config.image_size
    if any_size:
        stride = stride_of(model)
        shapes |= {2: stride * torch.export.Dim("rows"), 3: stride * torch.export.Dim("columns")}
        least = max(64, 2 * stride)  # a ResNet's last map should keep a few cells
        height, width = max(height, least) + stride, max(width, least) + 2 * stride
    return torch.zeros(2, 3, height, width), shapes


def to_proto(module: nn.Module, model: Model, any_size: bool) -> Any:
    """The graph of `module`, which computes what `model` does, as an onnx.ModelProto."""
    images, shapes = example(model, any_size)
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
        raise RuntimeError("torch.onnx.export gave no program")
    proto = program.model_proto
    clean(proto)
    proto.producer_name, proto.producer_version = "vitlab", __version__
    for key, value in metadata(model, any_size).items():
        proto.metadata_props.add(key=key, value=value)
    return proto


def metadata(model: Model, any_size: bool) -> dict[str, str]:
    """What a consumer needs to feed the model and to read it; lists and objects as JSON."""
    how = model.card.preprocess
    facts: dict[str, object] = {
        "labels": model.card.labels,
        "image_size": model.config.image_size,
        "any_size": any_size,
        "stride": stride_of(model),
        **to_json(how),
        "model": to_json(model.config),
    }
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in facts.items()}


def clean(proto: Any) -> None:
    """Without the exporter's notes, which tell the paths of this machine and are as long as the graph."""
    graph = proto.graph
    for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer):
        del part.metadata_props[:]
        part.doc_string = ""
    del proto.metadata_props[:]
    proto.doc_string = ""


# ---- files: beyond one file's limit the weights lie in another beside it


def save(proto: Any, place: Path, other: Path) -> None:
    """Write to `place`; weights too many for it go to `other`, which the file names."""
    import onnx

    if sum(len(tensor.raw_data) for tensor in proto.graph.initializer) <= LARGEST:
        place.write_bytes(proto.SerializeToString())
    else:
        onnx.save(proto, place, save_as_external_data=True, location=other.name, size_threshold=1024)


@contextmanager
def weights_beside(target: Path) -> Iterator[Path]:
    """The place of the other file; it goes again if the first one does not come."""
    other = target.with_name(f"{target.name}.data")
    if other.exists():
        raise UserError(f"{other} exists; remove it or name another place")
    try:
        yield other
    except BaseException:
        other.unlink(missing_ok=True)
        raise


def size_of(place: Path, other: Path) -> int:
    return sum(path.stat().st_size for path in (place, other) if path.exists())


# ---- noise


@contextmanager
def quiet() -> Iterator[None]:
    """The exporters' remarks are for their authors; what goes wrong is raised."""
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
