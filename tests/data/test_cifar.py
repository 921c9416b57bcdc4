"""CIFAR's archives: both kinds as torchvision reads them, and damaged and malicious ones."""

import functools
import gzip
import hashlib
import io
import os
import pickle
import struct
import tarfile
import threading
import time
from collections.abc import Callable
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torchvision.datasets
from numpy.typing import NDArray

from vitlab.data.cifar import BATCHES
from vitlab.data.open import open_data
from vitlab.data.plain_pickle import Array, NotPlain, read_pickle
from vitlab.data.source import ArraySource
from vitlab.errors import UserError

NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
FILES = (*BATCHES, "test_batch")
EACH = 4  # images of a file
Files = dict[str, bytes]
Images = tuple[NDArray[np.uint8], NDArray[np.uint8]]  # (6, n, 3072) and labels (6, n)


@pytest.fixture
def images() -> Images:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (6, EACH, 3072), dtype=np.uint8), rng.integers(0, 10, (6, EACH), dtype=np.uint8)


def text(value: str) -> bytes:
    """A text as Python 2 pickled it."""
    return b"U" + bytes([len(value)]) + value.encode()


def as_python2(pixels: NDArray[np.uint8], labels: list[int]) -> bytes:
    """A batch as the original archive has it: protocol 2 of Python 2, where text is bytes."""
    raw = pixels.tobytes()
    kind = b"cnumpy\ndtype\nq\x04" + text("u1") + b"K\x00K\x01\x87Rq\x05(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xff"
    kind += b"J\xff\xff\xff\xffK\x00tb"
    shape = b"M" + struct.pack("<H", len(pixels)) + b"M" + struct.pack("<H", 3072) + b"\x86"
    array = b"cnumpy.core.multiarray\n_reconstruct\nq\x02cnumpy\nndarray\nq\x03K\x00\x85" + text("b") + b"\x87R"
    array += b"(K\x01" + shape + kind + b"\x89T" + struct.pack("<I", len(raw)) + raw + b"tb"
    numbers = b"]q\x06(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    files = b"]r\x00\x01\x00\x00(" + b"".join(text(f"{i}.png") for i in range(len(labels))) + b"e"
    entries = text("data") + array + text("labels") + numbers + text("batch_label") + text("batch 1 of 5")
    return b"\x80\x02}q\x01(" + entries + text("filenames") + files + b"u."


def as_python3(pixels: NDArray[np.uint8], labels: list[int], protocol: int = 2) -> bytes:
    return pickle.dumps({"data": pixels, "labels": labels}, protocol)


def python_files(images: Images, write: Callable[..., bytes] = as_python2) -> Files:
    files = {name: write(pixels, labels.tolist()) for name, pixels, labels in zip(FILES, *images, strict=True)}
    return files | {"batches.meta": pickle.dumps({"label_names": NAMES, "num_vis": 3072}, 2)}


def binary_files(images: Images) -> Files:
    pixels, labels = images
    records = np.concatenate([labels[..., None], pixels], 2)
    files = {f"{name}.bin": records[i].tobytes() for i, name in enumerate(FILES)}
    return files | {"batches.meta.txt": ("\n".join(NAMES) + "\n\n").encode()}


def write_archive(path: Path, files: Files, extra: tuple[tarfile.TarInfo, ...] = ()) -> Path:
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for member in extra:
            archive.addfile(member)
        for name, content in files.items():
            member = tarfile.TarInfo(f"cifar/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_folder(path: Path, files: Files) -> Path:
    path.mkdir(parents=True)
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def as_torchvision(files: Files, root: Path, monkeypatch: pytest.MonkeyPatch, *, train: bool) -> tuple[object, object]:
    """torchvision's reading of the files; only its checksums are skipped, since these were made here."""
    if not root.exists():
        write_folder(root / "cifar-10-batches-py", files)
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *args: True)
    data = torchvision.datasets.CIFAR10(str(root), train=train)
    return data.data, data.targets


def test_all_kinds_equal_torchvisions_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: Images) -> None:
    old, new = python_files(images), python_files(images, as_python3)
    later = python_files(images, functools.partial(as_python3, protocol=4))
    plain = binary_files(images)
    places = [
        write_archive(tmp_path / "cifar-10-python.tar.gz", old),
        write_archive(tmp_path / "python3.tgz", new),
        write_folder(tmp_path / "cifar-10-batches-py", later),
        write_archive(tmp_path / "cifar-10-binary.tar.gz", plain),
        write_folder(tmp_path / "cifar-10-batches-bin", plain),
    ]
    theirs = {train: as_torchvision(old, tmp_path / "theirs", monkeypatch, train=train) for train in (True, False)}
    for place in places:
        data = open_data(str(place))
        assert list(data.classes) == NAMES
        for source, train in ((data.train, True), (data.test, False)):
            pixels, labels = theirs[train]
            assert isinstance(source, ArraySource)
            assert np.array_equal(source.pixels, np.asarray(pixels))
            assert source.labels.tolist() == labels
        assert data.note == "train and test are the set's own"


