"""No file takes more time or memory than its budget, and none prevents reading the next one."""

import contextlib
import io
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from chaos import bombs
from pictures import encoded, picture, write_folder
from PIL import Image
from timing import assert_below, seconds

import vitlab
from vitlab.data import folder
from vitlab.data.av1 import largest_frame
from vitlab.data.decoder import DecodeError, decode_bytes
from vitlab.data.headers import Header, ImpossibleHeader, read_header
from vitlab.data.images import BrokenImage, decode, is_plain, sandbox
from vitlab.data.loader import TrainLoader
from vitlab.data.sandbox import Budget, DecodeRequest, Sandbox
from vitlab.data.transforms import Augment, eval_pixels
from vitlab.models.config import Preprocess


def wide(width: int, height: int, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    picture(1, height, width).save(file, kind, **options)
    return file.getvalue()


def same_pixels(one: Image.Image, other: Image.Image) -> bool:
    return np.array_equal(np.asarray(one), np.asarray(other))


# ---- headers


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),  # the extended layout
    ],
)
def test_ordinary_photos_are_known_by_their_headers(kind: str, options: dict[str, object]) -> None:
    data = wide(333, 77, kind, **options)
    header = read_header(data)
    assert header is not None
    assert (header.width, header.height) == (333, 77)
    assert is_plain(data)
    assert 1 <= header.passes <= 20


@pytest.mark.parametrize("kind", ["GIF", "BMP", "TIFF", "PPM", "TGA", "AVIF", "JPEG2000"])
def test_other_formats_have_no_known_cost(kind: str) -> None:
    assert read_header(wide(40, 30, kind)) is None


def test_animations_are_not_plain() -> None:
    frames = [picture(i) for i in range(3)]
    for kind in ("PNG", "WEBP"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        assert read_header(file.getvalue()) is None
        assert decode(file.getvalue(), "x").size == (24, 20)


def test_a_large_claim_is_not_plain() -> None:
    data = bytearray(wide(40, 30, "PNG"))
    data[16:24] = (10_000).to_bytes(4, "big") * 2
    assert read_header(data) == Header(10_000, 10_000)
    assert not is_plain(data)


@pytest.mark.parametrize("size", [(333, 222), (1, 1), (1000, 17)])
def test_the_frame_inside_an_avif(size: tuple[int, int]) -> None:
    assert largest_frame(wide(*size, "AVIF")) == size
    assert largest_frame(bombs.inner_frame()) == (16_000, 16_000)


def test_truncated_headers_raise_nothing_new() -> None:
    for kind in ("JPEG", "PNG", "WEBP", "AVIF", "GIF"):
        data = wide(40, 30, kind)
        for end in range(len(data)):
            header = read_header(data[:end])
            assert header is None or header.pixels <= 40 * 30
            assert min(largest_frame(data[:end])) >= 0


# ---- bombs


def test_a_jpeg_of_many_scans() -> None:
    data = bombs.scans()

    def attempt() -> None:
        with pytest.raises(BrokenImage, match="scans"):
            decode(data, "bomb")

    assert_below(2, lambda: seconds(attempt))


def test_a_png_of_a_million_chunks() -> None:
    data = bombs.chunks()

    def attempt() -> None:
        with pytest.raises(BrokenImage, match="tiny chunks"):
            decode(data, "bomb")

    assert_below(2, lambda: seconds(attempt))


@pytest.mark.slow
def test_time_is_limited_and_the_next_picture_is_read() -> None:
    box, good = Sandbox(Budget(cpu=1, wall=15)), encoded(picture(3))
    with pytest.raises(DecodeError, match=r"more than 1 s of a core|longer than 15 s"):
        box.decode(bombs.scans(), DecodeRequest())
    assert same_pixels(box.decode(good, DecodeRequest()), picture(3))
    box.budget = Budget(wall=0.5)
    with pytest.raises(DecodeError, match=r"longer than 0\.5 s"):
        box.decode(bombs.odd_maxval(), DecodeRequest())
    box.budget = Budget()
    assert same_pixels(box.decode(good, DecodeRequest()), picture(3))
    box.kill(close=True)


@pytest.mark.parametrize("bomb", ["tile", "inner_frame"])
def test_memory_is_limited_and_the_next_picture_is_read(bomb: str) -> None:
    """Two gigabytes for a tile, hundreds of megabytes for a frame; the limit here is lower than either."""
    box = Sandbox(Budget(memory=200_000_000))
    with pytest.raises(DecodeError):
        box.decode(getattr(bombs, bomb)(), DecodeRequest())
    assert same_pixels(box.decode(encoded(picture(3)), DecodeRequest()), picture(3))
    assert box.process is not None
    status = Path(f"/proc/{box.process.pid}/status").read_text()
    assert int(status.split("VmHWM:")[1].split()[0]) < 300_000  # kB, at its peak
    box.kill(close=True)


def test_more_pixels_than_allowed() -> None:
    box = Sandbox()
    for data in (bombs.inner_frame(), wide(100, 101, "PNG")):
        with pytest.raises(DecodeError, match="pixels") as refused:
            box.decode(data, DecodeRequest(most_pixels=10_000))
        assert refused.value.fault == "large"
    assert box.decode(wide(100, 100, "PNG"), DecodeRequest(most_pixels=10_000)).size == (100, 100)
    box.kill(close=True)


# ---- the process


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "GIF", "WEBP"])
def test_the_process_gives_the_same_pixels(kind: str) -> None:
    data = wide(61, 47, kind)
    assert same_pixels(sandbox().decode(data, DecodeRequest()), decode_bytes(data))


