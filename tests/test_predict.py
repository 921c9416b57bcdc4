"""Predictions of files: what comes out, in which order, and what becomes of files, networks and processes that fail."""

import csv
import functools
import http.server
import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import fill
from PIL import Image
from rich.cells import cell_len
from timing import assert_below, seconds

import vitlab
from vitlab.cli import main
from vitlab.errors import UserError
from vitlab.models.config import Preprocess
from vitlab.predict import Classifier, web
from vitlab.predict.inputs import Inputs, find
from vitlab.predict.stream import predictions

VITLAB = Path(sys.executable).with_name("vitlab")
LABELS = ("cat", "dog, small", "고양이", 'a "quoted" one', "emu")
HOW = Preprocess((0.4, 0.5, 0.6), (0.2, 0.3, 0.25), "bilinear", "crop", 0.8)


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = fill(vitlab.create("Ti/8", image_size=16, classes=5, depth=1, width=32, mlp=64, heads=2))
    folder = tmp_path_factory.mktemp("runs") / "mine"
    vitlab.save(model, folder, labels=LABELS, preprocess=HOW)
    return str(folder)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """b/00.png ... b/06.png, a/00.png ...; a broken file, an empty one, and what is no picture by its name."""
    root = tmp_path_factory.mktemp("photos")
    for folder in ("b", "a"):
        (root / folder).mkdir()
        for i in range(7):
            picture(10 * ord(folder) + i).save(root / folder / f"{i:02d}.png")
    (root / "a" / "03x.jpg").write_text("this is a letter")
    (root / "b" / "05x.png").write_bytes(b"")
    (root / "notes.txt").write_text("holiday")
    (root / ".hidden.png").write_bytes(b"")
    return root


