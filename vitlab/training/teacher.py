"""A teacher: another model, whose answers to the very same images a run learns, after augmentation and mixing.

From its probabilities: T^2 times the cross-entropy of the student's softmax(logits / T) against the teacher's, over the
data's classes; the true labels have the rest of the loss. The factor T^2 keeps gradients as large as at T = 1.

From its features, where the heads differ: a linear map, trained along and not part of the model, predicts the teacher's
features from the student's. The teacher's are standardized, image by image, so that the squared error starts at 1.

Shapes: B batch, K classes of the data, D and E the student's and the teacher's features.
"""

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitlab.cost import cost
from vitlab.data import imagenet
from vitlab.data.loader import Batch
from vitlab.data.resident import resize_weights
from vitlab.errors import UserError
from vitlab.evaluation.classes import imagenet_order, match_classes, quote_names
from vitlab.kernels.class_token import use_class_token
from vitlab.models.config import Preprocess, ResNetConfig, Size
from vitlab.models.variants import Model, build
from vitlab.training.masked import MaskedPatches
from vitlab.training.objectives import LOSSES, Objective, at_least_float32
from vitlab.training.parallel import repeated_blocks
from vitlab.training.recipe import Recipe
from vitlab.weights.load import find_origin, load

ALTERNATIVE = "learn its features, which need no classes: teacher_share=0 teacher_features=1"
Kind = Literal["softmax", "sigmoid"]
log = logging.getLogger("vitlab")


# ---- find it


def open_teacher(recipe: Recipe, classes: tuple[str, ...]) -> Model | None:
    """The recipe's teacher, with the data's classes for its own where its probabilities are learned."""
    if recipe.teacher is None:
        return None
    if not recipe.teacher_share:
        return load(recipe.teacher, classes=0)
    return keep_classes(load(recipe.teacher), classes, recipe.teacher)


def keep_classes(model: Model, classes: tuple[str, ...], name: str) -> Model:
    """A teacher with the rows of its head that are the data's classes, in their order, and no others.

    So its probabilities are those of the data's classes given that it is one of them.
    """
    own, count = model.card.labels, model.config.classes
    if model.head is None:
        raise UserError(f"the teacher {name} has no classes to learn the probabilities of; {ALTERNATIVE}")
    try:
        found = match_classes(own, count, classes)
    except UserError:
        raise UserError(describe_unmatched(own, count, classes, name)) from None
    log.info("the teacher's classes were matched %s", found.note)
    rows = torch.from_numpy(found.place)
    model.head.weight.data, model.head.bias.data = model.head.weight.data[rows], model.head.bias.data[rows]
    thresholds = model.card.thresholds and tuple(model.card.thresholds[row] for row in found.place.tolist())
    model.card = dataclasses.replace(model.card, labels=classes, thresholds=thresholds, unknown=None)
    return model


def describe_unmatched(own: tuple[str, ...] | None, count: int, classes: tuple[str, ...], name: str) -> str:
    known = set(own or ())
    missing = [each for each in classes if each not in known]
    if imagenet_order(own, count) is not None:
        missing = imagenet.unknown_names(classes)
    if own is None and len(missing) == len(classes):
        what = f"the teacher {name} has {count} classes without names, and the data's are {quote_names(classes)}"
    else:
        what = f"the teacher {name} has no class, or several, for {len(missing)} of the data's {len(classes)}: "
        what += quote_names(missing)
    return f"{what}; name the data's classes as the teacher does, or by their synsets, or {ALTERNATIVE}"


def name_teacher(recipe: Recipe) -> dict[str, str]:
    """What provenance holds of a teacher: its name and the digest of its file; nothing without one."""
    if recipe.teacher is None:
        return {}
    origin = find_origin(recipe.teacher)
    return {"teacher": origin["source"], "teacher_sha256": origin["sha256"]}


def check_same_teacher(recipe: Recipe, provenance: Mapping[str, str], out: Path) -> None:
    """Raise UserError unless a run continues with the teacher it began with, wherever that is now."""
    before, now = provenance.get("teacher_sha256"), name_teacher(recipe).get("teacher_sha256")
    if before != now:
        has = f"the teacher {provenance.get('teacher', '')[:100]!r} (sha256 {before[:12]})" if before else "no teacher"
        asked = f"{recipe.teacher} (sha256 {now[:12]})" if now else "none"
        raise UserError(f"the run in {out} has {has}, not {asked}; continue it with its own, or use a new --out")


# ---- what it sees


