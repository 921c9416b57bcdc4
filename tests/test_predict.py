"""Predictions of files: content and order of the output, and files, networks and processes that fail."""

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
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command, fill
from numpy.typing import NDArray
from PIL import Image
from rich.cells import cell_len
from timing import assert_below, seconds

import vitlab
from vitlab.data.images import BrokenImage
from vitlab.errors import UserError
from vitlab.models.config import Preprocess
from vitlab.prediction import Classifier, Prediction, web
from vitlab.prediction.inputs import Inputs, find_inputs
from vitlab.prediction.stream import predict_stream

VITLAB = Path(sys.executable).with_name("vitlab")
LABELS = ("cat", "dog, small", "고양이", 'a "quoted" one', "emu")
HOW = Preprocess((0.4, 0.5, 0.6), (0.2, 0.3, 0.25), "bilinear", "crop", 0.8)


def random_image(seed: int, width: int = 40, height: int = 30) -> Image.Image:
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
    """b/00.png ... b/06.png, a/00.png ...; a broken file, an empty one, and two that are no images by name."""
    root = tmp_path_factory.mktemp("photos")
    for folder in ("b", "a"):
        (root / folder).mkdir()
        for i in range(7):
            random_image(10 * ord(folder) + i).save(root / folder / f"{i:02d}.png")
    (root / "a" / "03x.jpg").write_text("this is a letter")
    (root / "b" / "05x.png").write_bytes(b"")
    (root / "notes.txt").write_text("holiday")
    (root / ".hidden.png").write_bytes(b"")
    return root


def good(photos: Path) -> list[str]:
    return [str(photos / folder / f"{i:02d}.png") for folder in ("a", "b") for i in range(7)]


@pytest.fixture
def cli(command: Command) -> Command:
    """Run a command in this process: (exit code, standard output, standard error)."""
    return lambda *arguments: command(*map(str, arguments))


def same(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> bool:
    """The same classes in the same order, with the same probabilities to 1e-5."""
    names = [[each["name"] for each in classes] for classes in (one, other)]
    values = [[each["probability"] for each in classes] for classes in (one, other)]
    return names[0] == names[1] and values[0] == pytest.approx(values[1], abs=1e-5)


# ---- the classifier


def reference(run: str, image: Image.Image) -> NDArray[np.float64]:
    """Probabilities by resize, crop, normalize and softmax in numpy float64; only the network itself is vitlab's."""
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
def test_pixels_and_probabilities_match_a_numpy_reference(run: str, size: tuple[int, int]) -> None:
    classifier = Classifier(run, "cpu")
    image = random_image(3, *size)
    pixels = classifier.pixels(image)
    assert pixels.shape == (3, 16, 16)
    assert pixels.dtype == torch.uint8
    got = classifier.probabilities(pixels[None])
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got[0].numpy(), reference(run, image), atol=1e-6)
    np.testing.assert_allclose(classifier.logits(pixels[None]).softmax(1).numpy(), got.numpy(), atol=1e-7)


def test_labels_come_from_the_run_or_are_numbers(run: str, tmp_path: Path) -> None:
    assert Classifier(run, "cpu").labels == LABELS
    model = vitlab.create("Ti/8", image_size=16, classes=3, depth=1, width=32, mlp=64, heads=2)
    vitlab.save(model, tmp_path / "plain")
    assert Classifier(tmp_path / "plain", "cpu").labels == ("class 0", "class 1", "class 2")


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    vitlab.save(vitlab.create("Ti/8", image_size=16, classes=0, depth=1, width=32, mlp=64, heads=2), tmp_path / "run")
    with pytest.raises(UserError, match="has no head"):
        Classifier(tmp_path / "run")


def test_a_very_wide_image_needs_little_memory(run: str) -> None:
    classifier = Classifier(run, "cpu")
    stripes = np.zeros((1, 60_000, 3), np.uint8)
    stripes[:, 29_000:31_000] = 200  # resized before the crop it would be 20 x 1,200,000 pixels
    pixels = classifier.pixels(Image.fromarray(stripes))
    assert (pixels == 200).all()  # the middle


def test_predict_takes_a_path_or_an_image(run: str, photos: Path) -> None:
    path = photos / "a" / "02.png"
    classifier = Classifier(run, "cpu")
    got = classifier.predict(path, top=2)
    expected = reference(run, Image.open(path))
    order = np.argsort(-expected)[:2]
    assert (got.file, got.label) == (str(path), LABELS[order[0]])
    assert got.labels == tuple(LABELS[i] for i in order)
    np.testing.assert_allclose(got.probabilities, expected[order], atol=1e-5)
    assert got.top == list(zip(got.labels, got.probabilities, strict=True))
    assert classifier.predict(Image.open(path), top=2) == got
    assert Classifier(vitlab.load(run), "cpu").predict(str(path), top=2) == got
    assert len(classifier.predict(path, top=99).top) == 5
    turned = Image.open(path).transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6  # to be shown turned right
    assert classifier.predict(turned, top=2).probabilities == got.probabilities
    assert classifier.predict(turned).file == "image"


