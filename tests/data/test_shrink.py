"""`vitlab data shrink`: a smaller copy with the same splits, labels and order, complete or not at all."""

import io
import json
import multiprocessing
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from pictures import encoded, picture, write_shard
from PIL import Image

from vitlab.data import shrink
from vitlab.data.images import BrokenImage
from vitlab.data.loader import TrainLoader
from vitlab.data.open import find_splits, open_data
from vitlab.data.shards import ShardSource
from vitlab.data.shrink import Shrinking, shrink_set
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.models.config import Preprocess

HOW = Shrinking(32, 95)
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(shrink, "SHARD", 4)


def make_set(root: Path) -> Path:
    """Two classes of seven photos each, of several sizes and kinds."""
    for i in range(14):
        folder = root / ("ant", "bee")[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        kind = ("png", "jpg", "webp")[i % 3]
        picture(i, 40 + 8 * i, 120 - 4 * i).save(folder / f"{i:02d}.{kind}", quality=95)
    return root


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


def test_the_copy_has_the_same_images_in_the_same_splits(tmp_path: Path) -> None:
    done = shrink_set(str(make_set(tmp_path / "set")), tmp_path / "new" / "copy", HOW)
    assert (done.images, done.broken) == (14, ())
    old, new = open_data(str(tmp_path / "set")), open_data(str(done.path))
    assert new.classes == old.classes == ("ant", "bee")
    assert len(list(done.path.glob("train-*.tar"))) == 4
    for split, source in old.splits.items():
        other = new.splits[split]
        assert other.labels.tolist() == source.labels.tolist()
        for i in range(len(source)):
            image, expected = other.image(i), source.image(i)
            assert min(image.size) == 32
            assert abs(image.width / image.height - expected.width / expected.height) < 0.05
            small = expected.resize(image.size, Image.Resampling.LANCZOS)  # not by the way of a draft
            assert np.abs(np.asarray(image).astype(int) - np.asarray(small)).mean() < 6


def test_a_jpeg_that_would_not_become_smaller_stays_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "set" / "a").mkdir(parents=True)
    turned = Image.Exif()
    turned[0x0112] = 6
    picture(0, 20, 30).save(tmp_path / "set" / "a" / "0.jpg", exif=turned)  # smaller than the side
    picture(1, 40, 40).save(tmp_path / "set" / "a" / "1.jpg", quality=5)  # of a few bytes
    source = open_source(shrink_set(str(tmp_path / "set"), tmp_path / "copy", HOW).path)
    for i in range(2):
        assert source.encoded(i) == (tmp_path / "set" / "a" / f"{i}.jpg").read_bytes()
    assert source.image(0).size == (20, 30)


def open_source(path: Path) -> ShardSource:
    found, _ = find_splits(str(path))
    source = found["train"]
    assert isinstance(source, ShardSource)
    return source


def test_a_broken_image_keeps_its_place(tmp_path: Path) -> None:
    file = make_set(tmp_path / "set") / "ant" / "04.jpg"
    file.write_bytes(file.read_bytes()[:-400])
    done = shrink_set(str(tmp_path / "set"), tmp_path / "copy", HOW, workers=1)
    assert [name.partition(" (")[0] for name in done.broken] == [str(tmp_path / "set" / "ant" / "04.jpg")]
    source = open_source(done.path)
    assert len(source) == 14
    with pytest.raises(BrokenImage):
        source.image(2)
    loader = TrainLoader(source, (16, 16), Augment(), Preprocess(), batch=14, resident=False)
    next(loader.batches())
    assert set(loader.broken) == {2}


