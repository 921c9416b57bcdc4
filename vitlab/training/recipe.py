"""A training run as data: model, data, length, optimizer and the rest, checked once, with `key=value` overrides.

Augmentation and the model's own settings are declared where they belong (`Augment`, `ViTConfig`); their keys stand
beside the recipe's in `key=value`, in `change` and in `flat`.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from vitlab.data.balance import Balance
from vitlab.data.loader import BROKEN_LIMIT, Resize
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.models.config import LARGEST_SIDE, MOST_WIDTH, RATES, ImageSize, Preprocess, Size, ViTConfig
from vitlab.settings import RATE, Range, Setting, annotations, check_all, check_types, describe, parse_settings, to_json
from vitlab.text import listed
from vitlab.training.masked import CORRUPTED, Masking
from vitlab.training.objectives import SIGMOID_BIAS, ObjectiveName
from vitlab.training.optim import Decay, OptimizerName
from vitlab.training.parallel import Parallel
from vitlab.training.patch_targets import TargetName
from vitlab.weights.lora import LARGEST_ALPHA

Precision = Literal["auto", "float32", "bfloat16", "float64", "fp8"]
Compile = Literal["auto", "yes", "no"]
Freeze = Literal["none", "body"]
Head = Literal["auto", "new", "keep"]
Init = Literal["xavier", "lecun"]

COUNT, STEPS, NUMBER = Range(1), Range(1, 10**12), Range(0)
LENGTHS = ("epochs", "minutes", "steps")
NESTED = ("augment", "preprocess", "model_settings")
# What a model's name, the recipe or the data decide.
NOT_IN_RECIPE = ("image_size", "patch", "stem", "classes")
# What may change between a run and its continuation: it is the same run, on another machine to another rounding.
LOOSE = (
    *("workers", "device", "parallel", "checkpoint_every", "log_every", "data", "broken_limit", "teacher"),
    *("tensorboard", "wandb", "mlflow"),
)


@dataclass(frozen=True)
class Recipe:
    """Everything a run is determined by."""

    model: Annotated[str, "name of the model, such as B/16"]
    data: Annotated[str, "images to train on: a folder of class folders or any other source"]
    image_size: ImageSize = (224, 224)
    small_size: Annotated[
        Size | None, Range(1, LARGEST_SIDE), "height and width of the images that training starts with; none: the same"
    ] = None
    small_start: Annotated[float, RATE, "share of the run, at its start, with images of small_size"] = 0.5
    weights: Annotated[str | None, "weights to start from, as vitlab.load takes them; none: fresh"] = None
    head: Annotated[Head, "of the weights: auto keeps it if its classes have the data's names; new: zeros"] = "auto"
    new_positions: Annotated[
        bool, "draw the weights' positions anew for image_size, to be learned again, and do not resample them"
    ] = False
    objective: Annotated[ObjectiveName, "loss: softmax, sigmoid, or masked patch prediction"] = "softmax"
    masked_target: Annotated[
        TargetName, "masked patches: predict the mean color in 3 bits, 4x4 such colors, or the pixels by least squares"
    ] = "mean"
    corruption: Annotated[float, Range(0.01, 1), "masked patches: the share that is corrupted and predicted"] = (
        CORRUPTED
    )
    masking: Annotated[Masking, "masked patches: a coin for each, or exactly that share of every image's"] = "coin"
    head_bias: Annotated[float, Range(), "bias of a fresh head with objective=sigmoid"] = SIGMOID_BIAS
    teacher: Annotated[str | None, "weights whose answers are learned, as vitlab.load takes them; none: labels"] = None
    teacher_share: Annotated[float, Range(0, 1), "share of its probabilities in the loss; the rest: labels"] = 1.0
    teacher_temperature: Annotated[float, Range(above=0, most=1000), "both divide their logits by it for that"] = 1.0
    teacher_features: Annotated[
        float, Range(0, 1e6), "weight of the error in the teacher's features, through a linear map that learns too"
    ] = 0.0
    init: Annotated[Init, "fresh patch projection and pre-logits: Xavier uniform, or the authors' LeCun normal"] = (
        "xavier"
    )
    freeze: Annotated[Freeze, "body: only the head learns"] = "none"
    lora: Annotated[int, Range(0, MOST_WIDTH), "rank of low-rank updates (LoRA), which learn for the body; 0: none"] = 0
    lora_alpha: Annotated[float, Range(above=0, most=LARGEST_ALPHA), "low-rank updates count alpha / rank times"] = 16.0
    model_settings: Annotated[dict[str, Any], "the model's own settings that differ from its variant's"] = field(
        default_factory=dict
    )

    # data
    subset: Annotated[float | None, "share of the training images to use"] = None
    per_class: Annotated[int | None, "training images of each class to use"] = None
    holdout: Annotated[float, "share held out for testing where the data has no split of its own"] = 0.2
    validation: Annotated[
        float | None, RATE, "share of train held out to choose on, without a validation split; none: by its size"
    ] = None
    review: Annotated[str | None, "a review.csv whose decisions change labels and leave images out"] = None
    balance: Annotated[Balance, "uneven classes: weigh the loss by class, or sample classes equally often"] = "none"
    augment: Annotated[Augment, "augmentation"] = field(default_factory=Augment)
    preprocess: Annotated[Preprocess | None, "none: the weights' own, or scaling to [-1, 1]"] = None
    resident: Annotated[bool | None, "hold the images in the device's memory; none: where they fit"] = None
    resize: Annotated[Resize, "who scales crops of files: workers, or the device, equal to 1 of 255 and faster"] = (
        "workers"
    )
    broken_limit: Annotated[float, RATE, "share of broken images to skip before the run ends"] = BROKEN_LIMIT
    hash_data: Annotated[bool, "let --resume compare the images' contents too, not only names, sizes, labels"] = False

    # length, by epochs, time or steps
    epochs: Annotated[float | None, Range(above=0, most=10**9), "passes over the training images"] = None
    minutes: Annotated[
        float | None, Range(above=0, most=10**6), "time for everything: steps are fitted to the machine's speed"
    ] = None
    steps: Annotated[int | None, STEPS, "optimizer steps; one of epochs, minutes and steps"] = None
    batch: Annotated[int, Range(1, 10_000_000), "images of a step, over all processes"] = 4096
    micro: Annotated[int | None, COUNT, "images of a process at a time; none: what its memory holds"] = None

    # optimizer
    optimizer: Annotated[OptimizerName, "AdamW, SGD with momentum, or Muon: AdamW but for the blocks' matrices"] = (
        "adamw"
    )
    lr: Annotated[float, NUMBER, "peak learning rate"] = 1e-3
    warmup: Annotated[int, Range(0, 10**12), "steps of linear warm-up"] = 0
    decay: Annotated[Decay, "learning rate after the warm-up; wsd: constant, then linear in the last fifth"] = "cosine"
    lr_end: Annotated[float, NUMBER, "learning rate at which linear and wsd end"] = 0.0
    weight_decay: Annotated[float, NUMBER, "decoupled, times the learning rate; on kernels only"] = 0.0
    beta1: Annotated[float, RATE, "AdamW's first"] = 0.9
    beta2: Annotated[float, RATE, "AdamW's second"] = 0.999
    momentum: Annotated[float, RATE, "SGD's; Muon's is 0.95"] = 0.9
    clip: Annotated[float, NUMBER, "largest norm of the gradient; 0: not clipped"] = 0.0
    ema: Annotated[float, RATE, "decay of the weights' moving average; 0: none"] = 0.0

    # how it runs
    seed: Annotated[int, Range(0), "every random number follows from it"] = 0
    device: Annotated[str, "auto, cpu, cuda, cuda:1 or mps"] = "auto"
    precision: Annotated[Precision, "auto: mixed bfloat16 where the GPU has it; fp8: with MLPs in 8 bits"] = "auto"
    compile: Annotated[Compile, "torch.compile; auto: on a GPU"] = "auto"
    cuda_graph: Annotated[bool, "on one GPU without micro-batches, the step as a CUDA graph: for small models"] = False
    recompute: Annotated[bool, "activation checkpointing: less memory, a third more compute"] = False
    parallel: Annotated[Parallel, "under torchrun: a complete model in each process, or its shards"] = "ddp"
    workers: Annotated[int | None, Range(0, 1_024), "processes that read images; none: by the machine"] = None
    threads: Annotated[int | None, Range(1, 1_024), "CPU threads; none: torch's choice. Changes rounding"] = None
    evaluate_every: Annotated[int | None, COUNT, "steps between validations; none: up to ten a run"] = None
    patience: Annotated[
        int | None, COUNT, "validations without a better score or loss after which to stop; none: no limit"
    ] = None
    checkpoint_every: Annotated[int, COUNT, "steps between checkpoints"] = 500
    log_every: Annotated[int, COUNT, "steps between log records on disk"] = 10
    tensorboard: Annotated[bool, "write TensorBoard's event files too"] = False
    wandb: Annotated[bool, "log to Weights & Biases too; WANDB_MODE=offline needs no network"] = False
    mlflow: Annotated[bool, "log to MLflow too, where MLFLOW_TRACKING_URI points"] = False

    def __post_init__(self) -> None:
        check_types(self)
        self.model_settings.update(check_all(self.model_settings, model_keys()))
        if (self.epochs is None) == (self.steps is None and self.minutes is None):  # steps are fitted to minutes
            raise UserError("a recipe has one length: epochs, minutes or steps")
        if self.balance != "none" and self.objective == "masked":
            raise UserError(f"masked patch prediction uses no labels, so there is nothing for balance={self.balance}")
        if self.freeze == "body" and self.objective == "masked":
            raise UserError("masked patch prediction trains the body, so freeze='body' leaves nothing to learn")
        if self.lora and self.freeze == "body":
            raise UserError(f"lora={self.lora} freezes the body already and learns its updates; leave freeze='body'")
        if self.lora and self.objective == "masked":
            raise UserError(f"masked patch prediction trains the body itself; leave lora={self.lora}")
        if self.new_positions and (self.lora or self.freeze == "body"):
            frozen = f"lora={self.lora}" if self.lora else "freeze=body"
            raise UserError(f"new_positions=true has positions to learn, and {frozen} freezes them; leave one of them")
        if self.small_size is not None:
            self.check_small_size(self.small_size)
        if self.teacher is not None:
            self.check_teacher()

    def check_small_size(self, small: Size) -> None:
        """Raise UserError for a start of the run that has no smaller images, or an objective of one size alone."""
        if any(a > b for a, b in zip(small, self.image_size, strict=True)) or small == self.image_size:
            sizes = [f"{height}x{width}" for height, width in (small, self.image_size)]
            raise UserError(f"small_size={sizes[0]} is not smaller than image_size={sizes[1]}; set a smaller one")
        if self.objective == "masked":
            raise UserError("masked patch prediction has one grid of patches for all of the run; leave small_size")

    def check_teacher(self) -> None:
        """Raise UserError for settings under which there is nothing to learn from a teacher, or from its features."""
        if not self.teacher_share and not self.teacher_features:
            raise UserError("teacher_share=0 and teacher_features=0 learn nothing from the teacher; raise one of them")
        if self.objective == "masked" and self.teacher_share:
            fix = "set teacher_share=0 teacher_features=1, which learns the teacher's features"
            raise UserError(f"masked patch prediction has no classes, so a teacher's probabilities do not apply; {fix}")
        if self.freeze == "body" and self.teacher_features:
            raise UserError("a frozen body's features do not learn from a teacher's; leave teacher_features")
        if self.balance == "weights" and self.teacher_share == 1:
            raise UserError("balance=weights weighs the labels, of which teacher_share=1 leaves none; lower it")


# ---- flat keys: the recipe's own, the augmentation's and the model's


def model_keys() -> dict[str, Any]:
    """The model's settings that a recipe can change, with their annotations."""
    return {key: hint for key, hint in annotations(ViTConfig).items() if key not in NOT_IN_RECIPE}


