"""Figures of studies: dots by row, lines by cost or size, with the spread over seeds; the paper's own points faintly.

Values are lists with a number for each seed; shares are drawn in per cent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlab.plots.inside import similarity_mosaic
from vitlab.plots.style import COLORS, FAINT, INK, MAP, bare, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.floating[Any]]
WIDTH = 7.2  # inches: a page
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
FAINT_ALPHA = 0.45
SIDES = ((4, 3), (4, -3), (-4, 3), (-4, -3))  # points from the middle of a marker to its label
MARK = 4.0  # pixels from the middle of a marker to its edge
FEW = 5  # values of x that are their own ticks


@dataclass(frozen=True)
class Series:
    """Points of one kind: at each x the values of all seeds."""

    name: str
    x: Sequence[float]
    values: Sequence[Sequence[float]]
    labels: Sequence[str] = ()  # beside the points


@dataclass(frozen=True)
class Lines:
    """A panel of lines; `faint`: the paper's own points, in their own units."""

    title: str
    xlabel: str
    ylabel: str
    series: Sequence[Series]
    faint: bool = False
    log: bool = True
    log_y: bool = False
    full: bool = False  # shares from 0 to 100 %
    share: bool = True  # in per cent
    frontier: bool = False  # a line joins only the points that are better than all to their left


@dataclass(frozen=True)
class Dots:
    """A panel of rows, a dot for each seed and their mean; `groups` give rows of one number one color."""

    title: str
    xlabel: str
    names: Sequence[str]
    values: Sequence[Sequence[float]]
    groups: Sequence[int] = ()
    faint: bool = False
    share: bool = True


def lines_figure(panels: Sequence[Lines]) -> "Figure":
    """Draw panels of lines side by side, or two in a row; series of one name have one color and marker."""
    names = list(dict.fromkeys(series.name for panel in panels for series in panel.series))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with drawing():
        figure = new_figure(WIDTH, 0.5 + 3.3 * rows if columns > 1 else 4.2)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes, panel in zip(grid.flat, panels, strict=False):
            draw_lines(axes, panel, names)
        free = grid.flat[len(panels) :]
        for axes in free:
            axes.axis("off")
        if len(names) > 1:
            add_legend(figure, free[0] if len(free) else None)
        place_labels(figure)
    return figure


def place_labels(figure: "Figure") -> None:
    """Put each label on the side of its point where it covers no point and no earlier label, if there is one, and of
    these where it covers the fewest lines."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    for axes in figure.axes:
        points = [axes.transData.transform(label.xy) for label in axes.texts]  # type: ignore[attr-defined]
        taken = [Bbox.from_extents(x - MARK, y - MARK, x + MARK, y + MARK) for x, y in points]
        drawn = [line for line in axes.lines if line.get_linestyle() != "None"]
        lines = [line.get_path().transformed(axes.transData) for line in drawn]
        for label in axes.texts:
            covered = [covers(label, side, taken, lines) for side in SIDES]
            covers(label, SIDES[covered.index(min(covered))], taken, lines)  # which also puts it there
            taken.append(label.get_window_extent())


def covers(label: Any, side: tuple[int, int], others: Sequence[Any], lines: Sequence[Any]) -> tuple[int, int]:
    """Put a label on a side of its point; return how many others it covers there, and how many lines."""
    x, y = side
    label.set(position=side, ha="left" if x > 0 else "right", va="bottom" if y > 0 else "top")
    box = label.get_window_extent()
    return sum(box.overlaps(other) for other in others), sum(line.intersects_bbox(box, filled=False) for line in lines)


def add_legend(figure: "Figure", free: Any) -> None:
    """One legend for all panels: in the place that is free, else below them."""
    handles: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)  # ours are drawn before the paper's faint ones
    if free is None:
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=min(5, len(handles)))
    else:
        free.legend(handles.values(), handles, loc="center")


def draw_lines(axes: Any, panel: Lines, names: Sequence[str]) -> None:
    scale = 100 if panel.share else 1
    for series in panel.series:
        place = names.index(series.name)
        color, marker = COLORS[place % len(COLORS)], MARKERS[place % len(MARKERS)]
        points = enumerate(zip(series.x, series.values, strict=True))
        shown = [(x, values, i) for i, (x, values) in points if is_drawn(panel, x, values)]
        if not shown:
            continue
        x = [each[0] for each in shown]
        mean = [scale * float(np.mean(each[1])) for each in shown]
        spread = [scale * float(np.std(each[1], ddof=1)) if len(each[1]) > 1 else 0.0 for each in shown]
        alpha, dashes = (FAINT_ALPHA, "--") if panel.faint else (1.0, "-")
        line: Any = {"color": color, "linewidth": 1.4, "alpha": alpha}
        axes.errorbar(
            x,
            mean,
            spread if any(spread) else None,
            marker=marker,
            markersize=5,
            capsize=2.5,
            label=series.name,
            linestyle="none" if panel.frontier else dashes,
            **line,
        )
        if panel.frontier:
            best = [i for i, value in enumerate(mean) if value > max(mean[:i], default=0.0)]
            axes.plot([x[i] for i in best], [mean[i] for i in best], linestyle=dashes, **line)
        for at, height, (_, _, i) in zip(x, mean, shown, strict=True):
            if i < len(series.labels):
                axes.annotate(
                    series.labels[i], (at, height), SIDES[0], textcoords="offset points", fontsize=6.5, color=INK
                )
    if panel.log:
        scale_by_decades(axes, [x for series in panel.series for x in series.x])
    if panel.log_y:
        axes.set_yscale("log")
        plain_labels(axes.yaxis, [y for series in panel.series for values in series.values for y in values])
    if panel.full:
        axes.set_ylim(0, 103)
    axes.set(xlabel=panel.xlabel, ylabel=panel.ylabel)
    axes.set_title(panel.title, loc="left", color=FAINT if panel.faint else INK)


def is_drawn(panel: Lines, x: float, values: Sequence[float]) -> bool:
    """Whether there is something to draw at x; zero has no place on a log scale."""
    return bool(values) and (x > 0 or not panel.log) and (float(np.mean(values)) > 0 or not panel.log_y)


def scale_by_decades(axes: Any, x: Sequence[float]) -> None:
    """A log scale whose labels are plain numbers: of few values their own, of many some of each decade."""
    axes.set_xscale("log")
    plain_labels(axes.xaxis, x)
    if 1 < len(places := sorted({value for value in x if value > 0})) <= FEW:
        axes.set_xticks(places)


def plain_labels(axis: Any, values: Sequence[float]) -> None:
    """Plain numbers on an axis with a log scale, some of each decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if positive := [value for value in values if value > 0]:
        reach = max(positive) / min(positive)
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if reach < 30 else (1, 3) if reach < 1000 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}"))


