"""Malicious data sets: files made to fill the memory, to block forever, or to end the program with a traceback.

They are opened in a process with 2 GB of address space and a time limit, since they could take down the tests too.
"""

import io
import json
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from pictures import encoded, picture, write_folder, write_shard

from vitlab.data.images import BrokenImage
from vitlab.data.open import open_data
from vitlab.data.parquet_reader import class_names
from vitlab.errors import UserError

pa = pytest.importorskip("pyarrow")

OPEN = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
from vitlab.errors import UserError
from vitlab.data.open import open_data
for path in sys.argv[1:]:
    try:
        data = open_data(path)
        print(f"{len(data.train) + len(data.test)} images, {len(data.classes)} classes")
    except UserError as error:
        print("error:", error)
used = int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0])  # ru_maxrss begins with the parent's
assert used < 1 << 20, f"{used} kB"
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    return tmp_path / "cache"


def open_all(paths: Iterable[Path]) -> list[str]:
    """One line for each data set, opened in turn by one process: its size, or the error that refuses it."""
    command = [sys.executable, "-c", OPEN, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(command) - 3
    return lines


def opened(path: Path) -> str:
    return open_all([path])[0]


# ---- tar shards


def shard(path: Path, *labels: str) -> Path:
    return write_shard(path, [(str(i), encoded(picture(i)), label) for i, label in enumerate(labels)])


def test_labels_of_shards(tmp_path: Path) -> None:
    cases = [
        ("9999999999", "the class number 9,999,999,999 in a set of 5 images"),
        ("1000000", "the class number 1,000,000"),
        ("7" * 5000, "'4.cls' is 5,000 bytes long; 256 are the most"),
        ("7" * 200, "5 images, 3 classes"),  # text, since it is too long for a class number
        ("\u00b2", "5 images, 3 classes"),  # a digit in Unicode, but not a number
        ("20000", "5 images, 20001 classes"),
        ("\ud800", "5 images, 3 classes"),
    ]
    paths = [shard(tmp_path / f"{i}" / "set.tar", "0", "1", "0", "1") for i in range(len(cases))]
    for path, (label, _) in zip(paths, cases, strict=True):
        append(path, ("4.png", encoded(picture(4))), ("4.cls", label.encode("utf-8", "surrogatepass")))
    for (_, expected), line in zip(cases, open_all(paths), strict=True):
        assert expected in line


def append(path: Path, *members: tuple[str, bytes]) -> None:
    with tarfile.open(path, "a") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


def holes(path: Path, head: bytes, size: int) -> Path:
    """A sparse file of that size: zeros follow its head."""
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(size)
    return path


def test_a_label_of_gigabytes(tmp_path: Path) -> None:
    path = holes(tmp_path / "set.tar", header("a.cls", 3 << 30), (3 << 30) + 4096)
    assert "'a.cls' is 3,221,225,472 bytes long" in opened(path)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_of_gigabytes(tmp_path: Path, kind: bytes) -> None:
    path = holes(tmp_path / "set.tar", header("long", 3 << 30, kind), (3 << 30) + 4096)
    assert "a header claims to be 3,221,225,472 bytes long" in opened(path)


def test_a_header_that_takes_quadratic_time(tmp_path: Path) -> None:
    digits = b"1" * (1 << 20)
    (tmp_path / "set.tar").write_bytes(header("pax", len(digits), tarfile.XHDTYPE) + digits + bytes(1024))
    assert "a header claims to be 1,048,576 bytes long" in opened(tmp_path / "set.tar")


def test_a_member_that_leads_back_to_itself(tmp_path: Path) -> None:
    (tmp_path / "set.tar").write_bytes(header("note.txt", 0) + header("a.png", -512) + bytes(2048))
    assert "cannot be read as a tar shard" in opened(tmp_path / "set.tar")


def test_a_member_larger_than_its_shard(tmp_path: Path) -> None:
    paths = []
    for i, size in enumerate([1 << 33, 1 << 40, (1 << 63) - 1, 1 << 80]):
        paths.append(tmp_path / f"{i}.tar")
        paths[-1].write_bytes(header("a.cls", 0) + header("a.png", size) + bytes(2048))
    for line in open_all(paths):
        assert "cannot be read as a tar shard" in line


def test_a_label_of_holes(tmp_path: Path) -> None:
    """GNU's sparse files: a few bytes that expand to any number of zeros."""
    path = shard(tmp_path / "set.tar", "0", "1")
    with tarfile.open(path, "a", format=tarfile.PAX_FORMAT) as tar:
        for name, data in (("2.png", encoded(picture(2))), ("2.cls", b"0\n".ljust(512, b"\0"))):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if name == "2.cls":
                numbers = {"major": "1", "minor": "0", "realsize": str(3 << 30), "name": name}
                member.pax_headers = {f"GNU.sparse.{key}": value for key, value in numbers.items()}
            tar.addfile(member, io.BytesIO(data))
    assert "an image '2' without a label" in opened(path)


def test_headers_upon_headers(tmp_path: Path) -> None:
    (tmp_path / "set.tar").write_bytes(header("pax", 0, tarfile.XHDTYPE) * 5000 + bytes(1024))
    assert "cannot be read as a tar shard" in opened(tmp_path / "set.tar")


def test_names_and_lists_without_end(tmp_path: Path) -> None:
    path = write_shard(tmp_path / "set.tar", [("k" * 1000, encoded(picture(0)), "0"), ("b", encoded(picture(1)), "1")])
    latin, large = (shard(tmp_path / folder / "set.tar", "0", "1", "1") for folder in ("latin", "large"))
    (latin.parent / "classes.txt").write_bytes(b"caf\xe9\nbar\n")
    holes(large.parent / "classes.txt", b"ant\nbee\n", 3 << 30)
    lines = open_all([path, latin, large, tmp_path / "{0..99999999999}.tar"])
    assert "name is 1,000 bytes long; 512 are the most" in lines[0]
    assert lines[1] == "3 images, 2 classes"
    assert "classes.txt' is larger than 64 MB" in lines[2]
    assert "expands to more than 1,000,000 shards" in lines[3]


def test_a_picture_of_gigabytes_does_not_stop_the_next(tmp_path: Path) -> None:
    path = shard(tmp_path / "set.tar", "0", "1", "0", "1")
    append(path, ("4.cls", b"1"), ("4.png", b""))
    content = path.read_bytes()
    at = content.index(b"4.png\0")
    holes(path, content[:at] + header("4.png", 1 << 40), at + 512 + (1 << 40) + 1024)
    source = open_data(str(path)).train.source  # type: ignore[attr-defined]
    with pytest.raises(BrokenImage, match="4: it is larger than 256 MB"):
        source.image(4)
    assert source.image(3).size == (24, 20)


# ---- parquet


def table(labels: object, images: object = None, **metadata: str) -> object:
    count = len(labels)  # type: ignore[arg-type]
    given = [{"bytes": encoded(picture(i)), "path": f"{i}.png"} for i in range(count)] if images is None else images
    return pa.table({"image": given, "label": labels}).replace_schema_metadata(metadata or None)


def parquet(path: Path, content: object) -> Path:
    import pyarrow.parquet as pq

    pq.write_table(content, path)
    return path


@pytest.mark.slow
def test_labels_of_parquet(tmp_path: Path) -> None:
    cases: list[tuple[object, str]] = [
        ([0, 1, 10**9], "the class number 1,000,000,000 in a set of 3 images"),
        (["a", "b", "w" * 10_000], "a label of 10,000 characters; 256 are the most"),
        ([[[1]], [[2]], [[3]]], "labels are numbers or text"),
        ([b"a", b"\xff\xfe", b"a"], "3 images, 2 classes"),
        ([0, 1, None], "error: "),
        (["a", "b", None], "error: "),
        (pa.array([0, 1, 2**64 - 1], pa.uint64()), "cannot be read as parquet"),
        ([0.5, float("nan"), 0.5], "3 images, 2 classes"),
        (pa.array(["a", "b", "a"]).dictionary_encode(), "3 images, 2 classes"),
    ]
    paths = [parquet(tmp_path / f"{i}.parquet", table(labels)) for i, (labels, _) in enumerate(cases)]
    for (_, expected), line in zip(cases, open_all(paths), strict=True):
        assert expected in line


@pytest.mark.parametrize(
    "metadata",
    [
        "no JSON",
        "[" * 100_000,
        "[]",
        "3",
        '{"info": []}',
        '{"info": {"features": 7}}',
        '{"info": {"features": {"label": "names"}}}',
        '{"info": {"features": {"label": {"names": "abc"}}}}',
        '{"info": {"features": {"label": {"names": [1, 2]}}}}',
        '{"info": {"features": {"label": {"names": ["a", null]}}}}',
        '{"info": {"features": {"label": {"names": {"a": 1}}}}}',
        json.dumps({"info": {"features": {"label": {"names": ["a", "b" * 10_000]}}}}),
    ],
)
def test_a_schema_that_cannot_be_read_names_no_classes(metadata: str) -> None:
    names, warning = class_names({b"huggingface": metadata.encode()}, "label")
    assert names == []
    assert warning == "the class names in its schema cannot be read and are not used"


def test_a_schema_that_cannot_be_read_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parquet(tmp_path / "train.parquet", table([0, 1, 1], huggingface="[" * 100_000))
    assert open_data(str(tmp_path / "train.parquet")).classes == ("0", "1")
    assert "the class names in its schema cannot be read" in caplog.text


def test_names_in_a_schema_are_text(tmp_path: Path) -> None:
    metadata = json.dumps({"info": {"features": {"label": {"names": ["a", "\ud800"]}}}})
    parquet(tmp_path / "train.parquet", table([0, 1, 1], huggingface=metadata))
    assert open_data(str(tmp_path / "train.parquet")).classes == ("a", "\\ud800")


def test_millions_of_empty_rows(tmp_path: Path) -> None:
    rows = 3_000_000
    path = parquet(tmp_path / "train.parquet", table(pa.nulls(rows, pa.int64()), pa.nulls(rows, pa.binary())))
    assert path.stat().st_size < 1_000_000
    assert "claims 3,000,000 rows in" in opened(path)


@pytest.mark.slow
@pytest.mark.parametrize("schema", [True, False])  # read as a dictionary, and as its values
def test_one_picture_many_times_over(tmp_path: Path, schema: bool) -> None:
    """A dictionary of one value: 20 GB of pictures in a megabyte."""
    import pyarrow.parquet as pq

    value = pa.array([np.random.default_rng(0).bytes(1 << 20)], pa.binary())
    images = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), value)
    pq.write_table(table(np.arange(20_000) % 2, images), tmp_path / "train.parquet", store_schema=schema)
    path = tmp_path / "train.parquet"
    assert path.stat().st_size < 2 << 20
    assert "unpacks to more than 10 times its size" in opened(path)


