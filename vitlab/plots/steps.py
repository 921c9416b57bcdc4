"""The five steps of a ViT on one image, in one figure.

Shapes: height and width of the image in pixels, h and w the grid of patches, L layers, H heads, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vitlab.plots.inside import NOTE, add_note, overlay
from vitlab.plots.style import COLORS, FAINT, bare, drawing, new_figure, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.float32]
DEPTHS = 6  # depths shown: two small images under each large one
CLASSES = 8  # classes shown
CELLS = 8  # tokens before the patches shown


@dataclass(frozen=True)
class Steps:
    """The intermediate results of one image, as `vitlab.analysis.steps.five_steps` computes them.

    An axial block has two attention layers, and counts twice in L.
    """

    pixels: Floats  # (height, width, 3) in [0, 1]: the model's input, denormalized
    tokens: Floats  # (h, w, 3) in [0, 1]: the patch tokens before positions, in colors by PCA
    positions: Floats  # (h, w, 3) in [0, 1]: the position embeddings likewise; zeros where there are none at the stem
    depths: Floats  # (blocks, h, w, 3): the tokens after each block, a PCA each, signs as in the block before
    attention: Floats  # (L, H, h, w): of the class token (or of all tokens, on average); each sums to 1
    rollout: Floats  # (h, w): the same through all layers
    logits: Floats  # (K,); empty where the model has no head
    prefix: Floats  # (blocks, P, 3): class token and registers after each block, on the axes of its patches' PCA
    prefix_attention: Floats  # (L, H, P): the share of the attention that goes to them, before `attention` is scaled


def steps_figure(
    steps: Steps,
    names: Sequence[str],
    classes: Sequence[str],
    whose: str,
    *,
    hybrid: bool = False,
    rotary: bool = False,
    cells: Sequence[str] = (),
) -> "Figure":
    """Draw the steps; `names` of the attention layers, `classes` of the model, `whose` attention is shown.

    `cells` are the names of the tokens before the patches, to be drawn as cells of their own; none: they are left out.
    """
    h, w = steps.tokens.shape[:2]
    with drawing():
        sheet = Sheet(steps.pixels.shape[0] / steps.pixels.shape[1], strip=0.36 if cells else 0.0)
        patches, tokens, positions = (sheet.large(i) for i in range(3))
        draw_patches(patches, steps.pixels, (h, w))
        patches.set_title(f"1  {h} x {w} cells of the stem's map" if hybrid else f"1  cut into {h} x {w} patches")
        draw_colors(tokens, steps.tokens, "2  a token for each, colored by PCA")
        if steps.positions.any():
            draw_colors(positions, steps.positions, "3  positions, colored by PCA")
        else:
            positions.set_title("3  rotary positions, in every layer" if rotary else "3  no positions at the stem")
        draw_depths(sheet, steps, names, whose, cells)
        draw_scores(sheet.side(), steps.logits, classes)
        add_note(sheet.figure, NOTE)
    return sheet.figure


class Sheet:
    """The layout in inches: three large images, two rows of six small ones, a column at the right."""

    def __init__(self, ratio: float, strip: float = 0.0) -> None:
        self.gap, self.words, self.right = 0.08, 0.3, 2.5
        self.strip = strip  # under each small image, for the tokens that are no patches
        self.width = 10.4
        self.big = (self.width - self.right - 4 * self.gap) / 3
        self.small = (self.big - self.gap) / 2
        self.ratio = ratio  # height to width of an image
        self.height = (self.big + 2 * self.small) * ratio + 3 * self.words + self.gap + 0.35 + 2 * strip
        self.figure = new_figure(self.width, self.height, None)

    def add_axes(self, left: float, top: float, width: float, height: float) -> Any:
        place = (left / self.width, 1 - (top + height) / self.height, width / self.width, height / self.height)
        return self.figure.add_axes(place)

    def large(self, column: int) -> Any:
        return self.image_axes(self.gap + column * (self.big + self.gap), self.words, self.big)

    def small_top(self, row: int) -> float:
        """The upper edge of a row of small images."""
        return self.big * self.ratio + 3 * self.words + row * (self.small * self.ratio + self.gap + self.strip)

    def little(self, row: int, column: int) -> Any:
        return self.image_axes(self.gap + column * (self.small + self.gap), self.small_top(row), self.small)

    def cells(self, row: int, column: int) -> Any:
        """The axes under a small image."""
        top = self.small_top(row) + self.small * self.ratio + 0.05
        axes = self.add_axes(self.gap + column * (self.small + self.gap), top, self.small, 0.17)
        bare(axes)
        return axes

    def image_axes(self, left: float, top: float, width: float) -> Any:
        axes = self.add_axes(left, top, width, width * self.ratio)
        bare(axes)
        return axes

    def side(self) -> Any:
        end = self.small_top(1) + self.small * self.ratio + self.strip
        return self.add_axes(self.width - self.right + 0.15, self.words, self.right - 0.45, end - self.words)


def draw_depths(sheet: Sheet, steps: Steps, names: Sequence[str], whose: str, cells: Sequence[str]) -> None:
    """Draw step 4 in two rows: attention over the image, and the tokens after the block, at some depths.

    With `cells`, the tokens that are no patches have a row of cells under each: their share of the attention in
    percent, and their colors.
    """
    per_block = len(steps.attention) // len(steps.depths)  # two in an axial block: its last is shown
    text, top = f"4  attention {whose} by depth; below it the tokens after that layer", sheet.small_top(0) - 0.27
    if cells:
        text = f"4  attention {whose} by depth, tokens below it; {describe_cells(cells)}"
    sheet.figure.text(sheet.gap / sheet.width, 1 - top / sheet.height, text, fontsize=10, va="baseline")
    for column, block in enumerate(pick_evenly(len(steps.depths), DEPTHS)):
        layer = (block + 1) * per_block - 1
        axes = sheet.little(0, column)
        axes.imshow(overlay(steps.pixels, steps.attention[layer].mean(0)))
        axes.set_title(f"layer {names[layer]}", fontsize=9, pad=3)
        draw_colors(sheet.little(1, column), steps.depths[block], "")
        if cells:
            shares = steps.prefix_attention[layer].mean(0)
            draw_cells(sheet.cells(0, column), cells, 1 - np.repeat(shares[:, None], 3, 1), 100 * shares)
            draw_cells(sheet.cells(1, column), cells, steps.prefix[block], None)


def describe_cells(cells: Sequence[str]) -> str:
    """The tokens that are no patches, in words."""
    more = f", {CELLS} shown" if len(cells) > CELLS else ""
    return ("C class token, " if "C" in cells else "") + f"R registers, in %{more}"


def draw_cells(axes: Any, names: Sequence[str], colors: Floats, percent: Floats | None) -> None:
    """Draw a labeled cell for each token; with a number in it, if there are any."""
    shown = min(len(names), CELLS)
    for i in range(shown):
        axes.bar(i + 0.5, 1, 0.88, color=[colors[i]], edgecolor=FAINT, linewidth=0.5)
        axes.text(i + 0.5, -0.18, names[i], ha="center", va="top", fontsize=6)
        if percent is not None:
            ink = "white" if percent[i] > 50 else "black"
            axes.text(i + 0.5, 0.45, f"{percent[i]:.0f}", ha="center", va="center", fontsize=6, color=ink)
    axes.set(xlim=(0, max(shown, 4)), ylim=(-0.03, 1.03))


def draw_patches(axes: Any, pixels: Floats, grid: tuple[int, int]) -> None:
    """Draw the image with the borders of its patches."""
    height, width = pixels.shape[:2]
    axes.imshow(pixels, extent=(0, width, height, 0))
    axes.hlines(np.linspace(0, height, grid[0] + 1)[1:-1], 0, width, color="white", linewidth=0.6)
    axes.vlines(np.linspace(0, width, grid[1] + 1)[1:-1], 0, height, color="white", linewidth=0.6)


def draw_colors(axes: Any, colors: Floats, title: str) -> None:
    axes.imshow(colors, aspect="auto", interpolation="nearest")
    axes.set_title(title)


def draw_scores(axes: Any, logits: Floats, classes: Sequence[str]) -> None:
    """Draw the most probable classes as bars, names above them."""
    axes.set_title("5  class scores" if len(logits) else "5  this model has no head")
    if not len(logits):
        bare(axes)
        return
    powers = np.exp(logits.astype(np.float64) - logits.max())
    shares = powers / powers.sum()
    best = np.argsort(-shares, kind="stable")[:CLASSES]
    axes.barh(np.arange(len(best)), shares[best], color=COLORS[4], height=0.34)
    for i, k in enumerate(best):  # dollar signs in a name are not mathematics
        axes.text(0.01, i - 0.22, shorten(classes[k]), va="bottom", fontsize=8, parse_math=False)
        x, side = (shares[k] - 0.02, "right") if shares[k] > 0.75 else (shares[k] + 0.02, "left")
        axes.text(x, i, f"{shares[k]:.1%}", va="center", ha=side, fontsize=8)
    axes.set(xlim=(0, 1), ylim=(CLASSES - 0.5, -0.7), yticks=[])
    axes.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
    axes.grid(False, axis="y")


def pick_evenly(count: int, most: int) -> list[int]:
    """Choose at most `most` of `count` indices, evenly from the first to the last."""
    return sorted({round(float(i)) for i in np.linspace(0, count - 1, min(most, count))})
