"""Checkpoints are written completely or not at all, rejected when damaged, and hold nothing that could be run."""

import io
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from vitlab.errors import UserError
from vitlab.training.checkpoint import (
    CheckpointMeta,
    collect_state,
    find_checkpoint,
    read_checkpoint,
    remove_leftovers,
    replace_folder,
    restore_state,
    sibling,
    write_checkpoint,
)
from vitlab.training.optim import Average, OptimizerName, make_optimizer, set_learning_rate
from vitlab.training.sharded import RestrictedUnpickler, read_metadata


def meta(step: int) -> CheckpointMeta:
    return CheckpointMeta(step=step, log_bytes=10 * step, micro=4, best=0.5)


def state(value: float) -> dict[str, Tensor]:
    return {"model/w": torch.full((3,), value)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints" / "last"
    write_checkpoint(folder, state(1.0), meta(10))
    write_checkpoint(folder, state(2.0), meta(20))
    return folder


def value(folder: Path) -> float:
    return read_checkpoint(folder)["model/w"][0].item()


def test_the_newest_is_found(place: Path) -> None:
    found = find_checkpoint(place)
    assert found is not None
    assert (found.meta, value(found.folder), found.damaged) == (meta(20), 2.0, ())


def test_none_yet(tmp_path: Path) -> None:
    assert find_checkpoint(tmp_path / "checkpoints" / "last") is None


@pytest.mark.parametrize("name", ["state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_one_is_skipped_and_the_one_before_used(place: Path, name: str, damage: str) -> None:
    path = place / name
    content = path.read_bytes()
    if damage == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "flipped":
        path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
    else:
        path.unlink()
    if name == "state.json" and damage == "flipped":
        path.write_bytes(content.replace(b'"sha256"', b'"sha257"'))
    found = find_checkpoint(place)
    assert found is not None
    assert (found.meta.step, value(found.folder)) == (10, 1.0)
    assert len(found.damaged) == 1
    remove_leftovers(place, found.folder)
    assert find_checkpoint(place) is not None
    assert value(place) == 1.0


def test_a_crash_between_the_renames_loses_nothing(place: Path) -> None:
    shutil.rmtree(sibling(place, "old"))
    shutil.copytree(place, sibling(place, "new"))
    place.rename(sibling(place, "old"))
    found = find_checkpoint(place)
    assert found is not None
    assert value(found.folder) == 2.0


@pytest.mark.parametrize("content", [None, "", '{"format": "vit'])
def test_the_very_first_was_being_written(tmp_path: Path, content: str | None) -> None:
    """Interrupted there, nothing is lost: the run begins again."""
    folder = tmp_path / "checkpoints" / "last"
    new = sibling(folder, "new")
    new.mkdir(parents=True)
    (new / "state.safetensors").write_bytes(b"half")
    if content is not None:
        (new / "state.json").write_text(content)
    assert find_checkpoint(folder) is None


def test_a_first_one_of_another_run_is_an_error(place: Path) -> None:
    """It is complete, so the run does not begin again as if it had been interrupted there."""

    def refuse(meta: CheckpointMeta) -> None:
        raise UserError("of another run")

    shutil.rmtree(sibling(place, "old"))
    place.rename(sibling(place, "new"))
    with pytest.raises(UserError, match=r"last\.new \(of another run\)"):
        find_checkpoint(place, refuse)


def test_nothing_complete_is_an_error(place: Path) -> None:
    for folder in (place, sibling(place, "old")):
        (folder / "state.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="is complete"):
        find_checkpoint(place)


def test_a_failed_write_leaves_the_last_one(place: Path) -> None:
    def broken(folder: Path) -> None:
        (folder / "half").write_bytes(b"x")
        raise OSError(28, os.strerror(28))

    with pytest.raises(UserError, match=r"No space left.*--resume"):
        replace_folder(place, broken)
    found = find_checkpoint(place)
    assert found is not None
    assert value(found.folder) == 2.0
    assert not sibling(place, "new").exists()


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_restored_copy_trains_on_as_the_original(tmp_path: Path, kind: OptimizerName) -> None:
    """Its next steps are equal to the bit."""

    def make() -> tuple[nn.Module, torch.optim.Optimizer, Average]:
        module = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 2))
        for p in module.parameters():
            nn.init.normal_(p)
        optimizer = make_optimizer(module, kind, weight_decay=0.1, betas=(0.9, 0.99), momentum=0.9)
        return module, optimizer, Average(module, 0.9)

    def walk(module: nn.Module, optimizer: torch.optim.Optimizer, average: Average, steps: range) -> None:
        for step in steps:
            torch.manual_seed(step)
            module(torch.randn(8, 5)).pow(2).mean().backward()
            set_learning_rate(optimizer, 0.01 * (step + 1))
            optimizer.step()
            optimizer.zero_grad()
            average.update(step)

    first, second = make(), make()
    walk(*first, range(3))
    write_checkpoint(tmp_path / "last", collect_state(*first), meta(3))
    restore_state(read_checkpoint(tmp_path / "last"), *second)
    for run in (first, second):
        walk(*run, range(3, 6))
    ours, theirs = collect_state(*first), collect_state(*second)
    assert ours.keys() == theirs.keys()
    assert any(key.startswith("optimizer/") for key in ours)
    assert any(key.startswith("ema/") for key in ours)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_files_name_their_format(place: Path) -> None:
    about = json.loads((place / "state.json").read_text())
    assert about["format"] == "vitlab/1"
    assert set(about["sha256"]) == {"state.safetensors"}


def test_metadata_allows_no_other_classes() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("true",)

    with pytest.raises(UserError, match="system"):
        RestrictedUnpickler(io.BytesIO(pickle.dumps(Evil()))).load()


@pytest.mark.parametrize("path", ["../elsewhere", "/etc/passwd", "a/b"])
def test_shards_are_in_their_own_folder(tmp_path: Path, path: str) -> None:
    info = _StorageInfo(path, 0, 1)
    metadata = Metadata({}, storage_data={MetadataIndex("model/w"): info})
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UserError, match="not the metadata of a checkpoint"):
        read_metadata(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"junk", pickle.dumps(5), pickle.dumps({"a": 1})])
def test_damaged_metadata_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(content)
    with pytest.raises(UserError, match="metadata"):
        read_metadata(tmp_path)
