"""Before the first step: a new run folder or one to resume, the data, the model, the loaders, the micro-batch."""

import dataclasses
import json
import os
import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitlab.cost import quick_cost
from vitlab.data.loader import EvalLoader, TrainLoader
from vitlab.data.open import hold_out_validation, open_data
from vitlab.data.review_file import apply_review
from vitlab.data.source import Data
from vitlab.device import pick_workers
from vitlab.errors import UserError
from vitlab.files import atomic_file, check_folder, check_names
from vitlab.models.config import RATES, ModelConfig, Preprocess, ResNetConfig
from vitlab.models.meta import meta_model
from vitlab.models.positions import renew_positions
from vitlab.models.shown import shown_config
from vitlab.models.variants import Model, build, create
from vitlab.models.vit import ViT, lecun_normal
from vitlab.settings import check_value, from_json, to_json
from vitlab.terminal import warn
from vitlab.text import brief
from vitlab.training import checkpoint, manifest
from vitlab.training.checkpoint import CheckpointMeta, FoundCheckpoint, disk_errors
from vitlab.training.lora import check_rank
from vitlab.training.objectives import start_at_frequency, start_sigmoid
from vitlab.training.parallel import Cluster
from vitlab.training.recipe import Recipe, difference, is_settled, override, resolve_length, settle
from vitlab.training.seen import seen_since, seen_warnings, without_seen
from vitlab.training.stages import is_staged
from vitlab.training.start import choose_head, describe_training, make_provenance
from vitlab.training.teacher import check_same_teacher, image_bytes, open_teacher
from vitlab.training.trust import (
    check_trusted_data,
    check_trusted_review,
    check_trusted_teacher,
    check_trusted_weights,
    remember_recipe,
)
from vitlab.weights import load
from vitlab.weights.formats.vitlab import model_config, model_json, read_provenance
from vitlab.weights.lora import Adapter, base_json
from vitlab.weights.lora_base import find_base, name_base

RECIPE = "recipe.json"
MOST_LAYERS = 1_000
TEST_PIXELS = 256 * 224 * 224  # pixels of a test batch, at most


@dataclass(frozen=True)
class RunSetup:
    """A run that is ready to start: all that does not change while it trains."""

    out: Path
    recipe: Recipe
    data: Data
    config: ModelConfig
    preprocess: Preprocess
    provenance: dict[str, str]  # of the trained model
    checkpoint: FoundCheckpoint | None  # to resume from
    initial: Model | None  # the model to start with, where there is no checkpoint or it holds low-rank updates alone
    adapter: Adapter | None = None  # what these are, and the weights they are for
    teacher: Model | None = None  # to learn from


@dataclass(frozen=True)
class StoredRun:
    """The content of a run's recipe.json, checked: it may come from anywhere."""

    recipe: Recipe
    model: ModelConfig
    preprocess: Preprocess
    labels: tuple[str, ...]
    images: int
    provenance: dict[str, str]
    adapter: Adapter | None = None


def read_run(out: Path) -> StoredRun | None:
    """The run in a folder, or None; raises UserError where its recipe.json is damaged."""
    path = out / RECIPE
    if not os.path.lexists(path):
        return None
    try:
        about = checkpoint.read_run_json(path)
        parts = {key: check_value(about.get(key), dict, key) for key in ("recipe", "model", "preprocess")}
        images = max(0, check_value(about.get("images"), int, "images"))
        recipe, config = from_json(Recipe, parts["recipe"]), model_config(parts["model"], tensors=MOST_LAYERS)
        preprocess = from_json(Preprocess, parts["preprocess"])
        labels = check_value(about.get("labels"), tuple[str, ...], "labels")
        adapter = check_value(about.get("lora"), Adapter | None, "lora")
        if (adapter is None) == bool(recipe.lora):
            raise UserError("lora stands in its recipe alone, or beside it alone")
        return StoredRun(recipe, config, preprocess, labels, images, read_provenance(about) or {}, adapter)
    except UserError as error:
        raise UserError(f"{path} is not the recipe of a run: {brief(error)}; start again in a new --out") from None


def read_recipe(out: Path) -> Recipe | None:
    stored = read_run(out)
    return None if stored is None else stored.recipe


def recipe_to_resume(out: Path, pairs: list[str]) -> Recipe | None:
    """The recipe to resume the run in a folder with, or None. Data, weights and teacher that it names must have been
    given by this user, now (in `pairs`) or when the run started; raises UserError otherwise."""
    stored = read_recipe(out)
    if stored is None:
        return None
    if is_staged(out):
        command = f"vitlab finetune DATA --out {shlex.quote(str(out))} --resume"
        raise UserError(f"{out} is a run in stages; continue it with the command that started it: {command}")
    recipe, given = override(stored, pairs), {pair.partition("=")[0] for pair in pairs}
    if "data" not in given:
        check_trusted_data(stored.data, out / RECIPE, f"vitlab train --out {shlex.quote(str(out))} --resume data=")
    if recipe.weights is not None and "weights" not in given and opens_weights(recipe, out):
        check_trusted_weights(recipe.weights, out / RECIPE)
    if recipe.teacher is not None and "teacher" not in given:
        check_trusted_teacher(recipe.teacher, out / RECIPE)
    if recipe.review is not None and "review" not in given:
        check_trusted_review(recipe.review, out / RECIPE)
    return recipe


