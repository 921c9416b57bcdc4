"""The report of a run: its numbers against numpy, its page in a parser and a browser, and errors."""

import base64
import dataclasses
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from preloaded import program
from rich.console import Console
from typer.testing import CliRunner

import vitlab
from vitlab.analysis.class_map import class_map
from vitlab.cli import app
from vitlab.cost import cost
from vitlab.data.open import open_data
from vitlab.data.source import ArraySource
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import evaluate, score
from vitlab.models.config import Preprocess, ResNetConfig
from vitlab.models.names import configure
from vitlab.models.variants import build
from vitlab.plots.curves import smoothed
from vitlab.plots.inside import overlay
from vitlab.report import make, write_report
from vitlab.report.describe import describe_model, describe_recipe, model_name, si_number
from vitlab.report.history import read_history, training_seconds
from vitlab.report.images import MOST, worst_mistakes
from vitlab.report.matrix import PART
from vitlab.report.page import templates
from vitlab.report.subject import Subject
from vitlab.training.loop import train
from vitlab.training.recipe import make_recipe
from vitlab.training.trust import remember_recipe

CHROMIUM = Path("/usr/bin/chromium")
SMALL = make_recipe(
    "Ti/2",
    "digits",
    image_size=(8, 8),
    depth=2,
    width=32,
    mlp=64,
    heads=2,
    steps=40,
    batch=64,
    lr=5e-3,
    warmup=3,
    ema=0.9,
    augment=Augment(area=(0.8, 1.0), flip=False),
    preprocess=Preprocess(crop=1.0),  # no cropping
    threads=1,
)
Guesses = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
VOID = {"meta", "img", "source", "br", "rect", "input"}


