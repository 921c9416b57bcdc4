"""Sets of every kind are opened, split, thinned and checked alike."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from pictures import arrays, encoded, picture, write_folder, write_shard

from vitlab.data.labels import sort_classes
from vitlab.data.open import assign_splits, hold_out_validation, open_data, usual_share
from vitlab.data.source import ImageSource, Subset
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import open_split


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def counts(source: ImageSource) -> list[int]:
    return np.bincount(source.labels, minlength=len(source.classes)).tolist()


def names(source: ImageSource) -> set[str]:
    return {source.name(i) for i in range(len(source))}


# ---- digits


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    data = open_data("digits")
    known = load_digits()
    assert len(data.train) + len(data.test) == 1797
    assert abs(len(data.test) / 1797 - 1 / 3) < 0.005
    assert data.classes == tuple("0123456789")
    index = int(data.test.name(5).split()[-1])
    assert int(data.test.labels[5]) == known.target[index]
    found = np.asarray(data.test.image(5))[..., 0] / 255 * 16
    assert np.abs(found - known.images[index]).max() <= 0.5 / 255 * 16 + 1e-9


# ---- folders


def test_folder_with_other_files(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 5, "dog": 10})
    (tmp_path / "cat" / "deep" / "deeper").mkdir(parents=True)
    picture(1).save(tmp_path / "cat" / "deep" / "deeper" / "LOUD.JPG", "JPEG")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / ".hidden.png").write_bytes(b"x")
    (tmp_path / ".git").mkdir()
    picture(1).save(tmp_path / ".git" / "x.png")
    (tmp_path / "empty").mkdir()
    os.symlink(tmp_path / "cat", tmp_path / "cat" / "deep" / "round")  # a loop of links
    data = open_data(str(tmp_path))
    assert data.classes == ("cat", "dog")
    assert np.add(counts(data.train), counts(data.test)).tolist() == [6, 10]
    assert counts(data.test) == [1, 2]
    every = names(data.train) | names(data.test)
    assert len(every) == 16
    assert any(name.endswith("LOUD.JPG") for name in every)
    for source in (data.train, data.test):
        for i in range(len(source)):
            assert source.classes[source.labels[i]] in source.name(i)
            assert source.image(i).mode == "RGB"


@pytest.mark.parametrize(("second", "used"), [("test", "test"), ("val", "test"), ("Validation", "test")])
def test_folder_with_splits(tmp_path: Path, second: str, used: str) -> None:
    write_folder(tmp_path / "train", {"a": 3, "b": 4})
    write_folder(tmp_path / second, {"a": 2, "b": 1})
    data = open_data(str(tmp_path))
    assert (counts(data.train), counts(data.test)) == ([3, 4], [2, 1])


def test_validation_is_kept_beside_a_test_split(tmp_path: Path) -> None:
    for split, count in (("train", 5), ("valid", 2), ("test", 3)):
        write_folder(tmp_path / split, {"a": count, "b": count})
    data = open_data(str(tmp_path))
    assert data.validation is not None
    assert (len(data.train), len(data.validation), len(data.test)) == (10, 4, 6)
    assert "validation" in data.note


def test_unlabeled_test_images_are_not_a_test_split(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"a": 10, "b": 10})
    write_folder(tmp_path, {"test": 4})
    data = open_data(str(tmp_path))
    assert (counts(data.train), counts(data.test)) == ([8, 8], [2, 2])


def test_class_folders_of_numbers_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    numbers = [str(i) for i in range(12)]
    write_folder(tmp_path / "numbers", dict.fromkeys(numbers, 2))
    assert open_data(str(tmp_path / "numbers")).classes == tuple(numbers)
    write_folder(tmp_path / "mixed", dict.fromkeys(["2", "10", "ten"], 2))
    assert open_data(str(tmp_path / "mixed")).classes == ("10", "2", "ten")
    assert sort_classes(["9", "010", "09", "1"]) == ("1", "09", "9", "010")
    assert sort_classes(["b", "a", "b"]) == ("a", "b")


def test_imagenet_layout(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"n02": 2, "n01": 2})
    write_folder(tmp_path / "val", {"n01": 1, "n02": 1})
    data = open_data(f"imagenet:{tmp_path}")
    assert data.classes == ("n01", "n02")
    assert len(data.test) == 2


@pytest.mark.parametrize(("spec", "beside"), [("imagenet:", "devkit"), ("imagenet:", None), ("", None)])
def test_validation_alone_is_enough_to_evaluate(tmp_path: Path, spec: str, beside: str | None) -> None:
    write_folder(tmp_path / "val", {"n01": 3, "n02": 2})
    if beside:
        (tmp_path / beside).mkdir()
    for split in ("test", "validation", "all"):
        source, _ = open_split(f"{spec}{tmp_path}", split)
        assert (source.classes, counts(source)) == (("n01", "n02"), [3, 2])
    for use in (lambda: open_data(f"{spec}{tmp_path}"), lambda: open_split(f"{spec}{tmp_path}", "train")):
        with pytest.raises(UserError, match="has no train folder, only validation"):
            use()


def test_classes_may_be_called_test_and_val(tmp_path: Path) -> None:
    write_folder(tmp_path / "loose", {"test": 5, "val": 5})
    assert open_data(str(tmp_path / "loose")).classes == ("test", "val")
    write_folder(tmp_path / "nested", {"test/deep": 5, "pass": 5})
    assert open_data(str(tmp_path / "nested")).classes == ("pass", "test")


def test_a_parquet_file_of_tests_alone(tmp_path: Path) -> None:
    """Every image is one to test on, except for a model that was trained on part of them."""
    write_parquet(tmp_path / "test.parquet", [0, 1] * 10, ["cat", "dog"])
    spec = str(tmp_path / "test.parquet")
    assert len(open_split(spec, "test")[0]) == 20
    assert names(open_split(spec, "test", trained=True)[0]) == names(open_data(spec).test)
    assert len(open_data(spec).test) == 4


@pytest.mark.parametrize("spec", [".", "./", "cat/..", "../pets", "~/pets"])
def test_a_folder_is_called_by_its_own_name(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_folder(tmp_path / "pets", {"cat": 3, "dog": 3}))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_data(spec).name == "pets"


# ---- errors


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no images.*one folder per class"):
        open_data(str(tmp_path))


def test_loose_images(tmp_path: Path) -> None:
    picture(0).save(tmp_path / "a.png")
    with pytest.raises(UserError, match="are in no class folder"):
        open_data(str(tmp_path))


def test_one_class(tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 6})
    with pytest.raises(UserError, match="only the class 'cat'"):
        open_data(str(tmp_path))


def test_unknown_set() -> None:
    with pytest.raises(UserError, match=r"no data set 'digitz'.*digits"):
        open_data("digitz")


@pytest.mark.parametrize("name", ["Set.CSV", "Set.Parquet", "Set-000.TAR"])
def test_suffixes_of_any_case(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path, {"cat": 3, "dog": 3})
    if name == "Set.CSV":
        lines = [f"{label}/{i:03d}.png,{label}\n" for label in ("cat", "dog") for i in range(3)]
        (tmp_path / name).write_text("file,label\n" + "".join(lines))
    elif name == "Set.Parquet":
        write_parquet(tmp_path / name, ["cat", "dog"] * 3)
    else:
        write_shard(tmp_path / name, [(f"{i}", encoded(picture(i)), ("cat", "dog")[i % 2]) for i in range(6)])
    data = open_data(str(tmp_path / name))
    assert (data.name, data.classes) == (name.partition(".")[0], ("cat", "dog"))
    assert len(data.train) + len(data.test) == 6


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *[(f"a.{suffix}", "is an archive; unpack it") for suffix in ("zip", "tar.XZ", "tbz2")],
        ("a.xlsx", r"is no data set; name .*\.csv"),
    ],
)
def test_a_file_that_is_no_set(name: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this folder, or in another, where it could be the id of a set on the hub."""
    monkeypatch.chdir(tmp_path)
    for path in (Path(name), Path("sub") / name):
        if path.suffix != ".xlsx":  # which could be a name on the hub
            with pytest.raises(UserError, match=f"there is no file '{path}'"):
                open_data(str(path))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"PK")
        with pytest.raises(UserError, match=words):
            open_data(str(path))


