"""What a user asks of a study: data, seeds, other settings, --quick; and the usual jobs made from that."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from vitlab.device import pick_device, pick_workers
from vitlab.errors import UserError
from vitlab.models.config import RATES
from vitlab.settings import Range, annotations, check_types, last_of, parse_settings, to_pairs
from vitlab.studies.study import FewShot, Number, Study, Train
from vitlab.training.recipe import LENGTHS, keys, model_keys
from vitlab.training.recipes import find

PRETRAIN, FINETUNE = "study", "study-finetune"  # recipes
DATA, TARGETS = "zh-plus/tiny-imagenet", "oxford-pets,flowers102"
# --quick: the built-in digits, enlarged, on tiny models, for a few steps
QUICK_DATA = "digits"
QUICK_RUN: tuple[str, ...] = (
    *("image_size=32", "batch=32", "flip=false", "compile=no", "cuda_graph=false"),
    *("workers=0", "threads=1", "log_every=4"),
)
QUICK_STEPS = 12
QUICK_CONVOLUTIONS = ("batch=16", "steps=3", "warmup=1")  # ResNets and stems have no small size
QUICK_MODEL = ("depth=2", "width=32", "mlp=64", "heads=2")  # of a ViT; a ResNet has no smaller size
# How a run is computed, so that it applies to pre-training and fine-tuning alike.
HOW = (
    *("device", "precision", "compile", "micro", "recompute", "workers", "threads", "resident", "resize"),
    "broken_limit",
    *("tensorboard", "wandb", "mlflow", "log_every", "checkpoint_every"),
)
FIXED = ("seed", "model", "weights", *(key for key in LENGTHS if key != "steps"))  # by the study


@dataclass(frozen=True)
class StudySettings:
    """Settings of a study itself; other keys are those of its pre-training runs."""

    data: Annotated[str | None, "images to pre-train on; none: Tiny-ImageNet from the hub"] = None
    targets: Annotated[str | None, "sets to transfer to, A,B; none: oxford-pets,flowers102"] = None
    seeds: Annotated[int | None, Range(1, 100), "runs of every row, each with a seed of its own; none: the study's"] = (
        None
    )
    tune_steps: Annotated[int | None, Range(1, 10**9), "steps of each fine-tuning; none: 500"] = None
    tune_lr: Annotated[float | None, Range(above=0), "learning rate of each fine-tuning; none: 0.03"] = None

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class Request:
    """A study's settings as the user has them, and the jobs that follow from them."""

    study: str
    data: str
    targets: tuple[str, ...]
    seeds: int
    quick: bool
    pairs: tuple[str, ...] = ()  # the user's, for pre-training
    how: tuple[str, ...] = ()  # the user's, for every run
    tune: tuple[str, ...] = ()  # the user's, for fine-tuning

    @property
    def device(self) -> str:
        return str(self.given("device", "auto"))

    @property
    def workers(self) -> int | None:
        """Processes that read images; None: by the machine."""
        return self.given("workers", 0 if self.quick else None)

    def given(self, key: str, other: Any) -> Any:
        """The user's value of a setting for every run, or another where there is none."""
        return parse_settings(self.how, keys()).get(key, other)

    def shared(self, processes: int) -> "Request":
        """The request of each of several processes, which share the machine's cores for reading images."""
        if processes == 1 or self.workers is not None:
            return self
        return replace(self, how=(*self.how, f"workers={pick_workers(pick_device(self.device)) // processes}"))

    # ---- jobs

    def pretrain(self, name: str, seed: int, model: str = "Ti/8", **settings: Any) -> Train:
        """A run from scratch by the recipe `study`, with the settings of a row; the user's come last.

        In --quick, the row's own settings replace those of the tiny model.
        """
        row = to_pairs({"model": model} | settings)
        quick = self.quick_run(model, tiny="/" in model)
        check_free(self.study, row, self.pairs)
        pairs = merge([f"data={self.data}"], quick, row, self.pairs, self.how, [f"seed={seed}"])
        return Train(f"{slug(name)}-seed-{seed}", PRETRAIN, pairs)

    def finetune(self, run: Train | None, target: str, seed: int, name: str = "", **settings: Any) -> Train:
        """Fine-tuning of a run's model on a target by the recipe `study-finetune`; without a run, from scratch."""
        row, start = to_pairs(settings), None if run is None else run.name.removesuffix(f"-seed-{seed}")
        check_free(self.study, row, self.tune)
        model = str(settings.get("model", find(FINETUNE).recipe.model)) if run is None else run.settings().model
        quick = self.quick_run(model, tiny=run is None and "/" in model)  # else the weights decide the model
        shape = self.shape() if run is None else to_pairs({"image_size": run.settings().image_size})
        pairs = merge([f"data={target}"], quick, shape, row, self.how, self.tune, [f"seed={seed}"])
        words = [word for word in (start, name, "to", self.title(target)) if word]
        return Train(f"{slug('-'.join(words))}-seed-{seed}", FINETUNE, pairs, run)

    def quick_run(self, model: str, *, tiny: bool) -> list[str]:
        if not self.quick:
            return []
        run = [*QUICK_RUN, *(QUICK_MODEL if tiny else ()), *lengths(QUICK_STEPS)]
        return [*run, *(QUICK_CONVOLUTIONS if "+" in model or "/" not in model else ())]

    def few_shot(self, run: Train, target: str, shots: int = 5) -> FewShot:
        name = f"{run.name}-{shots}-shot-{slug(self.title(target))}"
        return FewShot(name, run, target, shots, device=self.device, workers=self.workers)

    # ---- numbers, by heading

    def few_shots(self, run: Train, shots: int = 5) -> dict[str, Number | tuple[Number, ...]]:
        """Few-shot accuracy on every target, and the mean."""
        return self.by_target(f"{shots}-shot", {t: self.few_shot(run, t, shots) for t in self.targets})

    def transfers(self, run: Train | None, seed: int, name: str = "", **settings: Any) -> Any:
        """Accuracy after fine-tuning on every target, and the mean, as `few_shots` has it."""
        return self.by_target("tuned", {t: self.finetune(run, t, seed, name, **settings) for t in self.targets})

    def by_target(self, what: str, jobs: dict[str, Any]) -> dict[str, Number | tuple[Number, ...]]:
        each = {target: Number(job, "accuracy") for target, job in jobs.items()}
        found: dict[str, Number | tuple[Number, ...]] = {f"{what} {self.title(t)}": n for t, n in each.items()}
        return found | ({f"{what} mean": tuple(each.values())} if len(each) > 1 else {})

    def mean_heading(self, what: str) -> str:
        """The heading of the mean over targets, which of a single target is its own."""
        return f"{what} mean" if len(self.targets) > 1 else f"{what} {self.title(self.targets[0])}"

    def title(self, target: str) -> str:
        """A target's short name."""
        return Path(target).name.removesuffix(".parquet") or target

    def sizes(self) -> list[str]:
        return [pair for pair in self.pairs if pair.startswith("image_size=")]

    def shape(self) -> list[str]:
        """The user's settings of a model that fine-tuning keeps: all but the rates of dropout."""
        kept = {"image_size", *model_keys()} - {*RATES}
        return [pair for pair in self.pairs if pair.partition("=")[0] in kept]