def test_predict_reports_what_cannot_be_read(run: str, photos: Path) -> None:
    classifier = Classifier(run, "cpu")
    with pytest.raises(UserError, match=r"03x\.jpg cannot be read: it is not an image of a known kind"):
        classifier.predict(photos / "a" / "03x.jpg")
    with pytest.raises(UserError, match="top must be at least 1, not 0"):
        classifier.predict(photos / "a" / "02.png", top=0)


def test_a_prediction_shows_itself_as_text_and_html() -> None:
    got = Prediction("<b>.png", ("<script>", "cat"), (0.75, 0.25))
    assert repr(got) == "Prediction('<b>.png': '<script>' 75.0%, 'cat' 25.0%)"
    page = got._repr_html_()
    assert "<caption>&lt;b&gt;.png</caption>" in page
    assert "<td>&lt;script&gt;</td><td>75.0%</td>" in page
    assert "<script>" not in page


# ---- which files, and in which order


def test_files_keep_the_order_of_arguments_and_are_sorted_within_a_folder(photos: Path) -> None:
    paths = [str(photos / "b" / "06.png"), str(photos), str(photos / "a" / "*1.png")]
    found = find_inputs(paths)
    a, b = ([str(photos / folder / f"{i:02d}.png") for i in range(7)] for folder in "ab")
    a.insert(4, str(photos / "a" / "03x.jpg"))
    b.insert(6, str(photos / "b" / "05x.png"))
    expected = [b[-1], *a, *b[:-1]]
    assert [found.name(i) for i in range(len(found))] == expected


