"""Figures of a classifier's scores: the confusion matrix and the calibration."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlab.plots.style import COLORS, FAINT, INK, drawing, new_figure, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
BLUE = "#00528C"  # all images of a class; none is white
COUNTED = 15  # classes up to which cells show their number of images
NAMED = 60  # classes up to which rows and columns show their names


def confusion_figure(matrix: Ints, names: Sequence[str]) -> "Figure":
    """Draw the shares of each class's images (rows) by prediction (columns); a class without images is gray.

    Of many classes, those without images that are never predicted are left out.
    """
    shown = np.arange(len(names))
    if len(names) > NAMED:
        shown = np.flatnonzero(matrix.sum(0) + matrix.sum(1))
        matrix = matrix[np.ix_(shown, shown)]
    k = len(shown)
    with drawing():
        from matplotlib.colors import LinearSegmentedColormap, PowerNorm

        cell = 0.5 if k <= COUNTED else 0.22
        side = min(max(3.0, cell * k), 13.0) if k <= NAMED else 8.0
        figure = new_figure(side + 2.6, side + 1.6)
        axes = figure.add_subplot()
        images = matrix.sum(1, keepdims=True)
        share = np.ma.masked_where(np.broadcast_to(images == 0, matrix.shape), matrix / np.maximum(images, 1))
        colors = LinearSegmentedColormap.from_list("blue", ["#FFFFFF", BLUE]).with_extremes(bad="#D9D9D9")
        # the square root makes a few per cent of confusion visible
        image = axes.imshow(share, cmap=colors, norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
        bar = figure.colorbar(image, ax=axes, shrink=0.8, pad=0.02, ticks=[0, 0.01, 0.05, 0.2, 0.5, 1])
        bar.ax.set_yticklabels(["0", "1 %", "5 %", "20 %", "50 %", "100 %"])
        bar.set_label("share of the class's images")
        axes.grid(False)
        name_axes(axes, [names[i] for i in shown.tolist()], shown)
        if k <= COUNTED:
            write_counts(axes, matrix, share)
        wrong = int(matrix.sum() - np.trace(matrix))
        axes.set_title(f"{wrong:,} of {int(matrix.sum()):,} images are taken for another class", loc="left")
    return figure


def name_axes(axes: Any, names: Sequence[str], numbers: Ints) -> None:
    k = len(names)
    if k <= NAMED:
        words = [shorten(name) for name in names]
        font: dict[str, Any] = {"fontsize": 9 if k <= COUNTED else 7, "parse_math": False}
        turn = {"rotation": 45, "ha": "right", "rotation_mode": "anchor"} if max(map(len, words)) > 2 else {}
        axes.set_xticks(range(k), words, **font, **turn)
        axes.set_yticks(range(k), words, **font)
        axes.set(xlabel="guess", ylabel="truth")
        axes.tick_params(length=2)
    else:
        places = np.linspace(0, k - 1, 9).round().astype(int)
        axes.set_xticks(places, numbers[places])
        axes.set_yticks(places, numbers[places])
        axes.set(xlabel="guess, by number of the class (from 0)", ylabel="truth, by number of the class")


def write_counts(axes: Any, matrix: Ints, share: Any) -> None:
    for (i, j), images in np.ndenumerate(matrix):
        if images:
            dark = float(share[i, j]) > 0.6
            size = 9 if images < 1000 else 7 if images < 100_000 else 5
            axes.text(j, i, f"{images}", ha="center", va="center", fontsize=size, color="white" if dark else "black")


def calibration_figure(error: float, count: Ints, confidence: Floats, accuracy: Floats) -> "Figure":
    """Draw accuracy by confidence, equal on the diagonal, and below it the number of images in each bin.

    `count`, mean `confidence` and `accuracy` are (B,) by bin of confidence, nan where a bin is empty.
    """
    bins = len(count)
    left, full = np.arange(bins) / bins, count > 0
    with drawing():
        figure = new_figure(5.2, 5.4)
        top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
        top.plot([0, 1], [0, 1], color=FAINT, linestyle="--", linewidth=1, label="accuracy equals confidence")
        mean, heights, label = confidence[full], accuracy[full], "accuracy at the mean confidence"
        top.bar(left[full], heights, 1 / bins, align="edge", color=COLORS[0], alpha=0.75, edgecolor="white")
        top.plot(mean, heights, marker="o", markersize=4, color=COLORS[1], label=label)
        top.set(xlim=(0, 1), ylim=(0, 1.02), ylabel="accuracy")
        top.set_title(f"calibration error {error:.1%}, {int(count.sum()):,} images", loc="left")
        figure.legend(loc="outside lower center", ncols=2)
        below.bar(left, count, 1 / bins, align="edge", color=FAINT, edgecolor="white")
        below.set_yscale("symlog", linthresh=10)
        below.set(xlabel="confidence of the guess", ylabel="images", ylim=(0, max(10, 2 * count.max())))
        ticks = [t for t in (1, 10, 100, 1000, 10_000, 100_000, 1_000_000) if t <= max(10, count.max())]
        below.set_yticks(ticks, [f"{t:,}" for t in ticks], color=INK)
        below.minorticks_off()
    return figure
