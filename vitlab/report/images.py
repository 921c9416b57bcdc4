"""Images embedded in the page: figures for a light and a dark screen, and the mistakes with the model's attention.

Shapes: h and w the model's height and width.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps

from vitlab.analysis.class_map import class_map
from vitlab.data.images import BrokenImage
from vitlab.data.rng import Ints
from vitlab.data.source import ImageSource
from vitlab.data.transforms import eval_pixels, normalize
from vitlab.device import pick_device
from vitlab.evaluation.result import Evaluation
from vitlab.html import data_url
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.plots.inside import overlay
from vitlab.plots.style import COLORS, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 12  # mistakes that are shown
GROUP = 4  # whose attention is computed at once
SIDE = 224  # pixels of their images: smaller ones are enlarged, larger ones reduced
# The colors of the dark page in place of the light one's text, axes, grid and background.
INK, FAINT, LINES, CARD = "#eceae5", "#8b9099", "#31353d", "#1c1f25"
BRIGHTER = dict(zip(COLORS[:3], ("#56B4E9", "#F2934D", "#35C79B"), strict=True))

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class PageFigure:
    """A figure as two data: URLs, and its size in pixels on the page."""

    light: str
    dark: str
    width: int
    height: int


@dataclass(frozen=True)
class Mistake:
    """A test image that was taken for another class."""

    file: str
    truth: str
    guess: str
    confidence: float
    image: str  # data: URL
    attention: str | None  # data: URL of the image under its attention; None where the model has none


# ---- figures


def embed_figure(figure: "Figure") -> PageFigure:
    """Both versions of a figure; it is left in dark colors."""
    width, height = (round(96 * side) for side in figure.get_size_inches())
    light = png_url(figure)
    darken(figure)
    return PageFigure(light, png_url(figure), width, height)


def png_url(figure: "Figure") -> str:
    """A figure with a transparent background, so that the page's own shows through."""
    file = io.BytesIO()
    save(figure, file, format="png", transparent=True)
    return data_url(file.getvalue(), "png")


def darken(figure: "Figure") -> None:
    """Recolor text, axes and lines for a dark page; text inside a plot keeps its color, chosen for what is under it."""
    inside = {id(text) for axes in figure.axes for text in axes.texts}
    for axes in figure.axes:
        axes.tick_params(which="both", colors=INK, grid_color=LINES)
        for spine in axes.spines.values():
            spine.set_edgecolor(FAINT)
        for patch in axes.patches:
            if tuple(patch.get_edgecolor()[:3]) == (1, 1, 1):
                patch.set_edgecolor(CARD)
    artists: list[Any] = figure.findobj()
    for artist in artists:
        if hasattr(artist, "set_fontsize"):
            if id(artist) not in inside:
                artist.set_color(INK)
        elif hasattr(artist, "get_color") and str(artist.get_color()) in BRIGHTER:
            artist.set_color(BRIGHTER[artist.get_color()])


# ---- mistakes


def worst_mistakes(
    tested: Evaluation,
    model: Model,
    source: ImageSource,
    device: str,
    done: Callable[[int], None],
    *,
    attention: bool = True,
) -> list[Mistake]:
    """The most confident mistakes, with attention where the model has some; only their images are read again.

    `done(1)` is called after each. Raises BrokenImage if one cannot be read any more.
    """
    wrong = np.flatnonzero(tested.guesses != tested.labels)
    worst = wrong[np.argsort(-tested.confidence[wrong], kind="stable")][:MOST].tolist()
    before, target = next(model.parameters()).device, pick_device(device)
    model.eval().to(target)
    mistakes = []
    for start in range(0, len(worst), GROUP):
        group = worst[start : start + GROUP]
        places = group if tested.index is None else tested.index[group].tolist()
        pixels = [eval_pixels(source.image(i), model.config.image_size, model.card.preprocess) for i in places]
        images = [resize_for_page(one.permute(1, 2, 0).numpy()) for one in pixels]
        seen: list[str | None] = [None] * len(group)
        if attention and isinstance(model, ViT):
            maps = evidence(model, torch.stack(pixels).to(target), tested.guesses[group])
            seen = [jpeg_url(overlay_map(image, grid)) for image, grid in zip(images, maps, strict=True)]
        for i, image, look in zip(group, images, seen, strict=True):
            names = tested.names[tested.labels[i]], tested.names[tested.guesses[i]]
            mistakes.append(Mistake(tested.files[i], *names, float(tested.confidence[i]), jpeg_url(image), look))
            done(1)
    model.to(before)
    return mistakes


def evidence(model: ViT, pixels: torch.Tensor, guesses: Ints) -> NDArray[np.float32]:
    """Maps (b, h, w) of the evidence for the predicted classes (b,) in pixels (b, 3, height, width)."""
    images = normalize(pixels, model.card.preprocess).to(next(model.parameters()).dtype)
    return class_map(model, images, torch.from_numpy(guesses)).float().cpu().numpy()


def overlay_map(image: Bytes, grid: NDArray[np.float32]) -> Bytes:
    """A map in colors over the image as the page shows it."""
    return (255 * overlay(image / 255, grid)).round().clip(0, 255).astype(np.uint8)


def resize_for_page(pixels: Bytes) -> Bytes:
    """Pixels (h, w, 3) at the size of the page; a small image is enlarged to squares, without interpolation."""
    height, width = pixels.shape[:2]
    factor = SIDE / max(height, width)
    if factor >= 2:
        times = round(factor)
        return pixels.repeat(times, 0).repeat(times, 1)
    size = max(1, round(width * factor)), max(1, round(height * factor))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)) if factor < 1 else pixels


def square(source: ImageSource, index: int, side: int) -> str | None:
    """The middle of an image as a small square, as a data: URL; None where it cannot be read."""
    try:
        image = source.image(index, lambda size: min(size) / side)
    except BrokenImage:
        return None
    enlarged = min(image.size) < side // 2
    kind = Image.Resampling.NEAREST if enlarged else Image.Resampling.LANCZOS
    return jpeg_url(np.asarray(ImageOps.fit(image, (side, side), kind)))


def jpeg_url(pixels: Bytes) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=88)
    return data_url(file.getvalue(), "jpeg")