def good(photos: Path) -> list[str]:
    return [str(photos / folder / f"{i:02d}.png") for folder in ("a", "b") for i in range(7)]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a verb in this process: (exit code, standard output, standard error)."""

    def call(*words: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitlab", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return call


def same(one: list[dict[str, object]], other: list[dict[str, object]]) -> bool:
    """The same classes in the same order, with the same probabilities to 1e-5."""
    names = [[each["name"] for each in classes] for classes in (one, other)]
    values = [[each["probability"] for each in classes] for classes in (one, other)]
    return names[0] == names[1] and values[0] == pytest.approx(values[1], abs=1e-5)


# ---- the classifier


def by_hand(run: str, image: Image.Image) -> np.ndarray:
    """Scale, crop, normalize and softmax, written out in numpy float64; only the network itself is ours."""
    width, height = image.size
    short = int(16 / HOW.crop)
    scaled = (short, int(short * height / width)) if width <= height else (int(short * width / height), short)
    image = image.resize(scaled, Image.Resampling.BILINEAR)
    left, top = round((image.width - 16) / 2), round((image.height - 16) / 2)
    pixels = np.asarray(image.crop((left, top, left + 16, top + 16)), np.float64) / 255
    x = ((pixels - HOW.mean) / HOW.std).transpose(2, 0, 1)[None]
    with torch.no_grad():
        logits = vitlab.load(run).double()(torch.from_numpy(x))[0].numpy()
    e = np.exp(logits - logits.max())
    return e / e.sum()


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (16, 16), (5, 7), (300, 20)])
def test_a_picture_is_framed_and_answered_as_written_out_by_hand(run: str, size: tuple[int, int]) -> None:
    classifier = Classifier(run, "cpu")
    image = picture(3, *size)
    pixels = classifier.pixels(image)
    assert pixels.shape == (3, 16, 16)
    assert pixels.dtype == torch.uint8
    got = classifier.probabilities(pixels[None])
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got[0].numpy(), by_hand(run, image), atol=1e-6)
    np.testing.assert_allclose(classifier.logits(pixels[None]).softmax(1).numpy(), got.numpy(), atol=1e-7)


def test_names_come_from_the_run_or_are_numbers(run: str, tmp_path: Path) -> None:
    assert Classifier(run, "cpu").labels == LABELS
    model = vitlab.create("Ti/8", image_size=16, classes=3, depth=1, width=32, mlp=64, heads=2)
    vitlab.save(model, tmp_path / "plain")
    assert Classifier(tmp_path / "plain", "cpu").labels == ("class 0", "class 1", "class 2")


def test_a_model_without_a_head_knows_no_classes(tmp_path: Path) -> None:
    vitlab.save(vitlab.create("Ti/8", image_size=16, classes=0, depth=1, width=32, mlp=64, heads=2), tmp_path / "run")
    with pytest.raises(UserError, match="has no head"):
        Classifier(tmp_path / "run")


def test_an_endless_picture_is_answered_without_endless_memory(run: str) -> None:
    classifier = Classifier(run, "cpu")
    stripes = np.zeros((1, 60_000, 3), np.uint8)
    stripes[:, 29_000:31_000] = 200  # scaled as a whole it would be 20 x 1,200,000 pixels
    pixels = classifier.pixels(Image.fromarray(stripes))
    assert (pixels == 200).all()  # the middle


# ---- which files, and in which order


def test_files_come_in_the_order_of_words_and_sorted_within_a_folder(photos: Path) -> None:
    words = [str(photos / "b" / "06.png"), str(photos), str(photos / "a" / "*1.png")]
    found = find(words)
    a, b = ([str(photos / folder / f"{i:02d}.png") for i in range(7)] for folder in "ab")
    a.insert(4, str(photos / "a" / "03x.jpg"))
    b.insert(6, str(photos / "b" / "05x.png"))
    wanted = [b[-1], *a, *b[:-1]]
    assert [found.name(i) for i in range(len(found))] == wanted


def test_patterns_reach_below_and_take_only_pictures(photos: Path) -> None:
    found = find([str(photos / "**" / "*")])
    assert {os.path.splitext(found.name(i))[1] for i in range(len(found))} == {".png", ".jpg"}
    assert len(found) == 16


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("nowhere.jpg", "there is no file or folder 'nowhere.jpg'"),
        ("nowhere/*.jpg", "nothing matches"),
        ("https://example.org/cat.jpg", "add --allow-url"),
        ("ftp://example.org/cat.jpg", "only http:// and https:// are"),
        ("file:///etc/passwd", "only http:// and https:// are"),
    ],
)
def test_words_that_name_nothing(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        find([word])


def test_a_folder_without_pictures(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(UserError, match="there is no image"):
        find([str(tmp_path)])


# ---- what pictures hold


def test_pictures_of_every_kind(run: str, tmp_path: Path, cli) -> None:
    upright = picture(5, 48, 32)
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned right
    upright.save(tmp_path / "a.png")
    turned.save(tmp_path / "b.png", exif=exif)
    grey = upright.convert("L")
    grey.convert("RGB").save(tmp_path / "c.png")
    Image.fromarray(np.asarray(grey).astype(np.uint16) * 257).save(tmp_path / "d.png")  # 16 bits
    few = upright.quantize(8)
    few.save(tmp_path / "e.png")  # a palette
    few.convert("RGB").save(tmp_path / "f.png")
    frames = [few, picture(6, 48, 32).quantize(8)]
    frames[0].save(tmp_path / "g.gif", save_all=True, append_images=frames[1:])
    upright.convert("CMYK").save(tmp_path / "h.tif")
    code, out, _ = cli("predict", run, tmp_path, "--json", "--top-k", 5)
    assert code == 0
    rows = {Path(row["path"]).name: row["classes"] for row in map(json.loads, out.splitlines())}
    assert len(rows) == 8
    for one, other in (
        ("a.png", "b.png"),
        ("c.png", "d.png"),
        ("e.png", "f.png"),
        ("f.png", "g.gif"),
        ("a.png", "h.tif"),
    ):
        assert same(rows[one], rows[other]), (one, other)
    assert not same(rows["a.png"], rows["c.png"])
    assert not same(rows["c.png"], rows["e.png"])


# ---- batches


@pytest.mark.parametrize(("batch", "workers"), [(1, 0), (3, 0), (16, 0), (4, 1)])
def test_answers_do_not_hang_on_the_batch(run: str, photos: Path, batch: int, workers: int) -> None:
    classifier, found = Classifier(run, "cpu"), find([str(photos)])
    every = list(predictions(classifier, found, range(len(found)), top=5, batch=batch, workers=workers))
    got = [answer for part in every for answer in part.good]
    assert [answer.path for answer in got] == good(photos)
    assert [Path(bad[1]).name for part in every for bad in part.broken] == ["03x.jpg", "05x.png"]
    for answer in got:
        wanted = by_hand(run, Image.open(answer.path))
        order = np.argsort(-wanted)
        assert [name for name, _ in answer.classes] == [LABELS[i] for i in order]
        np.testing.assert_allclose([value for _, value in answer.classes], wanted[order], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_neither_do_they(run: str, photos: Path) -> None:
    classifier, found = Classifier(run, "cuda"), find([str(photos)])

    def ask(part: range) -> dict[str, dict[str, float]]:
        every = predictions(classifier, found, part, top=5, workers=0)
        return {answer.path: dict(answer.classes) for batch in every for answer in batch.good}

    whole, some = ask(range(len(found))), ask(range(5, 8))
    assert len(some) == 3
    for path, classes in some.items():
        assert classes == pytest.approx(whole[path], abs=1e-5)


def test_pictures_are_read_as_they_are_answered(run: str, photos: Path) -> None:
    read = []

    class Counted(Inputs):
        def image(self, index: int, shrink: object = None) -> Image.Image:
            read.append(index)
            return super().image(index)

    found = Counted([name for name in good(photos) for _ in range(20)])
    stream = predictions(Classifier(run, "cpu"), found, range(len(found)), top=1, batch=8, workers=0)
    next(stream)
    assert len(read) <= 16  # of 280
    assert sum(len(part.good) for part in stream) == 272


# ---- what is printed


def test_the_table_lines_up_and_names_what_is_broken_at_the_end(run: str, photos: Path, cli) -> None:
    code, out, err = cli("predict", run, photos, "--top-k", 2, "--device", "cpu")
    assert code == 0
    head, *lines = out.splitlines()
    assert head.split() == ["image", "class", "probability", "then"]
    assert len(lines) == 14
    for name, line in zip(good(photos), lines, strict=True):
        wanted = by_hand(run, Image.open(name))
        first, second = np.argsort(-wanted)[:2]
        assert f"{LABELS[first]} " in line
        assert line.endswith(f"{LABELS[second]} {wanted[second]:.1%}")
        shown = line.index(f" {wanted[first]:.1%}  ") + len(f" {wanted[first]:.1%}")
        assert cell_len(line[:shown]) == head.index("probability") + len("probability")
    assert "2 of 16 files could not be read" in err
    assert "03x.jpg: it is not an image of a known kind" in err


def test_csv_is_what_the_csv_module_reads(run: str, photos: Path, cli) -> None:
    code, out, _ = cli("predict", run, photos, "--csv", "--top-k", 3)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["path"] for row in rows] == good(photos)
    for row in rows:
        wanted = by_hand(run, Image.open(row["path"]))
        order = np.argsort(-wanted)[:3]
        assert [row["class"], row["class_2"], row["class_3"]] == [LABELS[i] for i in order]
        got = [float(row[key]) for key in ("probability", "probability_2", "probability_3")]
        np.testing.assert_allclose(got, wanted[order], atol=1e-6)


def test_json_gives_one_object_a_line_and_no_more_classes_than_there_are(run: str, photos: Path, cli) -> None:
    _, out, _ = cli("predict", run, photos / "a", "--json", "--top-k", 99)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["path"] for row in rows] == good(photos)[:7]
    for row in rows:
        assert [set(row), len(row["classes"])] == [{"path", "classes"}, 5]
        assert sum(each["probability"] for each in row["classes"]) == pytest.approx(1, abs=1e-5)


def test_the_file_chooses_its_format_and_is_not_overwritten(run: str, photos: Path, tmp_path: Path, cli) -> None:
    for name in ("x.csv", "x.jsonl", "x.txt"):
        code, out, _ = cli("predict", run, photos / "a" / "01.png", "--out", tmp_path / name)
        assert (code, out) == (0, "")
    assert (tmp_path / "x.csv").read_text().startswith("path,class,probability\n")
    assert len(json.loads((tmp_path / "x.jsonl").read_text())["classes"]) == 5
    assert (tmp_path / "x.txt").read_text().startswith("image ")
    code, _, err = cli("predict", run, photos / "a" / "01.png", "--out", tmp_path / "x.csv")
    assert code == 1
    assert "exists; remove it" in err


def test_strict_tells_by_the_exit_code(run: str, photos: Path, cli) -> None:
    assert cli("predict", run, photos, "--strict")[0] == 1
    assert cli("predict", run, photos / "a" / "01.png", "--strict")[0] == 0


def test_nothing_readable_is_an_error_and_leaves_nothing(run: str, photos: Path, tmp_path: Path, cli) -> None:
    code, out, err = cli("predict", run, photos / "a" / "03x.jpg", "--out", tmp_path / "x.csv")
    assert (code, out) == (1, "")
    assert err.endswith("03x.jpg cannot be read: it is not an image of a known kind\n")
    assert not (tmp_path / "x.csv").exists()
    code, out, err = cli("predict", run, photos / "a" / "03x.jpg", photos / "b" / "05x.png")
    assert (code, out) == (1, "")
    assert "none of the 2 files can be read" in err


def test_names_that_would_break_a_line_or_are_no_text(run: str, tmp_path: Path, cli) -> None:
    names = [b"two\nlines.png", b"caf\xe9.png"]  # the second is Latin-1
    for name in names:
        picture(1).save(os.path.join(os.fsencode(tmp_path), name), format="PNG")
    _, out, _ = cli("predict", run, tmp_path)
    assert len(out.splitlines()) == 3
    code, out, _ = cli("predict", run, tmp_path, "--json")
    assert code == 0
    got = {os.path.basename(os.fsencode(json.loads(line)["path"])) for line in out.splitlines()}
    assert got == set(names)


def test_choose_one_format(run: str, photos: Path, cli) -> None:
    code, _, err = cli("predict", run, photos, "--json", "--csv")
    assert code == 1
    assert "choose one of --json and --csv" in err


# ---- standard input and addresses


def test_standard_input(run: str, photos: Path, cli, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (photos / "a" / "02.png").read_bytes()
    _, wanted, _ = cli("predict", run, photos / "a" / "02.png", "--json")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    code, out, _ = cli("predict", run, "-", "--json")
    assert code == 0
    got = json.loads(out)
    assert got["path"] == "-"
    assert same(got["classes"], json.loads(wanted)["classes"])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    monkeypatch.setattr(web, "LARGEST", 100)
    code, _, err = cli("predict", run, "-")
    assert code == 1
    assert "larger than" in err


class Site(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; some paths misbehave."""

    def do_GET(self) -> None:
        if self.path == "/away.png":
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
        elif self.path == "/drip.png":
            self.send_response(200)
            self.end_headers()
            for _ in range(40):
                self.wfile.write(b"x")
                time.sleep(0.05)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def site(photos: Path) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Site, directory=str(photos)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_addresses_are_fetched_only_when_allowed(run: str, photos: Path, site: str, cli) -> None:
    code, _, err = cli("predict", run, f"{site}/a/02.png")
    assert code == 1
    assert "add --allow-url" in err
    code, out, err = cli(
        "predict", run, f"{site}/a/02.png", f"{site}/no.png", f"{site}/away.png", "--allow-url", "--json"
    )
    assert code == 0
    _, wanted, _ = cli("predict", run, photos / "a" / "02.png", "--json")
    assert same(json.loads(out)["classes"], json.loads(wanted)["classes"])
    assert "2 of 3 files could not be read" in err
    assert "HTTP Error 404" in err
    assert "/away.png: " in err


