"""ReaL against counts by hand."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from vitlab.errors import UserError
from vitlab.evaluation.real import Lists, RealScore, image_number, image_numbers, read_real, score_real

REAL = Path(__file__).parents[2] / ".." / "shared" / "labels" / "real.json"


def name(number: int) -> str:
    return f"val/n01440764/ILSVRC2012_val_{number:08d}.JPEG"


def real_accuracy(guesses: NDArray[np.int64], names: Sequence[str], lists: Lists) -> RealScore:
    labels = np.zeros_like(guesses)
    return score_real(guesses, labels, lists, image_numbers(names, len(lists)))


def test_a_case_by_hand() -> None:
    lists = [[3], [1, 2], [], [7, 8, 9], [5], []]
    # image        1  2  3  4  5  6
    guesses = np.array([3, 2, 0, 8, 6, 5])  # right, right, skipped, right, wrong, skipped
    assert real_accuracy(guesses, [name(i) for i in range(1, 7)], lists) == RealScore(
        images=4, correct=3, skipped=2, own=0
    )


def test_images_are_found_by_number_not_order() -> None:
    lists = [[3], [1, 2], [], [7]]
    found = real_accuracy(np.array([7, 1, 0]), [name(4), name(2), name(1)], lists)
    assert found == RealScore(images=3, correct=2, skipped=0, own=0)


def test_empty_lists_are_skipped() -> None:
    found = real_accuracy(np.array([1, 2]), [name(1), name(2)], [[], [0]])
    assert found == RealScore(images=1, correct=0, skipped=1, own=1)
    with pytest.raises(UserError, match="lists of all 1 images are empty"):
        real_accuracy(np.array([1]), [name(1)], [[]])


@pytest.mark.parametrize(
    ("file", "number"),
    [
        ("ILSVRC2012_val_00000001.JPEG", 1),
        ("/data/val/n01751748/ILSVRC2012_val_00050000.jpeg", 50_000),
        ("ILSVRC2012_val_00000007_n01751748.JPEG", 7),
        ("data/validation.parquet row 12 (ILSVRC2012_val_00000042.JPEG)", 42),
        ("data/validation.parquet row 12 (a folder/ILSVRC2012_val_00000042_n01751748.JPEG)", 42),
        ("photos/00000123.png", 123),
    ],
)
def test_names_with_a_number(file: str, number: int) -> None:
    assert image_number(file, 50_000) == number - 1


@pytest.mark.parametrize(
    "file",
    [
        "cat.jpg",
        "n01440764_10026.JPEG",  # a training image: its number is another
        "digits 7",
        "data/validation.parquet row 12",
        "ILSVRC2012_val_00000001",
        "ILSVRC2012_test_00000001.JPEG",
    ],
)
def test_names_without_a_number(file: str) -> None:
    with pytest.raises(UserError, match="has no number") as error:
        image_number(file, 50_000)
    assert file in str(error.value)


@pytest.mark.parametrize("number", [0, 7])
def test_numbers_outside_the_lists(number: int) -> None:
    with pytest.raises(UserError, match=f"number {number}.*6 lists"):
        real_accuracy(np.array([1]), [name(number)], [[1]] * 6)


def test_two_images_of_one_number() -> None:
    with pytest.raises(UserError, match="same number"):
        real_accuracy(np.array([1, 1]), ["a/0001.png", "b/0001.png"], [[1]] * 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[1], [2", "is not JSON"),
        ("{}", "list of lists"),
        ("[]", "list of lists"),
        ("[[1], 3]", "entry 1"),
        ("[[1], [], [1000]]", "entry 2"),
        ('[["cat"]]', "entry 0"),
        ("[[true]]", "entry 0"),
        ("[[1.5]]", "entry 0"),
    ],
)
def test_bad_files_are_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "real.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_real(path)
    assert str(path) in str(error.value)


def test_no_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_real(tmp_path / "none.json")
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not JSON"):
        read_real(tmp_path / "binary.json")


def test_a_good_file_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "real.json"
    path.write_text(json.dumps([[0, 999], []]))
    assert read_real(path) == [[0, 999], []]


@pytest.mark.skipif(not REAL.exists(), reason="the ReaL labels are not here")
def test_the_published_file() -> None:
    lists = read_real(REAL)
    assert len(lists) == 50_000
    first = np.array([entry[0] if entry else 0 for entry in lists])
    found = real_accuracy(first, [name(i) for i in range(1, 50_001)], lists)
    assert found.images == found.correct == sum(len(entry) > 0 for entry in lists)
    assert found.images + found.skipped == 50_000
