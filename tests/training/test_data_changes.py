"""A resumed run notices that its data has changed, names the files, and continues only if asked to."""

import gzip
import io
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from small_runs import SMALL, records, skip_report, train_small
from test_received import photos
from test_resume import killed_at
from timing import assert_below, seconds

from vitlab.data.folder import FileSource
from vitlab.data.open import open_data
from vitlab.data.source import Data
from vitlab.errors import UserError
from vitlab.training import manifest
from vitlab.training.loop import train
from vitlab.training.recipe import change
from vitlab.training.seen import is_seen, unseen

Command = Callable[..., tuple[int, str, str]]
SETTINGS: dict[str, Any] = {"steps": 8, "batch": 4, "micro": 4, "warmup": 0, "checkpoint_every": 2}


@pytest.fixture(scope="module")
def cut_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with photos of three splits and a run that was killed at its fifth step."""
    folder = tmp_path_factory.mktemp("cut")
    for split in ("train", "val", "test"):
        photos(folder / "photos" / split)
    with pytest.MonkeyPatch.context() as patch, killed_at(4, patch):
        resume(folder, begin=True)
    return folder


@pytest.fixture
def cut(cut_once: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(cut_once, tmp_path / "cut"))


def resume(place: Path, *, begin: bool = False, **changes: Any) -> None:
    train_small(place / "run", resume=not begin, **{"data": str(place / "photos"), **SETTINGS, **changes})


def rename(folder: Path) -> None:
    (folder / "train/class0/0.png").rename(folder / "train/class0/zero.png")


def swap(folder: Path) -> None:
    a, b = folder / "train/class0/0.png", folder / "train/class1/1.png"
    content = a.read_bytes(), b.read_bytes()
    a.write_bytes(content[1] + b"\0")  # of another size
    b.write_bytes(content[0] + b"\0")


def replace(folder: Path) -> None:
    (folder / "test/class0/0.png").write_bytes((folder / "test/class0/0.png").read_bytes() + b"\0")


def add(folder: Path) -> None:
    shutil.copy(folder / "val/class0/0.png", folder / "val/class0/new.png")


def relabel(folder: Path) -> None:
    (folder / "train/class0/0.png").rename(folder / "train/class1/from0.png")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (rename, ["'train/class0/0.png' is gone", "'train/class0/zero.png' is new"]),
        (swap, ["'train/class0/0.png' has ", "'train/class1/1.png' has "]),
        (replace, ["'test/class0/0.png' has "]),
        (add, ["'validation/class0/new.png' is new"]),
        (relabel, ["'train/class0/0.png' is gone", "'train/class1/from0.png' is new"]),
    ],
)
def test_a_change_is_named_and_rejected(cut: Path, change: Callable[[Path], None], named: list[str]) -> None:
    change(cut / "photos")
    with pytest.raises(UserError, match="--accept-data-changes") as error:
        resume(cut)
    for words in named:
        assert words in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.slow
def test_an_accepted_change_is_the_new_manifest(cut: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_report(monkeypatch)
    add(cut / "photos")
    words = ("train", f"data={cut}/photos", "--out", str(cut / "run"), "--resume")
    assert command(*words)[0] == 1
    code, _, printed = command(*words, "--accept-data-changes")
    assert code == 0
    assert "'validation/class0/new.png' is new" in printed.replace("\n", " ")
    assert records(cut / "run")[-1]["step"] == 8
    resume(cut)


def test_what_was_learned_from_before_a_change_is_no_test_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the run goes on a second time, and after a second change."""
    root, run = photos(tmp_path / "photos", 20), tmp_path / "run"
    recipe = change(SMALL, data=str(root), **SETTINGS)
    with killed_at(4, monkeypatch):
        train_small(run, data=str(root), **SETTINGS)
    learned = {name: counts for name, counts in listed(run).items() if name[0] != "test"}
    for file in sorted(root.rglob("*.png")):  # so many that others are held out
        for i in range(3):
            shutil.copy(file, file.with_name(f"new{i}-{file.name}"))
    test = open_data(str(root)).test
    tested = {str(Path(test.name(i)).relative_to(root)) for i in range(len(test))}
    mixed = tested & {name for _, name in learned}
    assert mixed
    assert not is_seen(run, test).all()
    with pytest.raises(UserError, match="is new"):
        train_small(run, resume=True, data=str(root), **SETTINGS)
    with killed_at(6, monkeypatch):
        train(recipe, run, resume=True, accept_data_changes=True, console=Console(quiet=True))
    assert {name for split, name in listed(run) if split == "past"} == mixed
    shutil.copy(root / "class0/0.png", root / "class0/last.png")
    done = train(recipe, run, resume=True, accept_data_changes=True, console=Console(quiet=True))
    left = {str(Path(done.data.test.name(i)).relative_to(root)) for i in range(len(done.data.test))}
    assert left == tested - mixed
    assert f"without {len(mixed)} image" in done.data.note
    assert unseen(run, open_data(str(root))).note.endswith("that the run has learned from")


def listed(run: Path) -> dict[tuple[str, str], str]:
    """Sizes by (split, name) in the run's list."""
    found = {}
    for line in gzip.decompress((run / "data.txt.gz").read_bytes()).decode().splitlines():
        name, size, *_ = line.split("\t")
        split, _, rest = name.partition("/")
        found[split, rest] = size
    return found


