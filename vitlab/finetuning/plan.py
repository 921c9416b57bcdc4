"""What `vitlab finetune` will do: the data, the weights to start from, the recipe and the time, described in lines."""

import time
from dataclasses import dataclass

from vitlab.data.balance import Balance
from vitlab.data.source import Data
from vitlab.data.summary import class_warnings
from vitlab.device import pick_device
from vitlab.errors import UserError
from vitlab.finetuning.budget import BATCH, MINUTES
from vitlab.models.names import name_of
from vitlab.models.variants import Model
from vitlab.text import counted, duration
from vitlab.training.auto import LORA_TUNING, machine
from vitlab.training.first_weights import find_weights
from vitlab.training.lora import check_rank
from vitlab.training.recipe import Recipe, change, count_steps, override
from vitlab.training.recipes import vary
from vitlab.training.seen import seen_warnings
from vitlab.training.setup import open_recipe_data
from vitlab.training.start import choose_head

# SGD from a soft head, with mild crops: measured best of 40 recipes on eight small sets, see docs/finetuning.md
TUNING = f"batch={BATCH} optimizer=sgd lr=0.01 clip=1 area=0.6,1 patience=5 checkpoint_every=100"


@dataclass(frozen=True)
class Plan:
    """A set, a model with a head for its classes, and a recipe without its length."""

    data: Data
    model: Model
    weights: str
    recipe: Recipe
    pairs: tuple[str, ...]  # the user's own settings
    seconds: float
    timed: bool  # whether the user gave them
    steps: int | None  # as the user's settings have it; None: by the time
    balance: Balance | None  # likewise; None: by cross-validation
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    began: float  # on the clock of time.monotonic
    start: float  # seconds in which the program started

    def tuning(self, steps: int, balanced: bool) -> Recipe:
        """The recipe of fine-tuning from a head that was fitted."""
        recipe = change(self.recipe, head="keep", steps=steps, warmup=steps // 10)
        recipe = change(recipe, compile="auto" if steps * BATCH > COMPILED else "no")
        recipe = change(recipe, balance="weights") if balanced else recipe
        recipe = override(recipe, [pair for pair in self.pairs if pair.partition("=")[0] not in SETTLED])
        return change(recipe, warmup=min(recipe.warmup, steps - 1))


SETTLED = ("epochs", "steps", "head", "weights", "data")  # by the plan
COMPILED = 200_000  # images: in shorter runs compiling takes longer than it saves


def make_plan(
    spec: str, weights: str | None, pairs: list[str], minutes: float | None, began: float | None = None
) -> Plan | None:
    """The plan for a set and this machine; None where there is no first stage: without weights, or several labels.

    `began` is when the program began to start, on the clock of time.monotonic, if it did so for this plan.
    """
    now, asked = time.monotonic(), override(Recipe("B/16", spec, steps=1), pairs)
    began = now if began is None else began
    data = open_recipe_data(asked)
    if data.is_multi_label or data.validation is None or asked.objective != "softmax":
        return None
    device = pick_device(asked.device)
    found = find_weights(asked.weights or weights, device)
    weights, model = found.name, found.model
    if weights is None or model is None:
        return None
    if asked.new_positions:
        raise UserError("the first stage has no use for positions that are yet to be learned; add --paper, one stage")
    keys = {pair.partition("=")[0] for pair in pairs}
    name = name_of(model.config) or "B/16"
    size = asked.image_size if "image_size" in keys else model.config.image_size
    recipe = vary(Recipe(name, spec, size, weights=weights, head="new", steps=1), TUNING)
    recipe = override(vary(recipe, LORA_TUNING) if asked.lora else recipe, pairs)
    check_rank(model.config, recipe.lora)
    model = choose_head(model.resize(size), recipe, data.classes)
    seconds = 60 * (MINUTES if minutes is None else minutes)
    if seconds <= 0:
        raise UserError(f"--minutes must be above 0, not {minutes}")
    steps = count_steps(recipe, len(data.train)) if keys & {"epochs", "steps"} else None
    held = len(data.validation)
    lines = (
        f"data     {data.name}: {len(data.train)} images to train on, {held} to choose on, {len(data.test)} to test, "
        f"{len(data.classes)} classes; {data.note}",
        f"weights  {found.line}",
        f"model    {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {size[0]}x{size[1]} px",
        "stages   1. a head on frozen features, with a report; 2. fine-tuning from it, kept unless it is worse"
        + (f"; yours: {' '.join(pairs)}" if pairs else ""),
        "time     " + (f"{duration(seconds)} on this {machine(device)}" if steps is None else counted(steps, "step")),
    )
    return Plan(
        data=data,
        model=model,
        weights=weights,
        recipe=recipe,
        pairs=tuple(pairs),
        seconds=seconds,
        timed=minutes is not None,
        steps=steps,
        balance=recipe.balance if "balance" in keys else None,
        lines=lines,
        warnings=(*found.warnings, *class_warnings(data), *seen_warnings(weights, data)),
        began=began,
        start=now - began,
    )
