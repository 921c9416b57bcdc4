"""Figures as drawn: all text inside the page, none overlapping, the right image in each panel."""

import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from families import mostly_slow

matplotlib = pytest.importorskip("matplotlib")

from matplotlib.patches import Rectangle  # noqa: E402

from vitlab.plots import inside, style  # noqa: E402
from vitlab.plots.steps import pick_evenly, steps_figure  # noqa: E402

RANDOM = np.random.default_rng(0)
WHOSE = "of all tokens, averaged"  # the longer of the two


def maps(*shape: int) -> np.ndarray:
    values = RANDOM.random(shape)
    return values / values.sum((-2, -1), keepdims=True)


def steps(grid: tuple[int, int] = (4, 4), depth: int = 12, classes: int = 10, per_block: int = 1) -> Any:
    h, w = grid
    return SimpleNamespace(
        pixels=RANDOM.random((16 * h, 16 * w, 3)),
        tokens=RANDOM.random((h, w, 3)),
        positions=RANDOM.random((h, w, 3)),
        depths=RANDOM.random((depth, h, w, 3)),
        attention=maps(depth * per_block, 3, h, w),
        logits=RANDOM.normal(size=classes).astype(np.float32),
        prefix=RANDOM.random((depth, 12, 3)),
        prefix_attention=RANDOM.random((depth * per_block, 3, 12)) / 12,
    )


def layer_names(n: int) -> list[str]:
    return [str(i + 1) for i in range(n)]


def draw_steps(these: Any, names: list[str] | None = None, hybrid: bool = False, cells: tuple[str, ...] = ()) -> Any:
    classes = ["$one$", "w" * 80, *(f"a class with a rather long name, number {i}" for i in range(1000))]
    return steps_figure(these, names or layer_names(len(these.attention)), classes, WHOSE, hybrid=hybrid, cells=cells)


def heads(shape: tuple[int, int], layers: int, count: int) -> Any:
    pixels = RANDOM.random((*shape, 3))
    return inside.heads_figure(pixels, maps(24, 16, 4, 4), range(layers), range(count), layer_names(24), WHOSE)


def classes(shape: tuple[int, int], count: int) -> Any:
    names = ["$one$", "w" * 80, *(f"a class with a rather long name, number {i}" for i in range(count))][:count]
    return inside.classes_figure(np.zeros((*shape, 3)), np.zeros((count, 4, 4)), names, [0.1] * count)


def no_positions() -> Any:
    these = steps((6, 5), depth=1, classes=2)
    these.positions = np.zeros_like(these.positions)
    return these


FIGURES: dict[str, Callable[[], Any]] = {
    "filters": lambda: inside.filters_figure(RANDOM.normal(size=(28, 16, 16, 3)), np.full(28, 0.12), False),
    "few filters": lambda: inside.filters_figure(RANDOM.normal(size=(6, 2, 2, 3)), np.full(6, 0.12), False),
    "filters of a stem": lambda: inside.filters_figure(RANDOM.normal(size=(64, 7, 7, 3)), np.zeros(0), True),
    "positions": lambda: inside.positions_figure(RANDOM.random((14, 14, 14, 14))),
    "positions, wide": lambda: inside.positions_figure(RANDOM.random((3, 9, 3, 9))),
    "positions, tall": lambda: inside.positions_figure(RANDOM.random((8, 2, 8, 2))),
    "positions, many": lambda: inside.positions_figure(RANDOM.random((37, 37, 37, 37))),
    "distance": lambda: inside.distance_figure(RANDOM.random((12, 3)) * 150, 128, 117),
    "distance, axial, deep": lambda: inside.distance_figure(RANDOM.random((64, 16)) * 150, 12800, 117, axial=True),
    "classes": lambda: classes((64, 64), 3),
    "classes, one": lambda: classes((64, 64), 1),
    "classes, wide": lambda: classes((32, 96), 3),
    "classes, many, tall": lambda: classes((96, 64), 9),
    "rollout": lambda: inside.rollout_figure(RANDOM.random((64, 64, 3)), maps(4, 4), WHOSE),
    "rollout, wide": lambda: inside.rollout_figure(RANDOM.random((32, 96, 3)), maps(2, 6), WHOSE),
    "rollout, tall": lambda: inside.rollout_figure(RANDOM.random((96, 32, 3)), maps(6, 2), WHOSE),
    "layers": lambda: inside.layers_figure(RANDOM.random((64, 64, 3)), maps(12, 3, 4, 4), layer_names(12), WHOSE),
    "layers, one": lambda: inside.layers_figure(RANDOM.random((32, 64, 3)), maps(1, 3, 4, 4), ["1"], WHOSE),
    "layers, axial": lambda: inside.layers_figure(
        RANDOM.random((64, 32, 3)), maps(8, 3, 4, 4), [f"{i} columns" for i in range(8)], WHOSE
    ),
    "heads": lambda: heads((64, 64), 6, 12),
    "heads, one": lambda: heads((64, 64), 1, 1),
    "heads, wide": lambda: heads((40, 80), 6, 3),
    "steps": lambda: draw_steps(steps()),
    "steps, wide": lambda: draw_steps(steps((14, 21), 24, 1000), hybrid=True),
    "steps, tall, axial": lambda: draw_steps(
        steps((6, 4), 2, 3, per_block=2), ["1 rows", "1 columns", "2 rows", "2 columns"]
    ),
    "steps, no head": lambda: draw_steps(steps(classes=0)),
    "steps, no positions": lambda: draw_steps(no_positions()),
    "steps, registers": lambda: draw_steps(steps(), cells=("C", "R1", "R2", "R3", "R4")),
    "steps, registers, tall": lambda: draw_steps(steps((6, 4), 2), cells=("R1",)),
    "steps, many registers": lambda: draw_steps(steps((14, 21), 24), cells=("C", *(f"R{i}" for i in range(1, 12)))),
}


