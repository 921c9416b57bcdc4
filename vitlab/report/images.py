"""Pictures inside the page: figures for a light and a dark screen, and the mistakes with where the model looked.

Shapes: h and w the model's height and width.
"""

import base64
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from vitlab.analysis.attention import each_attention
from vitlab.analysis.rollout import rollout, to_grid
from vitlab.data.source import ImageSource
from vitlab.data.transforms import eval_pixels, normalize
from vitlab.device import pick_device
from vitlab.evaluation.result import Evaluation
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.plots.inside import overlay
from vitlab.plots.style import COLORS, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 12  # mistakes that are shown
SIDE = 224  # pixels of their pictures: smaller ones are enlarged, larger ones reduced
# The dark page's colors for what is drawn in ink on the light one.
INK, FAINT, LINES, CARD = "#eceae5", "#8b9099", "#31353d", "#1c1f25"
BRIGHTER = dict(zip(COLORS[:3], ("#56B4E9", "#F2934D", "#35C79B"), strict=True))

Bytes = NDArray[np.uint8]


@dataclass(frozen=True)
class Drawn:
    """A figure as two data: addresses, and its size in pixels on the page."""

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
    picture: str  # data: address
    looked: str | None  # the same with the attention over it; None where the model has none


# ---- figures


def drawn(figure: "Figure") -> Drawn:
    width, height = (round(96 * side) for side in figure.get_size_inches())
    light = encode_figure(figure)
    darken(figure)
    return Drawn(light, encode_figure(figure), width, height)


def encode_figure(figure: "Figure") -> str:
    """Without a background: the page's own shows through."""
    file = io.BytesIO()
    save(figure, file, format="png", transparent=True)
    return address(file.getvalue(), "png")


def darken(figure: "Figure") -> None:
    """Ink becomes chalk. Words inside a plot stay: they were chosen to stand out from what lies under them."""
    inside = {id(words) for axes in figure.axes for words in axes.texts}
    for axes in figure.axes:
        axes.tick_params(which="both", colors=INK, grid_color=LINES)
        for spine in axes.spines.values():
            spine.set_edgecolor(FAINT)
        for patch in axes.patches:
            if tuple(patch.get_edgecolor()[:3]) == (1, 1, 1):
                patch.set_edgecolor(CARD)
    found: list[Any] = figure.findobj()
    for artist in found:
        if hasattr(artist, "set_fontsize"):
            if id(artist) not in inside:
                artist.set_color(INK)
        elif hasattr(artist, "get_color") and str(artist.get_color()) in BRIGHTER:
            artist.set_color(BRIGHTER[artist.get_color()])


def address(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


# ---- mistakes


def worst_mistakes(
    found: Evaluation, model: Model, source: ImageSource, device: str, done: Callable[[int], None]
) -> list[Mistake]:
    """The mistakes the model was surest of; only these images are read again. `done` hears of each."""
    wrong = np.flatnonzero(found.guesses != found.labels)
    worst = wrong[np.argsort(-found.confidence[wrong], kind="stable")][:MOST]
    home, place = next(model.parameters()).device, pick_device(device)
    model.eval().to(place)
    mistakes = []
    for i in worst.tolist():
        pixels = eval_pixels(source.image(i), model.config.image_size, model.card.preprocess)
        shown = enlarged(pixels.permute(1, 2, 0).numpy())
        looked = where(model, pixels.to(place), shown) if isinstance(model, ViT) else None
        names = found.names[found.labels[i]], found.names[found.guesses[i]]
        looks = None if looked is None else encode(looked)
        mistakes.append(Mistake(found.files[i], *names, float(found.confidence[i]), encode(shown), looks))
        done(1)
    model.to(home)
    return mistakes


@torch.no_grad()
def where(model: ViT, pixels: torch.Tensor, shown: Bytes) -> Bytes:
    """Attention rollout of the picture (3, h, w) in colors over it as it is shown."""
    image = normalize(pixels[None], model.card.preprocess).to(next(model.parameters()).dtype)
    grid = to_grid(model, rollout(each_attention(model, image)))[0].float().cpu().numpy()
    return (255 * overlay(shown / 255, grid)).round().clip(0, 255).astype(np.uint8)


def enlarged(pixels: Bytes) -> Bytes:
    """Pixels (h, w, 3) at the size of the page; of few, each stays a square."""
    height, width = pixels.shape[:2]
    factor = SIDE / max(height, width)
    if factor >= 2:
        times = round(factor)
        return pixels.repeat(times, 0).repeat(times, 1)
    size = max(1, round(width * factor)), max(1, round(height * factor))
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS)) if factor < 1 else pixels


def encode(pixels: Bytes) -> str:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=88)
    return address(file.getvalue(), "jpeg")