@pytest.mark.slow
def test_a_label_for_every_row(tmp_path: Path) -> None:
    labels = [f"{i:0200d}" for i in range(400_000)]
    path = parquet(tmp_path / "train.parquet", table(labels, pa.nulls(400_000, pa.binary())))
    assert "different labels, or very long ones" in opened(path)


@pytest.mark.slow
def test_a_page_of_zeros(tmp_path: Path) -> None:
    """A value of 600 MB that compresses to nothing."""
    import pyarrow.parquet as pq

    content = table([0, 1], pa.array([bytes(600 << 20), bytes(10)], pa.binary()))
    pq.write_table(content, tmp_path / "train.parquet", compression="zstd", use_dictionary=False)
    del content
    assert (tmp_path / "train.parquet").stat().st_size < 1 << 20
    assert "unpacks to more than there is memory for" in opened(tmp_path / "train.parquet")


@pytest.mark.slow
def test_a_copy_that_takes_too_much_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.data.parquet.MIN_SECONDS", 1)
    rows = 900_000
    path = parquet(tmp_path / "train.parquet", table(np.zeros(rows, np.int64), pa.nulls(rows, pa.binary())))
    with pytest.raises(UserError, match="not unpacked by 1 second of work; is it what it claims"):
        open_data(str(path))
    assert not list((tmp_path / "cache").rglob("*.part.*"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no list of children")
def test_a_copy_that_waits_for_a_core_is_not_too_much_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine that others keep busy: the reader is stopped for longer than the work that it may do."""
    seconds = 5
    monkeypatch.setattr("vitlab.data.parquet.MIN_SECONDS", seconds)
    path = parquet(tmp_path / "train.parquet", table([0, 1, 1]))
    stopped = threading.Event()

    def stop_reader() -> None:
        while not (found := child_with("parquet_reader")):
            time.sleep(0.001)
        os.kill(found, signal.SIGSTOP)
        stopped.set()
        time.sleep(seconds + 1)
        os.kill(found, signal.SIGCONT)

    thread = threading.Thread(target=stop_reader)
    thread.start()
    assert len(open_data(str(path), holdout=0.4).train) > 0
    assert stopped.is_set()
    thread.join()


def child_with(word: str) -> int | None:
    """A child of this process that has a word in its command."""
    for tasks in Path("/proc/self/task").glob("*/children"):
        for child in tasks.read_text().split():
            with suppress(OSError):
                if word.encode() in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
    return None


def test_images_that_are_not_bytes(tmp_path: Path) -> None:
    cases = ([1, 2, 3], [[1], [2], [3]], [{"bytes": 1}] * 3, [{"bytes": [1, 2]}] * 3)
    paths = [parquet(tmp_path / f"{i}.parquet", table([0, 1, 1], images)) for i, images in enumerate(cases)]
    for line in open_all(paths):
        assert "not the bytes of images" in line


def test_rows_without_pictures_do_not_stop_the_next(tmp_path: Path) -> None:
    good = {"bytes": encoded(picture(1)), "path": None}
    images = [None, {"bytes": None, "path": "gone.png"}, {"bytes": b"no picture", "path": "\u202e.png"}, good, good]
    data = open_data(str(parquet(tmp_path / "train.parquet", table([0, 1, 0, 1, 0], images))), holdout=0.1)
    assert len(data.train) == 3
    source = data.train.source  # type: ignore[attr-defined]
    for index in (0, 1, 2):
        with pytest.raises(BrokenImage, match=f"row {index}"):
            source.image(index)
    assert source.image(3).size == (24, 20)


def test_a_damaged_file_is_a_user_error(tmp_path: Path) -> None:
    """Bytes at the end, where the file describes itself, are changed; some changes have no effect."""
    content = parquet(tmp_path / "train.parquet", table([0, 1, 1])).read_bytes()
    rng = np.random.default_rng(0)
    for _ in range(3):
        changed = bytearray(content)
        for at in rng.integers(len(content) // 2, len(content) - 8, 3):
            changed[at] = rng.integers(256)
        (tmp_path / "train.parquet").write_bytes(changed)
        with suppress(UserError):
            open_data(str(tmp_path / "train.parquet"))


def test_no_module_beside_the_set_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet(tmp_path / "train.parquet", table([0, 1, 1]))
    for name in ("pyarrow", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text("open('harm', 'w')")
    monkeypatch.chdir(tmp_path)
    assert len(open_data("train.parquet").classes) == 2
    assert not (tmp_path / "harm").exists()


# ---- folders


def test_pipes_and_sockets_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_folder(tmp_path / "set", {"cat": 3, "dog": 3})
    os.mkfifo(tmp_path / "set" / "cat" / "pipe.jpg")
    (tmp_path / "set" / "dog" / "zero.png").symlink_to("/dev/zero")
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(os.path.relpath(tmp_path / "set" / "dog" / "socket.png"))
        data = open_data(str(tmp_path / "set"))
    assert len(data.train) + len(data.test) == 6
    assert caplog.text.count("is not a regular file and is skipped") == 3


@pytest.mark.parametrize("name", ["train.parquet", "set.tar"])
def test_a_pipe_for_a_set(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "other").mkdir()
    os.mkfifo(tmp_path / "other" / name)
    found: list[str] = []

    def ask(path: Path) -> None:
        with pytest.raises(UserError, match="is not a file") as error:
            open_data(str(path))
        found.append(str(error.value))

    for path in (tmp_path / name, tmp_path / "other"):
        thread = threading.Thread(target=ask, args=[path], daemon=True)
        thread.start()
        thread.join(5)
    assert len(found) == 2


def test_class_folders_in_no_encoding(tmp_path: Path) -> None:
    write_folder(tmp_path / "set", {"cat": 2})
    os.mkdir(os.fsencode(tmp_path / "set") + b"/caf\xe9")
    for i in range(2):
        picture(i).save(os.fsdecode(os.fsencode(tmp_path / "set") + b"/caf\xe9/%d.png" % i))
    data = open_data(str(tmp_path / "set"))
    assert data.classes == ("caf\\udce9", "cat")
    assert "".join(data.classes).encode()
    assert data.train.image(0).size == (24, 20)
