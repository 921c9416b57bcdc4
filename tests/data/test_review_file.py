"""review.csv: written for spreadsheets and read back from them, and its decisions applied to every kind of split."""

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from pictures import write_folder

from vitlab.data.open import hold_out_validation, open_data
from vitlab.data.review_file import Finding, apply_review, read_review, write_review
from vitlab.data.source import Data, Subset
from vitlab.errors import UserError

FINDINGS = [
    Finding('photos/a,b "c".jpg', "train", "cat", "dog", "label", 0.9876, ""),
    Finding("photos/é\n.jpg", "test", "=1+1", "-x", "two labels", 0.5, "photos/1.jpg", "remove"),
]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "review.csv"
    write_review(path, FINDINGS)
    assert read_review(path) == FINDINGS
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["path"] for row in rows] == [finding.path for finding in FINDINGS]
    assert rows[0]["decision"] == ""
    assert rows[1]["label"] == "'=1+1"  # a spreadsheet shows it, and computes nothing
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")


def test_a_file_as_spreadsheets_save_it(tmp_path: Path) -> None:
    """Semicolons, decimal commas, columns in another order, and one column more."""
    path = tmp_path / "review.csv"
    path.write_text("decision;note;path;score\r\ndog;x;photos/1.jpg;0,75\r\n;;photos/2.jpg;0,5\r\n\r\n", "utf-8")
    found = read_review(path)
    assert [(f.path, f.score, f.decision) for f in found] == [("photos/1.jpg", 0.75, "dog"), ("photos/2.jpg", 0.5, "")]


@pytest.fixture
def data(tmp_path: Path) -> Data:
    write_folder(tmp_path / "photos", {"cat": 12, "dog": 12, "elk": 12})
    return hold_out_validation(open_data(str(tmp_path / "photos")), 0.25)


def decide(data: Data, path: Path, decisions: dict[tuple[str, int], str]) -> Data:
    write_review(path, [Finding(data.splits[s].name(i), s, decision=word) for (s, i), word in decisions.items()])
    return apply_review(data, path)


def test_decisions_change_labels_and_leave_images_out(data: Data, tmp_path: Path) -> None:
    words = {("train", 0): "elk", ("train", 3): "Remove", ("train", 5): "keep", ("train", 6): ""}
    words |= {("validation", 1): "remove", ("test", 2): "cat"}
    found = decide(data, tmp_path / "review.csv", words)
    assert found.classes == data.classes
    assert found.note.endswith("by review.csv, 2 labels are changed and 2 images left out")
    one = decide(data, tmp_path / "one.csv", {("train", 0): "elk", ("train", 3): "remove"})
    assert one.note.endswith("by one.csv, 1 label is changed and 1 image left out")
    left = [i for i in range(len(data.train)) if i != 3]
    assert [found.train.name(i) for i in range(len(found.train))] == [data.train.name(i) for i in left]
    expected = data.train.labels[left].copy()
    expected[0] = 2
    assert_array_equal(found.train.labels, expected)
    assert_array_equal(found.train.class_counts(), np.bincount(expected, minlength=3))
    assert found.train.image(3).tobytes() == data.train.image(4).tobytes()
    assert len(found.validation or ()) == len(data.validation or ()) - 1
    assert found.test.labels[2] == 0
    assert len(found.test) == len(data.test)
    part = Subset(found.train, np.array([3, 0]))
    assert_array_equal(part.labels, expected[[3, 0]])
    assert decide(data, tmp_path / "empty.csv", {("train", 0): ""}).train is data.train


def test_a_set_named_from_another_folder(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decide(data, tmp_path / "review.csv", {("train", 0): "elk"})
    monkeypatch.chdir(tmp_path)
    again = hold_out_validation(open_data("photos"), 0.25)
    assert apply_review(again, Path("review.csv")).train.labels[0] == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,decision\nnone.jpg,remove\n", r"line 2 of '.*' names '.*none.jpg', which is no image of photos"),
        ("path,decision\nnone.jpg,dgo\n", r"line 2 of '.*' decides 'dgo'; write keep, remove or 'dog' …"),
        ("path,decision\nnone.jpg,zzz\n", r"decides 'zzz'; write keep, remove, 'cat', 'dog' or 'elk'$"),
        ("path,decision\na.jpg,cat\na.jpg,\na.jpg,remove\n", r"lines 2 and 4 of '.*' decide differently about 'a.jpg'"),
        ("file,decision\n", "names no column path"),
        ("path,split\n", "names no column decision"),
        ("", "names no column path"),
        ("path,decision\n\xff\n", "cannot be read as CSV"),
    ],
)
def test_what_cannot_be_applied_is_one_line(data: Data, tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "review.csv"
    path.write_bytes(text.encode("latin-1" if "\xff" in text else "utf-8"))
    with pytest.raises(UserError, match=message) as error:
        apply_review(data, path)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="there is no file"):
        apply_review(data, tmp_path / "none.csv")


@pytest.mark.parametrize(("name", "word"), [("remove", "remove"), ("Keep", "keep"), ("remove", "REMOVE")])
def test_a_decision_that_is_also_a_class_is_refused(name: str, word: str, tmp_path: Path) -> None:
    """Nobody knows whether such an image is to go or to be of that class."""
    write_folder(tmp_path / "photos", {"cat": 12, name: 12})
    data = open_data(str(tmp_path / "photos"))
    with pytest.raises(UserError, match=rf"^line 3 of '.*' decides '{word}', which is also the name of a class; re"):
        decide(data, tmp_path / "review.csv", {("train", 0): "", ("train", 1): word})
    other = "keep" if word.lower() == "remove" else "remove"
    found = decide(data, tmp_path / "review.csv", {("train", 0): "", ("train", 1): other})
    assert len(found.train) == len(data.train) - (other == "remove")


@pytest.mark.parametrize(("split", "name"), [("train", "training"), ("validation", "validation"), ("test", "test")])
def test_not_every_image_of_a_split_can_be_removed(data: Data, tmp_path: Path, split: str, name: str) -> None:
    with pytest.raises(UserError, match=f"removes every {name} image"):
        decide(data, tmp_path / "review.csv", {(split, i): "remove" for i in range(len(data.splits[split]))})
