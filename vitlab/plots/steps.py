"""The five steps on one picture, in one figure.

Shapes: height and width of the picture in pixels, h and w the grid of patches, L layers, H heads, K classes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from vitlab.plots.inside import NOTE, note, overlay
from vitlab.plots.style import COLORS, bare, drawing, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.floating[Any]]
DEPTHS = 6  # depths shown: two small pictures under each large one
CLASSES = 8  # classes shown
LETTERS = 24  # of a class's name


class Steps(Protocol):
    """What `vitlab.analysis.steps.five_steps` gives."""

    @property
    def pixels(self) -> Floats: ...  # (height, width, 3)
    @property
    def tokens(self) -> Floats: ...  # (h, w, 3)
    @property
    def positions(self) -> Floats: ...  # (h, w, 3); zeros: none
    @property
    def depths(self) -> Floats: ...  # (blocks, h, w, 3)
    @property
    def attention(self) -> Floats: ...  # (L, H, h, w)
    @property
    def logits(self) -> Floats: ...  # (K,)


def steps_figure(steps: Steps, names: Sequence[str], classes: Sequence[str], looks: str, hybrid: bool) -> "Figure":
    """`names`: of the attention layers; `classes`: of the classes; `looks`: whose attention is shown."""
    h, w = steps.tokens.shape[:2]
    with drawing():
        sheet = Sheet(steps.pixels.shape[0] / steps.pixels.shape[1])
        patches, tokens, places = (sheet.large(i) for i in range(3))
        cut(patches, steps.pixels, (h, w))
        patches.set_title(f"1  {h} x {w} cells of the stem's map" if hybrid else f"1  cut into {h} x {w} patches")
        paint(tokens, steps.tokens, "2  a token for each, colored by PCA")
        if steps.positions.any():
            paint(places, steps.positions, "3  positions, colored by PCA")
        else:
            places.set_title("3  no positions at the stem")
        by_depth(sheet, steps, names, looks)
        bars(sheet.side(), steps.logits, classes)
        note(sheet.figure, NOTE)
    return sheet.figure


class Sheet:
    """Where things stand, in inches: three large pictures, two rows of six small ones, a column at the right."""

    def __init__(self, ratio: float) -> None:
        self.gap, self.words, self.right = 0.08, 0.3, 2.5
        self.width = 10.4
        self.big = (self.width - self.right - 4 * self.gap) / 3
        self.small = (self.big - self.gap) / 2
        self.ratio = ratio  # height to width of a picture
        self.height = (self.big + 2 * self.small) * ratio + 3 * self.words + self.gap + 0.35
        self.figure = new_figure(self.width, self.height)
        self.figure.set_layout_engine("none")

    def axes(self, left: float, top: float, width: float, height: float) -> Any:
        place = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(place)

    def large(self, column: int) -> Any:
        axes = self.axes(self.gap + column * (self.big + self.gap), self.words, self.big, self.big * self.ratio)
        bare(axes)
        return axes

    def row(self, row: int) -> float:
        """The upper edge of a row of small pictures."""
        first = self.big * self.ratio + 3 * self.words
        return first + row * (self.small * self.ratio + self.gap)

    def little(self, row: int, column: int) -> Any:
        left = self.gap + column * (self.small + self.gap)
        axes = self.axes(left, self.row(row), self.small, self.small * self.ratio)
        bare(axes)
        return axes

    def say(self, top: float, words: str) -> None:
        self.figure.text(self.gap / self.width, 1 - top / self.height, words, fontsize=10, va="baseline")

    def side(self) -> Any:
        end = self.row(1) + self.small * self.ratio
        return self.axes(self.width - self.right + 0.15, self.words, self.right - 0.45, end - self.words)


def by_depth(sheet: Sheet, steps: Steps, names: Sequence[str], looks: str) -> None:
    """Step 4 in two rows: attention over the picture, and the tokens after the block, at some depths."""
    per_block = len(steps.attention) // len(steps.depths)  # two in an axial block: its last is shown
    sheet.say(sheet.row(0) - 0.27, f"4  attention by depth: {looks}; below it the tokens after that layer")
    for column, block in enumerate(spread(len(steps.depths), DEPTHS)):
        layer = (block + 1) * per_block - 1
        axes = sheet.little(0, column)
        axes.imshow(overlay(steps.pixels, steps.attention[layer].mean(0)))
        axes.set_title(f"layer {names[layer]}", fontsize=9, pad=3)
        paint(sheet.little(1, column), steps.depths[block], "")


def cut(axes: Any, pixels: Floats, grid: tuple[int, int]) -> None:
    """The picture with the lines along which it is cut."""
    height, width = pixels.shape[:2]
    axes.imshow(pixels, extent=(0, width, height, 0))
    axes.hlines(np.linspace(0, height, grid[0] + 1)[1:-1], 0, width, color="white", linewidth=0.6)
    axes.vlines(np.linspace(0, width, grid[1] + 1)[1:-1], 0, height, color="white", linewidth=0.6)


def paint(axes: Any, colors: Floats, title: str) -> None:
    axes.imshow(colors, aspect="auto", interpolation="nearest")
    axes.set_title(title)


def bars(axes: Any, logits: Floats, classes: Sequence[str]) -> None:
    """The likeliest classes as bars, names above them."""
    axes.set_title("5  class scores" if len(logits) else "5  this model has no head")
    if not len(logits):
        bare(axes)
        return
    powers = np.exp(logits.astype(np.float64) - logits.max())
    shares = powers / powers.sum()
    best = np.argsort(-shares, kind="stable")[:CLASSES]
    axes.barh(np.arange(len(best)), shares[best], color=COLORS[4], height=0.34)
    for i, k in enumerate(best):  # a name may hold dollars, which are not mathematics
        axes.text(0.01, i - 0.22, clipped(classes[k]), va="bottom", fontsize=8, parse_math=False)
        inner = shares[k] > 0.75
        place, side = (shares[k] - 0.02, "right") if inner else (shares[k] + 0.02, "left")
        axes.text(place, i, f"{shares[k]:.1%}", va="center", ha=side, fontsize=8)
    axes.set_xlim(0, 1)
    axes.set_ylim(CLASSES - 0.5, -0.7)
    axes.set_yticks([])
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.grid(False, axis="y")


def clipped(name: str) -> str:
    return name if len(name) <= LETTERS else name[: LETTERS - 1].rstrip(" ,") + "…"


def spread(count: int, most: int) -> list[int]:
    """At most `most` of `count`, evenly from the first to the last."""
    return sorted({round(float(i)) for i in np.linspace(0, count - 1, min(most, count))})