def opens_weights(recipe: Recipe, out: Path) -> bool:
    """Whether resuming opens the weights that a run started from: without a checkpoint, and below low-rank updates."""
    return bool(recipe.lora) or checkpoint.find_checkpoint(checkpoint.last_checkpoint(out)) is None


def check_new_folder(out: Path, *, resume: bool) -> None:
    """Raise UserError, before data are looked at, for a folder that cannot hold a run or holds one already."""
    check_folder(out)
    if not resume and (os.path.lexists(out / RECIPE) or is_staged(out)):
        raise UserError(f"{out} holds a run already; continue it with --resume, or choose another --out")


def prepare_run(
    recipe: Recipe,
    out: Path,
    cluster: Cluster,
    *,
    resume: bool,
    data: Data | None = None,
    start: Path | None = None,
    accept: bool = False,
    trial: bool = False,
) -> RunSetup:
    """Start a run in `out`, or resume the one that is there; with `accept`, on data that has changed since.

    `start` are weights to start with, in place of the recipe's. A `trial` is not to be resumed, so neither its data nor
    its recipe is remembered. Raises UserError where the run cannot start.
    """
    stored = read_run(out)
    cluster.barrier()  # all have read before the first process writes
    if stored is not None and not resume:
        raise UserError(f"{out} holds a run already; continue it with --resume, or choose another --out")
    given = data is not None
    data = hold_out_validation(data, recipe.validation) if data is not None else open_recipe_data(recipe)
    check_names(data.classes)  # before the work of days
    if data.is_multi_label and recipe.objective == "softmax":
        raise UserError(f"{data.name} is multi-label, and softmax chooses one class of all; set objective=sigmoid")
    if data.is_multi_label and recipe.balance != "none":
        raise UserError(f"{data.name} is multi-label, and balance={recipe.balance} needs one label per image; leave it")
    images: list[str] = []  # the list of them, of the first process, if it is to be written
    if stored is not None:
        check = partial(check_data, stored, out, data, hashed=recipe.hash_data, accept=accept)
        cluster.agree(lambda: images.append(check()))
    if stored is not None and stored.recipe.minutes == recipe.minutes and not is_settled(recipe):
        recipe = settle(recipe, stored.recipe.steps) if stored.recipe.steps else recipe
    recipe = resolve_length(recipe, len(data.train), len(data.validation or data.test), cluster.world)
    teacher = open_teacher(recipe, data.classes)
    if stored is not None:
        check_same_teacher(recipe, stored.provenance, out)
        if (key := difference(recipe, stored.recipe)) is not None:
            advice = "continue it with its own settings, or use a new --out"
            raise UserError(f"the run in {out} has another {key}; {advice}")
        found = checkpoint.find_checkpoint(checkpoint.last_checkpoint(out), lambda meta: check_meta(meta, recipe))
        if found is not None:
            about = (stored.model, stored.preprocess, stored.provenance)
            base: tuple[Model | None, Adapter | None] = (None, None)
            if stored.adapter is not None:
                base = resume_base(stored, stored.adapter, out, data, start)
            else:
                check_size(stored.model, found.folder)
            cluster.agree(lambda: manifest.write_manifest(out, images[0]))
            data = without_seen(data, cluster.agree(partial(seen_since, out, data)))
            return RunSetup(out, recipe, data, *about, found, *base, teacher)
    adapter = new_adapter(recipe, out)
    model, preprocess = initial_model(recipe, data, start)
    if recipe.weights is not None and start is None and not given and cluster.first:  # given ones are not for the test
        for line in seen_warnings(recipe.weights, data):
            warn(line)
    check_rank(model.config, recipe.lora)  # before the folder is made
    if recipe.small_size is not None:
        shown_config(model.config, recipe.small_size)
    about = (model.config, preprocess, make_provenance(recipe, data, model))
    setup = RunSetup(out, recipe, data, *about, None, model, adapter, teacher)
    if stored is not None and start is not None:  # what `start` has learned from counts
        cluster.agree(lambda: manifest.write_manifest(out, images[0]))
    cluster.agree(lambda: write_run_files(setup, new=stored is None or start is None, trial=trial))
    return setup