@pytest.mark.parametrize("name", ["set.tar", "Set.TAR", "my.tgz", "set.tar.gz", "set.csv", "set.parquet", "set.zip"])
def test_a_folder_may_have_any_name(name: str, tmp_path: Path) -> None:
    write_folder(tmp_path / name, {"cat": 5, "dog": 5})
    assert len(open_data(str(tmp_path / name)).test) == 2


def test_a_missing_network_is_a_user_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(UserError, match="no folder 'nobody/nothing' here"):
        open_data("nobody/nothing")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"subset": 0.0}, "subset must be"),
        ({"per_class": 0}, "per_class must be"),
        ({"subset": 0.5, "per_class": 3}, "not both"),
        ({"holdout": 1.0}, "holdout must be"),
    ],
)
def test_wrong_settings(settings: dict[str, float], words: str) -> None:
    with pytest.raises(UserError, match=words):
        open_data("digits", **settings)  # type: ignore[arg-type]


# ---- hold-outs and subsets


def test_holdout_is_stratified_and_fixed() -> None:
    source = arrays(97, 3)
    data = assign_splits("x", {"train": source}, 0.2)
    assert counts(data.test) == [round(0.2 * count) for count in counts(source)]
    assert not names(data.train) & names(data.test)
    assert names(data.train) | names(data.test) == names(source)
    one, other = open_data("digits", seed=1), open_data("digits", seed=2)
    assert names(one.test) == names(other.test)


