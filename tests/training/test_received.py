"""A run's folder from an untrusted source: nothing in it is run, and nothing it names is opened unasked."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from small_runs import records, skip_report, train_small

from vitlab.errors import UserError
from vitlab.report import write_report
from vitlab.training import trust
from vitlab.training.setup import recipe_to_resume

Command = Callable[..., tuple[int, str, str]]


def photos(folder: Path, count: int = 6) -> Path:
    rng = np.random.default_rng(0)
    for label in range(2):
        (folder / f"class{label}").mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / f"class{label}" / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of this user's, on photos beside it."""
    home = tmp_path_factory.mktemp("made")
    train_small(home / "run", data=str(photos(home / "photos")), steps=4, batch=4, micro=4, warmup=0)
    return home / "run"


def receive(made: Path, place: Path, **changes: Any) -> Path:
    """A copy of a run with a changed recipe."""
    shutil.copytree(made, place)
    content = json.loads((place / "recipe.json").read_text())
    content["recipe"] |= changes
    (place / "recipe.json").write_text(json.dumps(content))
    return place


# ---- commands


def test_a_report_runs_no_command(made: Path, tmp_path: Path, command: Command) -> None:
    run = receive(made, tmp_path / "run", data=f"pipe:touch {tmp_path}/ran; exit 1")
    code, _, printed = command("report", str(run))
    assert not (tmp_path / "ran").exists()
    assert code == 1
    assert f"only taken from the command line: vitlab report {run} 'pipe:COMMAND'" in printed.replace("\n", " ")


@pytest.mark.parametrize("verb", [["train"], ["finetune", "digits"]])
def test_resuming_runs_no_command(made: Path, tmp_path: Path, command: Command, verb: list[str]) -> None:
    run = receive(made, tmp_path / "run", data=f"pipe:touch {tmp_path}/ran; exit 1")
    code, _, printed = command(*verb, "--out", str(run), "--resume")
    assert not (tmp_path / "ran").exists()
    assert code == 1
    assert "Traceback" not in printed
    if verb == ["train"]:
        assert f"vitlab train --out {run} --resume data='pipe:COMMAND'" in printed.replace("\n", " ")