def check_data(stored: StoredRun, out: Path, data: Data, *, hashed: bool, accept: bool) -> str:
    """Raise UserError unless a run's files are its own and the data has not changed, or changes are accepted; returns
    the list of images to write then."""
    checkpoint.check_own_files(out)
    if stored.labels != tuple(data.classes):
        counts = f"{len(stored.labels)} classes, and {data.name} has {len(data.classes)}, or other names for them"
        raise UserError(f"the run in {out} has {counts}; continue with the same data")
    return manifest.check_data(out, data, hashed=hashed, accept=accept)


def open_recipe_data(recipe: Recipe) -> Data:
    """The recipe's data, split as the recipe has it."""
    r = recipe
    data = open_data(r.data, seed=r.seed, subset=r.subset, per_class=r.per_class, holdout=r.holdout)
    data = hold_out_validation(data, r.validation)
    return data if r.review is None else apply_review(data, Path(r.review).expanduser())


def write_run_files(setup: RunSetup, *, new: bool, trial: bool) -> None:
    """Write the files that a run's folder has before the first step."""
    write_recipe(setup)
    if not trial:
        remember_recipe(setup.out / RECIPE)
        if new:
            manifest.write_manifest(setup.out, manifest.list_images(setup.data, setup.recipe.hash_data))


def training_lengths(setup: RunSetup) -> list[int]:
    """The lengths of the sequences that a run trains on: two where it starts with smaller images."""
    small = setup.recipe.small_size
    start = [] if small is None else [shown_config(setup.config, small).training_length]
    return [*start, setup.config.training_length]


def settle_run(setup: RunSetup, steps: int, cluster: Cluster) -> RunSetup:
    """The run with its number of steps, which is stored: a run by the clock, once its speed is known."""
    data = setup.data
    tests = len(data.validation or data.test)
    recipe = resolve_length(settle(setup.recipe, steps), len(data.train), tests, cluster.world)
    provenance = {**setup.provenance, "training": describe_training(recipe)}
    setup = dataclasses.replace(setup, recipe=recipe, provenance=provenance)
    cluster.agree(lambda: write_run_files(setup, new=False, trial=False))
    return setup


def check_meta(meta: CheckpointMeta, recipe: Recipe) -> None:
    """Raise UserError for a checkpoint that cannot belong to this run."""
    if meta.step > (recipe.steps or 0):
        raise UserError(f"step {meta.step} of a run of {recipe.steps}")
    if recipe.batch % (meta.world * meta.micro):
        raise UserError(f"{meta.world} processes with micro-batches of {meta.micro} do not make up {recipe.batch}")


def check_size(config: ModelConfig, folder: Path) -> None:
    """Raise UserError for a model that is larger than the checkpoint which holds it, before it is built."""
    need = sum(p.numel() * 2 for p in meta_model(config).state_dict().values())  # bytes, at the very least
    have = sum(path.stat().st_size for path in folder.iterdir())
    if need > have:
        raise UserError(f"{folder} has {have:,} bytes, too few for the model that {RECIPE} describes; use a new --out")


def new_adapter(recipe: Recipe, out: Path) -> Adapter | None:
    """What a run with low-rank updates is to write down about them, at its start."""
    if not recipe.lora:
        return None
    if recipe.weights is None:
        raise UserError(f"lora={recipe.lora} learns updates of weights that are there; name them with weights=")
    adapter = name_base(recipe.weights, recipe.lora, recipe.lora_alpha)
    return dataclasses.replace(adapter, near=base_json(adapter, out).get("near", ""))


def resume_base(
    stored: StoredRun, adapter: Adapter, out: Path, data: Data, start: Path | None
) -> tuple[Model, Adapter]:
    """The model that a checkpoint of low-rank updates is for, and where its weights are by now."""
    place = find_base(adapter, out, str(out))
    model, _ = initial_model(stored.recipe, data, place if start is None else start)
    if model.config != stored.model:
        raise UserError(f"{out / RECIPE} describes another model than {place}; start again in a new --out")
    return model, adapter if adapter.is_on_hub else dataclasses.replace(adapter, source=os.path.abspath(place))


def initial_model(recipe: Recipe, data: Data, start: str | Path | None = None) -> tuple[Model, Preprocess]:
    """The model before its first step: fresh, or from weights with their head or a new one."""
    torch.manual_seed(recipe.seed)
    is_masked = recipe.objective == "masked"
    weights = recipe.weights if start is None else start
    if weights is None:
        if recipe.new_positions:
            raise UserError("without weights all positions are new; leave new_positions, or name weights=")
        classes = 0 if is_masked else len(data.classes)
        model = create(recipe.model, image_size=recipe.image_size, classes=classes, **recipe.model_settings)
        if recipe.init == "lecun" and isinstance(model, ViT):  # a ResNet's convolutions are drawn so anyway
            for layer in (model.embed, model.prelogits):
                if layer is not None:
                    lecun_normal(layer)
        preprocess = recipe.preprocess or Preprocess()
    else:
        loaded = load(weights, classes=0 if is_masked else None, image_size=recipe.image_size)
        loaded = loaded if is_masked else choose_head(loaded, recipe, data.classes)
        model, preprocess = with_rates(loaded, recipe), recipe.preprocess or loaded.card.preprocess
        if recipe.new_positions:
            renew_positions(model)
    if recipe.objective == "sigmoid" and model.head is not None and not model.head.weight.any():  # a fresh head
        start_sigmoid(model.head, recipe.head_bias)
        if data.is_multi_label:
            start_at_frequency(model.head, data.train.class_counts(), len(data.train))
    return model, preprocess