def test_the_name_opens_what_is_in_the_cache_folder_or_downloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: Images
) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    there = write_archive(tmp_path / "there.tar.gz", python_files(images))
    handler = functools.partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/there.tar.gz"
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", address)
        for _ in range(2):  # nor is it used the next time
            with pytest.raises(UserError, match="cifar10 could not be downloaded"):  # its digest is another
                open_data("cifar10")
        digest = hashlib.md5(there.read_bytes()).hexdigest()
        monkeypatch.setattr(torchvision.datasets.CIFAR10, "tgz_md5", digest)
        assert len(open_data("cifar10").train) == 5 * EACH
        server.shutdown()
    assert len(open_data("cifar10").train) == 5 * EACH  # it is kept
    (tmp_path / "cache" / "cifar10" / "cifar-10-python.tar.gz").unlink()
    write_folder(tmp_path / "cache" / "cifar10" / "cifar-10-batches-bin", binary_files(images))
    assert len(open_data("cifar10").test) == EACH


def test_cifar100_has_its_fine_labels(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (6, 3072), dtype=np.uint8)
    fine, coarse, names = [9, 4, 0, 1, 7, 2], [1, 1, 0, 0, 1, 0], [f"kind {i}" for i in range(10)]
    batch = pickle.dumps({"data": pixels, "fine_labels": fine, "coarse_labels": coarse}, 2)
    meta = pickle.dumps({"fine_label_names": names, "coarse_label_names": ["a", "b"]}, 2)
    record = np.concatenate([np.array([coarse, fine], np.uint8).T, pixels], 1).tobytes()
    python = write_archive(tmp_path / "a.tar.gz", {"train": batch, "test": batch, "meta": meta})
    lines = "\n".join(names).encode()
    binary = write_archive(
        tmp_path / "b.tar.gz", {"train.bin": record, "test.bin": record, "fine_label_names.txt": lines}
    )
    for place in (python, binary):
        data = open_data(str(place))
        assert list(data.classes) == names
        assert data.test.labels.tolist() == fine
        assert np.array_equal(np.asarray(data.train.image(3)), pixels[3].reshape(3, 32, 32).transpose(1, 2, 0))


# ---- damage and malice


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("touch evil",)


def test_nothing_in_a_pickle_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, images: Images) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in range(2, 6):
        files = python_files(images) | {"data_batch_3": pickle.dumps({"data": Evil()}, protocol)}
        path = write_archive(tmp_path / f"{protocol}.tar.gz", files)
        with pytest.raises(UserError, match=r"'data_batch_3' in '.*' is not a file of CIFAR: it asks to call 'posix"):
            open_data(str(path))
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({(1, 2): 3}, 2),
        pickle.dumps(1.5, 2),
        pickle.dumps({"a": {1, 2}}, 2),
        b"",
        b"\x80",
        b"}q\x01",
        b".",
        b"e.",
        b"(e.",
        b"h\x07.",
        b"NR.",
        b"NNR.",
        b"Nb.",
        b"NNb.",
        b"}Ns.",
        b"cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
        b"cnumpy\nndarray\n)\x81.",  # an instruction to make an object
        b"X\xff\xff\xff\xff.",
        b"X\x01\x00\x00\x00\xff.",
        b"c" + b"a" * 1000,
    ],
)
def test_pickles_that_are_not_data(data: bytes) -> None:
    with pytest.raises(NotPlain):
        read_pickle(data)


def test_a_pickle_cannot_fill_the_memory_or_the_time() -> None:
    began = time.perf_counter()
    assert read_pickle(b"Nr\xff\xff\xff\xff.") is None  # Python's own machine has a table of that many entries
    nested = b"K\x00" + b"q\x00h\x00\x86" * 5_000  # a tuple of itself twice, 5,000 deep
    assert isinstance(read_pickle(nested + b"."), tuple)
    with pytest.raises(NotPlain, match="a key of it"):  # whose hash would take forever
        read_pickle(b"}" + nested + b"Ns.")
    assert time.perf_counter() - began < 2