def test_photos_stay_in_their_split_as_others_come_and_go(tmp_path: Path) -> None:
    """Else a model that is trained further, or tested again, would be tested on what it has learned from. The shares
    are kept, so where the number of a class changes one photo may change sides."""

    def splits(validation: float = 0.25) -> dict[str, set[str]]:
        found = hold_out_validation(open_data(str(root)), validation)
        return {split: {source.name(i) for i in range(len(source))} for split, source in found.splits.items()}

    root = write_folder(tmp_path / "photos", {"ant": 30, "bee": 30, "cow": 30})
    before = splits()
    assert [len(before[split]) for split in ("train", "validation", "test")] == [54, 18, 18]
    picture(1).save(root / "ant" / "000a.png")  # sorts before nearly all
    (root / "bee" / "010.png").unlink()
    write_folder(root, {"aardvark": 9})
    (root / "a longer name than all others").mkdir()
    picture(2).save(root / "a longer name than all others" / "and a long name of a photo.png")
    after = splits()
    for split, others in (("train", ("test", "validation")), ("test", ("train", "validation"))):
        assert sum(len(before[split] & after[other]) for other in others) <= 3
    moved = tmp_path / "moved"
    root.rename(moved)
    root = moved
    assert {split: {Path(n).name for n in names} for split, names in splits().items()} == {
        split: {Path(n).name for n in names} for split, names in after.items()
    }