def check_free(study: str, row: Iterable[str], given: Iterable[str]) -> None:
    """Raise UserError for a setting of the user that the rows of the study vary."""
    own = {pair.partition("=")[0] for pair in row}
    for pair in given:
        key = pair.partition("=")[0]
        if key in own or (key == "per_class" and "subset" in own):  # which choose the same images
            raise UserError(f"'{key}' is what the study '{study}' varies, so it cannot have one value; leave it")


def slug(text: str) -> str:
    """Text as part of a folder's name: R26+Ti/16 is R26+Ti16."""
    return re.sub(r"[^\w.+-]+", "-", text.replace("/", ""))


def lengths(steps: int) -> list[str]:
    """Settings of so many steps: their warm-up is a tenth, as in the recipes."""
    return [f"steps={steps}", f"warmup={steps // 10}"]


def merge(*groups: Iterable[str]) -> tuple[str, ...]:
    """`key=value` of all groups, each key once: a later group replaces an earlier one's."""
    found: dict[str, str] = {}
    for pair in (pair for group in groups for pair in group):
        key = pair.partition("=")[0]
        found.pop(key, None)
        found[key] = pair
    return tuple(found.values())


def make_request(study: Study, pairs: Iterable[str] = (), *, quick: bool = False) -> Request:
    """What a user asks of a study; raises UserError for unknown keys, wrong values and what the study itself sets."""
    pairs, known = last_of(pairs), annotations(StudySettings) | keys()
    own: dict[str, Any] = {}
    others: list[str] = []
    for pair in pairs:
        key = pair.partition("=")[0]
        if key in FIXED:
            fix = "seeds=3 runs three seeds" if key == "seed" else "steps= sets the length" if key in LENGTHS else ""
            raise UserError(f"'{key}' cannot be set here: the study sets it" + (f"; {fix}" if fix else ""))
        value = parse_settings([pair], known)
        if value.get("objective") == "masked":
            raise UserError(
                "studies measure accuracy, and objective=masked has none; `vitlab study masked` compares it"
            )
        if key in annotations(StudySettings):
            own |= value
        else:
            others.append(pair)
            if key == "steps" and not any(p.startswith("warmup=") for p in pairs):
                others.append(lengths(value["steps"])[1])
    asked = StudySettings(**own)
    targets = asked.targets or (QUICK_DATA if quick else TARGETS)
    names = tuple(dict.fromkeys(word.strip() for word in targets.split(",")))
    if "" in names:
        raise UserError(f"targets must be data sets such as pets,flowers, not '{targets}'")
    if len({slug(Path(name).name) for name in names}) < len(names):
        raise UserError(f"two of the targets {targets} have the same name; rename one of them")
    steps = [] if asked.tune_steps is None else lengths(asked.tune_steps)
    return Request(
        study=study.name,
        data=asked.data or (QUICK_DATA if quick else DATA),
        targets=names,
        seeds=asked.seeds or (1 if quick else study.seeds),
        quick=quick,
        pairs=tuple(pair for pair in others if pair.partition("=")[0] not in HOW),
        how=tuple(pair for pair in others if pair.partition("=")[0] in HOW),
        tune=(*steps, *([] if asked.tune_lr is None else [f"lr={asked.tune_lr}"])),
    )
