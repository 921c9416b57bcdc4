"""Maps, samples, the camera, the session, corrections, the report and snippets on the page, in a real browser."""

import base64
import io
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import pytest
from PIL import Image
from servers import NAMES, Running, encoded, photo, save, server, small
from visits import AXE, MARKS, Visit, open_browser, visiting

import vitlab
from vitlab.analysis.class_map import class_map
from vitlab.data.samples import write_samples
from vitlab.data.source import ArraySource
from vitlab.data.transforms import eval_image
from vitlab.prediction import Classifier

if TYPE_CHECKING:
    from playwright import sync_api

pytestmark = MARKS
FAKE_CAMERA = ("--use-fake-ui-for-media-stream", "--use-fake-device-for-media-stream")
HELD_OUT = [photo(seed, 64, 64) for seed in range(40, 50)]
REPORT = (
    '<!doctype html><html lang="en"><title>The report</title><h1>It went well</h1>'
    '<script>document.title = "a script"</script>'
    '<dialog open><form method="dialog"><button>Close</button></form></dialog>'
    '<form id="out" action="/v1/predict"><button>Send</button></form>'
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with samples and a report."""
    run = save(tmp_path_factory.mktemp("features") / "small", image_size=64)
    pixels = np.stack([np.asarray(image) for image in HELD_OUT])
    write_samples(run, ArraySource("held out", pixels, np.arange(10) % len(NAMES), tuple(NAMES)))
    (run / "report.html").write_text(REPORT)
    return run


@pytest.fixture(scope="module")
def corrections(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corrections") / "new"


@pytest.fixture(scope="module")
def live(run: Path, corrections: Path) -> Iterator[Running]:
    with server(run, "--corrections", str(corrections)) as live:
        yield live


@pytest.fixture(scope="module")
def browser() -> Iterator["sync_api.Browser"]:
    with open_browser(*FAKE_CAMERA) as browser:
        yield browser


@pytest.fixture
def visit(browser: "sync_api.Browser", live: Running) -> Iterator[Visit]:
    with visiting(browser, live.url) as visit:
        yield visit


def decoded(url: str) -> np.ndarray:
    """The pixels of a data: URL."""
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))).convert("RGB"))


# ---- maps


def test_the_photo_is_shown_as_it_is_beside_the_map(visit: Visit, run: Path) -> None:
    image = photo(3, 200, 150)
    visit.drop(encoded(image))
    visit.answered()
    seen = decoded(visit.pixels("photo"))
    truth = Classifier(run, "cpu").pixels(image).permute(1, 2, 0).numpy()
    large = np.asarray(Image.fromarray(truth).resize(seen.shape[1::-1], Image.Resampling.BICUBIC))
    assert np.abs(seen.astype(int) - large).mean() < 3
    boxes = [visit.page.locator(f"#{name}").bounding_box() for name in ("photo", "overlay")]
    assert boxes[0] is not None
    assert boxes[1] is not None
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]


def test_the_map_is_that_of_the_best_class_and_of_any_that_is_clicked(visit: Visit, run: Path) -> None:
    image = photo(3, 64, 64)
    model = vitlab.load(run)
    maps = [class_map(model, eval_image(image, (64, 64), model.card.preprocess)[None], i)[0].numpy() for i in range(7)]
    visit.drop(encoded(image))
    visit.answered()
    page = visit.page
    names = visit.texts("#bars .name")
    assert visit.texts("#bars [aria-pressed=true] .name") == names[:1]
    shown = {}
    for place, name in enumerate(names, 1):
        page.click(f"#bars li:nth-child({place}) button")
        page.wait_for_selector(f"#map-title:has-text('{name}')")
        assert visit.texts("#bars [aria-pressed=true] .name") == [name]
        values = maps[NAMES.index(name)]
        row, column = np.unravel_index(values.argmax(), values.shape)
        if values.max() > 0:
            assert f"row {row + 1}, column {column + 1} of 8" in page.inner_text("#look-words")
        shown[name] = visit.pixels()
    other = next(name for name in NAMES if name not in names)
    page.select_option("#other-class", label=other)
    page.wait_for_selector(f"#map-title:has-text('{other}')")
    shown[other] = visit.pixels()
    assert len(set(shown.values())) == len(shown)
    assert visit.texts("#bars [aria-pressed=true]") == []
    asked = [url for url in visit.requested if "/v1/map" in url]
    assert len(asked) == 5  # the first one came with the answer
    page.click("#bars li:nth-child(2) button")
    page.wait_for_selector(f"#map-title:has-text('{names[1]}')")
    assert visit.pixels() == shown[names[1]]
    assert [url for url in visit.requested if "/v1/map" in url] == asked  # and no map is asked for twice


def test_where_a_map_is_zero_the_photo_shows_through(visit: Visit, run: Path) -> None:
    """Grayish and darker, but not covered: its details are those of the photo."""
    image = photo(3, 64, 64)
    visit.drop(encoded(image))
    visit.answered()
    model = vitlab.load(run)
    best = NAMES.index(visit.answered()[0])
    values = class_map(model, eval_image(image, (64, 64), model.card.preprocess)[None], best)[0].numpy()
    bare, covered = decoded(visit.pixels("photo")).mean(2), decoded(visit.pixels()).mean(2)
    side = bare.shape[0] // 8
    zero = np.kron(values == 0, np.ones((side, side), bool))
    for shift in [(y, x) for y in (-side, 0, side) for x in (-side, 0, side)]:  # away from patches that are not zero
        zero &= np.roll(np.kron(values == 0, np.ones((side, side), bool)), shift, (0, 1))
    assert zero.sum() > 1000
    assert np.corrcoef(bare[zero], covered[zero])[0, 1] > 0.95


# ---- samples


def test_samples_are_the_runs_held_out_photos(visit: Visit, run: Path) -> None:
    page = visit.page
    page.wait_for_selector("#sample-list button")
    assert visit.texts("#sample-list .name") == [*NAMES, NAMES[0]]
    assert page.is_hidden("#sample")
    page.click("#sample-list li:nth-child(3) button")
    name, probability = visit.answered()
    truth = Classifier(run, "cpu").predict(HELD_OUT[2])  # tiny images are stored as they are
    assert name == truth.label
    assert probability == pytest.approx(truth.probability, abs=1e-3)
    assert f"Its class in the data: {NAMES[2]}." in page.inner_text("#footnote")


def test_a_drawn_sample_is_only_for_models_that_know_it(browser: "sync_api.Browser", tmp_path: Path) -> None:
    for labels, button in ((["Daisy", "rose"], True), (list("0123456789"), True), (["cat", "dog"], False)):
        run = tmp_path / labels[0]
        vitlab.save(small(image_size=64, classes=len(labels)), run, labels=labels)
        with server(run) as live, visiting(browser, live.url) as visit:
            assert visit.page.is_visible("#sample") == button
            assert visit.page.is_hidden("#samples")
            assert visit.page.is_hidden("#report")
            if button:
                visit.page.click("#sample")
                assert visit.answered()[0] in labels
            visit.drop(encoded(photo(1)))
            visit.answered()
            assert visit.page.is_hidden("#correct")  # off unless asked for


# ---- pictures


def test_many_pictures_are_answered_and_any_can_be_looked_at(visit: Visit, run: Path) -> None:
    images = [photo(seed, 80, 60) for seed in range(9)]
    files = [(encoded(image), f"{i}.png", "image/png") for i, image in enumerate(images)]
    files.insert(4, (b"nonsense", "broken.png", "image/png"))
    visit.drop_all(files)
    page = visit.page
    page.wait_for_selector("#session-count:text-is('10 pictures, 1 failed')")
    visit.answered()
    classifier = Classifier(run, "cpu")
    truth = {f"{i}.png": classifier.predict(image).label for i, image in enumerate(images)}
    listed = dict(zip(visit.texts("#session-list .file"), visit.texts("#session-list .name"), strict=True))
    assert "is not an image" in listed.pop("broken.png")
    assert listed == truth
    assert visit.texts("#session-list [aria-current=true] .file") == ["0.png"]
    page.click("#session-list li:has-text('7.png') button")
    page.wait_for_selector("#footnote:has-text('7.png')")
    assert visit.answered()[0] == truth["7.png"]
    assert "7.png" in page.evaluate("document.activeElement.textContent")  # the focus stays
    page.click("#session-list li:has-text('broken.png') button")
    page.wait_for_selector("#error:not([hidden])")
    assert page.is_hidden("#result")
    page.click("#session-list li:has-text('0.png') button")
    visit.answered()
    page.click("#forget")
    assert page.is_hidden("#session")
    assert page.is_hidden("#result")
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    visit.errors = [one for one in visit.errors if "422" not in one]  # the browser's own lines about the broken one


def test_many_pictures_are_chosen_with_the_button(visit: Visit, tmp_path: Path) -> None:
    for seed in range(3):
        photo(seed).save(tmp_path / f"{seed}.png")
    visit.page.set_input_files("#file", sorted(tmp_path.iterdir()))
    visit.page.wait_for_selector("#session-count:text-is('3 pictures')")
    assert visit.answered()[0] in NAMES


def store(visit: Visit, label: str) -> None:
    """Correct the answer that is shown."""
    visit.page.click("#correct summary")
    visit.page.select_option("#right-class", label=label)
    visit.page.click("#correct-form button")
    visit.page.wait_for_selector(f"#correct-result:has-text('Stored as “{label}”')")


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_large_photo_is_shrunk_upright_before_it_is_sent(
    visit: Visit, run: Path, corrections: Path, orientation: int
) -> None:
    image = photo(8, 4000, 3000)
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = image.transpose(Image.Transpose.ROTATE_90) if orientation == 6 else image
    noise = np.random.default_rng(0).normal(0, 20, (*stored.size[::-1], 3))
    grainy = Image.fromarray((np.asarray(stored) + noise).clip(0, 255).astype(np.uint8))
    data = encoded(grainy, "JPEG", quality=92, exif=exif)
    visit.drop(data, "large.jpg", "image/jpeg")
    name, probability = visit.answered()
    truth = Classifier(run, "cpu").predict(image)
    assert name == truth.label
    assert probability == pytest.approx(truth.probability, abs=0.03)
    store(visit, f"kind {orientation}")  # as it was sent
    (sent,) = (corrections / f"kind {orientation}").iterdir()
    assert sent.stat().st_size < len(data) / 4
    with Image.open(sent) as small_image:
        assert (small_image.size, small_image.format) == ((1600, 1200), "JPEG")
        assert dict(small_image.getexif()) == {}  # neither a rotation nor where it was taken
    sent.unlink()


def test_what_the_browser_cannot_decode_is_sent_as_it_is(browser: "sync_api.Browser", live: Running) -> None:
    heic = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(1000)
    page = browser.new_page()
    visit = Visit(page)
    visit.open(live.url)
    visit.drop(heic, "IMG_1.HEIC", "")
    page.wait_for_selector("#error:has-text('it is HEIC; send it as JPEG')")
    page.close()


def test_transparent_pictures_stay_over_white(visit: Visit, run: Path) -> None:
    """A large PNG with transparency is shrunk to a PNG, which the server lays over white as it does any other."""
    alpha = Image.new("L", (2400, 1800), 0)
    alpha.paste(255, (600, 300, 1800, 1500))
    image = photo(5, 2400, 1800)
    image.putalpha(alpha)
    visit.drop(encoded(image, compress_level=1), "cut out.png")
    name, probability = visit.answered()
    truth = Classifier(run, "cpu").predict(image)
    assert name == truth.label
    assert probability == pytest.approx(truth.probability, abs=0.03)


def test_a_picture_from_the_camera(visit: Visit) -> None:
    """Chromium's own test camera; it is off again when it is closed."""
    page = visit.page
    page.click("#use-camera")
    page.wait_for_function("() => document.getElementById('video').videoWidth > 0")
    page.evaluate("window.track = document.getElementById('video').srcObject.getTracks()[0]")
    page.click("#take")
    assert visit.answered()[0] in NAMES
    assert "camera" in page.inner_text("#footnote")
    page.click("#camera-off")
    assert page.evaluate("window.track.readyState") == "ended"
    assert page.is_hidden("#camera")
    assert page.evaluate("document.activeElement.id") == "use-camera"


def test_without_a_camera_there_is_no_button(browser: "sync_api.Browser", live: Running) -> None:
    page = browser.new_page()
    page.add_init_script("delete Navigator.prototype.mediaDevices")
    visit = Visit(page)
    visit.open(live.url)
    assert page.is_hidden("#use-camera")
    page.close()


# ---- corrections, the report, snippets


def test_a_wrong_answer_is_corrected(visit: Visit, corrections: Path) -> None:
    data = encoded(photo(77))
    visit.drop(data, "mine.png")
    visit.answered()
    page = visit.page
    store(visit, "kind 4")
    stored = [path for path in corrections.rglob("*") if path.is_file()]
    assert [path.read_bytes() for path in stored if path.parent.name == "kind 4"] == [data]
    page.select_option("#right-class", label="kind 5")
    page.click("#correct-form button")
    page.wait_for_selector("#correct-result:has-text('Stored as “kind 5”')")
    assert [path.parent.name for path in corrections.rglob("*.png")] == ["kind 5"]
    assert "stored there only if you correct" in page.inner_text("footer")


def test_the_report_opens_and_a_strangers_script_does_not_run(visit: Visit, live: Running) -> None:
    page = visit.page
    with page.expect_popup() as opened:
        page.click("#report")
    report = opened.value
    report.wait_for_selector("h1:has-text('It went well')")
    assert report.title() == "The report"
    report.click("dialog button")
    report.wait_for_selector("dialog", state="hidden")
    with report.expect_console_message(lambda message: "form-action" in message.text):  # blocked
        report.evaluate("() => document.getElementById('out').requestSubmit()")
    assert report.url == f"{live.url}/report"
    report.close()


@pytest.mark.parametrize("token", [None, "open sesame"])
def test_the_snippets_run(browser: "sync_api.Browser", run: Path, tmp_path: Path, token: str | None) -> None:
    """Each gives the answer of the page, with nothing changed but the token."""
    photo(1).save(tmp_path / "photo.jpg", quality=95)
    truth = Classifier(run, "cpu").predict(tmp_path / "photo.jpg")
    with server(run, *([] if token is None else ["--token", token])) as live:
        page = browser.new_page()
        page.goto(live.url)
        if token is not None:
            page.fill("#token-value", token)
            page.keyboard.press("Enter")
        page.wait_for_selector("#model:has-text('parameters')")
        page.click("#programs summary")
        visit = Visit(page)
        names, codes = visit.texts("#snippets h3"), visit.texts("#snippets code")
        page.close()
        snippets = {name: code.replace("TOKEN", token or "") for name, code in zip(names, codes, strict=True)}
        assert list(snippets) == ["curl", "Python", "JavaScript"]
        assert all(live.url in code for code in snippets.values())
        ways = {"curl": ["bash", "-c"], "Python": [sys.executable, "-c"]}
        ways["JavaScript"] = ["node", "--input-type=module", "-e"]
        for name, code in snippets.items():
            if shutil.which(ways[name][0]) is None:
                continue
            done = subprocess.run([*ways[name], code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
            assert truth.label in done.stdout
            numbers = [float(word) for word in re.findall(r"0\.\d+", done.stdout)]
            assert numbers[0] == pytest.approx(truth.probability, abs=1e-3)


# ---- for everybody


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is missing; npm install --no-save axe-core@4.14.0")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(
    browser: "sync_api.Browser", live: Running, width: int, scheme: Literal["light", "dark"]
) -> None:
    view = {"width": width, "height": 844}
    with visiting(browser, live.url, viewport=view, color_scheme=scheme) as visit:
        page = visit.page
        page.wait_for_selector("#sample-list button")
        found = visit.violations()
        visit.drop_all([(encoded(photo(seed)), f"{seed}.png", "image/png") for seed in range(5)])
        page.wait_for_selector("#session-count:text-is('5 pictures')")
        visit.answered()
        found += visit.violations()
        page.click("#correct summary")
        page.click("#programs summary")
        page.check("#kind-attention", force=True)
        page.click("#use-camera")
        page.wait_for_selector("#camera:not([hidden])")
        found += visit.violations()
        page.click("#camera-off")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert found == []


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is missing; npm install --no-save axe-core@4.14.0")
def test_axe_and_an_error(browser: "sync_api.Browser", live: Running) -> None:
    page = browser.new_page()
    visit = Visit(page)
    visit.open(live.url)
    visit.drop(b"nonsense", "cat.png")
    page.wait_for_selector("#error:not([hidden])")
    assert visit.violations() == []
    page.goto(f"{live.url}/docs")
    page.wait_for_selector(".route")
    assert visit.violations() == []
    page.close()
