"""The demo's own part of the story, on a run of a few steps; tests/test_tutorial.py runs the whole of it."""

import dataclasses
import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from vitlab import demo
from vitlab.data.source import open_data
from vitlab.errors import UserError
from vitlab.training.loop import train
from vitlab.training.recipes import find

VITLAB = Path(sys.executable).with_name("vitlab")


def listener() -> Console:
    return Console(file=io.StringIO(), width=120)


def heard(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo's model, cut short."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    short = dataclasses.replace(find("digits").recipe, steps=30, warmup=5)
    train(short, folder, console=Console(quiet=True))
    return folder


def test_the_story_is_told_to_its_end(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    console = listener()
    demo.tell(console, out)
    said = heard(console)
    assert "12 of its mistakes:" in said
    assert "cut into 4 x 4 patches of 2 x 2 pixels" in said
    assert [line.strip().split("   ")[0] for line in said.splitlines()[-3:]] == [command for command, _ in demo.NEXT]
    answers = capfd.readouterr().out.splitlines()
    assert [line.split()[0][-13:] for line in answers[1:]] == [f"samples/{i}.png" for i in range(10)]
    for figure in ("positions.png", "3/rollout.png", "3/steps.png"):
        assert Image.open(out / "inside" / figure).size[0] > 400


def test_the_files_are_digits_the_model_never_saw(out: Path) -> None:
    data = open_data("digits")
    demo.write_digits(data.test, out)
    seen = {np.asarray(data.train.image(i)).tobytes() for i in range(len(data.train))}
    held = {np.asarray(data.test.image(i)).tobytes(): int(data.test.labels[i]) for i in range(len(data.test))}
    files = sorted((out / "photos").glob("*/*.png"))
    assert len(files) == 200
    for path in [*files, *(out / "samples").glob("*.png")]:
        digit = np.asarray(Image.open(path).convert("RGB")).tobytes()
        assert digit not in seen
        assert held[digit] == int(path.stem if path.parent.name == "samples" else path.parent.name)
    folder = open_data(str(out / "photos"))
    assert folder.classes == tuple("0123456789")
    assert (len(folder.train), len(folder.test)) == (160, 40)


def test_it_says_whether_it_starts_goes_on_or_is_done(out: Path, tmp_path: Path) -> None:
    for folder, there, said in ((tmp_path, False, "training a small ViT on 1,198"), (out, True, "already")):
        console = listener()
        recipe, resume = demo.begin(console, folder)
        assert recipe == find("digits").recipe
        assert resume is there
        assert said in heard(console)
    (tmp_path / "recipe.json").write_text((out / "recipe.json").read_text())
    console = listener()
    assert demo.begin(console, tmp_path)[1]
    assert "going on training" in heard(console)


def test_another_run_in_its_place_is_left_alone(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlab.cli.demo import demo as verb

    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="has another"):
        verb(out)
    assert (out / "model.safetensors").read_bytes() == before


def test_figures_are_an_option(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = listener()
    demo.tell(console, out)
    assert "no figures: figures need matplotlib" in heard(console)
    assert "Next, with your own photos" in heard(console)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path: Path) -> None:
    words = [str(VITLAB), "demo", "--out", "run"]
    process = subprocess.Popen(words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    log = tmp_path / "run" / "log.jsonl"
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaint.splitlines()[-1] == "stopped and saved; the same command continues from there"
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()
    console = listener()
    assert demo.begin(console, tmp_path / "run")[1]
    assert "going on training" in heard(console)