def test_large_pictures_come_in_bands() -> None:
    image = Image.effect_noise((1500, 2001), 90).convert("RGB")
    file = io.BytesIO()
    image.save(file, "BMP")
    assert same_pixels(decode(file.getvalue(), "x"), image)


def test_framing_in_the_process_is_evaluation() -> None:
    data, preprocess = wide(61, 47, "PNG"), Preprocess(crop=0.9, interpolation="bicubic")
    found = sandbox().decode(data, DecodeRequest(size=(32, 24), preprocess=preprocess))
    assert np.array_equal(np.asarray(found).transpose(2, 0, 1), eval_pixels(decode_bytes(data), (32, 24), preprocess))


def test_jpegs_shrink_in_the_process_too() -> None:
    data, asked = wide(400, 300, "JPEG"), []

    def shrink(size: tuple[int, int]) -> float:
        asked.append(size)
        return 4.0

    assert sandbox().decode(data, DecodeRequest(), shrink).size == (100, 75)
    assert asked == [(300, 400)]


def test_a_process_that_was_killed_is_replaced() -> None:
    box, good = Sandbox(), encoded(picture(3))
    box.decode(good, DecodeRequest())
    assert box.process is not None
    os.kill(box.process.pid, signal.SIGKILL)
    assert same_pixels(box.decode(good, DecodeRequest()), picture(3))
    box.kill(close=True)


