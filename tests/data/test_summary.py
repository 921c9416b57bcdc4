"""The summary of a data set reports the problems that were put into it."""

import logging
from pathlib import Path

import numpy as np
import pytest
from pictures import picture, write_folder
from PIL import Image

from vitlab.cli.data import data
from vitlab.data.open import open_data
from vitlab.data.summary import LEGEND, class_warnings, contact_sheet, image_warnings, legend, summarize
from vitlab.errors import UserError


@pytest.mark.parametrize("workers", [0, 2])
def test_summary(tmp_path: Path, workers: int) -> None:
    write_folder(tmp_path / "train", {"many": 30, "few": 3})
    write_folder(tmp_path / "test", {"many": 4})  # the same pictures again
    picture(999, 33, 77).save(tmp_path / "train" / "few" / "wide.png")
    picture(1).save(tmp_path / "train" / "many" / "000.png")  # two alike within train are no leak
    (tmp_path / "train" / "many" / "broken.jpg").write_bytes(b"no")
    data = open_data(str(tmp_path))
    found = summarize(data, workers)
    assert found.data.classes == ("few", "many")
    assert found.splits["train"].counts.tolist() == [4, 31]
    assert found.splits["train"].sizes.max(0).tolist() == [33, 77]
    assert [Path(name).name for _, name, _ in found.splits["train"].broken] == ["broken.jpg"]
    pairs = {(Path(a).name, Path(b).name) for a, b in found.duplicates}
    assert pairs == {("000.png", "001.png"), ("002.png", "002.png"), ("003.png", "003.png")}  # 000 was replaced
    text = " / ".join(class_warnings(data) + image_warnings(found))
    for part in ("no test images: few", "fewer than 5 training images: few", "1 broken image in train", "3 images"):
        assert part in text


def test_one_photo_under_two_labels_is_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 10, "dog": 10})
    content = (tmp_path / "cat" / "004.png").read_bytes()
    (tmp_path / "dog" / "copy.png").write_bytes(content)
    Image.open(tmp_path / "cat" / "007.png").save(tmp_path / "cat" / "again.bmp")  # of one label
    data = open_data(str(tmp_path))
    found = summarize(data)
    [pair] = {tuple(sorted(pair)) for pair in found.two_labels}
    assert pair == (f"{tmp_path}/cat/004.png (cat)", f"{tmp_path}/dog/copy.png (dog)")
    assert any(line.startswith("1 image is under two labels, such as ") for line in image_warnings(found))


def test_uneven_classes_are_named(tmp_path: Path) -> None:
    write_folder(tmp_path, {"a": 50, "b": 5, "c": 20})
    [warning] = [line for line in class_warnings(open_data(str(tmp_path))) if "uneven" in line]
    assert warning == "the classes are uneven: 40 training images of 'a', 4 of 'b'"
    assert class_warnings(open_data("digits")) == []


def test_contact_sheet_shows_the_classes(tmp_path: Path) -> None:
    for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        (tmp_path / name).mkdir()
        for i in range(6):
            Image.new("RGB", (40, 30), color).save(tmp_path / name / f"{i}.png")
    sheet = np.asarray(contact_sheet(open_data(str(tmp_path)).train))
    upper, lower = np.array_split(sheet, 2)
    assert (upper == [0, 0, 255]).all(-1).any()  # rows are in the order of the classes
    assert (lower == [255, 0, 0]).all(-1).any()
    assert not (upper == [255, 0, 0]).all(-1).any()


def test_verb(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from typer.testing import CliRunner

    from vitlab.cli import app

    caplog.set_level(logging.CRITICAL)
    write_folder(tmp_path / "set", {"cat": 6, "dog": 7})
    out = tmp_path / "sheet.png"
    result = CliRunner().invoke(app, ["data", str(tmp_path / "set"), "--picture", str(out)])
    assert result.exit_code == 0, result.output
    assert "2 classes" in result.output
    assert "held out class by class" in " ".join(result.output.split())
    assert Image.open(out).size[0] > 500
    again = CliRunner().invoke(app, ["data", str(tmp_path / "set"), "--picture", str(out)])
    assert again.exit_code == 0, again.output  # its own picture is replaced


@pytest.mark.parametrize("name", ["mine.png", "mine.jpg", "notes.png", "x.txt", "dangling.png"])
def test_other_files_are_not_overwritten(name: str, tmp_path: Path) -> None:
    """The set does not exist: the picture is checked before anything is read."""
    file = tmp_path / name
    if name.startswith("mine"):
        picture(0).save(file)
    elif name == "dangling.png":
        file.symlink_to(tmp_path / "elsewhere.png")
    else:
        file.write_text("notes")
    before = file.read_bytes() if file.exists() else None
    with pytest.raises(UserError, match=r"--picture"):
        data(str(tmp_path / "no such set"), picture=file)
    assert (file.read_bytes() if file.exists() else None) == before


def test_the_legend(tmp_path: Path) -> None:
    """A line above the rows, and a red cell for a file that cannot be read."""
    write_folder(tmp_path, {"cat": 6, "dog": 7})
    plain = np.asarray(contact_sheet(open_data(str(tmp_path)).train, "pets"))
    assert (plain[:LEGEND] < 128).any()
    assert not (plain == [255, 0, 0]).all(-1).any()
    for i in range(20):
        (tmp_path / "cat" / f"broken{i}.png").write_text("no")
    broken = np.asarray(contact_sheet(open_data(str(tmp_path)).train, "pets"))
    assert (broken == [255, 0, 0]).all(-1).any()
    assert legend("pets", 12, 37) == (
        "pets: rows are 12 of its 37 classes, with up to 8 training images at random; red: cannot be read"
    )