def test_held_out_photos_follow_from_names_however_they_are_given(tmp_path: Path) -> None:
    """A copy in another format, and a list of paths in any spelling; what follows a dot need not be a suffix."""
    root = write_folder(tmp_path / "photos", {"ant": 30, "bee": 30})
    held = {(Path(n).parent.name, Path(n).stem) for n in names(open_data(str(root)).test)}
    assert len(held) == 12
    files, found = sorted(root.rglob("*.png")), []
    for start in ("photos/", "./photos/", "photos/../photos//", f"{root}/", f"{tmp_path}/photos/./"):
        rows = [f"{start}{f.parent.name}/{f.name},{f.parent.name}" for f in files]
        (tmp_path / "list.csv").write_text("\n".join(["file,label", *rows]))
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to(tmp_path)
        specs = (f"{tmp_path}/list.csv", f"{tmp_path}/photos/../list.csv", f"{tmp_path}/link/list.csv")
        found += [{os.path.realpath(n) for n in names(open_data(spec).test)} for spec in specs]
    assert all(each == found[0] for each in found)
    outside = tmp_path / "lists"
    outside.mkdir()
    for start in ("../photos/", f"{root}/", f"{tmp_path}/link/photos/"):
        rows = [f"{start}{f.parent.name}/{f.name},{f.parent.name}" for f in files]
        (outside / "list.csv").write_text("\n".join(["file,label", *rows]))
        found.append({os.path.realpath(n) for n in names(open_data(str(outside / "list.csv")).test)})
    assert found[-1] == found[-2] == found[-3]
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "mine").symlink_to(outside)
    rows = [f"../photos/{f.parent.name}/{f.name},{f.parent.name}" for f in files]
    (outside / "list.csv").write_text("\n".join(["file,label", *rows]))
    (root / "list.csv").write_text("\n".join(["file,label", *rows]))  # out of its own folder and in again
    assert {(Path(n).parent.name, Path(n).stem) for n in names(open_data(str(root / "list.csv")).test)} == held
    (root / "list.csv").unlink()
    test = open_data(str(tmp_path / "home" / "mine" / "list.csv")).test  # .. is that of the list's own place
    assert {os.path.realpath(n) for n in names(test)} == found[-1]
    (tmp_path / "photos").rename(tmp_path / "disk")
    (tmp_path / "photos").symlink_to("disk")  # wherever the photos lie
    assert {Path(n).name for n in names(open_data(str(outside / "list.csv")).test)} == {Path(n).name for n in found[-1]}
    (tmp_path / "photos").unlink()
    (tmp_path / "disk").rename(tmp_path / "photos")
    for file in files:
        file.rename(file.with_suffix(".JPG"))
    assert {(Path(n).parent.name, Path(n).stem) for n in names(open_data(str(root)).test)} == held
    rows = []
    for i in range(40):
        (tmp_path / f"scan.{i:03d}").write_bytes(encoded(picture(i)))
        rows.append(f"scan.{i:03d},{'ab'[i % 2]}")
    (tmp_path / "scans.csv").write_text("\n".join(["file,label", *rows]))
    scans = open_data(str(tmp_path / "scans.csv")).test
    assert {Path(n).suffix for n in names(scans)} != {f".{i:03d}" for i in range(8)}  # the first ones