def test_a_damaged_list_is_replaced_if_changes_are_accepted(cut: Path) -> None:
    (cut / "run" / "data.txt.gz").write_bytes(b"none")
    with pytest.raises(UserError, match=r"cannot be read .* --accept-data-changes"):
        resume(cut)
    recipe = change(SMALL, data=str(cut / "photos"), **SETTINGS)
    train(recipe, cut / "run", resume=True, accept_data_changes=True, console=Console(quiet=True))
    assert len(listed(cut / "run")) == 36


def test_other_changes_are_named_beside_changed_sides() -> None:
    before = "train/a\t1\t0\t\ntrain/b\t1\t0\t\ntest/c\t1\t0\t\ntrain/d\t1\t1\t\n"
    now = "test/a\t2\t0\t\ntrain/b\t1\t1\t\ntrain/c\t1\t0\t\ntrain/d\t1\t1\t\n"
    sides, *others = manifest.find_changes(before, now)
    assert sides.startswith("2 images of it changed sides, 'test/c' for one")
    assert others == ["'test/a' has 2 bytes, not 1", "'train/b' has the label 1, not 0"]
    assert manifest.find_changes(before + "past/z\t1\t\t\n", before) == []


def test_photos_that_changed_sides_are_called_that(cut: Path) -> None:
    for split in ("train", "test"):
        file = cut / f"photos/{split}/class0/0.png"
        file.rename(file.with_name(f"{split}.png"))
    shutil.rmtree(cut / "run")
    resume(cut, begin=True)
    for split, other in (("train", "test"), ("test", "train")):
        (cut / f"photos/{split}/class0/{split}.png").rename(cut / f"photos/{other}/class0/{split}.png")
    with pytest.raises(UserError, match="2 images of it changed sides, 'test/class0/test"):
        resume(cut)


def test_ten_are_named_and_the_rest_counted(cut: Path) -> None:
    for i in range(13):
        shutil.copy(cut / "photos/train/class0/0.png", cut / f"photos/train/class0/more{i}.png")
    with pytest.raises(UserError, match="and 3 more") as error:
        resume(cut)
    assert str(error.value).count("is new") == 10


def test_photos_that_moved_are_the_same(cut: Path) -> None:
    (cut / "photos").rename(cut / "elsewhere")
    resume(cut, data=str(cut / "elsewhere"))
    assert records(cut / "run")[-1]["step"] == 8


def test_other_content_of_the_same_size_is_noticed_with_hash_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos(tmp_path / "photos")
    with killed_at(4, monkeypatch):
        resume(tmp_path, begin=True, hash_data=True)
    path = tmp_path / "photos/class0/0.png"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(UserError, match=r"class0/0\.png' has other content"):
        resume(tmp_path, hash_data=True)


def test_a_damaged_manifest_is_an_error(cut: Path) -> None:
    kept = cut / "run" / manifest.NAME
    for content in (b"", b"junk", kept.read_bytes()[:40], gzip.compress(b"\xff\t\n\n\t\t\t\t\n")):
        kept.write_bytes(content)
        with pytest.raises(UserError, match="--accept-data-changes"):
            resume(cut)


def test_a_decompression_bomb_is_not_unpacked(cut: Path) -> None:
    bomb = io.BytesIO()
    with gzip.open(bomb, "wb", compresslevel=1) as file:
        for _ in range(100):
            file.write(b"\0" * (1 << 20))
    (cut / "run" / manifest.NAME).write_bytes(bomb.getvalue())
    with pytest.raises(UserError, match="--accept-data-changes"):
        resume(cut)


def test_shards_are_listed_by_key_and_length(tmp_path: Path) -> None:
    def shard(last: bytes) -> str:
        with tarfile.open(tmp_path / "train-0.tar", "w") as tar:
            for i in range(8):
                content = (photos_bytes(i) + (last if i == 3 else b""), str(i % 2).encode())
                for name, data in zip((f"{i}.png", f"{i}.cls"), content, strict=True):
                    info = tarfile.TarInfo(name)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        return manifest.list_images(open_data(str(tmp_path / "train-0.tar")), hashed=False)

    before = shard(b"")
    assert manifest.find_changes(before, before) == []
    changes = manifest.find_changes(before, shard(b"x"))
    assert any("train-0.tar: 3' has " in change for change in changes)


def photos_bytes(seed: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (8, 8, 3), np.uint8)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.slow
def test_many_images_stay_practical(tmp_path: Path) -> None:
    """100,000 files: a list of less than 20 bytes each, made and compared in seconds."""
    (tmp_path / "a").mkdir()
    for i in range(1000):
        (tmp_path / "a" / f"{i:06}.jpg").write_bytes(b"x" * (i % 97))
    names = [f"a/{i % 1000:06}.jpg" for i in range(100_000)]
    source = FileSource(tmp_path, names, [i % 2 for i in range(100_000)], ("a", "b"))

    def attempt() -> None:
        text = manifest.list_images(Data("many", source, source), hashed=False)
        manifest.write_manifest(tmp_path, text)
        assert manifest.find_changes(manifest.read_manifest(tmp_path, len(text)), text) == []

    assert_below(20, lambda: seconds(attempt))
    assert (tmp_path / manifest.NAME).stat().st_size < 20 * 200_000
