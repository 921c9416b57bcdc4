"""All figures of a model on some images, with the arrays they show, in one folder.

filters, positions, distance    .png, .svg, .npz     of the model; distance over all images
NAME/classes, rollout, layers, heads, steps    .png, .svg     of the image NAME
NAME/arrays.npz                                      the arrays of these, as in `steps.Steps` and `ClassMaps`
"""

import difflib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitlab.analysis.attention import check_vit
from vitlab.analysis.class_map import class_map
from vitlab.analysis.distance import batch_size, cell_distances, depth_trend, mean_distance
from vitlab.analysis.embeddings import patch_filters, position_similarity, position_trend
from vitlab.analysis.rollout import sees_token
from vitlab.analysis.steps import denormalize, five_steps, prefix_names, to_array
from vitlab.data.folder import walk_images, warn_skipped
from vitlab.data.images import BrokenImage, decode
from vitlab.data.transforms import eval_image
from vitlab.errors import UserError
from vitlab.files import atomic_file, mark_pictures
from vitlab.models.config import ViTConfig
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.plots import inside, style
from vitlab.plots.steps import Steps, pick_evenly, steps_figure
from vitlab.terminal import progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OF_WEIGHTS = ("filters", "positions")
OF_ATTENTION = ("rollout", "layers", "heads", "steps")
OF_IMAGE = ("classes", *OF_ATTENTION)
FIGURES = (*OF_WEIGHTS, "distance", *OF_IMAGE)
LAYERS = 6  # rows of the figure of heads, unless layers are chosen
CLASSES = 3  # the most probable ones in the figure of classes, unless others are chosen


@dataclass(frozen=True)
class Gallery:
    """The figures to draw of a model, and the folder to write them to. Layers and heads count from 0."""

    model: Model
    out: Path
    figures: Sequence[str] = FIGURES
    layers: Sequence[int] | None = None  # of the figure of heads; None: a few, from the first to the last
    heads: Sequence[int] | None = None  # None: all
    classes: Sequence[int] | None = None  # of the figure of classes; None: the most probable ones

    def __post_init__(self) -> None:
        for name in self.figures:
            if name not in FIGURES:
                raise UserError(f"there is no figure '{name}'; there are {', '.join(FIGURES)}")
        if set(self.figures) <= {"classes"}:
            return  # the only one that a ResNet has
        check_numbers("layer", self.layers, len(layer_names(self.vit.config)))
        check_numbers("head", self.heads, self.vit.config.heads)

    @property
    def vit(self) -> ViT:
        return check_vit(self.model)

    def write(self, paths: Sequence[Path], report: Callable[[str], None]) -> None:
        """Write the chosen figures of the model and of the images at `paths`; report a line for each finished part."""
        if not paths and not set(self.figures) <= set(OF_WEIGHTS):
            raise UserError(f"name at least one image; only the figures {' and '.join(OF_WEIGHTS)} need none")
        with style.drawing():  # without matplotlib this fails now rather than after the work
            pass
        mark_pictures(self.out)
        if "filters" in self.figures:
            report(self.write_filters())
        if "positions" in self.figures:
            report(self.write_positions())
        if "distance" in self.figures:
            report(self.write_distance(paths))
        if "classes" in self.figures and self.model.head is None:
            report("classes: no figure, this model has no head")
        if set(OF_IMAGE) & set(self.figures):
            report(self.write_images(paths))

    # ---- of the model

    def write_filters(self) -> str:
        patch = patch_filters(self.vit)
        self.write_figure("filters", inside.filters_figure(patch.filters, patch.shares, patch.stem))
        self.write_arrays("filters", filters=patch.filters, shares=patch.shares)
        if patch.stem:
            return f"filters: the {len(patch.filters)} root filters of the stem (a hybrid's patches are not of pixels)"
        return f"filters: first {len(patch.filters)} principal components"

    def write_positions(self) -> str:
        try:
            similarity = position_similarity(self.vit)
        except UserError as none:  # relative offsets, or none at all: nothing to draw, and no error
            return f"positions: no figure, {none}"
        self.write_figure("positions", inside.positions_figure(similarity))
        self.write_arrays("positions", similarity=similarity)
        trend = describe_trend("of similarity with grid distance", position_trend(similarity))
        return f"positions: {' x '.join(map(str, self.vit.config.grid))}{trend}"

    def write_distance(self, paths: Sequence[Path]) -> str:
        c = self.vit.config
        with progress("distance", len(paths)) as advance:
            distance = mean_distance(self.vit, read_batches(self.vit, paths, advance))
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
                self.write_image(name, read_image(self.model, path))
                advance(1)
        return f"images: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"

    def write_image(self, name: str, image: Tensor) -> None:
        arrays: dict[str, Any] = {"pixels": denormalize(self.model, image)}
        if "classes" in self.figures and self.model.head is not None:
            found = find_class_maps(self.model, image, self.classes)
            arrays |= vars(found)
            names = [class_names(self.model)[k] for k in found.classes.tolist()]
            drawn = inside.classes_figure(arrays["pixels"], found.class_maps, names, found.probabilities.tolist())
            self.write_figure(f"{name}/classes", drawn)
        of_attention = [figure for figure in OF_ATTENTION if figure in self.figures]
        if of_attention:
            steps = five_steps(self.vit, image)
            arrays |= vars(steps)
            for figure in of_attention:
                self.write_figure(f"{name}/{figure}", self.image_figure(figure, steps))
        self.write_arrays(f"{name}/arrays", **arrays)

    def image_figure(self, figure: str, steps: Steps) -> "Figure":
        c = self.vit.config
        names = layer_names(c)
        whose = "of the class token" if sees_token(c) else "of all tokens, averaged"
        if figure == "rollout":
            return inside.rollout_figure(steps.pixels, steps.rollout, whose)
        if figure == "layers":
            return inside.layers_figure(steps.pixels, steps.attention, names, whose)
        if figure == "heads":
            layers = pick_evenly(len(names), LAYERS) if self.layers is None else self.layers
            heads = range(c.heads) if self.heads is None else self.heads
            return inside.heads_figure(steps.pixels, steps.attention, layers, heads, names, whose)
        cells = prefix_names(c) if c.registers else []  # a class token alone is left out, as in the paper's figures
        settings = {"hybrid": c.stem is not None, "rotary": c.rotary != "none"}
        return steps_figure(steps, names, class_names(self.model), whose, **settings, cells=cells)

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