QUICK = ("few filters", "positions, wide", "distance", "classes", "rollout, tall", "heads, one", "steps, wide")


@pytest.mark.parametrize("name", mostly_slow(FIGURES, *QUICK))
def test_text_is_inside_the_page_and_apart(name: str) -> None:
    figure = FIGURES[name]()
    figure.set_dpi(80)  # inches decide; fewer pixels draw faster
    figure.draw_without_rendering()
    page = figure.bbox
    words = [text for text in figure.findobj(matplotlib.text.Text) if text.get_visible() and text.get_text().strip()]
    assert len(words) >= 2
    boxes = [(text.get_text(), text.get_window_extent()) for text in words]
    for text, box in boxes:
        assert box.x0 >= page.x0 - 1, text
        assert box.y0 >= page.y0 - 1, text
        assert box.x1 <= page.x1 + 1, text
        assert box.y1 <= page.y1 + 1, text
    for i, (one, box) in enumerate(boxes):
        for other, another in boxes[i + 1 :]:
            across = min(box.x1, another.x1) - max(box.x0, another.x0)
            down = min(box.y1, another.y1) - max(box.y0, another.y0)
            assert min(across, down) < 1.5, f"'{one}' overlaps '{other}'"


def shown_images(figure: Any) -> list[np.ndarray]:
    return [
        np.ma.filled(image.get_array().astype(float), np.nan) for image in figure.findobj(matplotlib.image.AxesImage)
    ]


def test_overlay_is_brightest_where_the_map_is() -> None:
    from matplotlib import colormaps

    grid = np.zeros((3, 4))
    grid[1, 2] = 1
    pixels = np.full((45, 60, 3), 0.5)  # patches of 15 pixels, which have a pixel in their middle
    got = inside.overlay(pixels, grid)
    assert got.shape == (45, 60, 3)
    assert got.min() >= 0
    assert got.max() <= 1
    high = np.array(colormaps["viridis"](1.0)[:3]) * inside.HEAT + 0.5 * (1 - inside.HEAT)
    np.testing.assert_allclose(got[22, 37], high, atol=1e-6)  # the middle of that patch
    np.testing.assert_allclose(got[7, 7], 0.5, atol=1e-6)  # of the first one: the image


def test_a_weak_map_is_transparent() -> None:
    """Halfway, the color's weight is half of the strongest."""
    from matplotlib import colormaps

    grid = np.array([[0.0, 0.5, 1.0, 1.0]])
    got = inside.overlay(np.full((15, 60, 3), 0.5), grid)
    expected = np.array(colormaps["viridis"](0.5)[:3]) * inside.HEAT / 2 + 0.5 * (1 - inside.HEAT / 2)
    np.testing.assert_allclose(got[7, 22], expected, atol=1e-6)


def test_overlay_is_not_dominated_by_a_few_cells() -> None:
    grid = np.full((10, 10), 0.001)
    grid[5, 5], grid[0, 0], grid[0, 9] = 0.004, 0.5, 0.4
    got = inside.overlay(np.zeros((110, 110, 3)), grid)
    green = got[..., 1]  # rises with viridis
    assert green[60, 60] > 3 * green[27, 27]
    assert green[5, 5] == green[5, 104] == green.max()


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_overlay_of_an_even_map_is_even(value: float) -> None:
    got = inside.overlay(np.ones((8, 8, 3)), np.full((2, 2), value))
    assert len(np.unique(got.reshape(-1, 3), axis=0)) == 1


def test_filters_are_gray_at_zero() -> None:
    filters = np.zeros((2, 4, 4, 3))
    filters[0, 0, 0] = [-2, 1, 0]
    first, second = shown_images(inside.filters_figure(filters, np.array([0.9, 0.1]), False))
    assert first[0, 0].tolist() == [0, 0.75, 0.5]
    assert (second == 0.5).all()


