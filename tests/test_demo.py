"""The demo after a run of a few steps; tests/test_tutorial.py runs all of it."""

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

import vitlab
from vitlab import demo
from vitlab.data.open import open_data
from vitlab.errors import UserError
from vitlab.terminal import Terminal
from vitlab.training.loop import train
from vitlab.training.recipes import find

VITLAB = Path(sys.executable).with_name("vitlab")


def recording() -> Terminal:
    console = Terminal()
    console.file, console.width = io.StringIO(), 120
    return console


def printed(console: Terminal) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the demo's model, cut short."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    short = dataclasses.replace(find("digits").recipe, steps=8, warmup=1)
    train(short, folder, console=Console(quiet=True))
    return folder


@pytest.mark.slow
def test_it_shows_mistakes_steps_and_predictions(out: Path, capfd: pytest.CaptureFixture[str], no_box: None) -> None:
    console = recording()
    demo.show(console, out)
    text = printed(console)
    assert "12 of its mistakes:" in text
    assert "cut into 4 x 4 patches of 2 x 2 pixels" in text
    assert "no photo: this copy of vitlab has no model in the box" in text
    assert [line.strip().split("   ")[0] for line in text.splitlines()[-3:]] == [command for command, _ in demo.NEXT]
    predictions = capfd.readouterr().out.splitlines()
    assert [line.split()[0][-13:] for line in predictions[1:]] == [f"samples/{i}.png" for i in range(10)]
    for figure in ("positions.png", "3/classes.png", "3/steps.png"):
        assert Image.open(out / "inside" / figure).size[0] > 400


def test_the_photo_of_the_package(out: Path, boxed: Path, capfd: pytest.CaptureFixture[str]) -> None:
    console = recording()
    demo.show_photo(console, out)
    text = printed(console)
    assert (out / "photo.jpg").read_bytes() == (Path(vitlab.__file__).parent / "box" / "photo.jpg").read_bytes()
    file, name, *_ = capfd.readouterr().out.splitlines()[1].split()
    model = vitlab.load(boxed)
    assert file.endswith("photo.jpg")
    assert name == model.labels[int(model(model.preprocess(out / "photo.jpg")).argmax())]
    assert "what happens to a photo" in text
    assert "cut into 4 x 4 patches of 8 x 8 pixels" in text
    assert f"the prediction is {name}" in text
    for picture in ("photo-looked.png", "photo/steps.png", "photo/classes.png"):
        assert Image.open(out / "inside" / picture).size[0] > 400


def test_the_files_are_test_digits(out: Path) -> None:
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


def test_it_starts_resumes_or_uses_the_finished_run(out: Path, tmp_path: Path) -> None:
    for folder, resumes, text in ((tmp_path, False, "training a small ViT on 1,198"), (out, True, "already has")):
        console = recording()
        recipe, resume = demo.begin(console, folder)
        assert recipe == find("digits").recipe
        assert resume is resumes
        assert text in printed(console)
    (tmp_path / "recipe.json").write_text((out / "recipe.json").read_text())
    console = recording()
    assert demo.begin(console, tmp_path)[1]
    assert "resuming training" in printed(console)


def test_another_run_in_its_folder_is_not_changed(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vitlab.cli.demo import demo as command

    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(UserError, match="has another"):
        command(out)
    assert (out / "model.safetensors").read_bytes() == before


def test_it_works_without_matplotlib(out: Path, boxed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = recording()
    demo.show(console, out)
    assert printed(console).count("no figures: figures need matplotlib") == 2
    assert (out / "inside" / "photo-looked.png").exists()
    assert "Next, with your own photos" in printed(console)


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_resumes(tmp_path: Path) -> None:
    arguments = [str(VITLAB), "demo", "--out", "run"]
    process = subprocess.Popen(arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    log = tmp_path / "run" / "log.jsonl"
    while not (log.exists() and log.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "stopped and saved; the same command continues from there"
    assert (tmp_path / "run" / "checkpoints" / "last" / "state.json").exists()
    console = recording()
    assert demo.begin(console, tmp_path / "run")[1]
    assert "resuming training" in printed(console)
