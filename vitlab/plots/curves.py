"""Figures of a training run by step: its loss, its accuracy on a split, its learning rate.

Shapes: S steps that were logged, T evaluations.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlab.plots.style import COLORS, FAINT, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
SIZE = (4.2, 2.8)  # inches: three fit side by side on a wide screen, one on a phone, with legible text
SPAN = 40  # the smoothed loss is a mean over this fraction of the run


def loss_figure(steps: Ints, loss: Floats) -> "Figure":
    """Draw the training loss (S,) of every step, and its running mean."""
    with drawing():
        figure, axes = panel(steps, "training loss")
        axes.plot(steps, loss, color=FAINT, alpha=0.45, linewidth=0.7, label="each step")
        axes.plot(steps, smoothed(loss, len(loss) // SPAN), color=COLORS[0], linewidth=1.6, label="running mean")
        axes.set_ylim(min(0.0, float(loss.min())), 1.05 * float(np.quantile(loss, 0.995)) or 1.0)
        axes.legend(loc="upper right")
    return figure


def accuracy_figure(title: str, steps: Ints, raw: Floats, averaged: Floats | None = None) -> "Figure":
    """Draw the accuracy (T,) on a split of the current weights and, where there are any, of the averaged weights."""
    with drawing():
        figure, axes = panel(steps, title)
        axes.plot(steps, 100 * raw, color=COLORS[1], marker="o", markersize=3.5, label="current weights")
        shown = raw
        if averaged is not None:
            axes.plot(steps, 100 * averaged, color=COLORS[0], marker="o", markersize=3.5, label="averaged weights")
            axes.legend(loc="lower right")
            shown = np.concatenate([raw, averaged])
        low, high = 100 * float(shown.min()), 100 * float(shown.max())
        margin = max(1.0, 0.08 * (high - low))
        axes.set_ylim(max(-1.0, low - margin), min(101.0, high + margin))
        axes.yaxis.set_major_formatter("{x:g} %")
    return figure


def rate_figure(steps: Ints, rate: Floats) -> "Figure":
    """Draw the learning rate (S,) of every step."""
    with drawing():
        figure, axes = panel(steps, "learning rate")
        axes.plot(steps, rate, color=COLORS[2], linewidth=1.6)
        axes.set_ylim(0, 1.08 * float(rate.max()) or 1.0)
    return figure


def panel(steps: Ints, title: str) -> "tuple[Figure, Any]":
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(*SIZE)
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set(xlabel="step", xlim=(0, max(1, int(steps.max())) * 1.02))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure, axes


def smoothed(values: Floats, reach: int) -> Floats:
    """Average over `reach` values to either side; near an end over fewer, but at least a quarter of them."""
    index, last = np.arange(len(values)), len(values) - 1
    reached = np.clip(np.minimum(index, last - index), reach // 4, reach)
    low, high = np.maximum(index - reached, 0), np.minimum(index + reached, last)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    return (sums[high + 1] - sums[low]) / (high - low + 1)