# ---- classes


@dataclass(frozen=True)
class ClassMaps:
    """The evidence for each of n classes in one image."""

    classes: NDArray[np.int64]  # (n,)
    probabilities: NDArray[np.float32]  # (n,)
    class_maps: NDArray[np.float32]  # (n, h, w)


def find_class_maps(model: Model, image: Tensor, classes: Sequence[int] | None) -> ClassMaps:
    """The maps of these classes of one normalized image (3, height, width), or of the most probable ones."""
    with torch.no_grad():
        logits = model(image[None])[0].float()
    if model.card.thresholds is not None:
        probabilities = logits.sigmoid()
    else:
        probabilities = (logits / model.card.temperature).softmax(-1)
    best = probabilities.argsort(descending=True, stable=True)[:CLASSES]
    chosen = best if classes is None else torch.tensor(classes, device=image.device)
    maps = class_map(model, image.expand(len(chosen), -1, -1, -1), chosen)
    return ClassMaps(chosen.cpu().numpy(), to_array(probabilities[chosen]), to_array(maps))


def class_names(model: Model) -> Sequence[str]:
    return model.card.labels or [f"class {i}" for i in range(model.config.classes)]


def find_class(model: Model, word: str) -> int:
    """The number of a class by its name, in any case, or by its number from 0."""
    names = class_names(model)
    if not names:
        raise UserError(f"there is no class '{word}': this model has no head")
    lower = [name.lower() for name in names]
    if word.lower() in lower:
        return lower.index(word.lower())
    if word.isdecimal() and int(word) < len(names):
        return int(word)
    near = difflib.get_close_matches(word.lower(), lower, 1, 0.5)
    fix = f"did you mean '{names[lower.index(near[0])]}'?" if near else f"such as '{names[0]}'"
    raise UserError(f"there is no class '{word}'; give the name of one of the {len(names)} classes, {fix}")


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


def read_image(model: Model, path: Path) -> Tensor:
    """Read a file as the model's input, (3, height, width), preprocessed as in evaluation."""
    try:
        decoded = decode(path, str(path))
    except BrokenImage as broken:
        raise UserError(f"'{broken.name}' cannot be read as an image: {broken.why}") from None
    image = eval_image(decoded, model.config.image_size, model.card.preprocess)
    weight = next(model.parameters())
    return image.to(weight.device, weight.dtype)


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