def with_rates(model: Model, recipe: Recipe) -> Model:
    """Loaded weights under the recipe's rates of dropout and the like; what else a model is, the weights decide."""
    given = recipe.model_settings
    for key, value in given.items():
        if key not in RATES and getattr(model.config, key, value) != value:
            has = getattr(model.config, key)
            raise UserError(f"{recipe.weights} has {key}={has}, not {value}; set {key}={has}, or start without weights")
    rates = {key: value for key, value in given.items() if key in RATES}
    if not rates or isinstance(model.config, ResNetConfig):
        return model
    new = build(dataclasses.replace(model.config, **rates))
    new.load_state_dict(model.state_dict())
    new.card = model.card
    return new


def write_recipe(setup: RunSetup) -> None:
    """Write recipe.json: the settings as they were resolved, and what the model is."""
    about = {
        "format": "vitlab/1",
        "recipe": to_json(setup.recipe),
        "model": model_json(setup.config),
        "preprocess": to_json(setup.preprocess),
        "labels": list(setup.data.classes),
        "images": len(setup.data.train),
        "provenance": setup.provenance,
        **({} if setup.adapter is None else {"lora": to_json(setup.adapter)}),
    }
    with atomic_file(setup.out / RECIPE, "w", errors=disk_errors) as file:
        file.write(json.dumps(about, indent=1) + "\n")


def make_loaders(setup: RunSetup, cluster: Cluster, micro: int) -> tuple[TrainLoader, dict[str, EvalLoader]]:
    """Loaders of training images, in micro-batches, and of the other splits by name."""
    r, size, preprocess, batch = setup.recipe, setup.config.image_size, setup.preprocess, micro * cluster.world
    workers = pick_workers(cluster.device) if r.workers is None else r.workers
    common: dict[str, Any] = {"workers": workers, "resident": r.resident, **vars(cluster)}  # device, rank and world
    stream: dict[str, Any] = {"batch": batch, "step": r.batch, "seed": r.seed, "broken_limit": r.broken_limit}
    stream |= {"balanced": r.balance == "sampling", "resize": r.resize}
    train = TrainLoader(setup.data.train, size, r.augment, preprocess, **stream, **common)
    batch = min(2 * micro, max(256, TEST_PIXELS // (size[0] * size[1])))  # without gradients, twice as many fit
    others = {name: source for name, source in setup.data.splits.items() if name != "train"}
    return train, {name: EvalLoader(source, size, preprocess, batch=batch, **common) for name, source in others.items()}


# ---- the micro-batch: as large as fits in memory


def choose_micro(setup: RunSetup, cluster: Cluster, core: nn.Module, *, bf16: bool) -> int:
    """Images of a process at a time: as the recipe sets, else as many as fit in its memory."""
    micro, share = setup.recipe.micro, setup.recipe.batch // cluster.world
    if micro is not None:
        if share % micro:
            near = min(divisors(share), key=lambda d: abs(d - micro))
            raise UserError(f"micro={micro} does not divide a process's batch of {share}; {near} does")
        return micro
    image = quick_cost(setup.config).activation_bytes * (1 if bf16 else 2)
    if setup.teacher is not None:  # it is done before the model begins
        image = max(image, image_bytes(setup.teacher, bf16=bf16))
    # gradient, two moments and an average, float32; in mixed precision weights and gradients in bfloat16 too
    state = (20 if bf16 else 16) * sum(p.numel() for p in core.parameters())
    return fit_micro(share, image, state, free_bytes(cluster.device))


def free_bytes(device: torch.device) -> int:
    """Memory of a device that a run may use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    # half of the total, not what happens to be free: the same run on the same machine is split the same way
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def fit_micro(batch: int, image_bytes: int, state_bytes: int, free: int) -> int:
    """The largest part of a batch that divides it and fits, with a fifth of the memory to spare."""
    room = max(0.0, 0.8 * free - state_bytes) / max(1, image_bytes)
    return next(n for n in divisors(batch) if n <= room or n == 1)


def divisors(n: int) -> list[int]:
    """The divisors of n, from n down to 1."""
    return [d for d in range(n, 0, -1) if n % d == 0]
