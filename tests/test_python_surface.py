"""The package as a Python user meets it: its names, completion, and what a notebook shows."""

import base64
import html
import io
import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import fill
from PIL import Image

import vitlab
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import score
from vitlab.evaluation.feature_file import Row
from vitlab.evaluation.multi_result import score_sets
from vitlab.evaluation.search import Hit, Hits
from vitlab.prediction.classifier import Prediction, Predictions

HOSTILE = "<script>alert('&')</script>"


# ---- names


def test_dir_holds_the_public_names_alone() -> None:
    assert set(dir(vitlab)) == {*vitlab.__all__, "__version__"}
    for name in vitlab.__all__:
        assert getattr(vitlab, name).__doc__, name
        assert ">>>" in str(getattr(vitlab, name).__doc__) or name == "UserError", name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vitlab.nothing


LAZY = """
import sys, vitlab
dir(vitlab)
assert not {"torch", "rich", "numpy", "PIL"} & set(sys.modules)
"""


def test_names_are_imported_when_used() -> None:
    done = subprocess.run([sys.executable, "-c", LAZY], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_no_folder_takes_the_place_of_a_function() -> None:
    import vitlab.evaluation.search
    import vitlab.finetuning
    import vitlab.prediction

    assert all(callable(getattr(vitlab, name)) for name in vitlab.__all__)
    names: dict[str, Any] = {}
    exec("from vitlab import *", names)
    assert set(names) - {"__builtins__"} == set(vitlab.__all__)


@pytest.mark.parametrize("use_jedi", [False, True])
def test_completion_offers_the_public_names(use_jedi: bool) -> None:
    completer = pytest.importorskip("IPython.core.completer")
    one = completer.IPCompleter(shell=None, namespace={"vitlab": vitlab}, global_namespace={})
    one.use_jedi = use_jedi
    with completer.provisionalcompleter():
        found = {match.text.removeprefix("vitlab").removeprefix(".") for match in one.completions("vitlab.", 7)}
    assert set(vitlab.__all__) <= found
    assert use_jedi or set(vitlab.__all__) == found
    assert not {"logging", "sys", "import_module", "TYPE_CHECKING", "Any"} & found


# ---- notebooks


class Balanced(HTMLParser):
    """Checks that every element is closed in its turn, and collects texts, images and frames."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, Any]]] = []
        self.texts: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag != "img":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def shown(thing: object) -> Balanced:
    """What IPython's display protocol shows of an object."""
    formatters = pytest.importorskip("IPython.core.formatters")
    bundle, _ = formatters.DisplayFormatter().format(thing)
    page = Balanced(bundle["text/html"])
    assert "script" not in {tag for tag, _ in page.tags}
    assert bundle["text/html"].encode()  # no lone surrogate from a file's name
    assert bundle["text/plain"]
    return page


def image_in(page: Balanced) -> Image.Image:
    source = next(about["src"] for tag, about in page.tags if tag == "img")
    kind, data = re.fullmatch("data:image/(jpeg|png);base64,(.*)", source).groups()  # type: ignore[union-attr]
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.format == kind.upper()
    return image


def test_a_prediction_shows_its_image_and_bars(tmp_path: Path) -> None:
    model = fill(vitlab.create("Ti/8", image_size=16, classes=2, depth=1, width=24, mlp=32, heads=2))
    vitlab.save(model, tmp_path / "run", labels=(HOSTILE, "cat"))
    red = Image.new("RGB", (400, 200), (250, 10, 10))
    red.save(tmp_path / "a & b.png")
    run = vitlab.Run(tmp_path / "run", device="cpu")
    for given in (red, np.asarray(red), tmp_path / "a & b.png"):
        page = shown(run.predict(given))
        assert HOSTILE in page.texts
        assert image_in(page).size == (96, 48)
        np.testing.assert_allclose(np.asarray(image_in(page)).mean((0, 1)), (250, 10, 10), atol=4)
        widths = [float(x) for x in re.findall(r"width:([\d.]+)px", str(page.tags))]
        assert sum(widths) == pytest.approx(100, abs=0.2)  # of the bars
    assert str(tmp_path / "a & b.png") in page.texts
    (tmp_path / "a & b.png").unlink()
    gone = shown(Prediction(str(tmp_path / "a & b.png"), ("cat",), (1.0,)))
    assert "img" not in {tag for tag, _ in gone.tags}
    odd = shown(Prediction("caf\udce9.jpg", ("cat",), (1.0,)))  # a name that is not valid text
    assert "caf\\udce9.jpg" in odd.texts


def test_a_long_list_shows_its_beginning() -> None:
    page = shown(Predictions(Prediction(f"{i}.jpg", ("cat",), (1.0,)) for i in range(30)))
    assert page.texts.count("cat") == 24
    assert "and 6 more" in page.texts


def test_evaluations_show_their_scores() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(40, 6)).astype(np.float32), rng.integers(0, 6, 40)
    names = (HOSTILE, "a", "b", "c", "d", "e")
    tested = score(logits, labels, names, "", tuple(f"{i}.jpg" for i in range(40)))
    text = " ".join(shown(tested).texts)
    hits = int((logits.argmax(1) == labels).sum())
    assert f"{hits / 40:.1%} of 40 images" in text
    assert HOSTILE in text or HOSTILE not in {tested.confused[0][0], tested.confused[0][1]}
    truth = rng.random((40, 6)) < 0.3
    sets = score_sets(logits, truth, np.ones(6, bool), (0.5,) * 6, names, "", tested.files)
    exact = (((logits > 0) == truth).all(1)).mean()
    assert f"{exact:.1%}" in shown(sets).texts