def dots_figure(panels: Sequence[Dots], similarity: Floats | None = None) -> "Figure":
    """Draw panels of rows beside each other, which share their names; `similarity` (h, w, h, w) is drawn after them."""
    names = panels[0].names
    height = max(2.4, 0.9 + 0.3 * len(names))
    with drawing():
        extra = similarity is not None
        figure = new_figure(WIDTH, max(height, 2.9) if extra else height)
        ratios = [1.0] * len(panels) + ([1.15] if extra else [])
        grid = figure.subplots(1, len(panels) + extra, squeeze=False, width_ratios=ratios)[0]
        for place, (axes, panel) in enumerate(zip(grid, panels, strict=False)):
            draw_dots(axes, panel, named=place == 0)
        if similarity is not None:
            draw_similarity(figure, grid[-1], similarity)
    return figure


def draw_dots(axes: Any, panel: Dots, *, named: bool) -> None:
    scale, alpha = 100 if panel.share else 1, FAINT_ALPHA if panel.faint else 1.0
    for y, values in enumerate(panel.values):
        group = panel.groups[y] if panel.groups else 0
        color, marker = COLORS[group % len(COLORS)], MARKERS[group % len(MARKERS)]
        points = [scale * value for value in values]
        if points:
            if len(points) > 1:
                axes.scatter(points, [y] * len(points), s=10, color=color, alpha=0.4 * alpha, linewidths=0)
            spread = float(np.std(points, ddof=1)) if len(points) > 1 else None
            axes.errorbar(
                float(np.mean(points)),
                y,
                xerr=spread,
                color=color,
                marker=marker,
                markersize=5,
                capsize=2.5,
                alpha=alpha,
            )
    axes.set_ylim(len(panel.names) - 0.5, -0.5)
    axes.set_yticks(range(len(panel.names)), panel.names if named else [])
    axes.set_xlabel(panel.xlabel)
    axes.set_title(panel.title, loc="left", color=FAINT if panel.faint else INK)


def draw_similarity(figure: "Figure", axes: Any, similarity: Floats) -> None:
    shown = axes.imshow(similarity_mosaic(similarity), cmap=MAP, vmax=1, interpolation="nearest")
    bare(axes)
    h, w = similarity.shape[:2]
    axes.set_title(f"learned rows, {h} x {w}", loc="left")
    figure.colorbar(shown, ax=axes, label="cosine similarity", orientation="horizontal", shrink=0.8, pad=0.04)