def test_a_built_in_set_is_split_alike_wherever_it_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision gives complete paths; the folder above the set must not decide which photos are held out."""
    found = []
    for place in ("a", "home/ann/.cache"):
        monkeypatch.setenv("VITLAB_DATA", str(tmp_path / place))
        root = tmp_path / place / "oxford-pets" / "oxford-iiit-pet"
        for folder in ("images", "annotations"):
            (root / folder).mkdir(parents=True)
        photos = [f"{kind}_{i}" for kind in ("Abyssinian", "beagle") for i in range(40)]
        for name in photos:
            (root / "images" / f"{name}.jpg").write_bytes(encoded(picture(0)))
        for split, numbers in (("trainval", range(30)), ("test", range(30, 40))):
            lines = [f"{name} {1 + (name[0] == 'b')} 1 1" for name in photos if int(name.split("_")[1]) in numbers]
            (root / "annotations" / f"{split}.txt").write_text("\n".join(lines) + "\n")
        data = hold_out_validation(open_data("oxford-pets", per_class=20, seed=3), 0.2)
        assert data.validation is not None
        assert [len(s) for s in data.splits.values()] == [32, 8, 20]
        assert all(Path(n).is_file() for n in names(data.train))
        found.append([{Path(n).name for n in names(s)} for s in data.splits.values()])
    assert found[0] == found[1]


def test_holdout_leaves_every_class_an_image() -> None:
    source = arrays(5, 3)  # classes of 2, 2 and 1
    data = assign_splits("x", {"train": source}, 0.9)
    assert counts(data.train) == [1, 1, 1]
    assert counts(data.test) == [1, 1, 0]


def test_subsets_are_stratified_seeded_and_nested() -> None:
    full, tenth, half = (open_data("digits", seed=4, subset=share) for share in (1.0, 0.1, 0.5))
    assert counts(tenth.train) == [round(0.1 * c) for c in counts(full.train)]
    assert names(tenth.train) < names(half.train) < names(full.train)
    assert names(tenth.test) == names(full.test)
    assert names(open_data("digits", seed=4, subset=0.1).train) == names(tenth.train)
    assert names(open_data("digits", seed=5, subset=0.1).train) != names(tenth.train)


def test_per_class(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert counts(open_data("digits", per_class=7).train) == [7] * 10
    write_folder(tmp_path, {"a": 3, "b": 20})
    assert counts(open_data(str(tmp_path), per_class=10).train) == [2, 10]
    assert "fewer than 10" in caplog.text


# ---- parquet

pa = pytest.importorskip("pyarrow")


def write_parquet(path: Path, labels: list[object], classes: list[str] | None = None, column: str = "label") -> None:
    import pyarrow.parquet as pq

    rows = [{"bytes": encoded(picture(i)), "path": f"photo_{i}.png"} for i in range(len(labels))]
    table = pa.table({"image": rows, column: labels})
    if classes:
        features = {"image": {"_type": "Image"}, column: {"names": classes, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=3)


def test_parquet(tmp_path: Path) -> None:
    import pickle

    write_parquet(tmp_path / "set" / "train-00000-of-00002.parquet", [0, 1, 1, 0], ["cat", "dog"])
    write_parquet(tmp_path / "set" / "train-00001-of-00002.parquet", [1, 1, 0], ["cat", "dog"])
    write_parquet(tmp_path / "set" / "test-00000-of-00001.parquet", [0, 1], ["cat", "dog"])
    data = open_data(str(tmp_path / "set"))
    assert data.classes == ("cat", "dog")
    assert data.train.labels.tolist() == [0, 1, 1, 0, 1, 1, 0]
    assert "photo_2.png" in data.train.name(6)
    again = open_data(str(tmp_path / "set"))  # from the copies
    for source in (data.train, pickle.loads(pickle.dumps(data.train)), again.train):
        for index, seed in enumerate([0, 1, 2, 3, 0, 1, 2]):
            assert (np.asarray(source.image(index)) == np.asarray(picture(seed))).all()


def test_parquet_of_words_and_of_bare_numbers(tmp_path: Path) -> None:
    write_parquet(tmp_path / "words.parquet", ["oak", "ash", "oak", "ash"])
    data = open_data(str(tmp_path / "words.parquet"))
    assert data.classes == ("ash", "oak")
    assert counts(data.train) == [1, 1]
    write_parquet(tmp_path / "numbers.parquet", [0, 2, 1, 2, 0, 1], column="fine_label")
    assert open_data(str(tmp_path / "numbers.parquet")).classes == ("0", "1", "2")


def test_parquet_label_out_of_range(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1, 5, 1], ["cat", "dog"])
    with pytest.raises(UserError, match=r"photo_2.png\) has the label 5, outside 0 to 1"):
        open_data(str(tmp_path), holdout=0.1)


def test_parquet_split_without_labels(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train.parquet", [0, 1, 0, 1], ["cat", "dog"])
    write_parquet(tmp_path / "validation.parquet", [0, 1], ["cat", "dog"])
    write_parquet(tmp_path / "test.parquet", [-1, -1, -1], ["cat", "dog"])
    data = open_data(str(tmp_path))
    assert (len(data.train), len(data.test)) == (4, 2)
    assert "test split has no labels" in data.note


def test_parquet_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "train.parquet").write_bytes(b"PAR0 nonsense")
    with pytest.raises(UserError, match=r"train.parquet' cannot be read as parquet"):
        open_data(str(tmp_path))
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": ["a"], "label": [0]}), tmp_path / "train.parquet")
    with pytest.raises(UserError, match="columns text, label and none called image"):
        open_data(str(tmp_path))


def test_hub_layouts(tmp_path: Path) -> None:
    """Configs are folders; the hub's own conversion has one folder per split too."""
    from vitlab.data.hub import one_config

    def files(*paths: str) -> list[Path]:
        return [tmp_path / path for path in paths]

    plain = files("data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet")
    assert one_config("o/n", "", plain, tmp_path) == plain
    both = files("small/train/0000.parquet", "large/train/0000.parquet", "large/test/0000.parquet")
    assert one_config("o/n", "large", both, tmp_path) == both[1:]
    with pytest.raises(UserError, match="configs large or small; write o/n:CONFIG"):
        one_config("o/n", "", both, tmp_path)


