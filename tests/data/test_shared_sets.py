"""Runs of one process that share the images they decoded."""

import io
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import Randomize
from PIL import Image

import vitlab
from vitlab.data import resident
from vitlab.data.decoder import DecodeHint
from vitlab.data.loader import EvalLoader, TrainLoader
from vitlab.data.open import open_data
from vitlab.data.packed_files import PackedSource
from vitlab.data.resident import ResidentSet
from vitlab.data.sharing import shared_sets
from vitlab.data.source import ImageSource, Subset
from vitlab.data.transforms import Augment
from vitlab.evaluation.extract import extract
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


# ---- images to test on


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The images that were read, by index."""
    found: list[int] = []
    read = PackedSource.image

    def image(self: PackedSource, index: int, shrink: DecodeHint | None = None) -> Image.Image:
        found.append(index)
        return read(self, index, shrink)

    monkeypatch.setattr(PackedSource, "image", image)
    return found


def test_features_of_the_same_images_are_read_once(tmp_path: Path, reads: list[int], randomize: Randomize) -> None:
    """By any model of one size, though no pass asks for more than the last batch."""
    path = write(tmp_path / "train.parquet", images=23)
    models = [randomize(vitlab.create("Ti/8", image_size=16, depth=1, width=width, heads=1)) for width in (8, 16)]
    alone = [extract(model, open_data(path).train, batch=4, workers=0, device="cpu") for model in models]
    reads.clear()
    with shared_sets():
        for model, expected in zip(models, alone, strict=True):
            found = extract(model, open_data(path).train, batch=4, workers=0, device="cpu")
            assert np.array_equal(found.values, expected.values)
            assert np.array_equal(found.labels, expected.labels)
        images = len(open_data(path).train)
        assert len(reads) == images
        extract(models[0], open_data(path).test, batch=4, workers=0, device="cpu")
        assert len(reads) == images + len(open_data(path).test)
        tall = randomize(vitlab.create("Ti/8", image_size=(24, 16), depth=1, width=8, heads=1))
        extract(tall, open_data(path).test, batch=4, workers=0, device="cpu")
        assert len(reads) == images + 2 * len(open_data(path).test)
    extract(models[0], open_data(path).train, batch=4, workers=0, device="cpu")
    assert len(reads) == 2 * (images + len(open_data(path).test))


def test_other_labels_of_the_same_images_are_their_own(tmp_path: Path, reads: list[int]) -> None:
    source = open_data(write(tmp_path / "train.parquet")).test
    other = open_data(str(tmp_path / "train.parquet")).test
    other.truth = other.labels[::-1].copy()
    with shared_sets():
        first, second = (EvalLoader(s, (16, 16), Preprocess(), batch=4, resident=True) for s in (source, other))
        labels = [torch.cat([batch.labels for batch in loader.batches()]).tolist() for loader in (first, second)]
    assert labels == [source.labels.tolist(), source.labels.tolist()[::-1]]
    assert len(reads) == len(source)


def test_a_pass_that_ends_early_is_not_shared(tmp_path: Path) -> None:
    source = open_data(write(tmp_path / "train.parquet")).train
    with shared_sets():
        loader, other = (EvalLoader(source, (16, 16), Preprocess(), batch=4, resident=True) for _ in range(2))
        next(loader.batches())
        assert len(list(other.batches())) == len(loader) > 1


def test_broken_images_are_known_to_all(tmp_path: Path, reads: list[int]) -> None:
    path = tmp_path / "train.parquet"
    write(path)
    rows = pq.read_table(path).to_pylist()
    for row in rows[::4]:
        row["image"]["bytes"] = row["image"]["bytes"][:40]
    pq.write_table(pa.Table.from_pylist(rows), path)
    source = open_data(str(path)).train
    passes = []
    with shared_sets():
        for _ in range(2):
            loader = EvalLoader(source, (16, 16), Preprocess(), batch=4, resident=True)
            index = torch.cat([batch.index for batch in loader.batches()]).tolist()
            passes.append((index, loader.broken))
            assert sorted([*index, *loader.broken]) == list(range(len(source)))
    assert passes[0] == passes[1]
    assert passes[0][1]
    assert len(reads) == len(source)
