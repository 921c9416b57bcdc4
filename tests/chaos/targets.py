"""What is fuzzed: each reader of files, valid files to begin with, and how they are changed.

A reader may refuse its input (`UserError`, `BrokenImage`) or accept it; anything else is a failure.
"""

import atexit
import functools
import io
import json
import os
import pickle
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image, features

import vitlab
from chaos import mutate
from vitlab.data import shards
from vitlab.data.images import BrokenImage, decode
from vitlab.data.parquet import splits as parquet_splits
from vitlab.errors import UserError
from vitlab.report.history import read_history
from vitlab.training import checkpoint
from vitlab.training.setup import read_recipe

REFUSED = (UserError, BrokenImage)
Read = Callable[[bytes], None]


@dataclass(frozen=True)
class Target:
    seeds: Callable[[Path], list[bytes]]  # valid and hostile files; in an empty folder
    reader: Callable[[Path], Read]  # from a folder of its own, what reads the bytes
    mutate: Callable[[bytes, mutate.Random], bytes]


# ---- pictures


def picture_seeds(_: Path) -> list[bytes]:
    rng = np.random.default_rng(0)
    rgb = Image.fromarray(rng.integers(0, 256, (9, 7, 3), np.uint8))
    found = []
    kinds = ["JPEG", "PNG", "BMP", "GIF", "TIFF", "PPM", "TGA"]
    kinds += [
        kind for kind, name in (("WEBP", "webp"), ("AVIF", "avif"), ("JPEG2000", "jpg_2000")) if features.check(name)
    ]
    for kind in kinds:
        for mode in ("RGB", "L", "RGBA", "P", "CMYK", "I;16", "1"):
            with suppress(OSError, ValueError, KeyError):  # not every kind has every mode
                found.append(saved(rgb.convert("L").convert("I;16") if mode == "I;16" else rgb.convert(mode), kind))
    turned = Image.Exif()
    turned[0x0112] = 6
    found.append(saved(rgb, "JPEG", exif=turned))
    found.append(saved(rgb, "JPEG", progressive=True))
    found += [saved(rgb, "TIFF", compression=kind) for kind in ("tiff_lzw", "tiff_adobe_deflate", "jpeg")]
    found.append(saved(rgb.convert("P"), "PNG", transparency=0))
    found.append(saved(rgb, "GIF", save_all=True, append_images=[rgb.transpose(Image.Transpose.ROTATE_180)]))
    return found


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture_reader(_: Path) -> Read:
    def read(data: bytes) -> None:
        decode(io.BytesIO(data), "input").load()

    return read


# ---- weights


def tiny(folder: Path, width: int = 8, gelu: str = "exact") -> Path:
    torch.manual_seed(0)
    model = vitlab.create("Ti/4", image_size=8, depth=1, width=width, heads=1, mlp=8, classes=3, gelu=gelu)
    vitlab.save(model, folder)
    return folder


def converted(folder: Path, name: str, to: str, width: int = 8, gelu: str = "exact") -> Path:
    vitlab.convert(tiny(folder / f"source of {name}", width, gelu), folder / name, to)
    return folder / name


def safetensors_seeds(folder: Path) -> list[bytes]:
    ours = tiny(folder / "ours") / "model.safetensors"
    alone = converted(
        folder, "timm.safetensors", "timm", width=64
    )  # the format has no number of heads; they are 64 wide
    return [path.read_bytes() for path in (ours, alone)]


def npz_seeds(folder: Path) -> list[bytes]:
    file = io.BytesIO()
    np.savez_compressed(file, a=np.zeros(1000, np.float32), b=np.array(["word"]))
    return [converted(folder, "google.npz", "google", gelu="tanh").read_bytes(), file.getvalue()]


class Hostile:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch outside",)


def pth_seeds(folder: Path) -> list[bytes]:
    state = vitlab.load(tiny(folder / "ours")).state_dict()
    found = []
    for value in (state, {"state_dict": state}, {"w": torch.zeros(3).to_sparse()}, {"w": Hostile()}, [1, "a"]):
        for new in (True, False):
            file = io.BytesIO()
            torch.save(value, file, _use_new_zipfile_serialization=new)
            found.append(file.getvalue())
    valid = converted(folder, "torchvision.pth", "torchvision", width=64).read_bytes()
    return [valid, *found, pickle.dumps({"w": Hostile()}), pickle.dumps({"w": 1})]


def weights_reader(name: str) -> Callable[[Path], Read]:
    def reader(folder: Path) -> Read:
        def read(data: bytes) -> None:
            (folder / name).write_bytes(data)
            vitlab.load(folder / name)

        return read

    return reader


def config_seeds(folder: Path) -> list[bytes]:
    folders = (tiny(folder / "ours"), converted(folder, "hf", "huggingface"), converted(folder, "timm", "timm"))
    return [(one / "config.json").read_bytes() for one in folders]


def config_reader(folder: Path) -> Read:
    """The same config beside three formats' weights."""
    folders = (tiny(folder / "ours"), converted(folder, "hf", "huggingface"), converted(folder, "timm", "timm"))

    def read(data: bytes) -> None:
        refused = []
        for one in folders:
            (one / "config.json").write_bytes(data)
            try:
                vitlab.load(one)
            except REFUSED as error:
                refused.append(error)
        if len(refused) == len(folders):
            raise refused[0]

    return read


