"""All figures of a model on some images, with the arrays they show, in one folder.

filters, positions, distance    .png, .svg, .npz     of the model; distance over all images
NAME/rollout, layers, heads, steps    .png, .svg     of the image NAME
NAME/arrays.npz                                      the arrays of these, as in `steps.Steps`
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from vitlab.analysis.distance import batch_size, cell_distances, depth_trend, mean_distance
from vitlab.analysis.embeddings import patch_filters, position_similarity, position_trend
from vitlab.analysis.steps import five_steps
from vitlab.data.folder import walk_images, warn_skipped
from vitlab.data.images import BrokenImage, decode
from vitlab.data.transforms import eval_image
from vitlab.errors import UserError
from vitlab.files import atomic_file
from vitlab.models.config import ViTConfig
from vitlab.models.vit import ViT
from vitlab.plots import inside, style
from vitlab.plots.steps import Steps, pick_evenly, steps_figure
from vitlab.terminal import progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_WEIGHTS = ("filters", "positions")
OF_IMAGE = ("rollout", "layers", "heads", "steps")
FIGURES = (*OF_WEIGHTS, "distance", *OF_IMAGE)
LAYERS = 6  # rows of the figure of heads, unless layers are chosen


@dataclass(frozen=True)
class Gallery:
    """The figures to draw of a model, and the folder to write them to. Layers and heads count from 0."""

    model: ViT
    out: Path
    figures: Sequence[str] = FIGURES
    layers: Sequence[int] | None = None  # of the figure of heads; None: a few, from the first to the last
    heads: Sequence[int] | None = None  # None: all

    def __post_init__(self) -> None:
        for name in self.figures:
            if name not in FIGURES:
                raise UserError(f"there is no figure '{name}'; there are {', '.join(FIGURES)}")
        check_numbers("layer", self.layers, len(layer_names(self.model.config)))
        check_numbers("head", self.heads, self.model.config.heads)

    def write(self, paths: Sequence[Path], report: Callable[[str], None]) -> None:
        """Write the chosen figures of the model and of the images at `paths`; report a line for each finished part."""
        if not paths and not set(self.figures) <= set(OF_WEIGHTS):
            raise UserError(f"name at least one image; only the figures {' and '.join(OF_WEIGHTS)} need none")
        with style.drawing():  # without matplotlib this fails now rather than after the work
            pass
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the folder '{self.out}' cannot be made: {error.strerror or error}") from None
        if "filters" in self.figures:
            report(self.write_filters())
        if "positions" in self.figures:
            report(self.write_positions())
        if "distance" in self.figures:
            report(self.write_distance(paths))
        if set(OF_IMAGE) & set(self.figures):
            report(self.write_images(paths))

    # ---- of the model

    def write_filters(self) -> str:
        patch = patch_filters(self.model)
        self.write_figure("filters", inside.filters_figure(patch.filters, patch.shares, patch.stem))
        self.write_arrays("filters", filters=patch.filters, shares=patch.shares)
        if patch.stem:
            return f"filters: the {len(patch.filters)} root filters of the stem (a hybrid's patches are not of pixels)"
        return f"filters: first {len(patch.filters)} principal components"

    def write_positions(self) -> str:
        try:
            similarity = position_similarity(self.model)
        except UserError as none:  # relative offsets, or none at all: nothing to draw, and no error
            return f"positions: no figure, {none}"
        self.write_figure("positions", inside.positions_figure(similarity))
        self.write_arrays("positions", similarity=similarity)
        trend = describe_trend("of similarity with grid distance", position_trend(similarity))
        return f"positions: {' x '.join(map(str, self.model.config.grid))}{trend}"

    def write_distance(self, paths: Sequence[Path]) -> str:
        c = self.model.config
        with progress("distance", len(paths)) as advance:
            distance = mean_distance(self.model, read_batches(self.model, paths, advance))
        even = float(cell_distances(c.grid, c.stride).mean())
        self.write_figure("distance", inside.distance_figure(distance, len(paths), even, c.attention == "axial"))
        self.write_arrays("distance", distance=distance, images=np.array([str(path) for path in paths]))
        images = f"{len(paths):,} image{'s' if len(paths) > 1 else ''}"
        return f"distance: over {images}{describe_trend('of depth with distance', depth_trend(distance))}"

    # ---- of each image

    def write_images(self, paths: Sequence[Path]) -> str:
        names = folder_names(paths)
        with progress("images", len(paths)) as advance:
            for path, name in zip(paths, names, strict=True):
                steps = five_steps(self.model, read_image(self.model, path))
                for figure in [figure for figure in OF_IMAGE if figure in self.figures]:
                    self.write_figure(f"{name}/{figure}", self.image_figure(figure, steps))
                self.write_arrays(f"{name}/arrays", **vars(steps))
                advance(1)
        return f"images: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"

    def image_figure(self, figure: str, steps: Steps) -> "Figure":
        c = self.model.config
        names = layer_names(c)
        whose = "of the class token" if c.token else "of all tokens, averaged"
        if figure == "rollout":
            return inside.rollout_figure(steps.pixels, steps.rollout, whose)
        if figure == "layers":
            return inside.layers_figure(steps.pixels, steps.attention, names, whose)
        if figure == "heads":
            layers = pick_evenly(len(names), LAYERS) if self.layers is None else self.layers
            heads = range(c.heads) if self.heads is None else self.heads
            return inside.heads_figure(steps.pixels, steps.attention, layers, heads, names, whose)
        classes = self.model.card.labels or [f"class {i}" for i in range(c.classes)]
        return steps_figure(steps, names, classes, whose, c.stem is not None)

    # ---- files

    def write_figure(self, name: str, figure: "Figure") -> None:
        style.write(figure, self.out / name, ("png", "svg"))

    def write_arrays(self, name: str, **arrays: Any) -> None:
        with atomic_file(self.out / f"{name}.npz") as file:
            np.savez_compressed(file, **arrays)


def describe_trend(what: str, correlation: float) -> str:
    """A rank correlation as text; "" where there is none, as of one layer."""
    return "" if np.isnan(correlation) else f", rank correlation {what} {correlation:+.2f}"


def layer_names(c: ViTConfig) -> list[str]:
    """Name the attention layers, counted from 1; an axial block has two."""
    axes = (" rows", " columns") if c.attention == "axial" else ("",)
    return [f"{block + 1}{axis}" for block in range(c.depth) for axis in axes]


def check_numbers(what: str, chosen: Sequence[int] | None, count: int) -> None:
    for number in chosen or ():
        if not 0 <= number < count:
            raise UserError(f"there is no {what} {number + 1}; this model has {what}s 1 to {count}")


# ---- reading images


def find_images(words: Sequence[str | Path]) -> list[Path]:
    """Return the files named, and all images in the folders named, at any depth; each once, in this order."""
    paths: dict[Path, None] = {}
    for word in words:
        path = Path(word).expanduser()
        if path.is_dir():
            skipped: list[str] = []
            inside = sorted(Path(file) for file in walk_images(path, skipped))
            warn_skipped(str(word), len(skipped))
            if not inside:
                raise UserError(f"the folder '{word}' holds no images, such as .jpg or .png files")
            paths.update(dict.fromkeys(inside))
        elif path.exists():
            paths[path] = None
        else:
            raise UserError(f"there is no file or folder '{word}'")
    return list(paths)


def read_image(model: ViT, path: Path) -> Tensor:
    """Read a file as the model's input, (3, height, width), preprocessed as in evaluation."""
    try:
        decoded = decode(path, str(path))
    except BrokenImage as broken:
        raise UserError(f"'{broken.name}' cannot be read as an image: {broken.why}") from None
    image = eval_image(decoded, model.config.image_size, model.card.preprocess)
    return image.to(model.embed.weight.device, model.embed.weight.dtype)


def read_batches(model: ViT, paths: Sequence[Path], advance: Callable[[int], None]) -> Iterator[Tensor]:
    size = batch_size(model.config)
    for some in (paths[start : start + size] for start in range(0, len(paths), size)):
        yield torch.stack([read_image(model, path) for path in some])
        advance(len(some))


def folder_names(paths: Sequence[Path]) -> list[str]:
    """Name a folder for each file: the file's name without its ending, numbered from the second of one name on."""
    names: dict[str, str] = {}  # by their lower case, as some file systems do not distinguish it
    for path in paths:
        numbered = (f"{path.stem}-{number}" for number in itertools.count(2))
        name = next(name for name in itertools.chain([path.stem], numbered) if name.lower() not in names)
        names[name.lower()] = name
    return list(names.values())
