"""The page in a real browser with the real server: it shows for a picture what the model predicts."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from PIL import Image
from servers import NAMES, VITLAB, Running, encoded, photo, save, server, small
from visits import MARKS, Visit, open_browser, visiting

import vitlab
from vitlab.data.source import ArraySource
from vitlab.evaluation.extract import extract
from vitlab.evaluation.unknown import fit_unknown

if TYPE_CHECKING:
    from playwright import sync_api

pytestmark = MARKS


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("page") / "small", image_size=64)


@pytest.fixture(scope="module")
def live(run: Path) -> Iterator[Running]:
    with server(run) as live:
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def visit(browser: "sync_api.Browser", live: Running) -> Iterator[Visit]:
    with visiting(browser, live.url) as visit:
        yield visit


def test_a_dropped_picture_gets_the_answer_of_the_command_line(visit: Visit, run: Path, tmp_path: Path) -> None:
    picture = tmp_path / "cat.png"
    picture.write_bytes(encoded(photo(3, 200, 150)))
    visit.drop(picture.read_bytes())
    name, probability = visit.answered()
    done = subprocess.run([VITLAB, "predict", run, picture, "--json"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    top = json.loads(done.stdout)["classes"][0]
    assert name == top["name"]
    assert probability == pytest.approx(top["probability"], abs=1e-3)
    assert visit.page.inner_text("#top-probability") == f"{100 * top['probability']:.1f}\xa0%"
    shown = visit.page.eval_on_selector_all("#bars .name", "all => all.map((one) => one.textContent)")
    assert len(shown) == 5
    assert shown[0] == name


def test_sliders_change_the_overlay(visit: Visit) -> None:
    visit.drop(encoded(photo(1)))
    visit.answered()
    page = visit.page
    page.check("#kind-attention", force=True)
    seen = [visit.pixels()]
    assert page.inner_text("#layer-word") == "all layers (rollout)"
    assert page.is_disabled("#head")
    for layer, head, words in [
        (1, 0, ("1 of 3", "mean of heads")),
        (3, 0, ("3 of 3", "mean of heads")),
        (3, 2, ("3 of 3", "2 of 3")),
    ]:
        visit.slide("layer", layer)
        visit.slide("head", head)
        assert (page.inner_text("#layer-word"), page.inner_text("#head-word")) == words
        assert page.get_attribute("#layer", "aria-valuetext") == words[0]
        seen.append(visit.pixels())
    assert len(set(seen)) == 4
    visit.slide("strength", 0)
    bare = visit.pixels()
    visit.slide("layer", 1)
    assert visit.pixels() == bare == visit.pixels("photo")  # the picture alone, whatever the layer


def test_the_five_steps_are_of_this_picture(visit: Visit) -> None:
    visit.drop(encoded(photo(1)))
    visit.answered()
    titles = visit.page.eval_on_selector_all("#steps h3", "all => all.map((one) => one.textContent)")
    assert len(titles) == 5
    shots = """() => [...document.querySelectorAll("#steps canvas")].map((one) => one.toDataURL())"""
    first = visit.page.evaluate(shots)
    assert len(first) == 3 + 2 * 3  # patches, tokens, positions; attention and tokens of three layers
    visit.drop(encoded(photo(2)), "other.png")
    visit.page.wait_for_selector("#footnote:has-text('other.png')")
    second = visit.page.evaluate(shots)
    same = [a == b for a, b in zip(first, second, strict=True)]
    assert same == [False, False, True, *[False] * 6]  # only the positions are every picture's


def test_everything_works_from_the_keyboard(visit: Visit) -> None:
    page = visit.page
    reached = []
    for _ in range(3):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
    assert reached == ["skip", "file", "use-camera"]
    visit.drop(encoded(photo(1)))
    visit.answered()
    before = visit.pixels()
    page.focus("#bars li:nth-child(2) button")
    page.keyboard.press("Enter")
    page.wait_for_selector("#bars li:nth-child(2) [aria-pressed=true]")
    assert visit.pixels() != before
    page.focus("#kind-class")
    page.keyboard.press("ArrowRight")
    assert page.is_checked("#kind-attention")
    before = visit.pixels()
    page.focus("#layer")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#layer") == "1"
    assert visit.pixels() != before
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "head"


def test_screen_readers_get_the_result(visit: Visit) -> None:
    visit.drop(encoded(photo(1)))
    name, _ = visit.answered()
    page = visit.page
    assert name in page.inner_text("[role=status]")
    assert "row" in (page.get_attribute("#overlay", "aria-label") or "")
    unnamed = """() => [...document.querySelectorAll("input, button, canvas:not([aria-hidden] *), [role=img]")]
        .filter((one) => one.checkVisibility() || one.type === "file")
        .filter((one) => !(one.labels?.length || one.ariaLabel || one.textContent || one.closest(".depths")))
        .map((one) => one.outerHTML)"""
    assert page.evaluate(unnamed) == []
    assert page.get_attribute("html", "lang") == "en"


def test_a_strange_picture_is_none_of_these(browser: "sync_api.Browser", tmp_path: Path) -> None:
    """A model of smooth pictures sees a checkerboard; its classes are shown in gray, as the nearest."""
    model = small(image_size=64)
    pixels = np.stack([np.asarray(photo(i, 64, 64)) for i in range(140)])
    source = ArraySource("smooth", pixels, np.arange(140) % len(NAMES), tuple(NAMES))
    model.card = replace(model.card, unknown=fit_unknown(extract(model, source, device="cpu", workers=0)))
    vitlab.save(model, tmp_path / "run", labels=NAMES)
    board = Image.fromarray((np.indices((64, 64)).sum(0) % 2 * 255).astype(np.uint8))
    with server(tmp_path / "run") as live:
        page = browser.new_page(reduced_motion="reduce")
        visit = Visit(page)
        visit.open(live.url)
        visit.drop(encoded(board), "board.png")
        assert visit.answered() == ("None of these", 0)
        assert page.is_visible("#nearest")
        assert "none of these" in page.inner_text("[role=status]").lower()
        assert "none of these" in page.inner_text("#steps li:last-child")
        gray = page.evaluate("getComputedStyle(document.querySelector('.fill')).backgroundColor")
        visit.drop(encoded(photo(150, 64, 64)), "smooth.png")
        page.wait_for_selector("#footnote:has-text('smooth.png')")
        assert visit.answered()[0] in NAMES
        assert page.is_hidden("#nearest")
        assert page.evaluate("getComputedStyle(document.querySelector('.fill')).backgroundColor") != gray
        page.close()
        assert visit.errors == []


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_every_width_in_light_and_dark(
    browser: "sync_api.Browser", live: Running, width: int, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    visit = Visit(page)
    visit.open(live.url)
    visit.drop(encoded(photo(1)), "a rather long name of a picture_" + "x" * 80 + ".png")
    visit.answered()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    light = page.evaluate("getComputedStyle(document.body).backgroundColor").removeprefix("rgb(").rstrip(")").split(",")
    assert (sum(map(int, light)) > 380) == (scheme == "light")
    page.close()
    assert visit.errors == []


def test_a_broken_picture_is_reported_and_the_next_one_shown(browser: "sync_api.Browser", live: Running) -> None:
    page = browser.new_page()
    visit = Visit(page)
    visit.open(live.url)
    visit.drop(b"not a picture", "cat.png")
    page.wait_for_selector("#error:not([hidden])")
    assert "'cat.png' is not an image" in page.inner_text("[role=alert]")
    visit.drop(encoded(photo(1)))
    visit.answered()
    assert page.is_hidden("#error")
    visit.drop(b"not a picture", "dog.png")
    page.wait_for_selector("#error:has-text('dog.png')")
    assert page.is_hidden("#result")  # what was there is not the answer to this picture
    page.close()


def test_a_server_with_a_token_asks_for_it_once(browser: "sync_api.Browser", run: Path) -> None:
    with server(run, "--token", "open sesame") as live:
        page = browser.new_page()
        visit = Visit(page)
        page.goto(live.url)
        page.wait_for_selector("#token:not([hidden])")
        assert visit.errors == []  # no request without it
        for word, then in (("wrong", "#error:not([hidden])"), ("open sesame", "#model:has-text('parameters')")):
            page.fill("#token-value", word)
            page.keyboard.press("Enter")
            page.wait_for_selector(then)
        visit.drop(encoded(photo(1)))
        assert visit.answered()[0] in NAMES
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
        page.close()


def test_the_description_of_the_api(visit: Visit, live: Running) -> None:
    visit.page.goto(f"{live.url}/docs")
    visit.page.wait_for_selector(".route")
    listed = visit.page.eval_on_selector_all(".route h2", "all => all.map((one) => one.textContent)")
    posts, gets = ["predict", "explain", "map"], ["v1/model", "v1/classes", "v1/samples", "healthz", "metrics"]
    assert listed == [*(f"POST /v1/{name}" for name in posts), *(f"GET /{name}" for name in gets)]
    visit.page.goto(live.url)
    visit.page.wait_for_selector("#model:has-text('parameters')")
