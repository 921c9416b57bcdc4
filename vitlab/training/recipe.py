"""A run as data: model, data, length, optimizer and the rest, checked once, with `key=value` overrides."""

import dataclasses
import typing
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from vitlab.data.loader import BROKEN_LIMIT
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.models.config import AttentionKind, Gelu, Placement, Pool, PositionKind, Preprocess, Size
from vitlab.settings import at_least, check_rate, check_types, parse_settings
from vitlab.text import listed
from vitlab.training.objectives import ObjectiveName
from vitlab.training.optim import Decay, OptimizerName
from vitlab.training.parallel import Parallel

Precision = Literal["auto", "float32", "bfloat16", "float64"]
Compile = Literal["auto", "yes", "no"]
Freeze = Literal["none", "body"]

MODEL_KEYS = (
    *("depth", "width", "mlp", "heads", "pool", "prelogits", "positions", "placement", "attention"),
    *("gelu", "dropout", "drop_path"),
)
MOST = {"batch": 10_000_000, "steps": 10**12, "epochs": 10**9, "warmup": 10**12, "workers": 1_024, "threads": 1_024}
# What may change between a run and its continuation: it is the same run, on another machine to another rounding.
LOOSE = ("workers", "device", "parallel", "checkpoint_every", "log_every", "tensorboard", "data")


