"""The report's matrix, its photos and the facts of its verdict; then the page in a browser, by mouse and keyboard."""

import base64
import dataclasses
import html
import io
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from docs_commands import check_command
from PIL import Image

from vitlab.cost import cost
from vitlab.data.review_file import Finding
from vitlab.data.source import ArraySource, Data
from vitlab.evaluation.evaluate import score
from vitlab.evaluation.result import Evaluation
from vitlab.evaluation.scores import confusion
from vitlab.models.names import configure
from vitlab.models.unknown import Unknown
from vitlab.models.variants import build
from vitlab.report import gallery
from vitlab.report import subject as subjects
from vitlab.report.collect import beyond_limit, collect, commands_for, last_loss
from vitlab.report.gallery import EXTRA, OF_CLASS, OF_PAIR, RIGHT, SIDE, choose_mistakes, choose_right, make_gallery
from vitlab.report.history import History
from vitlab.report.matrix import COMPLETE, LEVELS, PART, frequent_mistakes, make_matrix
from vitlab.report.page import render, templates
from vitlab.report.subject import Subject
from vitlab.report.verdict import judge
from vitlab.training.recipe import make_recipe
from vitlab.training.stages import Stages

if TYPE_CHECKING:
    from playwright import sync_api

CHROMIUM = Path("/usr/bin/chromium")
# `npm install --no-save axe-core` puts it there
AXE = Path(os.environ.get("AXE", Path(__file__).parents[1] / "node_modules" / "axe-core" / "axe.min.js"))


def scored(n: int, k: int, seed: int = 0, easy: float = 2.0) -> Evaluation:
    """A model's answers to images that are random but for a hint to their class."""
    g = np.random.default_rng(seed)
    labels = g.integers(0, k, n)
    logits = g.normal(size=(n, k)).astype(np.float32)
    logits[np.arange(n), labels] += easy
    return score(logits, labels, tuple(f"kind {i}" for i in range(k)), "", tuple(f"photo {i}.jpg" for i in range(n)))