def test_a_restarted_process_runs_no_command(
    made: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    run = receive(made, tmp_path / "run", data=f"pipe:touch {tmp_path}/ran; exit 1")
    code, _, printed = command("train", "--out", str(run))
    assert not (tmp_path / "ran").exists()
    assert code == 1
    assert "only taken from the command line" in printed.replace("\n", " ")


def test_even_ones_own_command_must_be_named_again(made: Path, tmp_path: Path) -> None:
    run = receive(made, tmp_path / "run", data=f"pipe:touch {tmp_path}/ran; exit 1")
    trust.remember_recipe(run / "recipe.json")
    with pytest.raises(UserError, match="only taken from the command line"):
        recipe_to_resume(run, [])
    with pytest.raises(UserError, match="only taken from the command line"):
        write_report(run)
    assert not (tmp_path / "ran").exists()


def test_a_command_on_the_command_line_is_run(made: Path, tmp_path: Path, command: Command) -> None:
    """What the user types is run."""
    run = receive(made, tmp_path / "run", data="pipe:touch nowhere")
    code, _, printed = command("report", str(run), f"pipe:touch {tmp_path}/ran; exit 3")
    assert (tmp_path / "ran").exists()
    assert code == 1
    assert "exit code 3" in printed


# ---- paths


def test_an_untrusted_path_is_not_opened(made: Path, tmp_path: Path, command: Command) -> None:
    private = photos(tmp_path / "private")
    run = receive(made, tmp_path / "run", data=str(private))
    shutil.rmtree(run / "checkpoints")
    (run / "report.html").unlink(missing_ok=True)
    code, _, printed = command("report", str(run))
    assert code == 1
    assert f"name the data to use: vitlab report {run} DATA" in printed.replace("\n", " ")
    assert not (run / "report.html").exists()
    code, _, printed = command("train", "--out", str(run), "--resume")
    assert code == 1
    assert f"name the data to use: vitlab train --out {run} --resume data=DATA" in printed.replace("\n", " ")


@pytest.mark.slow
def test_a_path_on_the_command_line_is_opened(made: Path, tmp_path: Path, command: Command) -> None:
    run = receive(made, tmp_path / "run", data="/nowhere")
    (run / "model.safetensors").unlink()
    (run / "config.json").unlink()
    data = str(made.parent / "photos")
    code, _, wrong = command("train", f"data={data}", "--out", str(run), "--resume")
    assert code == 0, wrong
    assert (run / "report.html").exists()


def test_untrusted_weights_are_not_opened(made: Path, tmp_path: Path) -> None:
    run = receive(made, tmp_path / "run", weights=str(made))
    data = f"data={made.parent / 'photos'}"
    assert recipe_to_resume(run, [data]) is not None  # the checkpoint replaces them
    checkpoints = run / "checkpoints"
    (checkpoints / "last").rename(checkpoints / "last.new")
    assert recipe_to_resume(run, [data]) is not None
    (checkpoints / "last.new" / "state.json").write_text("{}")  # as it is before it is written: the run begins again
    (checkpoints / "last-of-all").mkdir()
    with pytest.raises(UserError, match=r"weights .* are not opened unasked"):
        recipe_to_resume(run, [data])
    shutil.rmtree(checkpoints)
    with pytest.raises(UserError, match=r"weights .* are not opened unasked"):
        recipe_to_resume(run, [data])
    assert recipe_to_resume(run, [data, f"weights={made}"]) is not None


def test_ones_own_run_is_trusted(made: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when it was moved, as its recipe is the same."""
    moved = tmp_path / "moved"
    shutil.copytree(made, moved)
    assert command("report", str(made))[0] == 0
    skip_report(monkeypatch)
    assert command("train", "--out", str(moved), "--resume")[0] == 0


@pytest.mark.slow
def test_built_in_sets_are_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_small(tmp_path / "run", steps=4)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another-user"))
    assert not trust.is_trusted(tmp_path / "run" / "recipe.json")
    assert recipe_to_resume(tmp_path / "run", []) is not None
    assert write_report(tmp_path / "run").path.exists()


def test_a_home_that_cannot_be_written_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    train_small(tmp_path / "run", steps=4)
    assert "ask for this run's data again" in capsys.readouterr().err
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_the_report_of_a_run_uses_the_data_that_is_open(tmp_path: Path) -> None:
    """Even piped: the command line named it a moment ago."""
    result = train_small(tmp_path / "run", steps=4)
    path = tmp_path / "run" / "recipe.json"
    path.write_text(path.read_text().replace('"digits"', '"pipe:false"'))
    assert write_report(result.folder, result.data).path.exists()


# ---- links


@pytest.mark.parametrize("name", ["log.jsonl", "model.safetensors.new", "checkpoints/last.new", "recipe.json"])
def test_links_are_neither_read_nor_written_through(made: Path, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    target = tmp_path / "precious"
    target.write_text("precious\n" * 1000)
    path = run / name
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    recipe: dict[str, Any] = {"data": str(made.parent / "photos"), "steps": 4, "batch": 4, "micro": 4, "warmup": 0}
    with pytest.raises(UserError, match=path.name):
        train_small(run, resume=True, **recipe)
    with pytest.raises(UserError, match=path.name):
        write_report(run, str(made.parent / "photos"))
    assert target.read_text() == "precious\n" * 1000


def test_a_pipe_in_the_folder_blocks_nothing(made: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(made, run)
    (run / "recipe.json").unlink()
    os.mkfifo(run / "recipe.json")
    with pytest.raises(UserError, match="no regular file"):
        write_report(run)


def test_checkpoints_name_their_own_files_alone(made: Path, tmp_path: Path) -> None:
    """A digest of a file elsewhere would reveal whether it is there."""
    run = tmp_path / "run"
    shutil.copytree(made, run)
    from vitlab.training import checkpoint

    (tmp_path / "elsewhere").write_text("x")
    path = run / "checkpoints" / "last" / "state.json"
    content = json.loads(path.read_text())
    del content["digest"]
    content["sha256"]["../../../elsewhere"] = "0" * 64
    path.write_text(json.dumps(content | {"digest": checkpoint.meta_digest(content)}))
    with pytest.raises(UserError, match="not in its folder"):
        checkpoint.read_meta(path.parent)
    assert len(records(run)) > 0
