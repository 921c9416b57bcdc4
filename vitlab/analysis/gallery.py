"""Every figure of a model on a set of pictures, with the arrays behind it, in one folder.

filters, positions, distance    .png, .svg, .npz     of the model; distance over all pictures
NAME/rollout, layers, heads, steps    .png, .svg     of the picture NAME
NAME/arrays.npz                                      the arrays of these, as in `steps.Steps`
"""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitlab.analysis.distance import batch_size, cell_distances, depth_trend, mean_distance
from vitlab.analysis.embeddings import patch_filters, position_similarity, position_trend
from vitlab.analysis.steps import Steps, five_steps
from vitlab.data.folder import walk
from vitlab.data.images import BrokenImage, decode
from vitlab.data.transforms import eval_image
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.vit import ViT
from vitlab.plots import inside, style
from vitlab.plots.steps import spread, steps_figure
from vitlab.terminal import progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_WEIGHTS = ("filters", "positions")
OF_PICTURE = ("rollout", "layers", "heads", "steps")
FIGURES = (*OF_WEIGHTS, "distance", *OF_PICTURE)
KINDS = ("png", "svg")
LAYERS = 6  # rows of the figure of heads, unless layers are chosen

Say = Callable[[str], None]


@dataclass(frozen=True)
class Gallery:
    """What to draw of a model, and where to. Layers and heads count from 0."""

    model: ViT
    out: Path
    figures: Sequence[str] = FIGURES
    layers: Sequence[int] | None = None  # of the figure of heads; None: some, from the first to the last
    heads: Sequence[int] | None = None  # None: all

    def __post_init__(self) -> None:
        for name in self.figures:
            if name not in FIGURES:
                raise UserError(f"there is no figure '{name}'; there are {', '.join(FIGURES)}")
        check_numbers("layer", self.layers, len(layer_names(self.model.config)))
        check_numbers("head", self.heads, self.model.config.heads)

    def write(self, paths: Sequence[Path], say: Say) -> None:
        """All that was chosen; `say` hears one line for each finished part."""
        if not paths and any(name not in OF_WEIGHTS for name in self.figures):
            raise UserError(f"name at least one image; only the figures {' and '.join(OF_WEIGHTS)} need none")
        with style.drawing():  # no work before it is known that figures can be drawn
            pass
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the folder '{self.out}' cannot be made: {error.strerror or error}") from None
        if "filters" in self.figures:
            self.filters(say)
        if "positions" in self.figures:
            self.positions(say)
        if "distance" in self.figures:
            self.distance(paths, say)
        if any(name in OF_PICTURE for name in self.figures):
            self.pictures(paths, say)

    # ---- of the model

    def filters(self, say: Say) -> None:
        found = patch_filters(self.model)
        self.keep("filters", inside.filters_figure(found.filters, found.shares, found.stem))
        self.save("filters", {"filters": found.filters, "shares": found.shares})
        what = f"the {len(found.filters)} root filters of the stem (a hybrid's patches are not of pixels)"
        say(f"filters: {what if found.stem else f'first {len(found.filters)} principal components'}")

    def positions(self, say: Say) -> None:
        try:
            similarity = position_similarity(self.model)
        except UserError as none:  # relative offsets, or none at all: nothing to draw, and no mistake
            say(f"positions: no figure, {none}")
            return
        self.keep("positions", inside.positions_figure(similarity))
        self.save("positions", {"similarity": similarity})
        said = told("of similarity with grid distance", position_trend(similarity))
        say(f"positions: {' x '.join(map(str, self.model.config.grid))}{said}")

    def distance(self, paths: Sequence[Path], say: Say) -> None:
        c = self.model.config
        with progress("distance", len(paths)) as advance:
            distance = mean_distance(self.model, batches(self.model, paths, advance))
        even = float(cell_distances(c.grid, c.stride).mean())
        self.keep("distance", inside.distance_figure(distance, len(paths), even, c.attention == "axial"))
        self.save("distance", {"distance": distance, "images": np.array([str(path) for path in paths])})
        images = f"{len(paths):,} image{'s' if len(paths) > 1 else ''}"
        say(f"distance: over {images}{told('of depth with distance', depth_trend(distance))}")

    # ---- of each picture

    def pictures(self, paths: Sequence[Path], say: Say) -> None:
        names = folder_names(paths)
        with progress("pictures", len(paths)) as advance:
            for path, name in zip(paths, names, strict=True):
                steps = five_steps(self.model, read_image(self.model, path))
                for figure in OF_PICTURE:
                    if figure in self.figures:
                        self.keep(f"{name}/{figure}", self.draw(figure, steps))
                self.save(f"{name}/arrays", {f.name: getattr(steps, f.name) for f in fields(steps)})
                advance(1)
        say(f"pictures: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}")

    def draw(self, figure: str, steps: Steps) -> "Figure":
        c = self.model.config
        names = layer_names(c)
        looks = "where the class token looks" if c.token else "where all tokens look, on average"
        if figure == "rollout":
            return inside.rollout_figure(steps.pixels, steps.rollout, looks)
        if figure == "layers":
            return inside.layers_figure(steps.pixels, steps.attention, names, looks)
        if figure == "heads":
            layers = spread(len(names), LAYERS) if self.layers is None else self.layers
            heads = range(c.heads) if self.heads is None else self.heads
            return inside.heads_figure(steps.pixels, steps.attention, layers, heads, names, looks)
        classes = self.model.card.labels or [f"class {i}" for i in range(c.classes)]
        return steps_figure(steps, names, classes, looks, c.stem is not None)

    # ---- on disk

    def keep(self, name: str, figure: "Figure") -> None:
        style.write(figure, self.out / name, KINDS)

    def save(self, name: str, arrays: dict[str, Any]) -> None:
        """The arrays as name.npz, whole or not at all."""
        target, new = self.out / f"{name}.npz", self.out / f"{name}.new.npz"
        try:
            np.savez_compressed(new, **arrays)
            os.replace(new, target)
        except OSError as error:
            raise UserError(f"the arrays cannot be written to '{target}': {error.strerror or error}") from None