def colors(n: int, k: int = 1) -> ArraySource:
    """Images of which each has a color of its own."""
    each = np.stack([np.arange(n) % 256, np.arange(n) // 256, np.full(n, 99)], 1).astype(np.uint8)
    return ArraySource("colors", each[:, None, None].repeat(40, 1).repeat(50, 2), np.arange(n) % k, ("a",) * k)


# ---- the matrix


def test_all_of_a_small_matrix_is_in_the_table() -> None:
    counts = confusion(scored(500, 7).guesses, scored(500, 7).labels, 7)
    table = make_matrix(counts)
    assert [[cell.count for cell in row.cells] for row in table.rows] == counts.tolist()
    assert all(row.rest == 0 and row.images == counts[row.number].sum() for row in table.rows)
    assert not table.is_part
    for row in table.rows:
        for cell in row.cells:
            share = cell.count / row.images
            assert (cell.level == 0) == (cell.count == 0)
            assert (max(0, cell.level - 1) / LEVELS) ** 2 <= share <= (cell.level / LEVELS) ** 2 + 1e-9


def test_of_many_classes_the_most_confused_are_in_the_table() -> None:
    counts = np.diag(np.full(150, 50))
    for place, (i, j) in enumerate([(7, 120), (99, 3), (120, 7), (60, 61)]):
        counts[i, j] = 20 - place
    counts[np.arange(0, 150, 2), np.arange(1, 151, 2)] += 1  # a single mistake in half of the classes
    table = make_matrix(counts)
    assert table.is_part
    assert table.classes[:6] == [7, 120, 3, 99, 60, 61]  # by mistakes in either direction, each beside its other
    assert len(table.classes) == PART < COMPLETE
    for row in table.rows:
        assert sum(cell.count for cell in row.cells) + row.rest == counts[row.number].sum()
    assert frequent_mistakes(counts)[0] == (7, 120, 20, 70)
    assert make_matrix(np.diag(np.full(150, 50))).classes == []


# ---- photos


@pytest.mark.parametrize(("k", "everything"), [(6, False), (12, False), (150, False), (4, True)])
def test_of_many_mistakes_the_most_frequent_kinds_are_chosen(k: int, everything: bool) -> None:
    found = scored(700 if everything else 3_000, k, easy=0.5)
    chosen = choose_mistakes(found)
    wrong = [i for i in range(len(found.labels)) if found.labels[i] != found.guesses[i]]
    assert len(chosen) == len(set(chosen)) == min(gallery.WRONG, len(wrong))
    assert (len(chosen) == len(wrong)) == everything
    pairs: dict[tuple[int, int], list[int]] = {}
    for i in sorted(wrong, key=lambda i: -found.confidence[i]):
        pairs.setdefault((found.labels[i], found.guesses[i]), []).append(i)
    taken: dict[int, list[int]] = {}  # by how many mistakes a pair of classes has
    for images in pairs.values():
        mine = sorted(set(chosen) & set(images), key=chosen.index)
        assert mine == images[: len(mine)]  # the most confident ones
        taken.setdefault(len(images), []).append(len(mine))
    most = 0
    for size, numbers in sorted(taken.items()):
        assert min(numbers) >= min(OF_PAIR, size, most)  # no rarer pair has more
        most = max(most, *numbers)


def test_right_answers_from_both_ends_and_of_every_class() -> None:
    found = scored(400, 10)
    right = np.flatnonzero(found.guesses == found.labels)
    order = right[np.argsort(found.confidence[right], kind="stable")].tolist()
    least, most, others = choose_right(found)
    assert (least, most) == (order[:RIGHT], order[::-1][:RIGHT])
    assert not {*least, *most} & set(others)
    shown = np.bincount(found.labels[[*least, *most, *others]], minlength=10)
    assert (shown >= np.minimum(OF_CLASS, np.bincount(found.labels[right], minlength=10))).all()
    assert len(choose_right(scored(9_000, 300, easy=9))[2]) == EXTRA
    few = choose_right(scored(12, 2, easy=9))
    assert sorted([*few[0], *few[1]]) == list(range(12))


def test_the_gallery_shows_the_images_it_names() -> None:
    found, source = scored(300, 5), colors(300)
    made, seen = make_gallery(found, source, lambda _: None), 0
    wrong = int((found.guesses != found.labels).sum())
    assert made.mistakes == len(made.wrong) == wrong
    assert [one.confidence for one in made.wrong] == sorted((one.confidence for one in made.wrong), reverse=True)
    for one in (*made.wrong, *made.least, *made.most, *made.others):
        number = int(one.file.removeprefix("photo ").removesuffix(".jpg"))
        assert (one.truth, one.guess) == (found.labels[number], found.guesses[number])
        image = Image.open(io.BytesIO(base64.b64decode((one.image or "").partition(",")[2])))
        assert image.size == (SIDE, SIDE)
        mean = np.asarray(image).reshape(-1, 3).mean(0)
        assert np.abs(mean - [number % 256, number // 256, 99]).max() <= 4
        seen += 1
    assert seen == wrong + 2 * RIGHT + len(made.others)
    small = make_gallery(found, source, lambda _: None, room=100_000)
    assert len(small.wrong) < wrong == small.mistakes
    used = sum(len(one.image or "") for part in (small.wrong, small.least, small.most, small.others) for one in part)
    assert 95_000 < used < 105_000
    sections: Any = templates().get_template("sections.html").module
    text = html.unescape(str(sections.answers(subject(), found, small)))
    assert f"{len(small.wrong)} of its {wrong} mistakes" in text
    assert f"{wrong - len(small.wrong)} mistakes are not shown" in text
    (command,) = re.findall("<code>(vitlab evaluate .*?)</code>", text)
    check_command(command)


# ---- what a run says about itself

STAGED = Stages(
    weights="weights/b 16.npz",
    seconds=600,
    timed=True,
    image=0.05,
    spent=590,
    l2=1.0,
    cross_validation=0.9,
    head=0.9,
    balanced=False,
    steps=80,
    tuned=0.95,
    kept=True,
)


def subject(stages: Stages | None = STAGED, data: str = "photos of mine", **recipe: Any) -> Subject:
    settings = {"steps": 80, "batch": 32, "patience": 5, "image_size": (64, 64)} | recipe
    made = make_recipe("Ti/16", data, **settings)
    steps = np.arange(1, 81)
    loss = np.where(steps > 70, 0.02, 1.0)
    tests = np.arange(10, 81, 10)
    score = np.linspace(0.5, 0.9, 8)
    history = History(
        made, 320, steps, loss, loss, "validation", tests, "accuracy", score, None, np.linspace(2, 1, 8), 1.0, 1.0
    )
    train, test = colors(320, 4), colors(40, 4)
    config = configure("Ti/16", {"image_size": (64, 64), "classes": 4, "depth": 1})
    found = cost(lambda: build(config))
    return Subject(
        "runs/my run",
        history,
        config,
        Data("photos", train, test, colors(20, 4)),
        *(found.parameters, found.forward_flops, 1),
        stages,
    )


def test_facts_are_those_of_the_run() -> None:
    found = scored(200, 4)
    one = subject()
    doubts = [Finding("a.jpg", problem="label"), Finding("b.jpg", problem="label", decision="keep")]
    known = collect(one, subjects.Tested(found, 1.0), [*doubts, Finding("c.jpg", problem="outlier")], own=True)
    assert (known.right, known.total) == (int((found.guesses == found.labels).sum()), 200)
    assert known.stage == "trained"
    assert known.validation == (19, 20)
    assert known.doubtful == 1
    assert known.train_loss == pytest.approx(0.02)  # 320 images are 10 steps of 32
    assert known.curve is not None
    assert known.curve.trend == "better"
    assert known.unsure is not None
    order = np.argsort(found.confidence, kind="stable")
    assert known.unsure[:2] == (int((found.guesses == found.labels)[order[:20]].sum()), 20)
    assert found.confidence[order[19]] <= known.unsure[2] <= found.confidence[order[20]]
    other = collect(one, subjects.Tested(found, 1.0), [], own=False)
    assert other.validation is None
    assert other.train_images is None
    stages: dict[str, dict[str, Any]] = {"pending": {"tuned": None}, "head": {"tuned": None, "steps": 0}}
    stages["dropped"] = {"tuned": 0.8}
    for stage, change in stages.items():
        early = dataclasses.replace(one, stages=dataclasses.replace(STAGED, kept=False, **change))
        seen = collect(early, subjects.Tested(found, 1.0, "validation"), [], own=True)
        assert (seen.stage, seen.curve) == (stage, None)


def test_the_images_beyond_the_limit_of_refusals_are_counted() -> None:
    none = torch.zeros(0)
    unknown = Unknown(none, none, none, none, none, held_out=torch.linspace(0, 1, 100), rate=0.05)
    assert beyond_limit(unknown) == (100 - math.floor(101 * 0.95), 100)  # the limit is between the 95th and the 96th


@pytest.mark.parametrize(
    "settings", [{"mixup": 0.2}, {"label_smoothing": 0.1}, {"objective": "sigmoid"}, {"balance": "weights"}]
)
def test_a_loss_that_bounds_no_mistakes_is_left_out(settings: dict[str, Any]) -> None:
    assert last_loss(subject(**settings).history) is None


def test_commands_are_accepted_by_the_command_line(tmp_path: Path) -> None:
    photos = tmp_path / "my photos"
    photos.mkdir()
    head = dataclasses.replace(STAGED, tuned=None, kept=False, steps=0, seconds=60, spent=20)
    for stages in (STAGED, dataclasses.replace(STAGED, spent=100), head):
        given = commands_for(subject(stages, str(photos), review="a review.csv"))
        assert all((given.again, given.longer, given.stronger, given.review, given.pretrained, given.predict))
        for command in (given.again, given.longer, given.stronger, given.review, given.pretrained, given.predict):
            check_command(command or "")
            assert "'weights/b 16.npz'" in (command or "") or command in (given.pretrained, given.predict)
    assert "--minutes 20" in (commands_for(subject()).longer or "")
    quick = commands_for(subject(dataclasses.replace(STAGED, spent=100))).longer or ""
    assert "epochs=16" in quick  # minutes were left: 80 steps of 32 of 320 images are 8 passes
    assert "--minutes 6 " in (commands_for(subject(head)).longer or "")  # 20 s and 2,000 images at 3.2 x 0.05 s
    assert commands_for(subject()).again is None  # there is no such folder to add images to
    plain = commands_for(subject(None))
    assert plain.longer is None
    assert plain.setting == "epochs=16"


# ---- the page in a browser


def make_report(path: Path, found: Evaluation) -> Path:
    """A page about these answers, whose images have a color each."""
    one, tested = subject(), subjects.Tested(found, 1.0)
    photos = make_gallery(found, colors(len(found.labels)), lambda _: None)
    verdict = judge(collect(one, tested, [], own=False), commands_for(one))
    path.write_text(render(one, tested, verdict, [], photos, {}))
    return path


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Evaluation]]:
    """Pages by their number of classes."""
    folder = tmp_path_factory.mktemp("reports")
    made = {k: scored(n, k, easy=easy) for k, n, easy in ((4, 300, 1.5), (12, 900, 1.0), (150, 1_500, 2.0))}
    return {k: (make_report(folder / f"{k}.html", found), found) for k, found in made.items()}


class Visit:
    """A page, with the browser's messages and the URLs it requested."""

    def __init__(self, page: "sync_api.Page") -> None:
        self.page = page
        self.messages: list[str] = []
        self.requested: list[str] = []
        page.on("console", lambda message: self.messages.append(message.text))
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))

    def shown(self, where: str) -> list[tuple[int, int]]:
        """(truth, guess) of the photos that can be seen."""
        read = "all => all.filter(e => e.offsetParent).map(e => [Number(e.dataset.truth), Number(e.dataset.guess)])"
        return [(i, j) for i, j in self.page.eval_on_selector_all(f"{where} .photo", read)]

    def check(self) -> None:
        """It shows no error, loads nothing, and is no wider than the screen."""
        assert self.messages == []
        assert not [url for url in self.requested if not url.startswith(("file:", "data:"))]
        assert self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    if not CHROMIUM.exists():
        pytest.skip(f"there is no browser at {CHROMIUM}")
    with pytest.importorskip("playwright.sync_api").sync_playwright() as play:
        browser = play.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        yield browser
        browser.close()