def keys() -> dict[str, Any]:
    """The names and annotations of everything that `key=value` can set."""
    own = {key: hint for key, hint in annotations(Recipe).items() if key not in NESTED}
    return own | annotations(Augment) | model_keys()


def describe_keys() -> dict[str, list[Setting]]:
    """Tables of all keys with type, default and help, by title."""
    return {
        "the run": describe(Recipe, NESTED),
        "augmentation": describe(Augment),
        "the model; by default as its variant, or the weights, have it": describe(ViTConfig, NOT_IN_RECIPE),
    }


def nest(settings: dict[str, Any], base: Recipe | None = None) -> dict[str, Any]:
    """Flat settings as `Recipe`'s fields; the nested ones begin as `base` has them."""
    given = {key: value for key, value in settings.items() if key not in annotations(Augment) | model_keys()}
    augment = {key: value for key, value in settings.items() if key in annotations(Augment)}
    model = {key: value for key, value in settings.items() if key in model_keys()}
    if augment:
        given["augment"] = dataclasses.replace(given.get("augment") or (base.augment if base else Augment()), **augment)
    if model:
        merged = (base.model_settings if base else {}) | given.get("model_settings", {}) | model
        given["model_settings"] = {key: value for key, value in merged.items() if value is not None}
    return given


def make_recipe(model: str, data: str, **settings: Any) -> Recipe:
    """A recipe from flat settings: `make_recipe("B/16", "photos", epochs=3, mixup=0.2, dropout=0.1)`."""
    return Recipe(model, data, **nest(settings))


