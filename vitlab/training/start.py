"""Before the first step: a new run folder or one to continue, the data, the model, the micro-batch."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vitlab.config import ModelConfig, Preprocess, ResNetConfig, UserError, from_json, to_json
from vitlab.data.sources import Data, open_data
from vitlab.models.variants import Model, build, configure
from vitlab.training import checkpoint
from vitlab.training.checkpoint import Found
from vitlab.training.objectives import start_sigmoid
from vitlab.training.parallel import Cluster
from vitlab.training.recipe import MODEL_KEYS, Recipe, difference, resolved
from vitlab.weights import load, preprocess_of
from vitlab.weights.files import flush
from vitlab.weights.store import model_config, model_json

RECIPE = "recipe.json"
MANY = 1_000_000  # tensors: our own file is not suspected of layers that are not there


@dataclass(frozen=True)
class Plan:
    """A run that is ready to go: all that does not change in its course."""

    out: Path
    recipe: Recipe
    data: Data
    config: ModelConfig
    preprocess: Preprocess
    found: Found | None  # the checkpoint to continue from
    fresh: Model | None  # the model to begin with, where there is none

    def model(self) -> Model:
        return self.fresh if self.fresh is not None else build(self.config)


def last(out: Path) -> Path:
    return out / "checkpoints" / "last"


def stored_recipe(out: Path) -> Recipe | None:
    """The recipe of the run in a folder, if there is one."""
    if not (out / RECIPE).exists():
        return None
    return from_json(Recipe, checkpoint.read_json(out / RECIPE)["recipe"])


def make_plan(recipe: Recipe, out: Path, cluster: Cluster, *, resume: bool, data: Data | None = None) -> Plan:
    """Begin a run in `out`, or take up the one that is there."""
    stored = stored_recipe(out)
    cluster.barrier()  # all have looked before the first process writes
    if stored is not None and not resume:
        raise UserError(f"{out} holds a run already; continue it with --resume, or choose another --out")
    data = data or open_data(
        recipe.data, seed=recipe.seed, subset=recipe.subset, per_class=recipe.per_class, holdout=recipe.holdout
    )
    recipe = resolved(recipe, len(data.train), len(data.test), cluster.world)
    found = checkpoint.find(last(out)) if stored is not None else None
    if stored is not None:
        if (key := difference(recipe, stored)) is not None:
            raise UserError(
                f"the run in {out} has another {key}; continue it with its own settings, or use a new --out"
            )
        facts = checkpoint.read_json(out / RECIPE)
        check_same_data(facts, data, out)
        if found is not None:
            config = model_config(facts["model"], tensors=MANY)
            return Plan(out, recipe, data, config, from_json(Preprocess, facts["preprocess"]), found, None)
    model, preprocess = start_model(recipe, data)
    plan = Plan(out, recipe, data, model.config, preprocess, None, model)
    if cluster.first:
        write_recipe(plan)
    cluster.barrier()
    return plan


def start_model(recipe: Recipe, data: Data) -> tuple[Model, Preprocess]:
    """The model before its first step: fresh, or from weights with a new head."""
    torch.manual_seed(recipe.seed)
    classes = 0 if recipe.objective == "masked" else len(data.classes)
    if recipe.weights is None:
        model = build(configure(recipe.model, recipe.model_settings() | {"classes": classes}))
        preprocess = recipe.preprocess or Preprocess()
    else:
        loaded = load(recipe.weights, classes=classes, image_size=recipe.image_size)
        model, preprocess = with_rates(loaded, recipe), recipe.preprocess or preprocess_of(loaded)
    if recipe.objective == "sigmoid" and model.head is not None and not model.head.weight.any():  # a fresh head
        start_sigmoid(model.head)
    return model, preprocess


def with_rates(model: Model, recipe: Recipe) -> Model:
    """Loaded weights under the recipe's dropout and stochastic depth; what else a model is, the weights decide."""
    given = {key: getattr(recipe, key) for key in MODEL_KEYS if getattr(recipe, key) is not None}
    for key, value in given.items():
        if key not in ("dropout", "drop_path") and getattr(model.config, key, value) != value:
            has = getattr(model.config, key)
            raise UserError(f"{recipe.weights} has {key}={has}, not {value}; set {key}={has}, or start without weights")
    rates = {key: value for key, value in given.items() if key in ("dropout", "drop_path")}
    if not rates or isinstance(model.config, ResNetConfig):
        return model
    new = build(dataclasses.replace(model.config, **rates))
    new.load_state_dict(model.state_dict())
    return new


def write_recipe(plan: Plan) -> None:
    """recipe.json, whole or not at all: the settings as they were resolved, and what the model is."""
    said = {
        "format": "vitlab/1",
        "recipe": to_json(plan.recipe),
        "model": model_json(plan.config),
        "preprocess": to_json(plan.preprocess),
        "labels": list(plan.data.classes),
        "images": len(plan.data.train),
    }
    with checkpoint.disk_errors(plan.out / RECIPE):
        plan.out.mkdir(parents=True, exist_ok=True)
        new = plan.out / f"{RECIPE}.new"
        new.write_text(json.dumps(said, indent=1) + "\n")
        flush(new)
        new.rename(plan.out / RECIPE)


def check_same_data(facts: dict[str, Any], data: Data, out: Path) -> None:
    if facts["images"] != len(data.train) or facts["labels"] != list(data.classes):
        raise UserError(
            f"the run in {out} trains on {facts['images']} images of {len(facts['labels'])} classes, and {data.name} "
            f"has {len(data.train)} of {len(data.classes)} now, or other names; continue with the same data"
        )


# ---- the micro-batch: as much as memory carries


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory())
    # half of what is there, not what happens to be free: the same run on the same machine is split the same way
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def fit_micro(batch: int, image_bytes: int, state_bytes: int, free: int) -> int:
    """The largest part of a batch that divides it and fits, with a fifth of the memory to spare."""
    room = max(0.0, 0.8 * free - state_bytes) / max(1, image_bytes)
    return next(n for n in divisors(batch) if n <= room or n == 1)


def divisors(n: int) -> list[int]:
    """From n down to 1."""
    return [d for d in range(n, 0, -1) if n % d == 0]