def test_a_server_may_neither_flood_nor_dawdle(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "LARGEST", 200)
    with pytest.raises(web.BrokenImage, match="larger than"):
        web.fetch(f"{site}/a/02.png")
    monkeypatch.setattr(web, "PATIENCE", 0.3)

    def attempt() -> None:
        with pytest.raises(web.BrokenImage, match="did not come complete"):
            web.fetch(f"{site}/drip.png")

    assert_below(1.5, lambda: seconds(attempt))


# ---- processes


def test_under_torchrun_the_parts_are_the_whole(run: str, photos: Path, tmp_path: Path, cli) -> None:
    cli("predict", run, photos, "--out", tmp_path / "whole.csv", "--device", "cpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    words = ["predict", run, photos, "--out", tmp_path / "x.csv", "--device", "cpu"]
    done = subprocess.run([*command, VITLAB, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    parts = [list(csv.reader((tmp_path / f"x.rank{rank}.csv").open())) for rank in (0, 1)]
    whole = list(csv.reader((tmp_path / "whole.csv").open()))
    assert len(parts[0]) == 1 + 7
    for one, other in zip(whole, parts[0] + parts[1], strict=True):
        assert one[:2] == other[:2]
    got, wanted = (np.array([float(row[2]) for row in rows[1:]]) for rows in (parts[0] + parts[1], whole))
    np.testing.assert_allclose(got, wanted, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "said"), [([], "name a file with --out"), (["-", "--out", "x.csv"], "instead of '-'")]
)
def test_processes_do_not_share_streams(
    run: str, photos: Path, words: list[str], said: str, cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x")))
    code, _, err = cli("predict", run, photos, *words)
    assert code == 1
    assert said in err


def test_ctrl_c_leaves_whole_lines_and_says_so(run: str, photos: Path, tmp_path: Path) -> None:
    many = tmp_path / "many"
    many.mkdir()
    for i in range(20_000):
        (many / f"{i:05d}.png").symlink_to(photos / "a" / f"{i % 7:02d}.png")
    out = tmp_path / "x.jsonl"
    process = subprocess.Popen([VITLAB, "predict", run, many, "--out", out], stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (out.exists() and out.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    lines = out.read_text().splitlines(keepends=True)
    assert 0 < len(lines) < 20_000
    assert [Path(json.loads(line)["path"]).stem for line in lines] == [f"{i:05d}" for i in range(len(lines))]
    assert lines[-1].endswith("\n")
    assert f"stopped after {len(lines)} of 20000 images; their answers are in {out}" in err
    assert "Traceback" not in err


def test_a_reader_that_has_seen_enough(run: str, photos: Path) -> None:
    command = f"'{VITLAB}' predict '{run}' '{photos}' --batch 1 | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("image ")
    assert done.stderr.count("\n") <= 3, done.stderr
    assert "Traceback" not in done.stderr