def test_revisions_of_hub_sets(tmp_path: Path) -> None:
    """From the hub's cache, without a network; what was opened is named by its commit."""
    old, new = "0" * 40, "a1" * 20
    repo = tmp_path / "hub" / "datasets--some--set"
    (repo / "refs").mkdir(parents=True)
    for commit, branch, classes in ((old, "v1.0", ["ash", "oak"]), (new, "main", ["ant", "bee"])):
        write_parquet(repo / "snapshots" / commit / "data" / "train-0.parquet", [0, 1, 0, 1], classes)
        (repo / "refs" / branch).write_text(commit)
    code = f"""
from vitlab.data.open import open_data
for name in ("some/set", "some/set@v1.0", "some/set@{old}"):
    data = open_data(name)
    print(*data.classes, data.note[-40:])
"""
    settings = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | settings, cwd=tmp_path
    )
    assert done.stdout.splitlines() == [f"ant bee {new}", f"ash oak {old}", f"ash oak {old}"], done.stderr


def test_a_part_of_each_class_is_held_out_for_validation() -> None:
    data = open_data("digits")
    held = hold_out_validation(data, 0.1)
    train, chosen = held.train, held.validation
    assert isinstance(train, Subset)
    assert isinstance(chosen, Subset)
    assert sorted([*train.indices, *chosen.indices]) == list(range(len(data.train)))
    counts, parts = np.bincount(data.train.labels), np.bincount(chosen.labels)
    assert (np.abs(parts - counts / 10) <= 0.5).all()
    assert "validation is 0.1 of the training images" in held.note
    assert held.test is data.test
    again = hold_out_validation(open_data("digits", seed=3), 0.1).validation
    assert isinstance(again, Subset)
    assert np.array_equal(again.indices, chosen.indices)  # whatever the seed
    assert hold_out_validation(held, 0.3) is held  # it has one of its own
    assert hold_out_validation(data, 0.0) is data


def test_the_share_held_out_by_default_is_the_papers() -> None:
    assert [usual_share(n) for n in (3_312, 50_000, 1_281_167)] == [0.1, 0.02, 0.01]  # Pets, CIFAR, ImageNet
    data = open_data("digits")
    held, tenth = hold_out_validation(data, None), hold_out_validation(data, 0.1)
    assert isinstance(held.validation, Subset)
    assert isinstance(tenth.validation, Subset)
    assert np.array_equal(held.validation.indices, tenth.validation.indices)
    single = dataclasses.replace(data, train=Subset(data.train, np.unique(data.train.labels, return_index=True)[1]))
    assert hold_out_validation(single, None) is single  # one image of each class: all are needed to train
    with pytest.raises(UserError, match="set validation=0"):
        hold_out_validation(single, 0.1)
