"""`vitlab predict` with pipes, devices and hostile settings."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """One picture, and a pipe of nearly the same name."""
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (20, 30), "red").save(tmp_path / "photos" / "a.png")
    os.mkfifo(tmp_path / "photos" / "pipe.jpg")
    return tmp_path / "photos"


@pytest.mark.parametrize("pattern", ["", "*"])
def test_pipes_are_skipped(model: Path, photos: Path, pattern: str, command: Command) -> None:
    code, out, _ = command("predict", str(model), str(photos / pattern), "--json")
    assert code == 0
    assert len(out.splitlines()) == 1


@pytest.mark.parametrize("name", ["pipe.jpg", "/dev/zero"])
def test_a_pipe_or_device_by_name_is_an_error(model: Path, photos: Path, name: str, command: Command) -> None:
    code, _, err = command("predict", str(model), str(photos / name))
    assert code == 1
    assert f"'{photos / name}' is a pipe or a device, not a file" in err


@pytest.mark.parametrize("name", ["run", "model.safetensors", "config.json"])
def test_weights_that_are_a_pipe(photos: Path, tmp_path: Path, name: str, command: Command) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder" / name)
    for place in (tmp_path / "folder", tmp_path / "folder" / name):
        code, _, err = command("predict", str(place), str(photos))
        assert code == 1
        assert err.startswith("error: ")


@pytest.mark.parametrize(
    ("setting", "value", "words"),
    [
        ("crop", 1e-4, "crop must be at least 0.1 and at most 1, not 0.0001"),  # scales a photo to 80,000 pixels a side
        ("std", [1e-30] * 3, "std must be at least 0.0001 and at most 255"),
    ],
)
def test_preprocessing_that_asks_for_all_memory(
    model: Path, photos: Path, tmp_path: Path, setting: str, value: object, words: str, command: Command
) -> None:
    folder = shutil.copytree(model, tmp_path / "run")
    config = json.loads((folder / "config.json").read_text())
    config["preprocess"][setting] = value
    (folder / "config.json").write_text(json.dumps(config))
    code, _, err = command("predict", str(folder), str(photos))
    assert code == 1
    assert words in err
