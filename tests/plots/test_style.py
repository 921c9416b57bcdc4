"""Letters that the default font lacks: a fallback font, or one warning."""

import logging
import warnings
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

matplotlib = pytest.importorskip("matplotlib")

from vitlab.plots import style  # noqa: E402
from vitlab.plots.scores import confusion_figure  # noqa: E402

MATRIX = np.array([[5, 1], [0, 4]])
NO_GLYPH = "\ue0ff"  # for private use


def drawn(names: list[str]) -> np.ndarray:
    file = BytesIO()
    style.save(confusion_figure(MATRIX, names), file, format="png")
    return np.asarray(Image.open(file))


def test_missing_glyphs_are_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    style.warn_missing_glyphs.cache_clear()
    with caplog.at_level(logging.WARNING, "vitlab"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in ("one", "two"):
            style.write(confusion_figure(MATRIX, [f"a{NO_GLYPH}", "b"]), tmp_path / name, ("png", "svg"))
    assert [r.message for r in caplog.records] == [
        "figures show boxes for letters that no font here has; install one that does, such as Noto Sans CJK"
    ]
    assert (tmp_path / "two.png").exists()


def test_other_warnings_still_appear() -> None:
    with style.drawing():
        figure = style.new_figure(2, 2)
        figure.subplots().set_xlim(1, 2)
        figure.set_layout_engine("tight", pad=400)  # no room is left for the axes
    with pytest.warns(UserWarning, match="[Tt]ight layout"):
        style.save(figure, BytesIO(), format="png")


def test_cjk_names_are_drawn(caplog: pytest.LogCaptureFixture) -> None:
    if len(style.fonts()) == 1:
        pytest.skip("no font with Chinese, Japanese or Korean letters is installed")
    style.warn_missing_glyphs.cache_clear()
    with caplog.at_level(logging.WARNING, "vitlab"):
        one, other = drawn(["강아지", "고양이"]), drawn(["토끼토", "거북이"])
    assert not caplog.records
    assert one.shape != other.shape or (one != other).any()  # boxes would all look the same
