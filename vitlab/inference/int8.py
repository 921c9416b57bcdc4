"""A model's features in int8 by ONNX Runtime: one file beside the model, which holds what was measured on it too."""

import hashlib
import importlib
import json
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vitlab.errors import UserError
from vitlab.files import atomic_file, parse_json
from vitlab.inference.graph_check import check_graph
from vitlab.inference.onnx_file import LARGEST, Runner, open_session
from vitlab.inference.scales import Scales
from vitlab.models.config import Size
from vitlab.text import brief

NAME = "int8.onnx"
KEY = "vitlab_int8"  # of the file's metadata, in which all but the graph is
AGAIN = "calibrate again with --calibrate IMAGES"


@dataclass(frozen=True)
class Int8:
    """The graph from normalized images to features, and how far the classes agree with float32's."""

    weights: str  # of which it is made, as `weights_key` has it
    layers: int  # dense layers of the blocks,
    floats: tuple[str, ...]  # of which these stayed float
    agreement: float  # share of the images on which the best class is float32's
    images: int  # of which that is
    separate: bool  # whether the ranges are from others
    graph: bytes = field(repr=False)  # an ONNX file, without the above

    @property
    def digest(self) -> str:
        """What values computed with this graph depend on."""
        return hashlib.sha256(self.graph).hexdigest()[:12]

    def describe(self) -> str:
        """One line on what was measured."""
        where = "" if self.separate else ", including those the ranges are from"
        many = f"{self.layers - len(self.floats)} of {self.layers} dense layers in 8 bits"
        return f"int8: {many}; the best class is float32's on {self.agreement:.2%} of {self.images:,} images{where}"

    def runner(self) -> Runner:
        """Normalized images (b, 3, h, w) to features (b, D), in float32."""
        try:
            return open_session(self.graph)
        except Exception as error:  # of ONNX Runtime's own kinds
            raise UserError(f"ONNX Runtime cannot run the int8 model ({brief(error)}); {AGAIN}") from None

    def write(self, path: Path) -> None:
        """Replace the file, which is complete or not there."""
        import onnx

        proto = onnx.load_model_from_string(self.graph)
        facts = {name: value for name, value in vars(self).items() if name != "graph"}
        proto.metadata_props.add(key=KEY, value=json.dumps(facts))
        with atomic_file(path) as file:
            file.write(proto.SerializeToString())


EightBits = Scales | Int8


def check_runtime() -> None:
    """Raise UserError if what runs an ONNX file is missing."""
    for name in ("onnx", "onnxruntime"):
        try:
            importlib.import_module(name)
        except ImportError:
            raise UserError(f"int8 needs {name}: pip install 'vitlab[export]'") from None


def check_device(device: torch.device) -> None:
    if device.type != "cpu":
        other = "; use fp8 there" if device.type == "cuda" else ""
        raise UserError(f"int8 is for CPUs, and the device is {device}{other}, or add --device cpu")


def read_int8(path: Path, image_size: Size, features: int) -> Int8:
    """The model of a file that may be from anywhere; UserError where it is not one for such images and features."""
    try:
        proto = parse(read_bytes(path))
        found = [entry.value for entry in proto.metadata_props if entry.key == KEY]
        if len(found) != 1:
            raise UserError("it does not say what was measured")
        kept = [entry for entry in proto.metadata_props if entry.key != KEY]
        del proto.metadata_props[:]
        proto.metadata_props.extend(kept)
        check_graph(proto, image_size, features)
        return from_facts(parse_json(found[0].encode(), "what was measured"), proto.SerializeToString())
    except (UserError, OSError, ValueError, TypeError, AttributeError) as error:  # some where a name is no text
        raise UserError(f"{path} is no int8 model of this one ({brief(error)}); {AGAIN}") from None


def read_bytes(path: Path) -> bytes:
    """Of a file in a folder that may be from anywhere: no link and no pipe."""
    about = path.lstat()
    if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST:
        raise UserError("it is a link, no regular file, or too large")
    return path.read_bytes()


def parse(content: bytes) -> Any:
    import onnx

    try:
        return onnx.load_model_from_string(content)
    except Exception as error:  # of protobuf's own kinds
        raise UserError(f"it is no ONNX file: {brief(error)}") from None


def from_facts(facts: dict[str, Any], graph: bytes) -> Int8:
    kinds = {"weights": str, "layers": int, "floats": list, "agreement": float, "images": int, "separate": bool}
    if {name: type(value) for name, value in facts.items()} != kinds:
        raise UserError("it does not say what was measured")
    return Int8(**facts | {"floats": tuple(map(str, facts["floats"]))}, graph=graph)