def test_a_copy_begun_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in the middle: nothing under the final name, finished shards are kept, and the bytes are the same."""
    spec, part = str(make_set(tmp_path / "set")), tmp_path / ".copy.partial"
    expected = contents(shrink_set(spec, tmp_path / "other", HOW).path)
    slow = shrink.write_members

    def wait(*args: object) -> None:
        time.sleep(0.05)
        slow(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(shrink, "write_members", wait)
    process = multiprocessing.get_context("fork").Process(target=shrink_set, args=(spec, tmp_path / "copy", HOW))
    process.start()
    while not (part / "train-000001.tar").exists():
        time.sleep(0.005)
    process.kill()
    process.join()
    monkeypatch.undo()
    monkeypatch.setattr(shrink, "SHARD", 4)
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    assert not (tmp_path / "copy").exists()
    kept = (part / "train-000000.tar").stat()
    with pytest.raises(UserError, match="begun with other images or settings"):
        shrink_set(spec, tmp_path / "copy", Shrinking(33, 95))
    shrink_set(spec, tmp_path / "copy", HOW)
    assert (tmp_path / "copy" / "train-000000.tar").stat().st_ino == kept.st_ino
    assert contents(tmp_path / "copy") == expected
    assert not part.exists()


def test_several_labels_and_splits_are_kept(tmp_path: Path) -> None:
    rows = ["file,labels,split"]
    for i, labels in enumerate(["cat;dog", "", "dog", "cat;eel", "eel", "cat"]):
        picture(i, 50, 60).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{labels},{'test' if i > 3 else 'train'}")
    (tmp_path / "set.csv").write_text("\n".join(rows))
    done = shrink_set(str(tmp_path / "set.csv"), tmp_path / "copy", HOW)
    old, new = open_data(str(tmp_path / "set.csv")), open_data(str(done.path))
    assert new.classes == old.classes == ("cat", "dog", "eel")
    for split, source in old.splits.items():
        assert [new.splits[split].labels_of(i) for i in range(len(source))] == [
            source.labels_of(i) for i in range(len(source))
        ]


def test_what_cannot_be_shrunk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = str(make_set(tmp_path / "set"))
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there exists; remove it"):
        shrink_set(spec, tmp_path / "there", HOW)
    with pytest.raises(UserError, match="nothing to shrink"):
        shrink_set("digits", tmp_path / "copy", HOW)
    with pytest.raises(UserError, match="16 to 4096 pixels, not 3"):
        Shrinking(3)
    with pytest.raises(UserError, match="50 to 100, not 101"):
        Shrinking(quality=101)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(UserError, match=r"needs about .* GB, and .* has 0.00 GB left"):
        shrink_set(spec, tmp_path / "copy", HOW)
    assert not (tmp_path / "copy").exists()


def test_shards_are_shrunk_too(tmp_path: Path) -> None:
    """Their classes.txt as well; the record names what the copy was made with."""
    large = [(f"{i}", encoded(picture(i, 64, 64)), str(i % 2)) for i in range(5)]
    write_shard(tmp_path / "in" / "val-0.tar", large)
    write_shard(tmp_path / "in" / "train-0.tar", large)
    (tmp_path / "in" / "classes.txt").write_text("ü\nb\n", encoding="utf-8")
    done = shrink_set(str(tmp_path / "in"), tmp_path / "copy", HOW)
    assert open_data(str(done.path)).classes == ("ü", "b")
    about = json.loads((done.path / "shrunk.json").read_text())
    assert (about["side"], about["quality"]) == (32, 95)
    image = Image.open(io.BytesIO(open_source(done.path).encoded(0)))
    assert (image.format, image.size) == ("JPEG", (32, 32))
    assert done.bytes == sum(file.stat().st_size for file in done.path.glob("*.tar"))


def test_the_command(tmp_path: Path, command: Command) -> None:
    spec, out = str(make_set(tmp_path / "set")), tmp_path / "copy"
    code, printed, _ = command("data", "shrink", spec, str(out), "--size", "32")
    assert (code, printed) == (0, f"14 images, 0.1 MB: {out}\n")
    code, _, printed = command("data", "shrink", spec, str(out))
    assert (code, printed) == (1, f"error: {out} exists; remove it or name another place\n")
    code, _, printed = command("data", "shrink", spec, str(tmp_path / "other"), "--size", "5")
    assert (code, printed) == (1, "error: the shorter side must have 16 to 4096 pixels, not 5\n")