def test_it_reads_what_pythons_own_machine_reads() -> None:
    value = {"a": [1, 255, 256, 70_000, -3, None, True, False, "é", b"\xff", ()], "b": {"c": (1, 2, 3, 4)}}
    assert read_pickle(pickle.dumps(value, 4)) == value
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3) * 50
    for protocol in (2, 3, 4):
        array = read_pickle(pickle.dumps(pixels, protocol))
        assert isinstance(array, Array)
        assert (array.shape, array.code, array.tobytes()) == ((2, 3), "u1", pixels.tobytes())


def link(name: str, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, "/etc/passwd"
    return member


def test_damaged_archives(tmp_path: Path, images: Images) -> None:
    """Every one is refused in one line that names it."""
    plain, pickled = binary_files(images), python_files(images)
    good = write_archive(tmp_path / "good.tar.gz", plain).read_bytes()
    pixels, labels = images
    wrong = as_python3(pixels[0], [1, 2, 3])
    floats = pickle.dumps({"data": pixels[0].astype(np.float32), "labels": [0, 1, 2, 3]}, 2)
    lying = as_python2(pixels[0], labels[0].tolist()).replace(b"M" + struct.pack("<H", EACH), b"M\xff\xff", 1)
    cases: dict[str, tuple[bytes | Files, str]] = {
        "cut": (good[: len(good) // 2], "is damaged"),
        "empty": (b"", "is damaged"),
        "text": (b"no archive at all", "is damaged"),
        "gzip": (gzip.compress(b"no tar"), "is damaged"),
        "other": ({"photo.png": b""}, "is not CIFAR"),
        "missing": ({k: v for k, v in plain.items() if k != "test_batch.bin"}, "without test_batch.bin"),
        "short": (plain | {"data_batch_2.bin": plain["data_batch_2.bin"][:-1]}, "no multiple of an image's 3,073"),
        "none": (plain | {"data_batch_2.bin": b""}, "no multiple"),
        "label": (
            plain | {"test_batch.bin": b"\x0b" + plain["test_batch.bin"][1:]},
            "has the label 11, outside 0 to 9",
        ),
        "twice": (plain | {"batches.meta.txt": b"cat\ncat\n"}, "has a name twice"),
        "labels": (pickled | {"data_batch_1": wrong}, "3,072 bytes for each of its 3 labels"),
        "floats": (pickled | {"data_batch_1": floats}, "3,072 bytes for each of its 4 labels"),
        "lying": (pickled | {"data_batch_1": lying}, "3,072 bytes for each of its 4 labels"),
        "half": (pickled | {"test_batch": pickled["test_batch"][:5000]}, "it is cut short"),
        "keys": (pickled | {"test_batch": pickle.dumps({}, 2)}, "it has no 'data'"),
        "list": (pickled | {"test_batch": pickle.dumps([], 2)}, "it is not a dict"),
        "names": (pickled | {"batches.meta": pickle.dumps({"label_names": [1]}, 2)}, "no names of classes"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / f"{name}.tar.gz"
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            write_archive(path, content)
        check_refused(path, message)
    for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE):
        path = write_archive(tmp_path / "link.tar.gz", plain, (link("cifar/data_batch_1.bin", kind),))
        check_refused(path, "which is a link or leads out of it")
    for name in ("../data_batch_1.bin", "/data_batch_1.bin", "cifar/../../x"):
        check_refused(write_archive(tmp_path / "out.tar.gz", plain, (tarfile.TarInfo(name),)), "leads out of it")
    twice = tarfile.TarInfo("other/data_batch_1.bin")
    check_refused(write_archive(tmp_path / "again.tar.gz", plain, (twice,)), "'data_batch_1.bin' twice")
    many = tuple(tarfile.TarInfo(str(i)) for i in range(101))
    check_refused(write_archive(tmp_path / "many.tar.gz", plain, many), "more than 100 members")
    check_refused(tmp_path / "absent.tar.gz", "there is no file")


def check_refused(path: Path, message: str) -> None:
    with pytest.raises(UserError) as caught:
        open_data(str(path))
    line = str(caught.value)
    assert message in line, line
    assert path.name in line
    assert "\n" not in line


def test_an_archive_that_unpacks_to_gigabytes(tmp_path: Path) -> None:
    member = tarfile.TarInfo("cifar/readme.html")
    member.size = 40 << 30
    zeros = gzip.compress(bytes(1 << 24), 9)  # a stream may be repeated
    with open(tmp_path / "bomb.tar.gz", "wb") as file:
        file.write(gzip.compress(member.tobuf(tarfile.GNU_FORMAT)))
        for _ in range(20):
            file.write(zeros)
    check_refused(tmp_path / "bomb.tar.gz", "holds more than 250,000,000 bytes")