def told(what: str, correlation: float) -> str:
    """Nothing where there is no trend to speak of, as of one layer."""
    return "" if np.isnan(correlation) else f", rank correlation {what} {correlation:+.2f}"


def layer_names(c: ViTConfig) -> list[str]:
    """The attention layers, counted from 1; an axial block has two."""
    ways = (" rows", " columns") if c.attention == "axial" else ("",)
    return [f"{block + 1}{way}" for block in range(c.depth) for way in ways]


def check_numbers(what: str, chosen: Sequence[int] | None, count: int) -> None:
    for number in chosen or ():
        if not 0 <= number < count:
            raise UserError(f"there is no {what} {number + 1}; this model has {what}s 1 to {count}")


# ---- pictures in


def find_images(words: Sequence[str | Path]) -> list[Path]:
    """The files named, and all images in the folders named, at any depth; each once, in this order."""
    found: dict[Path, None] = {}
    for word in words:
        path = Path(word).expanduser()
        if path.is_dir():
            inside = sorted(Path(file) for file in walk(path))
            if not inside:
                raise UserError(f"the folder '{word}' holds no images, such as .jpg or .png files")
            found.update(dict.fromkeys(inside))
        elif path.exists():
            found[path] = None
        else:
            raise UserError(f"there is no file or folder '{word}'")
    return list(found)


def read_image(model: ViT, path: Path) -> Tensor:
    """A file as the model's input, (3, height, width), framed as in evaluation."""
    try:
        picture = decode(path, str(path))
    except BrokenImage as broken:
        raise UserError(f"'{broken.name}' cannot be read as an image: {broken.why}") from None
    image = eval_image(picture, model.config.image_size, model.card.preprocess)
    return image.to(model.embed.weight.device, model.embed.weight.dtype)


def batches(model: ViT, paths: Sequence[Path], advance: Callable[[int], None]) -> Iterator[Tensor]:
    size = batch_size(model.config)
    for start in range(0, len(paths), size):
        some = paths[start : start + size]
        yield torch.stack([read_image(model, path) for path in some])
        advance(len(some))


def folder_names(paths: Sequence[Path]) -> list[str]:
    """A folder for each file, called as the file without its ending; a second of one name gets a number."""
    taken: set[str] = set()
    names = []
    for path in paths:
        name, number = path.stem, 1
        while name.lower() in taken:
            number += 1
            name = f"{path.stem}-{number}"
        taken.add(name.lower())
        names.append(name)
    return names