class Page(HTMLParser):
    """A parsed page: tags with their attributes, the text without style, and whether tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += "|" if tag == "figure" else ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.text += re.sub(r"\s+", " ", data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def pixels(url: str | None) -> NDArray[np.uint8]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode((url or "").split(",")[1]))).convert("RGB"))


def section(name: str, *arguments: object) -> str:
    """One section of the page, as HTML."""
    return str(getattr(templates().get_template("sections.html").module, name)(*arguments))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "digits"
    train(dataclasses.replace(SMALL, validation=0.1), out, console=Console(quiet=True))
    write_report(out)
    return out


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page((run / "report.html").read_text())


@pytest.fixture(scope="module")
def guesses(run: Path) -> Guesses:
    """Labels, guesses and their probabilities of the test digits, by a plain pass over them."""
    test = open_data("digits").test
    gray = np.stack([np.asarray(test.image(i)) for i in range(len(test))]).astype(np.float32)
    with torch.no_grad():
        logits = vitlab.load(run)(torch.from_numpy(gray / 127.5 - 1).permute(0, 3, 1, 2)).double().numpy()
    odds = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return test.labels, odds.argmax(1), odds.max(1)


# ---- content


def test_accuracy_is_that_of_the_model_and_of_the_log(run: Path, page: Page, guesses: Guesses) -> None:
    labels, guess, _ = guesses
    right = int((labels == guess).sum())
    assert f"It gets {right} of 599 test images right" in page.text
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    last = [record for record in records if "test" in record][-1]
    assert last["ema"]["accuracy"] == pytest.approx(right / 599)
    assert f"{100 * right / 599:.1f}".removesuffix(".0") + " %" in page.text


def test_the_most_confident_mistakes_are_shown_in_order(page: Page, guesses: Guesses) -> None:
    labels, guess, odds = guesses
    wrong = np.flatnonzero(labels != guess)
    worst = wrong[np.argsort(-odds[wrong], kind="stable")][:MOST]
    assert len(worst) == MOST
    shown = re.findall(r"(\d) taken for (\d), ([\d.]+) % suredigits (\d+)", page.text)
    test = open_data("digits").test
    assert [(int(a), int(b)) for a, b, _, _ in shown] == [(labels[i], guess[i]) for i in worst]
    assert [f"digits {number}" for *_, number in shown] == [test.name(int(i)) for i in worst]
    assert np.allclose([float(share) for _, _, share, _ in shown], 100 * odds[worst], atol=0.06)


def test_mistakes_show_the_digit_and_where_the_model_looked(run: Path, page: Page, guesses: Guesses) -> None:
    labels, guess, odds = guesses
    wrong = np.flatnonzero(labels != guess)
    first = int(wrong[np.argmax(odds[wrong])])
    digit = np.asarray(open_data("digits").test.image(first)).astype(np.float64)
    images = [tag["src"] for tag in page.named("img") if (tag["src"] or "").startswith("data:image/jpeg")]
    images = images[: 2 * MOST]  # thumbnails follow
    shown, looked = pixels(images[0]).astype(float), pixels(images[1]).astype(float)
    side = shown.shape[0] // 8
    assert np.abs(shown.reshape(8, side, 8, side, 3).mean((1, 3)) - digit).max() < 12  # JPEG
    image = torch.from_numpy(digit / 127.5 - 1).permute(2, 0, 1)[None].float()
    grid = class_map(vitlab.load(run), image, int(guess[first]))[0].numpy()
    large = digit.repeat(side, 0).repeat(side, 1) / 255
    assert np.abs(looked / 255 - overlay(large, grid)).mean() < 0.02


def test_the_recipe_is_described(page: Page) -> None:
    held = sum(round(count * 0.1) for count in np.bincount(open_data("digits").train.labels).tolist())
    for text in (
        f"trained from scratch on {1198 - held:,} images of 10 classes",
        "All weights were trained for 40 steps of 64 images",
        "AdamW with a learning rate of 0.005, reached over 3 steps, then cosine decay",
        "2 layers of 2 heads, width 32, 4 x 4 patches",
        "test is 33% of the images",
    ):
        assert text in page.text


def test_commands_have_the_runs_own_path(run: Path, page: Page) -> None:
    for command in ("predict", "serve", "export", "inspect", "evaluate"):
        assert f"vitlab {command} {run}" in page.text
    strange = dataclasses.replace(subject_of(run), run="my runs/it's")
    assert "vitlab serve &#39;my runs/it&#39;&#34;&#39;&#34;&#39;s&#39;" in section("commands", strange)


def subject_of(run: Path) -> Subject:
    config = vitlab.load(run).config
    found = cost(lambda: build(config))
    numbers = found.parameters, found.forward_flops, 1
    return Subject(str(run), read_history(run), config, open_data("digits"), *numbers)


# ---- the page


def test_the_page_is_one_balanced_file_that_loads_nothing(run: Path, page: Page) -> None:
    assert page.open == []
    assert page.named("script") == [{}]  # one, in the page itself
    assert not page.named("link")
    linked = [value for _, tag in page.tags for key, value in tag.items() if key in ("src", "srcset", "href")]
    assert len(linked) >= 2 * MOST + 10
    assert all((value or "").startswith("data:image/") for value in linked)
    text = (run / "report.html").read_text()
    assert "url(" not in text
    script = text.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [tag["content"] or "" for tag in page.named("meta") if "http-equiv" in tag]
    assert f"script-src 'sha256-{digest}';" in policy
    assert policy.startswith("default-src 'none';")


def test_every_image_has_alt_text_and_figures_a_dark_version(page: Page) -> None:
    assert all(tag["alt"] for tag in page.named("img"))
    sources = page.named("source")
    assert len(sources) == 4  # loss, rate, accuracy, calibration
    assert any((tag["alt"] or "").startswith("Validation accuracy by step") for tag in page.named("img"))
    assert "validation is 0.1 of the training images, held out" in page.text
    assert all("dark" in (tag["media"] or "") for tag in sources)
    lights = [tag["src"] for tag in page.named("img") if (tag["src"] or "").startswith("data:image/png")]
    assert len(set(lights) | {tag["srcset"] for tag in sources}) == 8


def test_names_are_escaped(tmp_path: Path) -> None:
    names = ("<img src=x onerror=alert(1)>", 'a "quoted" & <b>bold', "{{ 7 * 7 }}{% raw %}")
    noise = np.random.default_rng(0)
    for name in names:
        (tmp_path / "set" / name).mkdir(parents=True)
        for i in range(6):
            Image.fromarray(noise.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(
                tmp_path / "set" / name / f"{i}.png"
            )
    recipe = dataclasses.replace(SMALL, data=str(tmp_path / "set"), steps=2, warmup=0, batch=4, holdout=0.5)
    train(recipe, tmp_path / "<run>", console=Console(quiet=True))
    found = Page(write_report(tmp_path / "<run>").path.read_text())
    assert found.open == []
    assert not [tag for tag in found.named("img") if not (tag["src"] or "").startswith("data:")]
    assert not [tag for tag in found.named("b") if tag.keys() - {"class"}]
    assert all(found.text.count(name) >= 2 for name in names)


def test_many_classes_are_folded_and_listed_by_pairs() -> None:
    generator = np.random.default_rng(0)
    names = tuple(f"kind {i}" for i in range(80))
    labels = generator.integers(0, 80, 400)
    logits = generator.normal(size=(400, 80)).astype(np.float32)
    found = score(logits, labels, names, "", tuple(map(str, range(400))))
    assert "<details" in section("classes", found)
    assert Page(section("classes", found)).text.count("kind ") == 80
    few = score(logits[:, :9], labels % 9, names[:9], "", tuple(map(str, range(400))))
    assert "<details" not in section("classes", few)
    rows = Page(section("confusions", found))
    assert rows.text.count("taken for") == 20
    assert len([tag for tag in rows.named("th") if tag["scope"] == "row"]) == PART


def test_a_perfect_score_has_a_lower_bound() -> None:
    logits = 9 * np.eye(3, dtype=np.float32)[np.arange(30) % 3]
    found = score(logits, np.arange(30) % 3, ("a", "b", "c"), "", tuple(map(str, range(30))))
    least = 100 * 30 / (30 + 1.959964**2)  # Wilson's lower bound where all of 30 are right
    assert f"{least:.1f} to 100.0 %" in Page(section("tiles", found, "test")).text
    assert "No class was taken for another" in section("confusions", found)
    assert section("mistakes", found, []).strip() == ""


def test_the_calibration_error_without_the_temperature_is_shown() -> None:
    generator = np.random.default_rng(0)
    labels = generator.integers(0, 4, 300)
    logits = (9 * np.eye(4)[labels] + 9 * generator.normal(size=(300, 4))).astype(np.float32)
    plain, scaled = (score(logits, labels, tuple("abcd"), "", ("",) * 300, temperature=t) for t in (1.0, 8.0))
    text = Page(section("confidence", scaled, None)).text
    assert "temperature of 8, chosen on held-out images, makes it less sure" in text
    for error in (plain.calibration_error.value, scaled.calibration_error.value):
        assert f"{100 * error:.1f}".removesuffix(".0") + " %" in text
    assert "temperature" not in section("confidence", plain, None)


def test_a_resnet_shows_its_mistakes_without_attention() -> None:
    model = build(ResNetConfig(image_size=(16, 16), stages=(1,), width=32, classes=3))
    assert model.head is not None
    torch.nn.init.normal_(model.head.weight)
    images = np.random.default_rng(0).integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
    source = ArraySource("noise", images, np.arange(20) % 3, ("a", "b", "c"))
    found = evaluate(model, source, device="cpu", workers=0, by_position=True)
    seen: list[int] = []
    shown = worst_mistakes(found, model, source, "cpu", seen.append)
    assert len(shown) == min(MOST, int((found.guesses != found.labels).sum())) == len(seen)
    assert all(one.attention is None for one in shown)
    assert "where it looked" not in section("mistakes", found, shown)


# with an accuracy in its log, and without
@pytest.mark.parametrize("target", ["mean", pytest.param("pixels", marks=pytest.mark.slow)])
def test_a_masked_run_has_a_shorter_report(target: Any, tmp_path: Path) -> None:
    recipe = dataclasses.replace(SMALL, objective="masked", masked_target=target, ema=0.0, steps=4, warmup=0)
    train(recipe, tmp_path / "masked", console=Console(quiet=True))
    found = Page(write_report(tmp_path / "masked").path.read_text())
    assert "It has no classes of its own" in found.text
    assert f"vitlab finetune photos/ --weights {tmp_path / 'masked'}" in found.text
    assert "taken for" not in found.text
    assert "vitlab predict" not in found.text


# ---- descriptions


def test_training_seconds_are_summed_between_records() -> None:
    speeds = [{"step": 10, "images_per_second": 50.0}, {"step": 30, "images_per_second": 200.0}]
    assert training_seconds(speeds, batch=100) == pytest.approx(10 * 100 / 50 + 20 * 100 / 200)
    assert training_seconds([], batch=100) == 0


def test_smoothing_is_a_mean_over_neighbors() -> None:
    values = np.random.default_rng(1).normal(size=23)
    for reach in (0, 1, 4, 10, 30):
        near = [max(reach // 4, min(reach, i, 22 - i)) for i in range(23)]
        expected = [values[max(i - r, 0) : i + r + 1].mean() for i, r in enumerate(near)]
        assert np.allclose(smoothed(values, reach), expected)


@pytest.mark.parametrize("name", ["Ti/16", "B/32", "H/14", "R50+B/16", "R50x1", "R152x4"])
def test_models_of_the_paper_are_called_by_their_names(name: str) -> None:
    assert model_name(configure(name, {})).endswith(name)


def test_descriptions() -> None:
    assert [si_number(n) for n in (853, 85_798_656, 4.258e21)] == ["853", "85.8 M", "4.26e+03 E"]
    frozen = dataclasses.replace(SMALL, freeze="body", optimizer="sgd", decay="constant", warmup=0, ema=0.0)
    text = describe_recipe(frozen, 64, frozen.steps or 0)
    assert text.startswith("Only the head was trained for 40 steps of 64 images (each training image about 40 times)")
    assert "(each training image about once), at 8 x 8 pixels" in describe_recipe(frozen, 40 * 64, 40)
    assert describe_model(configure("Ti/16", {"depth": 1, "heads": 1})).startswith("1 layer of 1 head, width 192")
    assert model_name(configure("R50x1", {"attention": "axial"})) == "axial ResNet R50x1"
    assert "SGD with a learning rate of 0.005. Images were cropped to 80 to 100 % of their area." in text


# ---- errors


@pytest.mark.slow
def test_the_command_writes_the_same_report_again(run: Path) -> None:
    before = (run / "report.html").read_text()
    (run / "report.html").unlink()
    done = CliRunner().invoke(app, ["report", str(run), "digits"])
    assert done.exit_code == 0, done.output
    assert f"report: {run / 'report.html'}" in done.output.replace("\n", "")

    def without_times(text: str) -> str:
        return re.sub(r"images in .*? with reading them", "", text)

    assert without_times((run / "report.html").read_text()) == without_times(before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report", "nowhere"], "nowhere has no recipe.json"),
        (["report", "{run}", "no-such-folder"], "there is no data set 'no-such-folder'"),
    ],
)
def test_user_errors(arguments: list[str], message: str, run: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        CliRunner().invoke(app, [word.format(run=run) for word in arguments], catch_exceptions=False)


def test_an_unfinished_run_and_data_that_moved_are_errors(run: Path, tmp_path: Path) -> None:
    stored = json.loads((run / "recipe.json").read_text())
    stored["recipe"]["data"] = "gone/photos"
    (tmp_path / "recipe.json").write_text(json.dumps(stored))
    with pytest.raises(UserError, match="is not finished; continue it with --resume"):
        write_report(tmp_path)
    for name in ("model.safetensors", "config.json", "log.jsonl"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    remember_recipe(tmp_path / "recipe.json")
    with pytest.raises(UserError, match="name it: vitlab report RUN DATA"):
        write_report(tmp_path)


def test_a_report_that_cannot_be_written_leaves_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(run.iterdir()), (run / "report.html").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(make, "make_page", lambda *_: ("new", None))
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match=r"report\.html cannot be written: No space left on device"):
        write_report(run)
    assert (sorted(run.iterdir()), (run / "report.html").read_bytes()) == before


def test_without_matplotlib_the_run_is_saved_and_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    small = ["depth=1", "width=16", "heads=2", "mlp=16", "steps=2", "warmup=0", "batch=8"]
    done = CliRunner().invoke(app, ["train", "digits", *small, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    printed = done.output.replace("\n", " ")
    assert "the model is saved, but there is no report: figures need matplotlib" in printed
    assert f"vitlab report {tmp_path / 'run'}" in printed
    assert getattr(vitlab.load(tmp_path / "run").config, "depth", None) == 1
    assert not (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [["train", "digits"], ["finetune", "digits", "--weights", "none"]])
def test_the_first_of_two_processes_writes_it(command: list[str], tmp_path: Path) -> None:
    torchrun = [str(program("torchrun")), "--standalone", "--nproc-per-node=2", "--no-python"]
    small = ["depth=1", "width=16", "heads=2", "mlp=16", "steps=4", "warmup=0", "batch=8", "device=cpu"]
    arguments = [*torchrun, str(program("vitlab")), *command, *small, "--out", str(tmp_path / "run")]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_in_a_browser_it_fits_and_loads_nothing(run: Path, width: int, scheme: Any) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        window = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
        requests: list[str] = []
        messages: list[str] = []
        window.on("request", lambda request: requests.append(request.url))
        window.on("console", lambda message: messages.append(message.text))
        window.goto(f"file://{run / 'report.html'}")
        assert window.evaluate("document.documentElement.scrollWidth") <= width
        assert window.evaluate("[...document.images].every(i => i.complete && i.naturalWidth > 0)")
        assert window.locator("figure.card").count() == MOST
        assert not messages
        assert not [url for url in requests if not url.startswith(("file:", "data:"))]
        background = window.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) < 200) == (scheme == "dark")
        assert len(window.pdf()) > 50_000
        browser.close()