@pytest.mark.parametrize("delay", [0.01, 0.1, 0.25])
def test_an_interrupted_picture_is_not_given_for_the_next_one(delay: float) -> None:
    """Whether Ctrl-C comes while its bytes are sent or while its pixels are awaited."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    large, good = wide(4000, 4000, "BMP"), wide(61, 47, "TIFF")
    sandbox().decode(good, DecodeRequest())
    usual = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        with contextlib.suppress(KeyboardInterrupt):  # a fast machine may have been done before
            sandbox().decode(large, DecodeRequest())
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    for data in (good, wide(20, 30, "GIF")):
        assert same_pixels(sandbox().decode(data, DecodeRequest()), decode_bytes(data))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of a fork beside threads, which the child here does not use
def test_a_forked_process_leaves_its_parents_decoder_alone() -> None:
    box, good = Sandbox(), wide(61, 47, "TIFF")
    box.decode(good, DecodeRequest())
    process = box.process
    child = os.fork()
    if not child:
        box.kill()
        os._exit(0)
    os.waitpid(child, 0)
    assert same_pixels(box.decode(good, DecodeRequest()), decode_bytes(good))
    assert process is not None
    assert box.process is process
    assert process.poll() is None
    box.kill(close=True)


def test_killing_ends_the_work_at_once() -> None:
    box, faults = Sandbox(), []

    def work() -> None:
        try:
            box.decode(bombs.scans(), DecodeRequest())
        except DecodeError as bad:
            faults.append(bad.why)

    thread = threading.Thread(target=work)
    thread.start()
    time.sleep(0.8)
    box.kill()
    assert seconds(lambda: thread.join(30)) < 6
    assert faults == ["decoding it was stopped"]


def test_a_clone_that_is_not_installed_starts_processes_of_its_own(tmp_path: Path) -> None:
    shutil.copytree(Path(vitlab.__file__).parent, tmp_path / "vitlab", ignore=shutil.ignore_patterns("__pycache__"))
    inner = "from vitlab.data import sandbox; print(sandbox.__file__)"
    code = f"from vitlab.data.sandbox import python_command as run; import subprocess; subprocess.run(run({inner!r}))"
    usual = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=usual, capture_output=True, text=True)
    assert done.stdout.strip() == str(tmp_path / "vitlab" / "data" / "sandbox.py"), done.stderr


def test_a_long_thin_picture_is_not_enlarged() -> None:
    """Scaling all of 1 x 60,000 pixels to cover 224 x 224 would take 10 GB."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for size in ((1, 60_000), (60_000, 1)):
        assert eval_pixels(Image.new("RGB", size), (224, 224), Preprocess()).shape == (3, 224, 224)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kB


# ---- files


def test_special_files_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jpg")

    def attempt(path: Path) -> None:
        with pytest.raises(BrokenImage, match=r"regular file|directory"):
            decode(path, str(path))

    for path in (tmp_path / "a.jpg", Path("/dev/zero"), tmp_path):
        assert_below(1, partial(seconds, partial(attempt, path)))
    with pytest.raises(BrokenImage, match="No such file"):
        decode(tmp_path / "b.jpg", "b.jpg")


def test_a_file_of_gigabytes(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    with path.open("wb") as file:
        file.truncate(3 << 30)  # a sparse file
    with pytest.raises(BrokenImage, match="larger than 256 MB"):
        decode(path, "a.png")


# ---- EXIF


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_exif_that_cannot_be_read_is_ignored() -> None:
    """Mutations of a real block, as a camera's bug or an editor could have made: the photo is still read."""
    exif = Image.Exif()
    exif[0x0112], exif[0x010F], exif[0x9003] = 6, "maker", "2026:01:01 00:00:00"
    exif.get_ifd(0x8769)[0x9286] = b"comment"
    block = bytearray(b"Exif\0\0" + exif.tobytes()[6:] if exif.tobytes().startswith(b"Exif") else exif.tobytes())
    rng = np.random.default_rng(0)
    for _ in range(500):
        odd = bytearray(block)
        for _ in range(int(rng.integers(1, 12))):
            odd[int(rng.integers(6, len(odd)))] = int(rng.integers(0, 256))
        for kind in ("JPEG", "PNG", "WEBP"):
            assert decode(wide(24, 20, kind, exif=bytes(odd)), "photo").size in ((24, 20), (20, 24))


def test_both_entry_points_refuse_impossible_headers() -> None:
    with pytest.raises(ImpossibleHeader):
        read_header(bombs.scans(64, 600))
    with pytest.raises(BrokenImage):
        decode(bombs.scans(64, 600), "x")


# ---- in training and evaluation


def test_loader_workers_have_processes_of_their_own(tmp_path: Path) -> None:
    """BMPs are decoded in processes with limits, those of the workers too; a bomb among them is a broken image."""
    write_folder(tmp_path / "photos", {"a": 6, "b": 6}, ".bmp")
    (tmp_path / "photos" / "a" / "003.bmp").write_bytes(bombs.scans())
    source = folder.splits(tmp_path / "photos")["train"]
    batches = []
    for workers in (0, 2):
        loader = TrainLoader(source, (16, 16), Augment(), Preprocess(), batch=12, workers=workers, resident=False)
        batches.append(next(loader.batches()))
        assert [Path(name).name for name in loader.broken.values()] == ["003.bmp"]
    assert torch.equal(batches[0].images, batches[1].images)
