"""A broken file in the validation or test share is left out and counted; it ends no run, resumed or not."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same_tensors, records, train_small
from test_parallel import call
from test_parallel import command as torchrun
from test_received import photos
from test_resume import killed_at

from vitlab.errors import UserError
from vitlab.report import write_report

SETTINGS: dict[str, Any] = {"steps": 8, "batch": 4, "micro": 2, "warmup": 0, "checkpoint_every": 100}
Command = Callable[..., tuple[int, str, str]]
BROKEN = ("val/class0/1.png", "test/class0/0.png", "test/class1/5.png")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of three splits, of which those that the others break are not there."""
    folder = tmp_path_factory.mktemp("good") / "photos"
    for split in ("train", "val", "test"):
        photos(folder / split)
    for name in BROKEN:
        (folder / name).unlink()
    return folder


@pytest.fixture(scope="module")
def clean(good: Path) -> Path:
    """The run on them."""
    train_small(good.parent / "run", data=str(good), **SETTINGS)
    return good.parent / "run"


@pytest.fixture
def damaged(good: Path, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(good, tmp_path / "photos"))
    for name, content in zip(BROKEN, (b"", b"no image", b"\x89PNG\r\n\x1a\n"), strict=True):
        (folder / name).write_bytes(content)
    return folder


def evaluations(out: Path) -> list[dict[str, Any]]:
    return [record for record in records(out) if "validation" in record or "test" in record]


def assert_same_scores(out: Path, clean: Path) -> None:
    """The runs are equal, and so are their scores up to the order of sums; the log counts what was left out."""
    assert_same_tensors(out, clean, "model.safetensors")
    ours, theirs = evaluations(out), evaluations(clean)
    assert len(ours) == len(theirs) == 3  # validation at step 7 and 8, and the test
    for mine, other in zip(ours, theirs, strict=True):
        split = "validation" if "validation" in mine else "test"
        assert mine["broken"] == {split: {"validation": 1, "test": 2}[split]}
        for key in (split, "ema"):
            assert mine[key] == pytest.approx(other[key], rel=1e-5)


def test_a_run_is_that_without_the_broken_files(
    damaged: Path, clean: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    train_small(out, data=str(damaged), **SETTINGS)
    assert_same_scores(out, clean)
    printed = capsys.readouterr().err
    assert printed.count("1 of 12 validation images cannot be read") == 1  # not at every evaluation
    assert printed.count("2 of 12 test images cannot be read") == 1
    assert "test/class1/5.png (" in printed
    assert "more than broken_limit (0.1)" in printed  # 2 of 12


def test_a_killed_run_continues_past_them(
    damaged: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, settings = tmp_path / "run", SETTINGS | {"data": str(damaged), "checkpoint_every": 3}
    with killed_at(7, monkeypatch):
        train_small(out, **settings)
    train_small(out, resume=True, **settings)
    assert_same_scores(out, clean)


def test_a_test_split_of_which_nothing_can_be_read(
    damaged: Path, clean: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trained state is saved first; with the files in place the run ends without a further step."""
    out, saved = tmp_path / "run", {path: path.read_bytes() for path in (damaged / "test").rglob("*.png")}
    for path in saved:
        path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(UserError, match=r"12 of 12 test images cannot be read.*--resume"):
        train_small(out, data=str(damaged), **SETTINGS)
    for path, content in saved.items():
        path.write_bytes(content)
    monkeypatch.setattr("vitlab.training.trainer.Trainer.accumulate", None)  # no step is left
    train_small(out, resume=True, data=str(damaged), broken_limit=0.5, **SETTINGS)
    assert_same_tensors(out, clean, "model.safetensors")


def test_every_image_can_be_required(damaged: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 of 12 validation images cannot be read"):
        train_small(tmp_path / "run", data=str(damaged), broken_limit=0.0, **SETTINGS)


@pytest.mark.slow
def test_the_report_counts_them(damaged: Path, clean: Path) -> None:
    page = write_report(clean, str(damaged), device="cpu").path.read_text()
    assert "2 test images could not be read and are left out: " in page
    assert "of 10 test images right" in page


def test_evaluate_counts_them(damaged: Path, clean: Path, tmp_path: Path, command: Command) -> None:
    (damaged / "test/class1/5.png").unlink()
    numbers = tmp_path / "numbers.json"
    status, printed, err = command("evaluate", str(clean), str(damaged), "--device", "cpu", "--json", str(numbers))
    assert status == 0, err
    assert "left out, broken" in printed
    found = json.loads(numbers.read_text())
    assert found["images"] == 10
    assert [Path(name).name for name in found["broken"]] == ["0.png"]
    assert found["top1"]["value"] == evaluations(clean)[-1]["ema"]["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_leave_out_the_same(damaged: Path, clean: Path, tmp_path: Path, parallel: str) -> None:
    """One of them has no readable image at all in its share of the test split: each makes as many passes."""
    for path in (damaged / "test" / "class1").iterdir():
        path.write_bytes(b"broken")
    target, script = tmp_path / "measured.json", str(Path(__file__).with_name("measure_run.py"))
    out = Path(shutil.copytree(clean, tmp_path / "run"))
    (out / "data.txt.gz").unlink()
    found = []
    for processes in (1, 2):
        words = (script, str(out), str(target), f"parallel={parallel}", f"data={damaged}")
        call(*torchrun(processes, "python", *words))
        found.append(json.loads(target.read_text()))
    assert found[0]["accuracy"] * 5 == pytest.approx(round(found[0]["accuracy"] * 5))  # of the five good ones
    assert found[1] == pytest.approx(found[0] | {"world": 2}, rel=1e-5)