class Teacher(nn.Module):
    """A model that looks at a student's batches, at its own resolution and in its own normalization; never trained."""

    pixels_scale: Tensor
    pixels_shift: Tensor
    scale: Tensor
    shift: Tensor
    rows: Tensor
    columns: Tensor

    def __init__(self, model: Model, preprocess: Preprocess, size: Size) -> None:
        """`preprocess` and `size` are those of the student's batches."""
        super().__init__()
        self.model = model
        own, to = model.card.preprocess, model.config.image_size
        self.is_normalized = (own.mean, own.std) == (preprocess.mean, preprocess.std)
        self.is_resized = size != to
        tables = {
            "pixels_scale": channels(preprocess.std),
            "pixels_shift": channels(preprocess.mean),
            "scale": 1 / channels(own.std),
            "shift": -channels(own.mean) / channels(own.std),
            "rows": resize_matrix(size[0], to[0], own),
            "columns": resize_matrix(size[1], to[1], own),
        }
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)
        use_class_token(model)
        self.eval().requires_grad_(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, K) and features (B, E) of a student's images; without a head, the features twice."""
        features = self.model.features(self.see(images))
        return (features if self.model.head is None else self.model.head(features)), features

    def see(self, images: Tensor) -> Tensor:
        """A student's images as the teacher takes them: not normalized any more, resized as by Pillow, normalized."""
        if self.is_normalized and not self.is_resized:
            return images
        with torch.autocast(images.device.type, enabled=False):  # pixels keep their precision
            pixels = images * self.pixels_scale + self.pixels_shift  # (B, 3, h, w) in [0, 1]
            if self.is_resized:
                pixels = (self.rows @ (pixels @ self.columns.T)).clamp(0, 1)  # cubic weights go beyond the ends
            return pixels * self.scale + self.shift


def channels(values: tuple[float, float, float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


def resize_matrix(side: int, to: int, preprocess: Preprocess) -> Tensor:
    """(to, side): Pillow's resize of one side, antialiased where it shrinks, by the teacher's own filter."""
    low, high = torch.tensor([[0.0], [side]], dtype=torch.float64)
    return resize_weights(low, high, to, side, preprocess.interpolation)[0].double()


def image_bytes(model: Model, *, bf16: bool) -> int:
    """Memory that a teacher needs for an image: what a block computes, and the image resized and normalized."""
    kept = cost(lambda: build(model.config)).activation_bytes * (1 if bf16 else 2)
    height, width = model.config.image_size
    return kept // max(1, len(repeated_blocks(model))) + 3 * 3 * 4 * height * width


# ---- what is learned from it


class Mapped(nn.Module):
    """A student whose features are mapped to its teacher's; the student inside is the run's product."""

    def __init__(self, student: Model | MaskedPatches, width: int) -> None:
        super().__init__()
        self.student = student
        inside = student.vit if isinstance(student, MaskedPatches) else student
        self.map = nn.Linear(feature_width(inside), width)
        nn.init.zeros_(self.map.weight)
        nn.init.zeros_(self.map.bias)

    def forward(self, *inputs: Any, mapped: bool = False) -> Any:
        """The student's own output and, if asked for, its mapped features (B, E) too."""
        if not mapped:
            return self.student(*inputs)
        output, features = with_features(self.student, *inputs)
        return output, self.map(features)


def with_features(student: Model | MaskedPatches, images: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """A student's output and its features (B, D): of masked patches, those of the corrupted image."""
    if isinstance(student, MaskedPatches):
        tokens = student.tokens(images, *rest)
        return student.predict(tokens), student.vit.pool_tokens(tokens)
    features = student.features(images)
    return (features if student.head is None else student.head(features)), features


def feature_width(model: Model) -> int:
    return model.config.channels if isinstance(model.config, ResNetConfig) else model.config.features


@dataclass(frozen=True)
class Distillation:
    """The loss of a run with a teacher, of which `own` is the part of the labels, or of the masked patches."""

    own: Objective
    teacher: nn.Module
    kind: Kind
    share: float  # of the teacher's probabilities; the rest is `own`
    temperature: float
    features: float  # weight of the features' error, beside both
    separate: bool = False  # the teacher's probabilities are a yes or no for each class, not one of all

    def loss(self, module: nn.Module, batch: Batch, step: int) -> Tensor:
        """The mean loss of a micro-batch; the module is called once."""
        taught, shown = self.teacher(batch.images)
        kept: list[tuple[Tensor, Tensor | None]] = []

        def student(*inputs: Any) -> Tensor:
            kept.append(module(*inputs, mapped=True) if self.features else (module(*inputs), None))
            return kept[0][0]

        losses = []
        if self.share < 1:
            losses.append((1 - self.share) * self.own.loss(student, batch, step))
        else:
            student(batch.images)
        logits, mapped = kept[0]
        if self.share:
            losses.append(self.share * self.probability_loss(logits, taught))
        if mapped is not None:
            losses.append(self.features * feature_loss(mapped, shown))
        return torch.stack(losses).sum()

    def probability_loss(self, logits: Tensor, taught: Tensor) -> Tensor:
        """T^2 times the loss of the student's logits (B, K) against the teacher's probabilities, both at T."""
        t = self.temperature
        taught = at_least_float32(taught) / t
        likely = taught.sigmoid() if self.separate else taught.softmax(-1)
        return t * t * LOSSES[self.kind](at_least_float32(logits) / t, likely)


def make_lesson(recipe: Recipe, own: Objective, model: Model, teacher: nn.Module) -> Distillation:
    """What a recipe learns from a teacher, `model`, that is called as `teacher`."""
    r = recipe
    separate = r.objective == "sigmoid" and model.card.thresholds is not None
    kind: Kind = "sigmoid" if r.objective == "sigmoid" else "softmax"
    return Distillation(own, teacher, kind, r.teacher_share, r.teacher_temperature, r.teacher_features, separate)


def feature_loss(mapped: Tensor, shown: Tensor) -> Tensor:
    """The mean squared error of mapped features (B, E) against the teacher's, each image's of mean 0 and variance 1."""
    target = F.layer_norm(at_least_float32(shown), shown.shape[-1:])
    return F.mse_loss(at_least_float32(mapped), target)
