"""Files have the permissions that the umask gives every new file, whichever library writes them."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from peers import randomize

from vitlab.models.config import ViTConfig
from vitlab.models.variants import build
from vitlab.training.checkpoint import CheckpointMeta, write_checkpoint
from vitlab.weights import convert, save

VIT = ViTConfig((16, 16), patch=8, depth=1, width=64, mlp=40, heads=1, classes=3)
TARGETS = {"hub": "huggingface", "timm": "timm", "vit.safetensors": "timm", "vit.pth": "torchvision"}
TARGETS |= {"tv.safetensors": "torchvision", "vit.npz": "google"}


@pytest.fixture(params=[0o022, 0o007], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def test_every_writer_follows_the_umask(umask: int, tmp_path: Path) -> None:
    model = randomize(build(VIT))
    save(model, tmp_path / "ours")
    save(model, tmp_path / "ours")  # and over itself
    for name, to in TARGETS.items():
        convert(tmp_path / "ours", tmp_path / "out" / name, to, gelu="tanh" if to == "google" else None)
    meta = CheckpointMeta(step=1, log_bytes=10, micro=4, best=0.5)
    write_checkpoint(tmp_path / "run" / "last", {"model/x": torch.ones(2)}, meta)
    found = [path for folder in ("ours", "out", "run") for path in (tmp_path / folder).rglob("*")]
    assert sum(path.is_file() for path in found) >= 12
    for path in found:
        assert path.stat().st_mode & 0o777 == (0o777 if path.is_dir() else 0o666) & ~umask, path
