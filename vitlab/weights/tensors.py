"""Tensors from untrusted files: safetensors, npz, and PyTorch's own pickles.

The kind of a file follows from its first bytes. Opening one compares every claim it makes about itself (sizes, offsets,
shapes) with the bytes that are there, before anything is allocated; tensors are read one by one when asked for.
Nothing in a file is ever run.
"""

import contextlib
import logging
import math
import pickle
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitlab.errors import UserError
from vitlab.files import JSON_LIMIT, parse_json
from vitlab.text import brief

Shape = tuple[int, ...]

BOMB_RATIO, BOMB_FLOOR = 16, 256_000_000  # weights hardly compress, except that zeros do
MAX_RANK = 8
log = logging.getLogger("vitlab")


@dataclass(frozen=True)
class TensorFile:
    """A file's tensors: their shapes, known, and their values, read when asked for."""

    path: Path
    shapes: Mapping[str, Shape]
    read: Callable[[str], Tensor]
    metadata: Mapping[str, str] = field(default_factory=dict)


def open_tensors(path: Path) -> TensorFile:
    """The tensors of a file, whose kind follows from its first bytes; a UserError for any other file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(10)
    if not size:
        raise UserError(f"{path} is empty")
    if start.startswith(b"PK\x03\x04"):
        return open_npz(path) if has_arrays(path) else open_pickle(path)
    if start[8:9] == b"{":
        return open_safetensors(path, size)
    if start[:1] == b"\x80":  # a pickle's first byte: PyTorch's format before 1.6
        return open_pickle(path)
    raise UserError(f"{path} is not a safetensors, npz or PyTorch file, or is damaged at its start")


def not_floats(path: Path, name: str, kind: object) -> UserError:
    return UserError(f"'{name}' in {path} is {kind}; weights are floating-point numbers")


# ---- safetensors


def open_safetensors(path: Path, size: int) -> TensorFile:
    """A safetensors file. The library checks types, shapes and offsets; here is checked what it does not: that the
    header is short, has no key twice, and no shape of absurd length."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > min(size - 8, JSON_LIMIT):
            raise UserError(
                f"{path} claims a header of {length:,} bytes and is {size:,} bytes long: it is cut short or damaged"
            )
        parse_json(stream.read(length), f"the header of {path}")
    try:
        file: Any = safe_open(path, "pt")
    except SafetensorError as error:
        raise UserError(f"{path} is not a valid safetensors file, or is damaged: {brief(error)}") from None
    shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    for name, shape in shapes.items():
        if len(shape) > MAX_RANK:
            raise UserError(f"'{name}' in {path} has {len(shape)} axes; weights have {MAX_RANK} at most")

    def read(name: str) -> Tensor:
        kind = file.get_slice(name).get_dtype()
        if kind not in ("F64", "F32", "F16", "BF16"):
            raise not_floats(path, name, kind)
        return file.get_tensor(name).clone()  # the library's tensor is a view of the file, which may change

    return TensorFile(path, shapes, read, file.metadata() or {})


# ---- npz: a zip of npy arrays


def has_arrays(path: Path) -> bool:
    with open_zip(path) as archive:
        return any(name.endswith(".npy") for name in archive.namelist())