@pytest.mark.parametrize(("h", "w", "step"), [(3, 5, 1), (16, 4, 1), (20, 3, 2), (40, 37, 3)])
def test_the_grid_of_grids_has_each_in_its_place(h: int, w: int, step: int) -> None:
    similarity = RANDOM.random((h, w, h, w))
    mosaic, *_ = shown_images(inside.positions_figure(similarity))
    for y in range(0, h, step):
        for x in range(0, w, step):
            top, left = y // step * (h + 1), x // step * (w + 1)
            np.testing.assert_array_equal(mosaic[top : top + h, left : left + w], similarity[y, x])
    assert np.isnan(mosaic[h]).all()
    assert np.isnan(mosaic[:, w]).all()


def test_every_head_has_a_dot() -> None:
    distance = np.array([[10.0, 20], [30, 40], [50, 60]])
    figure = inside.distance_figure(distance, 2, 45)
    (axes,) = figure.axes
    dots = axes.collections[0].get_offsets()
    assert np.asarray(dots).tolist() == [[1, 10], [1, 20], [2, 30], [2, 40], [3, 50], [3, 60]]
    mean, even = axes.lines
    assert np.asarray(mean.get_ydata()).tolist() == [15, 35, 55]
    assert set(np.asarray(even.get_ydata())) == {45}


def test_heads_are_the_chosen_ones() -> None:
    pixels, attention = np.zeros((8, 8, 3)), maps(3, 4, 2, 2)
    shown = shown_images(inside.heads_figure(pixels, attention, [2, 0], [1, 3], layer_names(3), WHOSE))
    expected = [inside.overlay(pixels, attention[layer, head]) for layer in (2, 0) for head in (1, 3)]
    assert len(shown) == 4
    for one, other in zip(shown, expected, strict=True):
        np.testing.assert_allclose(one, other)


def test_the_image_is_beside_the_map_of_each_class() -> None:
    pixels, grids = RANDOM.random((8, 8, 3)), maps(5, 2, 2)
    figure = inside.classes_figure(pixels, grids, list("abcde"), [0.5, 0.25, 0.125, 0.1, 0.025])
    first, *others = shown_images(figure)
    np.testing.assert_allclose(first, pixels)
    assert len(others) == 5
    for one, grid in zip(others, grids, strict=True):
        np.testing.assert_allclose(one, inside.overlay(pixels, grid))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["image", "a\n50.0%", "b\n25.0%", "c\n12.5%", "d\n10.0%", "e\n2.5%"]


def test_registers_are_cells_of_their_own() -> None:
    """Under each image of step 4, labeled: their share of the attention in percent, then their colors."""
    these = steps(depth=2)
    figure = draw_steps(these, cells=("C", "R1", "R2"))
    strips = [axes for axes in figure.axes if {"C", "R1"} <= {text.get_text() for text in axes.texts}]
    assert len(strips) == 2 * 2
    for block in range(2):
        shares, colors = strips[2 * block : 2 * block + 2]
        assert [text.get_text() for text in colors.texts] == ["C", "R1", "R2"]
        percent = 100 * these.prefix_attention[block].mean(0)[:3]
        assert [text.get_text() for text in shares.texts][1::2] == [f"{number:.0f}" for number in percent]
        bars = cast(list[Rectangle], colors.patches)
        drawn = np.array([cast(Any, bar.get_facecolor())[:3] for bar in bars])
        np.testing.assert_allclose(drawn, these.prefix[block, :3], atol=1e-6)


def test_class_scores_are_a_softmax_by_rank() -> None:
    these = steps(classes=3)
    these.logits = np.log(np.array([0.2, 0.7, 0.1], np.float32))
    figure = steps_figure(these, layer_names(12), ["cat", "dog", "owl"], WHOSE)
    texts = [text.get_text() for text in figure.axes[-1].texts]
    assert texts == ["dog", "70.0%", "cat", "20.0%", "owl", "10.0%"]
    bars = cast(list[Rectangle], figure.axes[-1].patches)
    assert [bar.get_width() for bar in bars] == pytest.approx([0.7, 0.2, 0.1])


def test_long_names_are_clipped_and_short_ones_are_not() -> None:
    assert style.shorten("dog") == "dog"
    assert len(style.shorten("w" * 80)) == 24
    assert style.shorten("a class with a name, which is long").endswith("…")


@pytest.mark.parametrize(("count", "chosen"), [(1, [0]), (4, [0, 1, 2, 3]), (12, [0, 2, 4, 7, 9, 11])])
def test_depths_run_from_the_first_to_the_last(count: int, chosen: list[int]) -> None:
    assert pick_evenly(count, 6) == chosen


def test_files_are_complete_and_reproducible(tmp_path: Path) -> None:
    distance = np.arange(6.0).reshape(3, 2)
    for name in ("one", "two"):
        written = style.write(inside.distance_figure(distance, 2, 3), tmp_path / name, ("png", "svg"))
        assert [path.name for path in written] == [f"{name}.png", f"{name}.svg"]
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert ElementTree.parse(tmp_path / "one.svg").getroot().tag.endswith("svg")
    assert (tmp_path / "one.png").read_bytes()[:4] == b"\x89PNG"