def test_patterns_are_recursive_and_match_only_images(photos: Path) -> None:
    found = find_inputs([str(photos / "**" / "*")])
    assert {os.path.splitext(found.name(i))[1] for i in range(len(found))} == {".png", ".jpg"}
    assert len(found) == 16


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.jpg", "there is no file or folder 'nowhere.jpg'"),
        ("nowhere/*.jpg", "nothing matches"),
        ("https://example.org/cat.jpg", "add --allow-url"),
        ("ftp://example.org/cat.jpg", "only http:// and https:// URLs can"),
        ("file:///etc/passwd", "only http:// and https:// URLs can"),
    ],
)
def test_paths_that_name_nothing(path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        find_inputs([path])


def test_a_folder_without_images(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("none")
    with pytest.raises(UserError, match="there is no image"):
        find_inputs([str(tmp_path)])


# ---- kinds of images


def test_images_of_every_kind(run: str, tmp_path: Path, cli: Command) -> None:
    upright = random_image(5, 48, 32)
    turned = upright.transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned right
    upright.save(tmp_path / "a.png")
    turned.save(tmp_path / "b.png", exif=exif)
    gray = upright.convert("L")
    gray.convert("RGB").save(tmp_path / "c.png")
    Image.fromarray(np.asarray(gray).astype(np.uint16) * 257).save(tmp_path / "d.png")  # 16 bits
    few = upright.quantize(8)
    few.save(tmp_path / "e.png")  # a palette
    few.convert("RGB").save(tmp_path / "f.png")
    frames = [few, random_image(6, 48, 32).quantize(8)]
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
def test_predictions_do_not_depend_on_the_batch(run: str, photos: Path, batch: int, workers: int) -> None:
    classifier, found = Classifier(run, "cpu"), find_inputs([str(photos)])
    every = list(predict_stream(classifier, found, range(len(found)), top=5, batch=batch, workers=workers))
    got = [prediction for part in every for prediction in part.good]
    assert [prediction.file for prediction in got] == good(photos)
    assert [Path(bad[1]).name for part in every for bad in part.broken] == ["03x.jpg", "05x.png"]
    for prediction in got:
        expected = reference(run, Image.open(prediction.file))
        order = np.argsort(-expected)
        assert prediction.labels == tuple(LABELS[i] for i in order)
        np.testing.assert_allclose(prediction.probabilities, expected[order], atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_predictions_do_not_depend_on_the_batch_on_a_gpu(run: str, photos: Path) -> None:
    classifier, found = Classifier(run, "cuda"), find_inputs([str(photos)])

    def predict(part: range) -> dict[str, dict[str, float]]:
        every = predict_stream(classifier, found, part, top=5, workers=0)
        return {prediction.file: dict(prediction.top) for batch in every for prediction in batch.good}

    complete, some = predict(range(len(found))), predict(range(5, 8))
    assert len(some) == 3
    for path, classes in some.items():
        assert classes == pytest.approx(complete[path], abs=1e-5)


def test_images_are_read_as_they_are_predicted(run: str, photos: Path) -> None:
    read: list[int] = []

    class Counted(Inputs):
        def image(self, index: int, shrink: Any = None) -> Image.Image:
            read.append(index)
            return super().image(index)

    found = Counted([name for name in good(photos) for _ in range(20)])
    stream = predict_stream(Classifier(run, "cpu"), found, range(len(found)), top=1, batch=8, workers=0)
    next(stream)
    assert len(read) <= 16  # of 280
    assert sum(len(part.good) for part in stream) == 272


# ---- what is printed


def test_the_table_is_aligned_and_broken_files_are_listed_at_the_end(run: str, photos: Path, cli: Command) -> None:
    code, out, err = cli("predict", run, photos, "--top-k", 2, "--device", "cpu")
    assert code == 0
    head, *lines = out.splitlines()
    assert head.split() == ["image", "class", "probability", "then"]
    assert len(lines) == 14
    for name, line in zip(good(photos), lines, strict=True):
        expected = reference(run, Image.open(name))
        first, second = np.argsort(-expected)[:2]
        assert f"{LABELS[first]} " in line
        assert line.endswith(f"{LABELS[second]} {expected[second]:.1%}")
        shown = line.index(f" {expected[first]:.1%}  ") + len(f" {expected[first]:.1%}")
        assert cell_len(line[:shown]) == head.index("probability") + len("probability")
    assert "2 of 16 files could not be read" in err
    assert "03x.jpg: it is not an image of a known kind" in err


def test_csv_is_what_the_csv_module_reads(run: str, photos: Path, cli: Command) -> None:
    code, out, _ = cli("predict", run, photos, "--csv", "--top-k", 3)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [row["path"] for row in rows] == good(photos)
    for row in rows:
        expected = reference(run, Image.open(row["path"]))
        order = np.argsort(-expected)[:3]
        assert [row["class"], row["class_2"], row["class_3"]] == [LABELS[i] for i in order]
        got = [float(row[key]) for key in ("probability", "probability_2", "probability_3")]
        np.testing.assert_allclose(got, expected[order], atol=1e-6)


def test_json_is_one_object_a_line_with_at_most_all_classes(run: str, photos: Path, cli: Command) -> None:
    _, out, _ = cli("predict", run, photos / "a", "--json", "--top-k", 99)
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["path"] for row in rows] == good(photos)[:7]
    for row in rows:
        assert [set(row), len(row["classes"])] == [{"path", "classes"}, 5]
        assert sum(each["probability"] for each in row["classes"]) == pytest.approx(1, abs=1e-5)


def test_the_file_chooses_its_format_and_is_not_overwritten(
    run: str, photos: Path, tmp_path: Path, cli: Command
) -> None:
    for name in ("x.csv", "x.jsonl", "x.txt"):
        code, out, _ = cli("predict", run, photos / "a" / "01.png", "--out", tmp_path / name)
        assert (code, out) == (0, "")
    assert (tmp_path / "x.csv").read_text().startswith("path,class,probability\n")
    assert len(json.loads((tmp_path / "x.jsonl").read_text())["classes"]) == 5
    assert (tmp_path / "x.txt").read_text().startswith("image ")
    code, _, err = cli("predict", run, photos / "a" / "01.png", "--out", tmp_path / "x.csv")
    assert code == 1
    assert "exists; remove it" in err
    code, _, err = cli("predict", run, photos / "a" / "01.png", "--out", tmp_path / "x.xlsx")
    assert code == 1
    assert "x.xlsx ends in .xlsx, which is not written; use --out with .csv, .jsonl or .txt" in err
    assert not (tmp_path / "x.xlsx").exists()
    code, _, _ = cli("predict", run, photos / "a" / "01.png", "--csv", "--out", tmp_path / "x.tmp")
    assert (code, (tmp_path / "x.tmp").read_text()) == (0, (tmp_path / "x.csv").read_text())


def test_strict_changes_the_exit_code(run: str, photos: Path, cli: Command) -> None:
    assert cli("predict", run, photos, "--strict")[0] == 1
    assert cli("predict", run, photos / "a" / "01.png", "--strict")[0] == 0


def test_nothing_readable_is_an_error_and_leaves_nothing(run: str, photos: Path, tmp_path: Path, cli: Command) -> None:
    code, out, err = cli("predict", run, photos / "a" / "03x.jpg", "--out", tmp_path / "x.csv")
    assert (code, out) == (1, "")
    assert err.endswith("03x.jpg cannot be read: it is not an image of a known kind\n")
    assert not (tmp_path / "x.csv").exists()
    code, out, err = cli("predict", run, photos / "a" / "03x.jpg", photos / "b" / "05x.png")
    assert (code, out) == (1, "")
    assert "none of the 2 files can be read" in err


def test_names_with_line_breaks_or_in_other_encodings(run: str, tmp_path: Path, cli: Command) -> None:
    names = [b"two\nlines.png", b"caf\xe9.png"]  # the second is Latin-1
    for name in names:
        random_image(1).save(os.path.join(os.fsencode(tmp_path), name), format="PNG")
    _, out, _ = cli("predict", run, tmp_path)
    assert len(out.splitlines()) == 3
    code, out, _ = cli("predict", run, tmp_path, "--json")
    assert code == 0
    got = {os.path.basename(os.fsencode(json.loads(line)["path"])) for line in out.splitlines()}
    assert got == set(names)


def test_choose_one_format(run: str, photos: Path, cli: Command) -> None:
    code, _, err = cli("predict", run, photos, "--json", "--csv")
    assert code == 1
    assert "choose one of --json and --csv" in err


# ---- standard input and URLs


def test_standard_input(run: str, photos: Path, cli: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    data = (photos / "a" / "02.png").read_bytes()
    _, expected, _ = cli("predict", run, photos / "a" / "02.png", "--json")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    code, out, _ = cli("predict", run, "-", "--json")
    assert code == 0
    got = json.loads(out)
    assert got["path"] == "-"
    assert same(got["classes"], json.loads(expected)["classes"])
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


def test_urls_are_fetched_only_when_allowed(run: str, photos: Path, site: str, cli: Command) -> None:
    code, _, err = cli("predict", run, f"{site}/a/02.png")
    assert code == 1
    assert "add --allow-url" in err
    code, out, err = cli(
        "predict", run, f"{site}/a/02.png", f"{site}/no.png", f"{site}/away.png", "--allow-url", "--json"
    )
    assert code == 0
    _, expected, _ = cli("predict", run, photos / "a" / "02.png", "--json")
    assert same(json.loads(out)["classes"], json.loads(expected)["classes"])
    assert "2 of 3 files could not be read" in err
    assert "HTTP Error 404" in err
    assert "/away.png: " in err


def test_large_and_slow_responses_are_cut_off(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "LARGEST", 200)
    with pytest.raises(BrokenImage, match="larger than"):
        web.fetch(f"{site}/a/02.png")
    monkeypatch.setattr(web, "TIMEOUT", 0.3)

    def attempt() -> None:
        with pytest.raises(BrokenImage, match="did not arrive completely"):
            web.fetch(f"{site}/drip.png")

    assert_below(1.5, lambda: seconds(attempt))


# ---- processes


def check_parts(folder: Path) -> None:
    """x.rank0.csv and x.rank1.csv together are one.csv."""
    parts = [list(csv.reader((folder / f"x.rank{rank}.csv").open())) for rank in (0, 1)]
    one = list(csv.reader((folder / "one.csv").open()))
    assert len(parts[0]) == 1 + 7
    joined = parts[0] + parts[1]
    assert [row[:2] for row in joined] == [row[:2] for row in one]
    got, expected = (np.array([float(row[2]) for row in rows[1:]]) for rows in (joined, one))
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_the_files_of_several_processes_join_to_one(
    run: str, photos: Path, tmp_path: Path, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("predict", run, photos, "--out", tmp_path / "one.csv", "--device", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in "01":
        monkeypatch.setenv("RANK", rank)
        code, _, err = cli("predict", run, photos, "--out", tmp_path / "x.csv", "--device", "cpu")
        assert code == 0, err
    check_parts(tmp_path)


@pytest.mark.slow
def test_torchrun(run: str, photos: Path, tmp_path: Path, cli: Command) -> None:
    cli("predict", run, photos, "--out", tmp_path / "one.csv", "--device", "cpu")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    arguments = ["predict", run, str(photos), "--out", str(tmp_path / "x.csv"), "--device", "cpu"]
    done = subprocess.run([*command, str(VITLAB), *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    check_parts(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"), [([], "name a file with --out"), (["-", "--out", "x.csv"], "instead of '-'")]
)
def test_processes_do_not_share_streams(
    run: str, photos: Path, arguments: list[str], message: str, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x")))
    code, _, err = cli("predict", run, photos, *arguments)
    assert code == 1
    assert message in err


@pytest.mark.slow
def test_ctrl_c_leaves_complete_lines(run: str, photos: Path, tmp_path: Path) -> None:
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
    assert f"stopped after {len(lines)} of 20000 images; their predictions are in {out}" in err
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(run: str, photos: Path) -> None:
    command = f"'{VITLAB}' predict '{run}' '{photos}' --batch 1 | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("image ")
    assert done.stderr.count("\n") <= 3, done.stderr
    assert "Traceback" not in done.stderr