def test_hits_show_their_images(tmp_path: Path) -> None:
    Image.new("RGB", (20, 10), "blue").save(tmp_path / "x.png")
    row = Row(str(tmp_path / "x.png"), None, 0, (HOSTILE,))
    page = shown(Hits([Hit(**vars(row), similarity=0.5)]))
    assert image_in(page).size == (20, 10)
    assert {HOSTILE, "0.500"} <= set(page.texts)


# ---- runs


def test_a_run_shows_its_scores_and_its_report(tmp_path: Path) -> None:
    model = fill(vitlab.create("Ti/8", image_size=16, classes=2, depth=1, width=24, mlp=32, heads=2))
    vitlab.save(model, tmp_path / "run", labels=(HOSTILE, "cat"))
    run = vitlab.Run(tmp_path / "run", device="cpu")
    assert f"2 ({HOSTILE}, cat)" in shown(run).texts
    with pytest.raises(UserError, match=r"has no report.html; `vitlab report .*run` writes it"):
        _ = run.report
    with pytest.raises(UserError, match=r"has no scores.json"):
        _ = run.accuracy
    logits, labels = np.array([[1, 0], [0, 1], [1, 0]], np.float32), np.array([0, 1, 1])
    tested = score(logits, labels, run.labels, "", ("a", "b", "c"))
    tested.write_json(run.folder / "scores.json", {"split": "test"})
    assert run.accuracy == pytest.approx(2 / 3)
    assert run.scores["images"] == 3
    assert "test accuracy 66.7% of 3 images" in repr(run)
    page = f"<html><body><h1>{html.escape(HOSTILE)}</h1></body></html>"
    (run.folder / "report.html").write_text(page)
    frame = next(about for tag, about in shown(run.report).tags if tag == "iframe")
    assert frame["srcdoc"] == page
    assert "allow-same-origin" not in frame["sandbox"]
    assert Path(run.report).read_text() == page
    assert Path(run) == run.folder
    (run.folder / "scores.json").write_text(json.dumps({"images": 3, "top1": [1]}))
    with pytest.raises(UserError, match="does not hold the scores of a run"):
        _ = run.scores
    shown(run)


def test_a_folder_without_a_model_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds no model"):
        vitlab.Run(tmp_path)
    with pytest.raises(UserError, match="is not a folder"):
        vitlab.Run(tmp_path / "nowhere")
