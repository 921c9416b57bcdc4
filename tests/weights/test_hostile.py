"""Hostile files: each raises one line of error, takes little memory, and nothing in it is run."""

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peers import head_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import VisionTransformer

import vitlab
from vitlab.errors import UserError
from vitlab.weights import load, save

MEGABYTE = 1024  # in the kilobytes that the kernel counts


def attempt(source: Path) -> tuple[str, int]:
    """The error of `load` for a file, and its memory beyond that of doing nothing; in a process of its own."""

    def peak(work: Callable[[], str]) -> tuple[str, int]:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            torch.set_num_threads(1)  # a fork does not have the parent's pool of threads
            os.write(write, work().encode()[:4000])
            os._exit(0)
        os.close(write)
        message = os.read(read, 5000).decode()
        os.close(read)
        return message, os.wait4(child, 0)[2].ru_maxrss

    def work() -> str:
        try:
            load(source)
        except UserError as error:
            return str(error)
        except BaseException as error:
            return f"TRACEBACK {type(error).__name__}: {error}"
        return "LOADED"

    message, memory = peak(work)
    return message, memory - peak(str)[1]


def check_refused(source: Path, megabytes: int = 500) -> str:
    """The error of `load`, which must be one line that names the file."""
    message, memory = attempt(source)
    assert message != "LOADED"
    assert not message.startswith("TRACEBACK"), message
    assert source.name in message
    assert "\n" not in message
    assert memory < megabytes * MEGABYTE
    return message


# ---- safetensors


