"""The figure of attention distances by depth, of several models side by side: arrays in, a figure out.

Shapes: S seeds, L layers, H heads.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlab.plots.style import COLORS, FAINT, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 7.2  # inches: a page


@dataclass(frozen=True)
class Heads:
    """Mean attention distances (S, L, H) of one kind of model, in pixels; `even`: if attention were spread evenly."""

    title: str
    distance: NDArray[np.floating[Any]]
    even: float


def heads_figure(panels: Sequence[Heads]) -> "Figure":
    """Draw a dot for each head of each seed and a line through the layers' means, panels with the same axes."""
    with drawing():
        figure = new_figure(WIDTH, 3.6)
        grid = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for place, (axes, panel) in enumerate(zip(grid, panels, strict=True)):
            color = COLORS[place % len(COLORS)]
            seeds, layers, _ = panel.distance.shape
            number = np.arange(1, layers + 1)
            at = np.broadcast_to(number[None, :, None], panel.distance.shape)
            axes.scatter(at, panel.distance, s=16, color=color, alpha=max(0.25, 0.75 / seeds), linewidths=0)
            axes.plot(number, panel.distance.mean((0, 2)), color=color, linewidth=1.6)
            axes.axhline(panel.even, color=FAINT, linestyle="--", linewidth=1)
            axes.set(xlim=(0.5, layers + 0.5), xticks=number[:: -(-layers // 12)])
            axes.set_xlabel("layer, from the input")
            axes.set_title(panel.title, loc="left")
        top = max(max(panel.even, float(panel.distance.max())) for panel in panels)
        grid[0].set(ylabel="mean attention distance (pixels)", ylim=(0, 1.05 * top))
        add_key(figure)
    return figure


def add_key(figure: "Figure") -> None:
    from matplotlib.lines import Line2D

    dot = Line2D([], [], color=FAINT, marker="o", linestyle="", markersize=4, label="a head")
    line = Line2D([], [], color=FAINT, linewidth=1.6, label="mean of a layer")
    even = Line2D([], [], color=FAINT, linestyle="--", linewidth=1, label="attention spread evenly")
    figure.legend(handles=[dot, line, even], loc="outside lower center", ncols=3)