def visit(browser: "sync_api.Browser", report: Path, width: int = 1280, **settings: Any) -> Visit:
    page = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion="reduce", **settings)
    found = Visit(page)
    page.goto(report.as_uri())
    return found


@pytest.mark.slow
def test_a_cell_opens_its_images_by_mouse_and_by_keyboard(browser: "sync_api.Browser", reports: Any) -> None:
    report, found = reports[4]
    one = visit(browser, report)
    counts = confusion(found.guesses, found.labels, 4)
    for truth, guess in ((2, 1), (0, 3), (1, 1)):
        one.page.click(f".matrix button[data-truth='{truth}'][data-guess='{guess}']")
        assert one.page.is_visible("dialog")
        shown = one.shown("dialog")
        assert set(shown) == {(truth, guess)}
        about = one.page.inner_text("dialog .about")
        assert about.startswith(f"{counts[truth, guess]} of {counts[truth].sum()} images")
        assert len(shown) == counts[truth, guess] if truth != guess else f"{len(shown)} of these are in" in about
        one.page.keyboard.press("Escape")
        assert not one.page.is_visible("dialog")
    focus = "[document.activeElement.dataset.truth, document.activeElement.dataset.guess].map(Number)"
    assert one.page.evaluate(focus) == [1, 1]  # where it was opened
    one.page.keyboard.press("ArrowRight")
    one.page.keyboard.press("ArrowDown")
    assert one.page.evaluate(focus) == [2, 2]
    one.page.keyboard.press("ArrowLeft")
    one.page.keyboard.press("Enter")
    assert set(one.shown("dialog")) == {(2, 1)}
    assert one.page.inner_text("dialog h2") == "kind 2 taken for kind 1"
    one.page.keyboard.press("Enter")  # the button to close it has the focus
    assert not one.page.is_visible("dialog")
    stops = one.page.eval_on_selector_all(".matrix button", "all => all.filter(e => e.tabIndex === 0).length")
    assert stops == 1
    one.check()