@contextlib.contextmanager
def open_zip(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except UserError:
        raise
    except Exception as error:  # on damaged archives zipfile raises exceptions of a dozen types
        raise UserError(f"{path} is a damaged zip archive: {brief(error)}") from None


def open_npz(path: Path) -> TensorFile:
    """An npz file. numpy believes every claim of a file; names, sizes and headers are checked here first."""
    with open_zip(path) as archive:
        members = archive.infolist()
        check_members(members, path)
        headers = {info.filename.removesuffix(".npy"): read_header(archive, info, path) for info in members}

    def read(name: str) -> Tensor:
        dtype = headers[name][1]
        is_bfloat16 = dtype == np.dtype("V2")  # numpy has no bfloat16 and stores it as two bytes without a name
        if not is_bfloat16 and (dtype.kind != "f" or dtype.itemsize > 8):
            raise not_floats(path, name, dtype)
        with open_zip(path) as archive, archive.open(f"{name}.npy") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
        if is_bfloat16:
            return torch.from_numpy(array.copy("C").view(np.uint16)).view(torch.bfloat16)
        return torch.from_numpy(array.astype(dtype.newbyteorder("="), order="C"))

    return TensorFile(path, {name: shape for name, (shape, _) in headers.items()}, read)


def check_members(members: list[zipfile.ZipInfo], path: Path) -> None:
    """Raise a UserError for names that are not those of arrays, and for a zip bomb."""
    names = [info.filename for info in members]
    for name in names:
        parts = name.split("/")
        if not name.endswith(".npy") or "\\" in name or "" in parts or ".." in parts or ":" in parts[0]:
            raise UserError(f"{path} has a member '{name}', which is not the name of an array; it is not weights")
    if len(set(names)) != len(names):
        raise UserError(f"{path} holds an array twice")
    total, size = sum(info.file_size for info in members), path.stat().st_size
    if total > max(BOMB_RATIO * size, BOMB_FLOOR):
        raise UserError(f"{path} is {size:,} bytes long and claims to unpack to {total:,}; no weights compress so well")


def read_header(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> tuple[Shape, np.dtype[Any]]:
    """The shape and type of an array, from its npy header, checked against the member's size."""
    where = f"'{info.filename}' in {path}"
    with archive.open(info) as file:
        try:
            version = np.lib.format.read_magic(file)
            readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, _, dtype = readers[version](file)
        except zipfile.BadZipFile:
            raise
        except Exception as error:  # numpy raises ValueErrors and what its parser of Python literals raises
            raise UserError(f"{where} is not an array: {brief(error)}") from None
        size = info.file_size - file.tell()
    if dtype.hasobject:
        raise UserError(f"{where} holds Python objects, which are never unpickled; weights are numbers")
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != size:
        raise UserError(f"{where} claims shape {shape}, which is not what its {size:,} bytes hold")
    return tuple(map(int, shape)), dtype


# ---- PyTorch's pickles


def open_pickle(path: Path) -> TensorFile:
    tensors = find_state_dict(unpickle(path), path)
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


def unpickle(path: Path) -> object:
    if zipfile.is_zipfile(path):
        with open_zip(path) as archive:
            members = archive.infolist()
        if any(info.filename.endswith("/constants.pkl") for info in members):
            save = f"torch.save(torch.jit.load({path.name!r}, map_location='cpu').state_dict(), 'weights.pth')"
            raise UserError(f"{path} is a TorchScript archive, which is code, so it is not loaded; once, run {save}")
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
    except Exception as error:  # on hostile bytes the unpickler can raise anything
        raise UserError(f"{path} is a damaged PyTorch file: {brief(error)}") from None


def find_state_dict(data: object, path: Path) -> dict[str, Tensor]:
    for key in ("state_dict", "model", "teacher"):  # training scripts wrap the weights once
        if isinstance(data, Mapping) and isinstance(data.get(key), Mapping):
            data = data[key]
            break
    if not isinstance(data, Mapping):
        raise UserError(f"{path} holds a {type(data).__name__}, not a state dict; save model.state_dict()")
    for name, value in data.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise UserError(f"{path} is not a state dict: {name!r} is a {type(value).__name__}")
    return strip_prefixes(dict(data), path)


def strip_prefixes(tensors: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Without what training puts before every name, and without the heads beside a backbone, which are logged."""
    if tensors and all(name.startswith("module.") for name in tensors):
        tensors = {name.removeprefix("module."): x for name, x in tensors.items()}
    if "backbone.patch_embed.proj.weight" not in tensors:
        return tensors
    others = [name for name in tensors if not name.startswith("backbone.")]
    if others:
        log.info("%s: of %d tensors beside the backbone none is loaded: %s ...", path, len(others), others[0])
    return {name.removeprefix("backbone."): x for name, x in tensors.items() if name.startswith("backbone.")}