def tensors_file(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


TEN_GB = 10 * 2**30
SAFETENSORS: dict[str, tuple[Any, bytes]] = {
    "claims 10 GB": ({"patch_embed.proj.weight": entry([TEN_GB // 4], 0, TEN_GB)}, b""),
    "shape is not its bytes": ({"a": entry([2, 2], 0, 4)}, bytes(4)),
    "absurd shape": ({"a": entry([2**62, 2**62, 2**62], 0, 4)}, bytes(4)),
    "zero times much": ({"patch_embed.proj.weight": entry([2**60, 3, 0, 0], 0, 0)}, b""),
    "overlap": ({"a": entry([1], 0, 4), "b": entry([1], 2, 6)}, bytes(6)),
    "gap": ({"a": entry([1], 0, 4), "b": entry([1], 8, 12)}, bytes(12)),
    "bytes left over": ({"a": entry([1], 0, 4)}, bytes(8)),
    "backwards": ({"a": entry([1], 4, 0)}, bytes(4)),
    "negative": ({"a": entry([-1], 0, 4)}, bytes(4)),
    "shape of words": ({"a": entry(["1"], 0, 4)}, bytes(4)),
    "shape of booleans": ({"a": entry([True], 0, 4)}, bytes(4)),
    "no such type": ({"a": entry([1], 0, 4, "F31")}, bytes(4)),
    "type is a list": ({"a": {**entry([1], 0, 4), "dtype": ["F32"]}}, bytes(4)),
    "entry is a number": ({"a": 3}, b""),
    "header is a list": (b"{[1]}", b""),
    "not JSON": (b"{not json at all", b""),
    "not UTF-8": (b'{"\xff\xfe": 1}', b""),
    "a key twice": (b'{"a": 1, "a": 2}', b""),
    "NaN": (b'{"a": NaN}', b""),
    "deep": (b'{"a":' * 200_000, b""),
    "endless number": (b'{"a": ' + b"9" * 10_000 + b"}", b""),
    "metadata of numbers": ({"__metadata__": {"format": 1}}, b""),
    "half a letter in our own metadata": ({"__metadata__": {"vitlab/1": "\ud800"}}, b""),
    "nothing in it": ({}, b""),
    "many tensors": ({f"t{i}": entry([0], 0, 0) for i in range(50_000)}, b""),
}


@pytest.mark.parametrize("name", SAFETENSORS)
def test_safetensors(name: str, tmp_path: Path) -> None:
    header, data = SAFETENSORS[name]
    check_refused(tensors_file(tmp_path / "bad.safetensors", header, data))


@pytest.mark.parametrize("length", [0, 2**63, 10**8, 9])
def test_safetensors_with_a_wrong_header_length(length: int, tmp_path: Path) -> None:
    check_refused(tensors_file(tmp_path / "bad.safetensors", {"a": entry([1], 0, 4)}, bytes(4), length))


def test_a_sparse_file_that_is_really_that_long(tmp_path: Path) -> None:
    """All its sizes are correct; it is refused for the name of its one tensor before any byte of that is read."""
    file = tensors_file(tmp_path / "long.safetensors", {"patch_embed.proj.weight": entry([TEN_GB // 4], 0, TEN_GB)})
    os.truncate(file, file.stat().st_size + TEN_GB)
    check_refused(file)


def test_a_header_of_any_length_is_a_header(tmp_path: Path) -> None:
    """The first byte of a file belongs to the header's length, and may be equal to a pickle's first byte."""
    theirs = VisionTransformer(8, 8, 1, 1, 64, 64, num_classes=2).state_dict()
    starts = set()
    for padding in range(0, 256, 8):
        file = tmp_path / f"{padding}.safetensors"
        save_file(theirs, file, {"x": "y" * padding})
        starts.add(file.read_bytes()[0])
        assert torch.equal(head_of(load(file)).weight, theirs["heads.head.weight"])
    assert 0x80 in starts


def test_integers_are_no_weights(tmp_path: Path) -> None:
    tensors = VisionTransformer(8, 8, 1, 1, 64, 64, num_classes=2).state_dict()
    tensors["heads.head.bias"] = torch.zeros(2, dtype=torch.int64)
    save_file(tensors, tmp_path / "integers.safetensors")
    torch.save(tensors, tmp_path / "integers.pth")
    for name in ("integers.safetensors", "integers.pth"):
        assert "heads.head.bias" in check_refused(tmp_path / name)


# ---- pickles


class Trap:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return (Path.write_text, (self.target, "ran"))


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_pickle_is_not_run(zipped: bool, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    torch.save({"head.weight": Trap(mark)}, tmp_path / "trap.pth", _use_new_zipfile_serialization=zipped)
    assert "code" in check_refused(tmp_path / "trap.pth")
    (tmp_path / "plain.pth").write_bytes(pickle.dumps(Trap(mark)))
    check_refused(tmp_path / "plain.pth")
    assert not mark.exists()


def test_modules_and_other_objects_are_refused(tmp_path: Path) -> None:
    for name, thing in {"module": nn.Linear(2, 2), "number": 3, "list": [torch.zeros(1)], "mixed": {"a": "b"}}.items():
        torch.save(thing, tmp_path / f"{name}.pth")
        check_refused(tmp_path / f"{name}.pth")
    torch.save({"state_dict": {"a": torch.zeros(1)}, "model": 1}, tmp_path / "nested.pth")
    assert "'a'" in check_refused(tmp_path / "nested.pth")  # unwrapped, and refused for the names in it


def test_a_tensor_larger_than_its_storage(tmp_path: Path) -> None:
    torch.save({"patch_embed.proj.weight": torch.zeros(1).expand(10**5, 10**5)}, tmp_path / "wide.pth")
    assert "more than its bytes" in check_refused(tmp_path / "wide.pth")


def test_tensors_that_are_not_ordinary(tmp_path: Path) -> None:
    odd = {"meta": torch.empty(10**9, device="meta"), "sparse": torch.eye(3).to_sparse()}
    for name, tensor in odd.items():
        torch.save({"patch_embed.proj.weight": tensor}, tmp_path / f"{name}.pth")
        check_refused(tmp_path / f"{name}.pth")


def test_a_compressed_bomb_in_a_pth(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("bomb/data.pkl", bytes(300_000_000))
    check_refused(tmp_path / "bomb.pth", megabytes=200)


# ---- npz


def zip_file(path: Path, members: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    with zipfile.ZipFile(path, "w", compression, compresslevel=1) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def claim(shape: str, descr: str = "'<f4'") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + bytes(16)


NPZ: dict[str, dict[str, bytes]] = {
    "objects": {"embedding/kernel.npy": npy(np.array([{}, []], dtype=object))},
    "traversal": {"../../embedding/kernel.npy": npy(np.zeros(3))},
    "absolute": {"/embedding/kernel.npy": npy(np.zeros(3))},
    "backslash": {"..\\kernel.npy": npy(np.zeros(3))},
    "drive": {"C:/kernel.npy": npy(np.zeros(3))},
    "other member": {"embedding/kernel.npy": npy(np.zeros(3)), "run.py": b"print()"},
    "10 GB claimed": {"embedding/kernel.npy": claim(f"({TEN_GB},)")},
    "absurd shape": {"embedding/kernel.npy": claim("(4611686018427387904, 4611686018427387904)")},
    "negative": {"embedding/kernel.npy": claim("(-4,)")},
    "shape is code": {"embedding/kernel.npy": claim("__import__('os').getcwd()")},
    "type is code": {"embedding/kernel.npy": claim("(4,)", "[('a', 'O')]")},
    "deep header": {"embedding/kernel.npy": claim("(" * 5000 + ")" * 5000)},
    "no array": {"embedding/kernel.npy": b"hello"},
    "words": {"embedding/kernel.npy": npy(np.array(["a", "b"]))},
    "empty member": {"embedding/kernel.npy": b""},
}


@pytest.mark.parametrize("name", NPZ)
def test_npz(name: str, tmp_path: Path) -> None:
    check_refused(zip_file(tmp_path / "bad.npz", NPZ[name]))


def test_a_compressed_bomb_in_an_npz(tmp_path: Path) -> None:
    zeros = npy(np.zeros(75_000_000, dtype="f4"))
    file = zip_file(tmp_path / "bomb.npz", {"embedding/kernel.npy": zeros}, zipfile.ZIP_DEFLATED)
    del zeros
    assert "compress" in check_refused(file, megabytes=200)


# ---- other files and folders


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run folder."""
    folder = tmp_path_factory.mktemp("saved") / "run"
    save(vitlab.create("Ti/16", image_size=16, classes=2, depth=1), folder)
    return folder


@pytest.mark.parametrize("ending", ["safetensors", "npz", "pth", "txt"])
@pytest.mark.parametrize("data", [b"", b"x", b"\x80", b"PK\x03\x04", bytes(100), b"\x80\x02}q\x00.", b"GIF89a" * 20])
def test_files_of_no_kind(data: bytes, ending: str, tmp_path: Path) -> None:
    (tmp_path / f"bad.{ending}").write_bytes(data)
    with pytest.raises(UserError, match="bad"):
        load(tmp_path / f"bad.{ending}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", None),
        ("model", {"kind": "vit"}),
        ("model", {"kind": ["vit"]}),
        ("preprocess", 3),
        ("preprocess", {"mean": "grey"}),
        ("labels", "cat"),
        ("labels", [1, 2]),
        ("labels", ["one"]),
        ("provenance", ["here"]),
        ("provenance", "here"),
        ("provenance", {"source": 3}),
        ("sha256", 5),
        ("format", ["vitlab/1"]),
    ],
)
def test_our_config_with_wrong_types(key: str, value: Any, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "run")
    file = tmp_path / "run" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    if key == "format":  # then it is not a vitlab folder, and only the weights' own header counts
        assert load(tmp_path / "run").config.classes == 2
    else:
        check_refused(tmp_path / "run")


@pytest.mark.parametrize(
    "field",
    [
        {"depth": 10**9},
        {"width": 10**15},
        {"image_size": [10**6, 10**6], "patch": 1},
        {"heads": 7},
        {"stem": {"stages": [10**8]}},
        {"stem": {"stages": [1] * 300}},
        {"stem": 3},
        {"norm_eps": "1e-6"},
        {"color": "red"},
    ],
)
def test_a_header_with_an_absurd_model(field: dict[str, Any], saved: Path, tmp_path: Path) -> None:
    with safe_open(saved / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(saved / "model.safetensors")
    metadata["vitlab/1"] = json.dumps(json.loads(metadata["vitlab/1"]) | field)
    save_file(tensors, tmp_path / "absurd.safetensors", metadata)
    check_refused(tmp_path / "absurd.safetensors")


def test_the_command_prints_one_line(command: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    torch.save({"a": Trap(tmp_path / "mark")}, tmp_path / "trap.pth")
    code, _, err = command("convert", str(tmp_path / "trap.pth"), str(tmp_path / "out"), "--to", "vitlab")
    assert code == 1
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "mark").exists()
