"""Runs of one process that share the images they decoded."""

import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from vitlab.data import resident
from vitlab.data.loader import TrainLoader
from vitlab.data.open import open_data
from vitlab.data.resident import ResidentSet, shared_sets
from vitlab.data.source import ImageSource, Subset
from vitlab.data.transforms import Augment
from vitlab.models.config import Preprocess


def write(path: Path, seed: int = 0, images: int = 24) -> str:
    rng, rows = np.random.default_rng(seed), []
    for i in range(images):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(file, "PNG")
        rows.append({"image": {"bytes": file.getvalue(), "path": f"{i}.png"}, "label": i % 3})
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def load(source: ImageSource, size: int = 16, preprocess: Preprocess | None = None) -> ResidentSet:
    how = preprocess or Preprocess()
    held = TrainLoader(source, (size, size), Augment(), how, batch=4, resident=True).held
    assert held is not None
    return held


def test_the_same_images_are_decoded_once(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet")
    with shared_sets():
        first = load(open_data(path).train)
        assert load(open_data(path).train) is first  # another source of the same file
        others = [
            load(open_data(path).test),
            load(open_data(path).train, size=8),
            load(open_data(path).train, preprocess=Preprocess(interpolation="nearest")),
            load(open_data(path, subset=0.5).train),
        ]
        assert len({id(held) for held in [first, *others]}) == 5
        half = open_data(path, subset=0.5).train
        assert isinstance(half, Subset)
        assert torch.equal(load(half).pixels, others[3].pixels)
        assert load(half) is others[3]
    assert load(open_data(path).train) is not first
    assert torch.equal(load(open_data(path).train).pixels, first.pixels)


def test_a_changed_file_is_another_set(tmp_path: Path) -> None:
    path = write(tmp_path / "train.parquet")
    with shared_sets():
        first = load(open_data(path).train)
        write(tmp_path / "train.parquet", seed=1)
        os.utime(path, (1, 1))
        second = load(open_data(path).train)
    assert not torch.equal(second.pixels, first.pixels)


def test_folders_and_arrays_have_no_identity(tmp_path: Path) -> None:
    """A folder's thousands of files would all have to be looked at again."""
    digits = open_data("digits").train
    with shared_sets():
        assert digits.identity() is None
        assert load(digits, 8) is not load(digits, 8)


def test_the_oldest_sets_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path / f"{i}.parquet", seed=i) for i in range(3)]
    sources = [open_data(path).train for path in paths]
    room = sum(3 * 16 * 16 * len(source) for source in sources[:2])
    monkeypatch.setattr(resident, "memory_budget", lambda device: room)
    with shared_sets():
        first, second = load(sources[0]), load(sources[1])
        assert load(sources[0]) is first  # so the second was not used for longer
        load(sources[2])
        assert load(sources[0]) is first
        assert load(sources[1]) is not second
