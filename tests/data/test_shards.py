"""Tar shards: indexed once and read in any order; piped ones fetched when training reaches them."""

import pickle
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, picture, write_shard

from vitlab.data.loader import WINDOW, TrainLoader
from vitlab.data.open import open_data
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.models.config import Preprocess


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(folder: Path, split: str, shards: int, each: int = 5) -> None:
    for s in range(shards):
        samples = [(f"{s}/{i}", encoded(picture(s * each + i)), str(i % 3)) for i in range(each)]
        write_shard(folder / f"{split}-{s:06d}.tar", samples)


@pytest.mark.parametrize("form", ["{folder}", "{folder}/*.tar"])
def test_local_shards(tmp_path: Path, form: str) -> None:
    write(tmp_path / "test", "train", 2)  # a folder's own name is not a split
    write(tmp_path / "test", "val", 1)
    (tmp_path / "test" / "classes.txt").write_text("ant\nbee\ncow\n")
    for _ in range(2):  # the second time from the cached index
        data = open_data(form.format(folder=tmp_path / "test"))
        assert data.classes == ("ant", "bee", "cow")
        assert data.train.labels.tolist() == [0, 1, 2, 0, 1] * 2
        assert len(data.test) == 5
        source = pickle.loads(pickle.dumps(data.train))
        for index in (7, 0, 9, 3):
            assert (np.asarray(source.image(index)) == np.asarray(picture(index))).all()
        assert source.name(7).endswith("train-000001.tar: 1/2")


def test_braces_and_words(tmp_path: Path) -> None:
    for s in range(3):
        write_shard(tmp_path / f"a-{s:03d}.tar", [(f"{s}{w}", encoded(picture(s)), w) for w in ("yes", "no")])
    data = open_data(f"{tmp_path}/a-{{000..001}}.tar")
    assert data.classes == ("no", "yes")
    assert len(data.train) + len(data.test) == 4
    with pytest.raises(UserError, match=r"no shard '.*a-003.tar'"):
        open_data(f"{tmp_path}/a-{{000..003}}.tar")


def test_a_changed_shard_is_indexed_anew(tmp_path: Path) -> None:
    write(tmp_path / "s", "train", 1, each=6)
    assert len(open_data(str(tmp_path / "s"), holdout=0.4).train) == 3
    write(tmp_path / "s", "train", 1, each=12)
    data = open_data(str(tmp_path / "s"), holdout=0.4)
    assert len(data.train) + len(data.test) == 12


def test_names_of_classes_stand_beside_shards_however_they_are_spelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sets").mkdir()
    for i in range(2):
        write_shard(
            tmp_path / "sets" / f"train-{i}.tar", [(f"{i}{k}", encoded(picture(k)), f"{k % 2}") for k in range(8)]
        )
    (tmp_path / "sets" / "classes.txt").write_text("ant\nbee\n")
    for spelled in (f"{tmp_path}/sets", "~/sets", "sets", "./sets"):
        assert open_data(f"{spelled}/train-{{0..1}}.tar").classes == ("ant", "bee")


def test_problems_are_reported(tmp_path: Path) -> None:
    write(tmp_path, "train", 1)
    content = (tmp_path / "train-000000.tar").read_bytes()
    (tmp_path / "cut.tar").write_bytes(content[: len(content) // 2 + 100])
    with pytest.raises(UserError, match=r"cut.tar' cannot be read as a tar shard"):
        open_data(str(tmp_path / "cut.tar"))
    write_shard(tmp_path / "wrong.tar", [("a", encoded(picture(0)), "0"), ("b", encoded(picture(1)), "7")])
    (tmp_path / "classes.txt").write_text("ant\nbee\n")
    with pytest.raises(UserError, match="label 7, outside 0 to 1"):
        open_data(str(tmp_path / "wrong.tar"))
    with pytest.raises(UserError, match="failed with exit code 3"):
        open_data("pipe:exit 3")


def test_piped_shards(tmp_path: Path, cache: Path) -> None:
    """Shards come from a command; the order uses few of them at a time, and is the same after a restart."""
    write(tmp_path / "far", "shard", 24)
    data = open_data(f"pipe:cat {tmp_path}/far/shard-{{000000..000023}}.tar", holdout=0.2)
    assert len(data.train) + len(data.test) == 120
    assert data.train.groups is not None

    def loader(workers: int) -> TrainLoader:
        return TrainLoader(data.train, (8, 8), Augment(), Preprocess(), batch=24, seed=1, workers=workers)

    assert not loader(0).resident
    order = loader(0).order(0)
    assert sorted(order.tolist()) == list(range(len(data.train)))
    first = data.train.groups[order[: len(order) // 6]]  # a sixth of the epoch: one window of 24 shards
    assert len(set(first.tolist())) == WINDOW
    batches = loader(0).batches()
    kept = [next(batches) for _ in range(4)]
    again = loader(2).batches(2)
    for batch in kept[2:]:
        assert (next(again).images == batch.images).all()
    assert len(list((cache / "pipes").glob("*.tar"))) <= 16
