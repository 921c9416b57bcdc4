"""The report's section on images that are worth a look: its cards, its thumbnails, hostile names, and a browser."""

import base64
import html
import io
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from vitlab.data.open import open_data
from vitlab.data.review_file import Finding, write_review
from vitlab.data.source import Data
from vitlab.report import write_report
from vitlab.report.review import SHOWN, worth_a_look
from vitlab.training.loop import train
from vitlab.training.recipe import make_recipe

CHROMIUM = Path("/usr/bin/chromium")
SETTINGS = {"image_size": (16, 16), "depth": 1, "width": 16, "mlp": 16, "heads": 2, "steps": 2, "batch": 8}


def colored_photos(root: Path) -> Data:
    """Photos of which each has a color of its own, 36 by 24 pixels."""
    for number, label in enumerate(("cat", "<b>dog</b>")):
        (root / label.replace("/", "\u2215")).mkdir(parents=True)
        for i in range(20):
            color = (10 * i, 120 * number, 50)
            Image.new("RGB", (36, 24), color).save(root / label.replace("/", "\u2215") / f"{i:02}.png")
    return open_data(str(root))


def findings(data: Data) -> list[Finding]:
    names = [data.train.name(i) for i in range(len(data.train))]
    found = [Finding(name, "train", "cat", "<b>dog</b>", "label", 0.9) for name in names[:15]]
    found += [Finding(names[3], "train", "cat", "", "copy", 1.0, names[4], "remove")]
    found += [Finding(names[5], "train", "cat", "", "two splits", 1.0, data.test.name(0))]
    return [*found, Finding(names[6], "train", "cat", "", "outlier", 0.7), Finding("gone.jpg", problem="outlier")]


def color_of(url: str | None) -> list[int]:
    assert url is not None
    image = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert image.size == (160, 160)
    return [int(value) for value in np.asarray(image).reshape(-1, 3).mean(0).round()]


def test_groups_have_the_images_that_were_found(tmp_path: Path) -> None:
    data = colored_photos(tmp_path / "photos")
    groups = worth_a_look(findings(data), data)
    assert [(group.count, len(group.looks)) for group in groups] == [(15, SHOWN), (2, 2), (2, 2)]
    for group in groups:
        for look in group.looks:
            for name, url in ((look.finding.path, look.image), (look.finding.other, look.other)):
                if name in ("", "gone.jpg"):
                    assert url is None
                else:
                    expected = np.asarray(Image.open(name))[0, 0]
                    assert np.abs(np.array(color_of(url)) - expected).max() <= 3
    assert worth_a_look([], data) == []


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("review")
    data = colored_photos(home / "photos")
    recipe = make_recipe("Ti/8", str(home / "photos"), **SETTINGS)
    train(recipe, home / "run", console=Console(quiet=True))
    write_review(home / "run" / "review.csv", findings(data))
    write_report(home / "run", device="cpu")
    return home / "run"


@pytest.mark.slow
def test_the_page_shows_them_and_escapes_names(run: Path) -> None:
    page = (run / "report.html").read_text()
    section = page[page.index("<h2>Worth a look</h2>") :]
    assert "<b>dog</b></b>" not in section
    assert html.escape("<b>dog</b>") in section
    assert section.count('<figure class="card">') == SHOWN + 4
    assert "decided:" in section
    assert "in two splits" in section
    assert "not readable" in section
    assert f"--apply {run / 'review.csv'}" in section
    assert page.count("<script") == 1  # the page's own
    assert not re.search(r"http-equiv=.refresh|src=\"http", page)
    (run / "review.csv").unlink()
    assert "Worth a look" not in write_report(run, device="cpu").path.read_text()
    data = open_data(str(run.parent / "photos"))
    write_review(run / "review.csv", findings(data))
    write_report(run, device="cpu")


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM.exists(), reason="needs Debian's chromium")
def test_the_section_fits_a_phone_and_a_screen(run: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        browser = tools.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        for width in (360, 1200):
            window = browser.new_page(viewport={"width": width, "height": 800})
            window.goto((run / "report.html").as_uri())
            assert window.evaluate("document.documentElement.scrollWidth") <= width
            loaded = window.evaluate("[...document.querySelectorAll('.looks img')].map(i => i.naturalWidth)")
            assert len(loaded) == SHOWN + 2 * 2 + 1
            assert set(loaded) == {160}
        browser.close()