@pytest.mark.slow
def test_the_filter_finds_what_numpy_finds(browser: "sync_api.Browser", reports: Any) -> None:
    report, found = reports[4]
    one = visit(browser, report)
    wrong = found.guesses != found.labels
    names = [f"{found.names[i]} {found.names[j]} {file}" for i, j, file in pairs_of(found)]

    def check(expected: Any) -> None:
        number = int(expected.sum())
        one.page.locator("#filter output", has_text=f"{number} of {wrong.sum()}").wait_for()  # a reset is seen later
        assert one.page.inner_text("#filter output") == f"{number} of {wrong.sum()}"
        assert len(one.shown("#wrong")) == min(24, number)

    check(wrong)
    one.page.select_option("select[name=truth]", "2")
    check(wrong & (found.labels == 2))
    one.page.select_option("select[name=guess]", "0")
    check(wrong & (found.labels == 2) & (found.guesses == 0))
    assert set(one.shown("#wrong")) == {(2, 0)}
    one.page.click("#filter button[type=reset]")
    check(wrong)
    one.page.select_option("select[name=sure]", "0.9 2")
    check(wrong & (found.confidence >= 0.9))
    one.page.select_option("select[name=sure]", "0 0.5")
    check(wrong & (found.confidence < 0.5))
    one.page.click("#filter button[type=reset]")
    for text in ("photo 1", "KIND 3", "2.jpg kind 1", "no such"):
        one.page.fill("#filter input", text)
        check(wrong & [all(word in name for word in text.lower().split()) for name in names])
    one.page.click("#filter button[type=reset]")
    one.page.click("#more")
    assert len(one.shown("#wrong")) == min(48, int(wrong.sum()))
    one.check()


