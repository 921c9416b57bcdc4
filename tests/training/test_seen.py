"""No test on what a run has learned from, when photos come, go or move and it is tested or trained again."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_runs import train_small
from test_received import photos

from vitlab.data.open import open_data
from vitlab.data.source import Data
from vitlab.errors import UserError
from vitlab.finetuning.plan import make_plan
from vitlab.training.seen import is_seen, unseen

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on photos beside it."""
    home = tmp_path_factory.mktemp("made")
    train_small(home / "run", data=str(photos(home / "photos", 20)), steps=2, batch=4, micro=4, warmup=0)
    return home


def learned(run: Path) -> set[str]:
    """Names of the images that the run had, by its log of them."""
    lines = gzip.decompress((run / "data.txt.gz").read_bytes()).decode().splitlines()
    names = (line.split("\t")[0].partition("/") for line in lines)
    return {name for split, _, name in names if split != "test"}


def below(data: Data, root: Path) -> list[str]:
    return [str(Path(data.test.name(i)).relative_to(root)) for i in range(len(data.test))]


def grow(root: Path) -> None:
    for label in range(2):
        for i in range(7):
            picture = np.random.default_rng(i).integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(picture).save(root / f"class{label}" / f"{i}-new.png")


def test_a_run_knows_what_it_has_learned_from(made: Path, tmp_path: Path) -> None:
    data, seen = open_data(str(made / "photos")), learned(made / "run")
    assert len(seen) == 32
    assert is_seen(made / "run", data.train).all()
    assert not is_seen(made / "run", data.test).any()
    assert unseen(made / "run", data) is data
    assert unseen(tmp_path / "none", data) is data
    shutil.copytree(made / "photos", tmp_path / "photos")
    grow(tmp_path / "photos")
    data = open_data(str(tmp_path / "photos"), holdout=0.5)
    before, left = below(data, tmp_path / "photos"), unseen(made / "run", data)
    assert set(before) & seen
    assert below(left, tmp_path / "photos") == [name for name in before if name not in seen]
    assert left.note.endswith(f", without {len(set(before) & seen)} images that the run has learned from")


def test_files_of_the_same_names_are_not_the_same_images(made: Path, tmp_path: Path) -> None:
    """Nor are those of a test split of its own, though they had the same sizes."""
    photos(tmp_path / "others", 20)
    for file in (tmp_path / "others").rglob("*.png"):
        Image.new("RGB", (8, 8), "red").save(file)
    assert not is_seen(made / "run", open_data(str(tmp_path / "others")).train).any()
    for split in ("train", "test"):
        shutil.copytree(made / "photos", tmp_path / "split" / split)
    data = open_data(str(tmp_path / "split"))
    assert unseen(made / "run", data) is data


def test_nothing_left_is_an_error(made: Path, tmp_path: Path) -> None:
    seen = learned(made / "run")
    shutil.copytree(made / "photos", tmp_path / "photos")
    for file in (tmp_path / "photos").rglob("*.png"):
        if str(file.relative_to(tmp_path / "photos")) not in seen:
            file.unlink()
    with pytest.raises(UserError, match="has learned from every test image of photos; test it on other images"):
        unseen(made / "run", open_data(str(tmp_path / "photos")))


def test_evaluate_report_and_training_on_a_folder_that_has_grown(
    made: Path, tmp_path: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("run", "photos"):
        shutil.copytree(made / name, tmp_path / name)
    run, root = tmp_path / "run", tmp_path / "photos"
    grow(root)
    for file in sorted((root / "class0").glob("1*.png"))[:6]:
        file.unlink()
    data, seen = open_data(str(root)), learned(run)
    fresh = [name for name in below(data, root) if name not in seen]
    lost = len(data.test) - len(fresh)
    assert lost
    code, out, err = command("evaluate", str(run), str(root), "--json", str(tmp_path / "scores.json"))
    assert code == 0, err
    assert f"without {lost} image{'s' * (lost > 1)} that the run has learned from" in out.replace("\n", " ")
    assert json.loads((tmp_path / "scores.json").read_text())["images"] == len(fresh)
    code, _, err = command("report", str(run), str(root))
    assert code == 0, err
    assert json.loads((run / "scores.json").read_text())["images"] == len(fresh)
    settings: dict[str, Any] = {"model_settings": {}, "head": "new", "steps": 2, "batch": 4, "micro": 4, "warmup": 0}
    train_small(tmp_path / "more", data=str(root), weights=str(run), **settings)
    line = f"run has learned from {lost} of the {len(data.test)} test images"
    assert line in capsys.readouterr().err
    plan = make_plan(str(root), str(run), [], 0.2)
    assert plan is not None
    assert any(line in warning for warning in plan.warnings)


def test_a_damaged_list_is_said_and_stops_nothing(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(made / "run", tmp_path / "run")
    (tmp_path / "run" / "data.txt.gz").write_bytes(b"none")
    data = open_data(str(made / "photos"))
    assert unseen(tmp_path / "run", data) is data
    assert "so it is not known which images the run has learned from" in capsys.readouterr().err.replace("\n", " ")
