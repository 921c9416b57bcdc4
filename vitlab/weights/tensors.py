"""Tensors from files nobody vouches for: safetensors, npz, and PyTorch's own pickles.

A file is known by its first bytes. Opening one checks every claim it makes about itself (sizes, offsets, shapes)
against the bytes that are there, before anything is allocated; tensors are read one by one when asked for.
Nothing in a file is ever run.
"""

import contextlib
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import parse_json
from vitlab.text import brief

Shape = tuple[int, ...]

HEADER_LIMIT = 10_000_000  # bytes of JSON; a header of 1,000 tensors has some 100,000
BOMB_RATIO, BOMB_FLOOR = 16, 256_000_000  # weights hardly compress, except that zeros do

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OTHERS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4}
OTHERS |= {"U64": 8, "I64": 8, "C64": 8}


@dataclass(frozen=True)
class TensorFile:
    """A file's tensors: their shapes, known, and their values, read when asked for."""

    path: Path
    shapes: Mapping[str, Shape]
    read: Callable[[str], Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def open_tensors(path: Path) -> TensorFile:
    """The tensors of a file, by what its first bytes say it is."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(10)
    if not size:
        raise UserError(f"{path} is empty")
    if start.startswith(b"PK\x03\x04"):
        return open_npz(path) if _holds_arrays(path) else open_pickle(path)
    if start[8:9] == b"{":
        return open_safetensors(path, size)
    if start[:1] == b"\x80":  # a pickle's first byte: PyTorch's format before 1.6
        return open_pickle(path)
    raise UserError(f"{path} is not a safetensors, npz or PyTorch file, or is damaged at its start")


# ---- JSON


# ---- safetensors: 8 bytes of header length, a JSON header, the tensors end to end


@dataclass(frozen=True)
class Span:
    kind: str
    shape: Shape
    start: int
    end: int


def open_safetensors(path: Path, size: int) -> TensorFile:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, HEADER_LIMIT):
            raise UserError(
                f"{path} claims a header of {length:,} bytes and is {size:,} bytes long: it is cut short or damaged"
            )
        header = parse_json(file.read(length), f"the header of {path}")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise UserError(f"the metadata of {path} must be words")
    spans = {name: _span(name, entry, path) for name, entry in header.items()}
    end = 0
    for name, span in sorted(spans.items(), key=lambda item: (item[1].start, item[1].end)):
        if span.start != end:
            raise UserError(f"'{name}' in {path} starts at byte {span.start}, where {end} is due; the file is damaged")
        end = span.end
    if 8 + length + end != size:
        raise UserError(
            f"{path} claims {8 + length + end:,} bytes and is {size:,} bytes long: it is cut short or damaged"
        )

    def read(name: str) -> Tensor:
        span = spans[name]
        if span.kind not in FLOATS:
            raise not_floats(path, name, span.kind)
        if span.end == span.start:
            return torch.empty(span.shape, dtype=FLOATS[span.kind])
        data = bytearray(span.end - span.start)
        with path.open("rb") as file:
            file.seek(8 + length + span.start)
            if file.readinto(data) != len(data):
                raise UserError(f"{path} ends within '{name}'; it changed while it was read")
        return torch.frombuffer(data, dtype=FLOATS[span.kind]).reshape(span.shape)

    return TensorFile(path, {name: span.shape for name, span in spans.items()}, read, metadata)


def _span(name: str, entry: Any, path: Path) -> Span:
    where = f"'{name}' in {path}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise UserError(f"{where} must have a dtype, a shape and data_offsets")
    kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(kind, str) or kind not in {*FLOATS, *OTHERS}:
        raise UserError(f"{where} is of a type this package does not know: {kind!r}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2 or len(shape) > 8:
        raise UserError(f"{where} has an impossible shape or place: {shape!r}, {offsets!r}")
    width = FLOATS[kind].itemsize if kind in FLOATS else OTHERS[kind]
    if math.prod(shape) * width != offsets[1] - offsets[0]:
        raise UserError(f"{where} has shape {shape}, which is not what its {offsets[1] - offsets[0]:,} bytes hold")
    return Span(kind, tuple(shape), *offsets)


def _counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and v >= 0 for v in values)


def not_floats(path: Path, name: str, kind: object) -> UserError:
    return UserError(f"'{name}' in {path} is {kind}; weights are floating-point numbers")


# ---- npz: a zip of npy arrays


def _holds_arrays(path: Path) -> bool:
    with _zip(path) as archive:
        return any(name.endswith(".npy") for name in archive.namelist())


@contextlib.contextmanager
def _zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except UserError:
        raise
    except Exception as error:  # zipfile raises a dozen kinds on damaged archives; all mean this
        raise UserError(f"{path} is a damaged zip archive: {brief(error)}") from None


@dataclass(frozen=True)
class Array:
    member: str
    dtype: np.dtype[Any]
    shape: Shape
    fortran: bool
    offset: int  # of the values in the member


def open_npz(path: Path) -> TensorFile:
    with _zip(path) as archive:
        members = archive.infolist()
        _check_members(members, path)
        arrays = {info.filename.removesuffix(".npy"): _array(archive, info, path) for info in members}

    def read(name: str) -> Tensor:
        array = arrays[name]
        with _zip(path) as archive, archive.open(array.member) as file:
            data = bytearray(file.read())[array.offset :]
        return _tensor(data, array, path, name)

    return TensorFile(path, {name: array.shape for name, array in arrays.items()}, read)


def _check_members(members: list[zipfile.ZipInfo], path: Path) -> None:
    names = [info.filename for info in members]
    for name in names:
        parts = name.split("/")
        if not name.endswith(".npy") or "\\" in name or "" in parts or ".." in parts or ":" in parts[0]:
            raise UserError(f"{path} has a member '{name}', which is no array's name; it is not a file of weights")
    if len(set(names)) != len(names):
        raise UserError(f"{path} holds an array twice")
    total, size = sum(info.file_size for info in members), path.stat().st_size
    if total > max(BOMB_RATIO * size, BOMB_FLOOR):
        raise UserError(f"{path} is {size:,} bytes long and claims to unpack to {total:,}; no weights compress so well")


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Array:
    """What an npy header says, checked against the member's size; its values stay where they are."""
    where = f"'{info.filename}' in {path}"
    with archive.open(info) as file:
        try:
            version = np.lib.format.read_magic(file)
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran, dtype = readers[version](file)
        except zipfile.BadZipFile:
            raise
        except Exception as error:  # numpy raises ValueErrors and what its parser of Python literals raises
            raise UserError(f"{where} is no array: {brief(error)}") from None
        offset = file.tell()
    if dtype.hasobject:
        raise UserError(f"{where} holds Python objects, which are never unpickled; weights are numbers")
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != info.file_size - offset:
        raise UserError(f"{where} claims shape {shape}, which is not what its {info.file_size - offset:,} bytes hold")
    return Array(info.filename, dtype, tuple(map(int, shape)), fortran, offset)


def _tensor(data: bytearray, array: Array, path: Path, name: str) -> Tensor:
    bfloat = array.dtype == np.dtype("V2")  # numpy has no bfloat16 and stores it as two bytes without a name
    if not bfloat and (array.dtype.kind != "f" or array.dtype.itemsize > 8):
        raise not_floats(path, name, array.dtype)
    values = np.frombuffer(data, np.dtype("u2") if bfloat else array.dtype)
    values = values.reshape(array.shape[::-1]).T if array.fortran else values.reshape(array.shape)
    values = np.ascontiguousarray(values, values.dtype.newbyteorder("=")).reshape(array.shape)
    return torch.from_numpy(values).view(torch.bfloat16) if bfloat else torch.from_numpy(values)


# ---- PyTorch's pickles


def open_pickle(path: Path) -> TensorFile:
    tensors = _state_dict(_unpickled(path), path)
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
            raise UserError(f"'{name}' in {path} is not an ordinary tensor")
        if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
            raise UserError(f"'{name}' in {path} claims shape {tuple(tensor.shape)}, more than its bytes hold")

    def read(name: str) -> Tensor:
        if not tensors[name].is_floating_point() or tensors[name].element_size() < 2:
            raise not_floats(path, name, tensors[name].dtype)
        return tensors[name].detach().clone(memory_format=torch.contiguous_format)  # may share storage

    return TensorFile(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, read)


def _unpickled(path: Path) -> object:
    if zipfile.is_zipfile(path):
        with _zip(path) as archive:
            members = archive.infolist()
        size = path.stat().st_size
        if any(info.compress_type for info in members) or sum(info.file_size for info in members) > size:
            raise UserError(f"{path} is compressed or claims more than its {size:,} bytes; torch.save writes neither")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise UserError(
            f"{path} holds more than tensors, and pickled objects can run code, so it is not loaded; "
            "save its state_dict() alone, best as .safetensors"
        ) from None
    except Exception as error:  # the unpickler meets hostile bytes: whatever it raises, the file is no good
        raise UserError(f"{path} is a damaged PyTorch file: {brief(error)}") from None


def _state_dict(data: object, path: Path) -> dict[str, Tensor]:
    for key in ("state_dict", "model"):  # training scripts wrap the weights once
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
            break
    if not isinstance(data, Mapping):
        raise UserError(f"{path} holds a {type(data).__name__}, not a state dict; save model.state_dict()")
    for name, value in data.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{path} is no state dict: {name!r} is a {type(value).__name__}")
    return dict(data)


# ---- files as such
