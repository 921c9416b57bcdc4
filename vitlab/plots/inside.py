"""Figures of learned weights and of attention: arrays in, figures out.

Shapes: height and width of the image in pixels, h and w the grid of patches, L layers, H heads.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitlab.plots.style import COLORS, DPI, FAINT, INK, MAP, bare, drawing, new_figure, shorten

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Floats = NDArray[np.floating[Any]]
HEAT = 0.75  # weight of the brightest color over the gray image; weaker ones are more transparent
TOP = 0.97  # cells above this quantile share the brightest color, so that a few outliers do not hide the rest
NOTE = f"each map in its own scale; the strongest {1 - TOP:.0%} of its patches are equally bright"
MOST = 16  # grids in a row of the figure of positions
WIDTH = 7.0  # inches across a figure, unless it has too many panels


# ---- learned weights


def filters_figure(filters: Floats, shares: Floats, stem: bool) -> "Figure":
    """Draw signed filters (n, P, P, 3) as small images, zero in gray; `shares`: of the variance, for components."""
    n, side = filters.shape[:2]
    columns = min(n, 8 if stem else 7)
    peaks = np.abs(filters).max((1, 2, 3), keepdims=True)
    images = 0.5 + 0.5 * filters / np.where(peaks > 0, peaks, 1)
    with drawing():
        figure, grid = panels(-(-n // columns), columns, (1, 1), WIDTH, each=0.02 if stem else 0.22)
        title = f"Patch embedding, {side} x {side} pixels: first {n} principal components of its filters"
        add_title(figure, f"The stem of this hybrid: {n} root filters of {side} x {side} pixels" if stem else title)
        for i, axes in enumerate(grid.flat[:n]):
            axes.imshow(images[i], interpolation="nearest")
            axes.set_title("" if stem else f"{i + 1}:  {shares[i]:.1%}", fontsize=8, pad=3)
        legend = "each scaled by itself, zero in gray"
        add_note(figure, legend if stem else f"{legend}; in per cent: share of the variance")
    return figure


def positions_figure(similarity: Floats) -> "Figure":
    """Draw cosine similarities (h, w, h, w) as a grid of grids, one of a patch's position with all others.

    Of a large grid only every second, third ... patch has its own grid.
    """
    h, w = similarity.shape[:2]
    step = -(-max(h, w) // MOST)
    rows, columns = range(0, h, step), range(0, w, step)
    mosaic = similarity_mosaic(similarity)
    with drawing():
        down, across = mosaic.shape
        cell = max(3 / DPI, min(5.4 / across, 8 / down))  # inches; three pixels at least
        figure = new_figure(max(WIDTH, cell * across + 1.6), max(2.4, cell * down + 0.9))
        figure.set_layout_engine("compressed", w_pad=0.08, h_pad=0.1)
        axes = figure.subplots()
        shown = axes.imshow(mosaic, cmap=MAP, vmin=similarity.min(), vmax=1, interpolation="nearest")
        bare(axes)
        axes.yaxis.set_ticks([i * (h + 1) + (h - 1) / 2 for i in range(len(rows))], [str(y + 1) for y in rows])
        axes.xaxis.set_ticks([j * (w + 1) + (w - 1) / 2 for j in range(len(columns))], [str(x + 1) for x in columns])
        axes.tick_params(length=0)
        which = "each" if step == 1 else f"every {step}{'nd' if step == 2 else 'rd' if step == 3 else 'th'}"
        figure.suptitle(f"Position embeddings: {which} of the {h} x {w} patches against all of them", fontsize=10)
        axes.set(xlabel="patch column", ylabel="patch row")
        figure.colorbar(shown, ax=axes, label="cosine similarity", aspect=30, pad=0.05 * max(1, down / across))
    return figure


def similarity_mosaic(similarity: Floats) -> Floats:
    """Grids (h, w, h, w) side by side as one array, lines of nan between them; of many, every second, third ..."""
    h, w = similarity.shape[:2]
    shown = similarity[:: -(-max(h, w) // MOST), :: -(-max(h, w) // MOST)]
    mosaic = np.full((len(shown) * (h + 1) - 1, shown.shape[1] * (w + 1) - 1), np.nan)
    for i, j in np.ndindex(shown.shape[:2]):
        mosaic[i * (h + 1) :, j * (w + 1) :][:h, :w] = shown[i, j]
    return mosaic


def distance_figure(distance: Floats, images: int, even: float, axial: bool = False) -> "Figure":
    """Draw mean attention distances (L, H) in pixels: a dot for each head, a line through the layers' means.

    `even`: the distance if attention were spread evenly over all patches.
    """
    layers, heads = distance.shape
    number = np.arange(1, layers + 1)
    with drawing():
        figure = new_figure(WIDTH, 4.2)
        axes = figure.subplots()
        axes.scatter(np.repeat(number, heads), distance.ravel(), s=26, color=COLORS[0], alpha=0.75, label="a head")
        axes.plot(number, distance.mean(1), color=COLORS[1], linewidth=1.6, label="mean of the layer's heads")
        axes.axhline(even, color=FAINT, linestyle="--", linewidth=1, label="attention spread evenly")
        axes.set(xlim=(0.5, layers + 0.5), ylim=(0, None), xticks=number[:: -(-layers // 16)])
        axes.set_xlabel("attention layer" + (" (odd: along rows, even: along columns)" if axial else ""))
        axes.set_ylabel("mean attention distance (pixels)")
        axes.set_title(f"Mean attention distance by depth ({images:,} image{'s' if images != 1 else ''})")
        figure.legend(loc="outside lower center", ncols=3)
    return figure


# ---- attention over an image


def overlay(pixels: Floats, grid: Floats) -> Floats:
    """Lay a map (h, w) in colors over the gray version of an image (height, width, 3) in [0, 1].

    Colors run from the smallest cell, which is transparent, to the `TOP` quantile, bilinear between cells. Returns
    (height, width, 3).
    """
    from matplotlib import colormaps

    smooth = smooth_map(grid, pixels.shape[:2])
    colors = colormaps[MAP](smooth)[..., :3]
    opacity = HEAT * smooth[..., None]
    gray = pixels @ np.array([0.299, 0.587, 0.114])
    return np.asarray(opacity * colors + (1 - opacity) * gray[..., None])


def smooth_map(grid: Floats, size: tuple[int, ...]) -> Floats:
    """A map (h, w) in [0, 1] at the size (height, width): its smallest cell is 0, its `TOP` quantile 1."""
    low, high = float(grid.min()), float(np.quantile(grid, TOP))
    share = ((grid - low) / (high - low)).clip(0, 1) if high > low else (grid > low) * 1.0
    height, width = size
    return np.asarray(Image.fromarray(share.astype(np.float32)).resize((width, height), Image.Resampling.BILINEAR))


def classes_figure(pixels: Floats, maps: Floats, names: Sequence[str], probabilities: Sequence[float]) -> "Figure":
    """Draw an image and the map (n, h, w) of each class over it, with the class's name and probability."""
    count = len(maps) + 1
    columns = min(count, 4)
    with drawing():
        figure, grid = panels(-(-count // columns), columns, pixels.shape, max(5, 2.2 * columns), each=0.36)
        add_title(figure, "Evidence for each class")
        first, *others = grid.flat
        first.imshow(pixels)
        first.set_title("image", pad=3, fontsize=9)
        for axes, one, name, probability in zip(others, maps, names, probabilities, strict=False):
            axes.imshow(overlay(pixels, one))
            text = f"{shorten(name)}\n{probability:.1%}" + ("" if one.any() else ", no evidence for it")
            axes.set_title(text, pad=3, fontsize=9, parse_math=False)  # dollar signs in a name are not mathematics
        for axes in others[len(maps) :]:
            axes.remove()
        add_note(figure, NOTE)
    return figure


def rollout_figure(pixels: Floats, grid: Floats, whose: str) -> "Figure":
    """Draw an image, the rollout (h, w) over it, and the rollout alone with its scale. `whose` attention."""
    height, width = pixels.shape[:2]
    with drawing():
        figure, ((left, middle, right),) = panels(1, 3, pixels.shape, 8.0, right=0.8)
        for axes, image, title in ((left, pixels, "image"), (middle, overlay(pixels, grid), "attention rollout")):
            axes.imshow(image)
            axes.set_title(title, pad=4)
        shown = right.imshow(100 * grid, cmap=MAP, vmin=0, extent=(0, width, height, 0), interpolation="nearest")
        right.set_title("rollout alone", pad=4)
        figure.colorbar(shown, cax=right.inset_axes((1.04, 0, 0.05, 1)), label="% of attention")
        add_title(figure, f"Attention rollout {whose}, through all layers")
        add_note(figure, NOTE)
    return figure


def layers_figure(pixels: Floats, attention: Floats, names: Sequence[str], whose: str) -> "Figure":
    """Draw the attention (L, H, h, w) of each layer, averaged over heads, over the image: one panel per layer."""
    columns = min(len(attention), 6)
    with drawing():
        figure, grid = panels(-(-len(attention) // columns), columns, pixels.shape, max(5, 1.4 * columns), each=0.22)
        add_title(figure, f"Attention {whose} by layer, mean over heads")
        for axes, one, name in zip(grid.flat, attention, names, strict=False):
            axes.imshow(overlay(pixels, one.mean(0)))
            axes.set_title(f"layer {name}", pad=3, fontsize=9)
        add_note(figure, NOTE)
    return figure


def heads_figure(
    pixels: Floats, attention: Floats, layers: Sequence[int], heads: Sequence[int], names: Sequence[str], whose: str
) -> "Figure":
    """Draw single heads of (L, H, h, w) over the image: a row for each of `layers`, a column for each of `heads`."""
    with drawing():
        figure, grid = panels(len(layers), len(heads), pixels.shape, 0.4 + max(4.6, 1.5 * len(heads)), left=0.3)
        add_title(figure, f"Attention {whose} by layer and head")
        for row, layer in zip(grid, layers, strict=True):
            row[0].set_ylabel(f"layer {names[layer]}", fontsize=9)
            for axes, head in zip(row, heads, strict=True):
                axes.imshow(overlay(pixels, attention[layer, head]))
        for axes, head in zip(grid[0], heads, strict=True):
            axes.set_title(f"head {head + 1}", pad=3, fontsize=9)
        add_note(figure, NOTE)
    return figure


def panels(
    rows: int, columns: int, shape: Sequence[int], width: float, *, left: float = 0, right: float = 0, each: float = 0
) -> "tuple[Figure, Any]":
    """Create a figure with rows x columns bare axes for images of (height, width, ...), without gaps.

    In inches: `width` of the figure, `left` and `right` for text beside the panels, `each` row's own titles.
    """
    gap, top, foot = 0.06, 0.34 + (0 if each else 0.22), 0.28
    across = (width - left - right - gap * (columns + 1)) / columns
    down = across * shape[0] / shape[1]
    height = top + rows * (down + each + gap) + foot
    figure = new_figure(width, height, None)  # the positions are exact, so that images touch no text
    grid = np.empty((rows, columns), object)
    for r, c in np.ndindex(rows, columns):
        x, y = left + gap + c * (across + gap), height - top - (r + 1) * (down + each + gap) + gap
        grid[r, c] = figure.add_axes((x / width, y / height, across / width, down / height))
        bare(grid[r, c])
    return figure, grid


def add_title(figure: "Figure", text: str) -> None:
    """Add a title to a figure with exact positions."""
    figure.suptitle(text, y=1 - 0.1 / figure.get_figheight(), va="top", fontsize=10)


def add_note(figure: "Figure", text: str) -> None:
    """Add small text at the bottom of a figure."""
    figure.text(0.5, 0.08 / figure.get_figheight(), text, ha="center", va="bottom", fontsize=7, color=INK)