def change(recipe: Recipe, **settings: Any) -> Recipe:
    """A recipe with other flat settings; of epochs, minutes and steps each replaces the others.

    Weights bring their model: of what the recipe has set of one, only rates of dropout and the like stay.
    """
    if settings.get("weights") is not None:
        rates = {key: value for key, value in recipe.model_settings.items() if key in RATES}
        recipe = dataclasses.replace(recipe, model_settings=rates)
    given = [key for key in LENGTHS if settings.get(key) is not None]
    if len(given) > 1:
        raise UserError(f"a recipe has one length: {listed(given)}, not both")
    if given:
        settings = dict.fromkeys(LENGTHS) | settings
    return dataclasses.replace(recipe, **nest(settings, recipe))


def override(recipe: Recipe, pairs: Iterable[str]) -> Recipe:
    """A recipe with settings from the command line: `["steps=120", "mixup=0.2"]`."""
    return change(recipe, **parse_settings(pairs, keys()))


def flat(recipe: Recipe) -> dict[str, Any]:
    """A recipe's settings by the keys that `key=value` has for them, as JSON values."""
    data = to_json(recipe)
    nested = data.pop("model_settings") | data.pop("augment")
    return data | nested


# ---- length


def resolve_length(recipe: Recipe, images: int, tests: int, world: int) -> Recipe:
    """The recipe with its length in steps, for so many images to train on and to validate on, on so many processes.

    Minutes stay as they are until the trainer has measured the speed, see minutes.py.
    """
    if recipe.batch % world:
        raise UserError(f"batch={recipe.batch} does not divide over {world} processes; use a multiple of {world}")
    if not is_settled(recipe):
        return recipe
    steps = count_steps(recipe, images)
    if recipe.warmup >= steps:
        fix = f"set warmup={steps // 10}, or a longer run"
        raise UserError(f"a warm-up of {recipe.warmup} steps leaves nothing of a run of {steps}; {fix}")
    every = recipe.evaluate_every or -(-steps // evaluations(steps * recipe.batch, tests))
    return dataclasses.replace(recipe, steps=steps, epochs=None, evaluate_every=every)


def is_settled(recipe: Recipe) -> bool:
    """Whether the length is known; that of a run by the clock is not, until its speed is."""
    return recipe.minutes is None or recipe.steps is not None


def settle(recipe: Recipe, steps: int) -> Recipe:
    """A recipe by the clock with the steps there is time for; a warm-up that does not fit becomes a tenth of them."""
    warmup = recipe.warmup if recipe.warmup < steps else steps // 10
    return dataclasses.replace(recipe, steps=steps, warmup=warmup)


def count_steps(recipe: Recipe, images: int) -> int:
    return recipe.steps or max(1, round((recipe.epochs or 0) * images / recipe.batch))


def plain_from(recipe: Recipe) -> int | None:
    """How many images a run sees before its plain end, see `Augment`; None where it has none, or no length yet."""
    share = recipe.augment.plain_end
    return round((1 - share) * recipe.steps) * recipe.batch if share and recipe.steps else None


def small_until(recipe: Recipe) -> int:
    """How many images of `small_size` a run starts with; 0 where it has none, or no length yet."""
    return 0 if recipe.small_size is None else round(recipe.small_start * (recipe.steps or 0)) * recipe.batch


def evaluations(seen: int, tests: int) -> int:
    """How often to validate a run that sees so many images: ten times, or less, to spend little of its time on it."""
    return max(1, min(10, seen // (2 * tests)))


def difference(ours: Recipe, stored: Recipe) -> str | None:
    """The first setting in which a continuation differs from its run, as text; None where it does not."""
    mine, theirs = flat(ours), flat(stored)
    odd = next((key for key in theirs | mine if key not in LOOSE and mine.get(key) != theirs.get(key)), None)
    return odd and f"{odd} (the run has {theirs.get(odd)}, not {mine.get(odd)})"
