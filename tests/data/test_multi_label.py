"""Multi-label sets: the same labels from a CSV, from shards and from parquet, as plain Python sets count them."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, picture, write_shard
from sklearn.preprocessing import MultiLabelBinarizer

from vitlab.data.csv_file import splits as csv_splits
from vitlab.data.label_sets import sets_of
from vitlab.data.open import hold_out_validation, open_data
from vitlab.data.parquet_reader import class_names
from vitlab.data.source import ImageSource
from vitlab.data.summary import class_warnings, contact_sheet, summarize, tables
from vitlab.errors import UserError

ROWS = [{i % 4, (i * i) % 5} if i % 7 else set[int]() for i in range(40)]  # none, one or two of five classes
NAMES = ("ant", "bee", "cat", "dog", "eel")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))


def write_csv(root: Path, named: bool = True, split: bool = False) -> Path:
    with (root / "set.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(["file", "labels", *["split"] * split])
        for i, row in enumerate(ROWS):
            picture(i).save(root / f"{i:02d}.png")
            words = ";".join(NAMES[k] if named else str(k) for k in sorted(row))
            lines.writerow([f"{i:02d}.png", words, *["val" if i % 4 else "train"] * split])
    return root / "set.csv"


def write_tar(root: Path, separator: str = " ") -> Path:
    (root / "classes.txt").write_text("\n".join(NAMES))
    labels = (separator.join(map(str, sorted(row))) for row in ROWS)
    samples = [(f"{i:02d}", encoded(picture(i)), text) for i, text in enumerate(labels)]
    return write_shard(root / "set.tar", samples)


def write_parquet(root: Path, named: bool) -> Path:
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = [[NAMES[k] for k in row] if named else [*row, *row] for row in ROWS]  # repetitions count once
    table = pa.table({"image": [encoded(picture(i)) for i in range(len(ROWS))], "labels": labels})
    pq.write_table(table, root / "set.parquet")
    return root / "set.parquet"


def rows_of(source: ImageSource) -> list[set[int]]:
    return [set(source.labels_of(i)) for i in range(len(source))]


def test_labels_and_images_are_the_same_from_every_kind_of_file(tmp_path: Path) -> None:
    for kind, classes in {"csv": NAMES, "tar": NAMES, "parquet": tuple("01234")}.items():
        root = tmp_path / kind
        root.mkdir()
        path = write_csv(root) if kind == "csv" else write_tar(root) if kind == "tar" else None
        data = hold_out_validation(open_data(str(path or write_parquet(root, named=False))), 0)
        assert data.classes == classes
        assert data.is_multi_label
        assert data.validation is not None
        assert sum(map(len, data.splits.values())) == len(ROWS)
        known = {picture(i).tobytes(): row for i, row in enumerate(ROWS)}
        for source in data.splits.values():
            assert [known[source.image(i).tobytes()] for i in range(len(source))] == rows_of(source)


@pytest.mark.parametrize("separator", [",", ", ", "\n", ";"])
def test_separators_in_label_files(tmp_path: Path, separator: str) -> None:
    data = open_data(str(write_tar(tmp_path, separator)))
    assert sorted(map(sorted, (row for s in data.splits.values() for row in rows_of(s)))) == sorted(map(sorted, ROWS))


def test_a_set_of_one_label_each_stays_one(tmp_path: Path) -> None:
    for i in range(6):
        picture(i).save(tmp_path / f"{i}.png")
    lines = "".join(f"{i}.png,{'yes' if i % 2 else 'no, never'!r}\n".replace("'", '"') for i in range(6))
    (tmp_path / "set.csv").write_text("path,class\n" + lines)
    data = open_data(str(tmp_path / "set.csv"))
    assert not data.is_multi_label
    assert data.classes == ("no, never", "yes")
    assert data.validation is None
    assert sorted([*data.train.labels, *data.test.labels]) == [0, 0, 0, 1, 1, 1]
    shard = write_shard(tmp_path / "one.tar", [(str(i), encoded(picture(i)), f"{i % 3}") for i in range(9)])
    assert not open_data(str(shard)).is_multi_label


@pytest.mark.parametrize("delimiter", [";", "\t"])
def test_columns_as_spreadsheets_separate_them(tmp_path: Path, delimiter: str) -> None:
    """The same set as with commas; cells of several labels are in quotes where these hold the delimiter."""
    expected = open_data(str(write_csv(tmp_path)))
    with (tmp_path / "set.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    with (tmp_path / "other.csv").open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows([*row, ""] for row in rows)  # with an empty column at the end
    found = open_data(str(tmp_path / "other.csv"))
    assert found.classes == expected.classes
    assert rows_of(found.train) == rows_of(expected.train)
    assert [found.test.name(i) for i in range(len(found.test))] == [
        expected.test.name(i) for i in range(len(expected.test))
    ]


@pytest.mark.parametrize(
    "text",
    [
        'file,label,"note; a; b; c"\n0.png,cat,x\n1.png,dog,"y; z"\n',  # other delimiters in the heading
        "file;label;x, y, z, w\n0.png;cat;1\n1.png;dog;2\n",
        "file,label\n0.png,cat, \n1.png,dog,,\n",  # a blank after the last column
        "\n \nfile;label\n0.png;cat\n;\n1.png;dog\n;\n",  # blank lines, as spreadsheets leave below a table
        "sep=;\nfile;label\n0.png;cat\n1.png;dog\n",
        '"sep=\t"\r\nfile\tlabel\r\n0.png\tcat\r\n1.png\tdog\r\n',
    ],
)
def test_headings_and_lines_of_other_programs(tmp_path: Path, text: str) -> None:
    for i in range(2):
        picture(i).save(tmp_path / f"{i}.png")
    (tmp_path / "set.csv").write_text(text, newline="")
    (source,) = csv_splits(tmp_path / "set.csv").values()
    assert [(Path(source.name(i)).name, source.classes[source.labels[i]]) for i in range(len(source))] == [
        ("0.png", "cat"),
        ("1.png", "dog"),
    ]


def test_own_splits_of_a_csv(tmp_path: Path) -> None:
    data = hold_out_validation(open_data(str(write_csv(tmp_path, named=False, split=True))), 0)
    assert data.classes == tuple("01234")
    assert rows_of(data.test) == [row for i, row in enumerate(ROWS) if i % 4]
    assert data.validation is not None
    assert len(data.train) + len(data.validation) == 10


def test_rows_rarest_labels_and_matrix() -> None:
    sets = sets_of(sorted(row) for row in ROWS)
    hot = MultiLabelBinarizer(classes=range(5)).fit_transform(ROWS).astype(bool)
    assert (sets.multi_hot(5) == hot).all()
    chosen = np.random.default_rng(0).permutation(40)[:25]
    assert (sets[chosen].multi_hot(5) == hot[chosen]).all()
    assert (sets[3:17].multi_hot(5) == hot[3:17]).all()
    assert sets[3:17].tobytes() == sets_of(sorted(row) for row in ROWS[3:17]).tobytes()
    count = hot.sum(0)
    expected = [min(row, key=lambda k: (count[k], k)) if row else -1 for row in ROWS]
    assert sets.rarest.tolist() == expected


def test_splits_keep_every_class_and_do_not_depend_on_the_seed(tmp_path: Path) -> None:
    path = str(write_csv(tmp_path))
    data = open_data(path)
    assert (data.train.class_counts() > 0).all()
    names = [data.test.name(i) for i in range(len(data.test))]
    other = open_data(path, seed=5, subset=0.5)
    assert [other.test.name(i) for i in range(len(other.test))] == names
    assert len(other.train) == pytest.approx(len(data.train) / 2, abs=3)
    with pytest.raises(UserError, match="use subset"):
        open_data(path, per_class=2)


def test_summary_counts_labels_and_images(tmp_path: Path) -> None:
    data = open_data(str(write_csv(tmp_path)))
    summary = summarize(data)
    kept = [ROWS[int(Path(data.train.name(i)).stem)] for i in range(len(data.train))]
    assert summary.splits["train"].counts.tolist() == [sum(k in row for row in kept) for k in range(5)]
    assert next(tables(summary)).columns[1]._cells[0] == str(len(data.train))
    assert contact_sheet(data.train).width > 0
    class_warnings(data)


def test_what_needs_one_label_says_so(tmp_path: Path) -> None:
    data = open_data(str(write_csv(tmp_path)))
    with pytest.raises(UserError, match="one label per image"):
        data.train.labels  # noqa: B018


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a.png,cat\n", "names no column"),
        ("file,labels\nb.png,cat\n", "no such file"),
        ("file,labels\na.png,cat;;dog\n", "empty"),
        ("file,labels\na.png,cat\na.png,\n", "no label for"),
        ("file,labels,split\na.png,cat;dog,exam\n", "exam"),
        ("file,labels\na.png\n", "fewer columns"),
        ("file,labels\na.png,cat,dog\n", "more columns"),
        ("file;labels\na.png;cat;dog\n", "more columns"),
        ("file,labels\n", "names no images"),
        ("file,labels\na\0.png,cat;dog\n", "no such file"),
        ("file,labels\na.png,1;-3\n", "label -3"),
        ("file,labels\na.png,1;999999999\n", "class number"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, text: str, match: str) -> None:
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "set.csv").write_text(text)
    with pytest.raises(UserError, match=match):
        open_data(str(tmp_path / "set.csv"))


@pytest.mark.slow
def test_parquet_lists_of_words(tmp_path: Path) -> None:
    data = open_data(str(write_parquet(tmp_path, named=True)))
    assert data.classes == NAMES
    assert sorted(map(sorted, (row for s in data.splits.values() for row in rows_of(s)))) == sorted(map(sorted, ROWS))


@pytest.mark.slow
def test_parquet_of_too_many_labels_and_of_both_kinds(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = encoded(picture(0))
    pq.write_table(pa.table({"image": [image], "label": [list(range(1001))]}), tmp_path / "many.parquet")
    with pytest.raises(UserError, match="1,001 labels"):
        open_data(str(tmp_path / "many.parquet"))
    (tmp_path / "both").mkdir()
    pq.write_table(pa.table({"image": [image], "label": [[1]]}), tmp_path / "both" / "train.parquet")
    pq.write_table(pa.table({"image": [image], "label": [1]}), tmp_path / "both" / "test.parquet")
    with pytest.raises(UserError, match="lists of labels"):
        open_data(str(tmp_path / "both"))


def test_class_names_of_lists_from_the_hub() -> None:
    names = {"names": ["ant", "bee"], "_type": "ClassLabel"}
    for feature in ({"feature": names, "_type": "Sequence"}, [names], names):
        metadata = {b"huggingface": json.dumps({"info": {"features": {"label": feature}}}).encode()}
        assert class_names(metadata, "label") == (["ant", "bee"], "")
        assert class_names(metadata, "other") == ([], "")
    wrong: list[object] = [[], "names", {"feature": [names]}, {"names": 3}]
    for broken in wrong:
        metadata = {b"huggingface": json.dumps({"info": {"features": {"label": broken}}}).encode()}
        assert class_names(metadata, "label")[0] == []


def test_a_csv_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "wide.csv").write_text("file,label\n", "utf-16")
    with pytest.raises(UserError, match=r"wide\.csv' cannot be read as CSV: .*; save it as CSV in UTF-8"):
        open_data(str(tmp_path / "wide.csv"))
    with pytest.raises(UserError, match="there is no file"):
        open_data(str(tmp_path / "none.csv"))
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UserError, match="no images"):
        open_data(str(tmp_path / "folder.csv"))  # a folder is what its content is, whatever its name