# ---- runs


@functools.cache
def example() -> Path:
    """A run, small, but with everything that a run leaves; trained once in a process."""
    from rich.console import Console

    from chaos.runs import RECIPE
    from vitlab.training.loop import train

    folder = Path(tempfile.mkdtemp(prefix="chaos-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    train(RECIPE, folder / "run", console=Console(quiet=True))
    return folder / "run"


def run_seeds(name: str) -> Callable[[Path], list[bytes]]:
    return lambda _: [(example() / name).read_bytes()]


def run_reader(name: str) -> Callable[[Path], Read]:
    """What `--resume` and the report read of a run's folder."""

    def reader(folder: Path) -> Read:
        run = folder / "run"
        shutil.copytree(example(), run)
        shutil.rmtree(run / "checkpoints" / "last.old")  # nothing to fall back on

        def read(data: bytes) -> None:
            (run / name).write_bytes(data)
            read_recipe(run)
            checkpoint.find_checkpoint(checkpoint.last_checkpoint(run))
            read_history(run)

        return read

    return reader


# ---- sets of images


def tar_seeds(_: Path) -> list[bytes]:
    picture = saved(Image.new("RGB", (3, 2)), "PNG")
    found = []
    for labels, form in (((b"0", b"1"), tarfile.USTAR_FORMAT), ((b"cat", b"dog"), tarfile.PAX_FORMAT)):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w", format=form) as tar:
            for i, label in enumerate(labels):
                for name, data in ((f"é{i}.png", picture), (f"é{i}.cls", label)):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        found.append(file.getvalue()[: 512 * 14])
    return found


@contextmanager
def emptied() -> Iterator[None]:
    """Empty the readers' cache afterwards."""
    try:
        yield
    finally:
        for kept in Path(os.environ["VITLAB_DATA"]).iterdir():
            shutil.rmtree(kept) if kept.is_dir() else kept.unlink()


def tar_reader(folder: Path) -> Read:
    def read(data: bytes) -> None:
        path = folder / "train.tar"
        path.write_bytes(data)
        with emptied():
            found = shards.splits(str(path))["train"]
            for i in range(min(3, len(found))):
                found.image(i)

    return read


def parquet_seeds(_: Path) -> list[bytes]:
    picture = saved(Image.new("RGB", (3, 2)), "PNG")
    images = [pa.array([{"bytes": picture, "path": "a.png"}] * 2), pa.array([picture, None]), pa.array([1, 2])]
    labels = [
        pa.array([0, 1]),
        pa.array([None, 5]),
        pa.array(["cat", "dog"]),
        pa.array([-1, 2**62]),
        pa.array([0.5, None]),
    ]
    schema = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    notes = [
        json.dumps(schema),
        "[]",
        "null",
        '{"info": null}',
        '{"info": {"features": {"label": {"names": 3}}}}',
        "\xff{",
    ]
    found = []
    for i in range(max(len(labels) * 2, len(notes))):
        table = pa.table({"image": images[i % 3 if i % 2 else 0], "label": labels[i % len(labels)]})
        file = io.BytesIO()
        metadata = {"huggingface": notes[i % len(notes)]}
        pq.write_table(table.replace_schema_metadata(metadata), file, compression=("none", "snappy")[i % 2])
        found.append(file.getvalue())
    return found


def parquet_reader(folder: Path) -> Read:
    def read(data: bytes) -> None:
        path = folder / "train.parquet"
        path.write_bytes(data)
        with emptied():
            found = parquet_splits([path], folder)["train"]
            for i in range(min(3, len(found))):
                found.name(i)
                found.image(i)

    return read


def flat_reader(folder: Path) -> Read:
    """The same as parquet_reader without its process for each file: faster, and with coverage."""
    from vitlab.data.parquet_reader import FlatCopyWriter

    def read(data: bytes) -> None:
        path = folder / "train.parquet"
        path.write_bytes(data)
        try:
            FlatCopyWriter(str(path), str(folder / "copy")).write()
        except Exception as error:  # which that process reports as an error
            raise UserError(str(error)) from None

    return read


TARGETS = {
    "pictures": Target(picture_seeds, picture_reader, mutate.picture),
    "safetensors": Target(safetensors_seeds, weights_reader("model.safetensors"), mutate.safetensors),
    "npz": Target(npz_seeds, weights_reader("model.npz"), mutate.zipped),
    "pth": Target(pth_seeds, weights_reader("model.pth"), mutate.zipped),
    "config.json": Target(config_seeds, config_reader, mutate.json_text),
    "recipe.json": Target(run_seeds("recipe.json"), run_reader("recipe.json"), mutate.json_text),
    "state.json": Target(
        run_seeds("checkpoints/last/state.json"), run_reader("checkpoints/last/state.json"), mutate.sealed
    ),
    "log.jsonl": Target(run_seeds("log.jsonl"), run_reader("log.jsonl"), mutate.json_text),
    "tar": Target(tar_seeds, tar_reader, mutate.tarred),
    "parquet": Target(parquet_seeds, parquet_reader, mutate.parquet),
    "parquet unpacked": Target(parquet_seeds, flat_reader, mutate.parquet),
}