@dataclass(frozen=True)
class Recipe:
    """Everything a run is determined by."""

    model: str
    data: str
    image_size: Size = (224, 224)
    weights: str | None = None  # what to start from, as vitlab.load takes it; none: fresh
    objective: ObjectiveName = "softmax"
    freeze: Freeze = "none"  # body: only the head learns

    # the model's own settings; none: as the variant, or the weights, have it
    depth: int | None = None
    width: int | None = None
    mlp: int | None = None
    heads: int | None = None
    pool: Pool | None = None
    prelogits: int | None = None
    positions: PositionKind | None = None
    placement: Placement | None = None
    attention: AttentionKind | None = None
    gelu: Gelu | None = None
    dropout: float | None = None
    drop_path: float | None = None

    # data
    subset: float | None = None
    per_class: int | None = None
    holdout: float = 0.2  # share held out where the data has no split of its own
    augment: Augment = field(default_factory=Augment)
    preprocess: Preprocess | None = None  # none: the weights' own, or [-1, 1]
    resident: bool | None = None  # hold the set in the device's memory; none: where it fits
    broken_limit: float = BROKEN_LIMIT  # share of broken images passed over before the run gives up
    hash_data: bool = False  # --resume compares the images' content too, not only their names, sizes and labels

    # length, by epochs or by steps
    epochs: float | None = None
    steps: int | None = None
    batch: int = 4096
    micro: int | None = None  # images of a process at a time; none: what its memory carries

    # optimizer
    optimizer: OptimizerName = "adamw"
    lr: float = 1e-3
    warmup: int = 0
    decay: Decay = "cosine"
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    momentum: float = 0.9
    clip: float = 0.0  # most the gradient's norm may be; 0: not clipped
    ema: float = 0.0  # Polyak averaging; 0: none

    # how it runs
    seed: int = 0
    device: str = "auto"
    precision: Precision = "auto"
    compile: Compile = "auto"
    cuda_graph: bool = False  # where one GPU takes a batch whole, AdamW's step as one CUDA graph: for small models
    recompute: bool = False  # activation checkpointing: less memory, a third more compute
    parallel: Parallel = "ddp"  # under torchrun: the whole model in each process, or its parts
    workers: int | None = None  # processes that read images; none: by the machine
    threads: int | None = None  # of the CPU's arithmetic; none: torch's choice. Another number rounds differently
    evaluate_every: int | None = None  # steps; none: up to ten times a run
    checkpoint_every: int = 500
    log_every: int = 10
    tensorboard: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("batch", "checkpoint_every", "log_every"):
            at_least(self, name, 1)
        for name in ("warmup", "seed"):
            at_least(self, name, 0)
        if self.workers is not None:
            at_least(self, "workers", 0)
        check_rate(self, "broken_limit")
        for name in ("steps", "micro", "evaluate_every", "threads"):
            if getattr(self, name) is not None:
                at_least(self, name, 1)
        for name, most in MOST.items():
            if (getattr(self, name) or 0) > most:
                raise UserError(f"{name} must be at most {most:,}, not {getattr(self, name)}")
        for name in ("lr", "weight_decay", "clip"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise UserError(f"{name} must be a number from 0 up, not {getattr(self, name)}")
        for name in ("beta1", "beta2", "momentum", "ema"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if self.epochs is not None and not 0 < self.epochs < float("inf"):
            raise UserError(f"epochs must be positive, not {self.epochs}")
        if (self.epochs is None) == (self.steps is None):
            raise UserError("a recipe says its length once: epochs or steps")
        if self.freeze == "body" and self.objective == "masked":
            raise UserError("masked patch prediction trains the body, so freeze='body' leaves nothing to learn")

    def model_settings(self) -> dict[str, Any]:
        """What `configure` takes besides the name and the classes."""
        return {"image_size": self.image_size} | {key: getattr(self, key) for key in MODEL_KEYS}


def keys() -> dict[str, Any]:
    """The names and types of everything `key=value` can set."""
    own = typing.get_type_hints(Recipe)
    return {k: h for k, h in own.items() if k not in ("augment", "preprocess")} | typing.get_type_hints(Augment)


def override(recipe: Recipe, pairs: Iterable[str]) -> Recipe:
    """A recipe with settings of the user's: `["steps=120", "mixup=0.2"]`."""
    settings = parse_settings(pairs, keys())
    if "steps" in settings and "epochs" not in settings:
        settings["epochs"] = None
    if "epochs" in settings and "steps" not in settings:
        settings["steps"] = None
    augment = {key: settings.pop(key) for key in typing.get_type_hints(Augment) if key in settings}
    if augment:
        settings["augment"] = dataclasses.replace(recipe.augment, **augment)
    return dataclasses.replace(recipe, **settings)


def resolved(recipe: Recipe, images: int, tests: int, world: int) -> Recipe:
    """The recipe with its length in steps, for a set of so many images and test images on so many processes."""
    if recipe.batch % world:
        raise UserError(f"batch={recipe.batch} does not divide over {world} processes; use a multiple of {world}")
    steps = count_steps(recipe, images)
    if recipe.warmup >= steps:
        raise UserError(
            f"a warm-up of {recipe.warmup} steps leaves nothing of a run of {steps}; set warmup={steps // 10}, "
            "or a longer run"
        )
    every = recipe.evaluate_every or -(-steps // evaluations(steps * recipe.batch, tests))
    return dataclasses.replace(recipe, steps=steps, epochs=None, evaluate_every=every)


def count_steps(recipe: Recipe, images: int) -> int:
    return recipe.steps or max(1, round((recipe.epochs or 0) * images / recipe.batch))


def evaluations(seen: int, tests: int) -> int:
    """How often to test a run that sees so many images: ten times, or less, to spend little of its time on it."""
    return max(1, min(10, seen // (2 * tests)))


def difference(ours: Recipe, stored: Recipe) -> str | None:
    """The first setting in which a continuation differs from its run, in words."""
    for name in (f.name for f in dataclasses.fields(Recipe)):
        a, b = getattr(ours, name), getattr(stored, name)
        if name not in LOOSE and a != b:
            if name == "augment":
                parts = dataclasses.fields(Augment)
                name = listed(f.name for f in parts if getattr(a, f.name) != getattr(b, f.name))
            return f"{name} (the run has {show(b, name)}, not {show(a, name)})"
    return None


def show(value: Any, name: str) -> str:
    return str(getattr(value, name)) if hasattr(value, name) else str(value)