def pairs_of(found: Evaluation) -> Iterator[tuple[int, int, str]]:
    return zip(found.labels.tolist(), found.guesses.tolist(), found.files, strict=True)


@pytest.mark.slow
def test_wide_tables_show_that_there_is_more(browser: "sync_api.Browser", reports: Any) -> None:
    phone = visit(browser, reports[12][0], 390)
    box, after = ".scroll:has(.matrix)", "e => [e.classList.contains('after'), getComputedStyle(e, '::after').opacity]"
    assert phone.page.eval_on_selector(box, after) == [True, "1"]
    assert phone.page.get_attribute(f"{box} .wide", "tabindex") == "0"
    phone.page.eval_on_selector(f"{box} .wide", "e => { e.scrollLeft = e.scrollWidth; }")
    phone.page.wait_for_function(f"!document.querySelector('{box}').classList.contains('after')")
    assert phone.page.eval_on_selector(box, after) == [False, "0"]
    name = phone.page.locator(".matrix tbody th").first.bounding_box()
    assert name is not None
    assert name["x"] >= 0  # the names of rows stay
    phone.check()
    screen = visit(browser, reports[4][0], 1280)
    assert screen.page.locator(".scroll.after").count() == 0
    assert screen.page.locator(".wide[tabindex]").count() == 0
    screen.check()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_many_classes_show_the_most_confused(browser: "sync_api.Browser", reports: Any, width: int) -> None:
    report, found = reports[150]
    one = visit(browser, report, width)
    counts = confusion(found.guesses, found.labels, 150)
    assert one.page.locator(".matrix tbody tr").count() == PART
    truth, guess, n, _ = frequent_mistakes(counts)[0]
    one.page.click(f".confused button[data-truth='{truth}'][data-guess='{guess}']")
    assert one.shown("dialog") == [(truth, guess)] * n
    assert report.stat().st_size < 9_000_000
    one.check()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_numbers_in_the_matrix_can_be_read(browser: "sync_api.Browser", reports: Any, scheme: str) -> None:
    """A contrast of at least 4.5 in every step of color, and each step further from the page than the one before."""
    one = visit(browser, reports[4][0], color_scheme=scheme)
    read = "all => all.map(e => [getComputedStyle(e).backgroundColor, getComputedStyle(e).color])"
    steps = [[luminance(color) for color in pair] for pair in one.page.eval_on_selector_all(".legend i", read)]
    assert len(steps) == LEVELS
    assert min((max(pair) + 0.05) / (min(pair) + 0.05) for pair in steps) >= 4.5
    fills = np.diff([fill for fill, _ in steps])
    assert (fills < 0).all() if scheme == "light" else (fills > 0).all()
    (card,) = one.page.eval_on_selector_all(
        "main section:first-of-type", "all => [getComputedStyle(all[0]).backgroundColor]"
    )
    assert (luminance(card) == 1) if scheme == "light" else (luminance(card) < steps[0][0])


def luminance(color: str) -> float:
    """The relative luminance of a color by WCAG 2."""
    shares = [int(value) / 255 for value in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.slow
def test_without_scripts_all_photos_are_there(browser: "sync_api.Browser", reports: Any) -> None:
    report, found = reports[4]
    one = visit(browser, report, java_script_enabled=False)
    assert one.page.locator("#wrong .photo:visible").count() == (found.guesses != found.labels).sum()
    assert not one.page.is_visible("#filter")
    assert one.page.locator(".matrix tbody tr").count() == 4


@pytest.mark.slow
@pytest.mark.skipif(not AXE.exists(), reason=f"needs axe-core at {AXE} (npm install --no-save axe-core)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("classes", [4, 150])
def test_axe_finds_nothing_serious(
    browser: "sync_api.Browser", reports: Any, classes: int, width: int, scheme: str
) -> None:
    one = visit(browser, reports[classes][0], width, color_scheme=scheme)
    one.page.evaluate(AXE.read_text())
    assert serious(one.page) == []
    one.page.click(".confused button")
    assert serious(one.page) == []  # with the window open


def serious(page: "sync_api.Page") -> list[tuple[str, str]]:
    """(rule, element) of what axe-core finds serious."""
    found = page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
    return [(one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")]
