"""Figures of speeds side by side: bars of one case, and lines of how cost grows along an axis.

Shapes: C contestants, R rounds, V values along the axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vitlab.plots.style import COLORS, INK, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, BAR, LINES = 6.4, 0.32, 2.8  # inches: of the figure, of a bar, of a panel with lines


@dataclass(frozen=True)
class Bars:
    """Speeds of contestants in one case: the rounds (R,) of each."""

    title: str
    unit: str
    rounds: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Lines:
    """Speeds of contestants along an axis: the values (V,), and each contestant's medians (V,), NaN where none."""

    title: str
    axis: str
    unit: str
    values: Sequence[float]
    medians: Mapping[str, Sequence[float]]


def speed_figure(panels: Sequence[Bars | Lines]) -> "Figure":
    """Draw the panels one below the other; a contestant has one color in all of them."""
    names = list(dict.fromkeys(name for p in panels for name in (p.rounds if isinstance(p, Bars) else p.medians)))
    colors = {name: COLORS[i % len(COLORS)] for i, name in enumerate(names)}
    heights = [0.7 + BAR * len(p.rounds) if isinstance(p, Bars) else LINES for p in panels]
    with drawing():
        figure = new_figure(WIDTH, sum(heights))
        all_axes = np.atleast_1d(figure.subplots(len(panels), 1, height_ratios=heights))
        for panel, axes in zip(panels, all_axes, strict=True):
            axes.set_title(panel.title, loc="left")
            if isinstance(panel, Bars):
                draw_bars(axes, panel, colors)
            else:
                draw_lines(axes, panel, colors)
    return figure


def draw_bars(axes: Any, bars: Bars, colors: Mapping[str, str]) -> None:
    """The median of each contestant's rounds, with a line from the lowest to the highest."""
    for i, (name, rounds) in enumerate(bars.rounds.items()):
        median = float(np.median(rounds))
        axes.barh(i, median, height=0.7, color=colors[name])
        axes.plot([min(rounds), max(rounds)], [i, i], color=INK, linewidth=1.2)
        text = f"{median:,.0f}" if median >= 1000 else f"{median:.4g}"
        axes.annotate(f" {text}", (max(median, max(rounds)), i), va="center", fontsize=8)
    axes.set_yticks(range(len(bars.rounds)), list(bars.rounds))
    axes.set(xlabel=bars.unit, xlim=(0, 1.15 * max(max(rounds) for rounds in bars.rounds.values())))
    axes.invert_yaxis()
    axes.grid(False, axis="y")


def draw_lines(axes: Any, lines: Lines, colors: Mapping[str, str]) -> None:
    from matplotlib.ticker import LogLocator

    for name, medians in lines.medians.items():
        axes.plot(lines.values, medians, color=colors[name], marker="o", markersize=3.5, label=name)
    axes.set(xlabel=lines.axis, ylabel=lines.unit, xscale="log", yscale="log")
    axes.set_xticks(list(lines.values), [f"{value:g}" for value in lines.values])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()
    axes.legend(loc="best")
