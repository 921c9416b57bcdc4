"""`vitlab finetune` without settings: a recipe, image size, batch and length that fit the data and the machine.

A GPU that can run it gets the paper's recipe: SGD, batch 512, 384 pixels, 500 to 20,000 steps by the size of the set.
Any other machine is timed on a few images first, and gets small batches at the weights' own size for as many epochs
as fit into some minutes; where not even one fits, only the head learns.
"""

import dataclasses
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from vitlab.cost import Cost, cost
from vitlab.data.images import BrokenImage
from vitlab.data.source import Data, ImageSource
from vitlab.data.summary import class_warnings, image_warnings, summarize
from vitlab.device import peak_flops, pick_device
from vitlab.models.config import Preprocess, Size
from vitlab.models.names import name_of
from vitlab.models.variants import Model, build, create
from vitlab.text import counted, duration
from vitlab.training.first_weights import find_weights
from vitlab.training.recipe import Recipe, change, count_steps, evaluations, override
from vitlab.training.recipes import DIGITS, made, vary
from vitlab.training.setup import free_bytes, open_recipe_data

TIME_LIMIT = 10 * 60.0  # seconds that a run without settings may take where there is no large GPU
EPOCHS = (2, 12)  # least and most of them there
PAPER_LIMIT = 12 * 3600.0  # seconds: where the paper's recipe takes longer, it is not the default
SUSTAINED = 0.35  # share of a GPU's peak that training reaches
SMALLEST_MICRO = 16  # a GPU that cannot hold as many images at 384 px is not one for the paper's recipe
FULL_RATE, HEAD_RATE = 0.01, 0.1  # SGD's learning rates for small batches
LORA_TUNING = "optimizer=adamw lr=0.001"  # low-rank updates start at zero, where SGD hardly moves them
DECODE_LIMIT = 10_000  # images: sets up to here are decoded once to find duplicates


@dataclass(frozen=True)
class FinetunePlan:
    """A recipe, its description in lines, warnings, and the seconds it will take."""

    recipe: Recipe
    lines: tuple[str, ...]
    warnings: tuple[str, ...]
    seconds: float


def finetune_recipe(spec: str, start: str | None, pairs: list[str]) -> FinetunePlan:
    """A recipe for a set and this machine. `start` are the weights to begin with ("none" for none); the user's own
    settings, `pairs`, take precedence."""
    asked = override(Recipe("B/16", spec, steps=1), pairs)
    data = open_recipe_data(asked)
    device = pick_device(asked.device)
    found = find_weights(asked.weights or start, device)
    weights, model = found.name, found.model
    if model is None:
        recipe, why = for_labels(data, *from_scratch(data, spec))
        recipe = override(recipe, pairs)
        model = create(recipe.model, classes=len(data.classes), image_size=recipe.image_size, **recipe.model_settings)
    else:
        recipe, why = for_labels(data, *from_weights(data, spec, weights, model, device, lora=asked.lora))
        recipe = override(recipe, pairs)
        model.resize(recipe.image_size)
    recipe = fit_length(recipe, model, data, device, pairs)
    seconds = run_seconds(recipe, model, data, device)
    lines = (
        f"data     {data.name}: {len(data.train)} images to train on, "
        + (f"{len(data.validation)} to choose on, " if data.validation is not None else "")
        + f"{len(data.test)} to test, {len(data.classes)} classes; {data.note}",
        f"weights  {found.line}",
        f"model    {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, "
        f"{recipe.image_size[0]}x{recipe.image_size[1]} px",
        f"recipe   {why}" + (f"; yours: {' '.join(pairs)}" if pairs else ""),
        f"length   {length(recipe, len(data.train))}, about {duration(seconds)} on this {machine(device)}",
    )
    return FinetunePlan(recipe, lines, (*found.warnings, *data_warnings(data, spec)), seconds)


def from_weights(
    data: Data, spec: str, weights: str | None, model: Model, device: torch.device, *, lora: int = 0
) -> tuple[Recipe, str]:
    """The paper's recipe where the machine can run it; else one of small batches at the weights' own size.

    Low-rank updates have AdamW in place of SGD.
    """
    n = len(data.train)
    steps = 500 if n < 20_000 else 10_000 if n < 500_000 else 20_000
    warmup = 100 if steps == 500 else 500
    name = name_of(model.config) or "B/16"  # a recipe has to name one; the weights themselves decide
    paper = Recipe(name, spec, higher(model.config.image_size, model), weights=weights, steps=steps)
    paper = vary(paper, f"batch=512 optimizer=sgd lr=0.01 warmup={warmup} clip=1 checkpoint_every={warmup}")
    if can_run_paper(paper, model, data, device):
        paper, how = for_updates(paper, lora)
        return paper, f"the paper's: {how}, batch 512, {paper.image_size[0]} px, lr {paper.lr:g}, cosine"
    frozen = not lora and image_seconds(model, device, frozen=False) * n * EPOCHS[0] > TIME_LIMIT
    # as many epochs as there is time for: see fit_length
    small = f"epochs={EPOCHS[1]} batch={min(32, n)} lr={FULL_RATE} area=0.3,1 checkpoint_every=100"
    recipe, what = vary(change(paper, image_size=model.config.image_size), small), "all weights"
    if frozen:
        recipe = change(recipe, freeze="body", lr=HEAD_RATE)
        what = "the head alone (all weights would take too long)"
    recipe, how = for_updates(recipe, lora)
    what = "low-rank updates and the head" if lora else what
    return recipe, f"{what}, {how}, batch {recipe.batch}, the weights' own size, lr {recipe.lr:g}, cosine"


def for_updates(recipe: Recipe, lora: int) -> tuple[Recipe, str]:
    """A recipe of SGD as it is or, for low-rank updates, with AdamW; and the optimizer's name."""
    return (vary(recipe, LORA_TUNING), "AdamW") if lora else (recipe, "SGD")


def from_scratch(data: Data, spec: str) -> tuple[Recipe, str]:
    """A small ViT on small images."""
    if spec == "digits":
        return DIGITS, "the built-in recipe of the digits"
    side = 64 if typical_side(data.train) >= 48 else 32
    recipe = made(
        f"model=Ti/{side // 8} image_size={side} depth=6 width=96 mlp=192 heads=4 batch={min(64, len(data.train))} "
        "epochs=100 lr=0.002 warmup=100 weight_decay=0.05 clip=1 area=0.5,1 mixup=0.2 label_smoothing=0.1 "
        "checkpoint_every=200",
        data=spec,
        preprocess=Preprocess(crop=1.0),
    )
    return recipe, f"a small model, AdamW, batch {recipe.batch}, lr {recipe.lr:g}, cosine, Mixup, label smoothing"


def for_labels(data: Data, recipe: Recipe, why: str) -> tuple[Recipe, str]:
    """The recipe with a sigmoid for each class where images have any number of labels."""
    if not data.is_multi_label:
        return recipe, why
    return change(recipe, objective="sigmoid"), f"{why}; a sigmoid for each class, as the set is multi-label"


def fit_length(recipe: Recipe, model: Model, data: Data, device: torch.device, pairs: list[str]) -> Recipe:
    """As many epochs as the time limit allows, unless the user set them; the warm-up is at most a tenth of the run."""
    keys = {pair.partition("=")[0] for pair in pairs}
    n = len(data.train)
    if recipe.epochs is not None and not keys & {"epochs", "steps"}:
        each = image_seconds(model, device, frozen=recipe.freeze == "body")
        recipe = dataclasses.replace(recipe, epochs=min(recipe.epochs, max(1.0, TIME_LIMIT // (each * n))))
    if "warmup" not in keys:
        recipe = dataclasses.replace(recipe, warmup=min(recipe.warmup, count_steps(recipe, n) // 10))
    return recipe


def typical_side(source: ImageSource) -> int:
    """The median of the shorter sides of some pictures."""
    sides = []
    for index in np.unique(np.linspace(0, len(source) - 1, 25).astype(int)).tolist():
        with suppress(BrokenImage):
            sides.append(min(source.image(index).size))
    return int(np.median(sides)) if sides else 0


def higher(native: Size, model: Model) -> Size:
    """384 pixels as in the paper, or the nearest above that the patches divide; the native size where it is larger."""
    step = int(getattr(model.config, "stride", 1))  # a ResNet has none
    side = -(-384 // step) * step
    return max(native, (side, side))


# ---- time


def can_run_paper(recipe: Recipe, model: Model, data: Data, device: torch.device) -> bool:
    """Whether this machine has a GPU with the memory and the speed for the paper's recipe."""
    if peak_flops(device) is None:
        return False
    config = dataclasses.replace(model.config, image_size=recipe.image_size, classes=len(data.classes))
    c = cost(lambda: build(config))
    fits = c.activation_bytes * SMALLEST_MICRO + 16 * c.parameters < 0.8 * free_bytes(device)
    return fits and gpu_seconds(recipe, c, data, device) < PAPER_LIMIT


def gpu_seconds(recipe: Recipe, c: Cost, data: Data, device: torch.device) -> float:
    seen, tested = workload(recipe, data)
    return (seen + tested / 3) * c.train_flops / (SUSTAINED * (peak_flops(device) or 1e12))


def workload(recipe: Recipe, data: Data) -> tuple[int, int]:
    """Images that a run trains on and tests on, with averaged weights twice; a test takes a forward pass alone."""
    seen = count_steps(recipe, len(data.train)) * recipe.batch
    choose = 0 if data.validation is None else len(data.validation)
    tested = len(data.test) + (evaluations(seen, choose) * choose if choose else 0)
    return seen, tested * (2 if recipe.ema else 1)


def run_seconds(recipe: Recipe, model: Model, data: Data, device: torch.device) -> float:
    """How long a run will take: by operations on a GPU of the table, elsewhere by measuring."""
    if peak_flops(device) is not None:
        return gpu_seconds(recipe, cost(lambda: build(model.config)), data, device)
    seen, tested = workload(recipe, data)
    forward = image_seconds(model, device, frozen=True)
    each = forward if recipe.freeze == "body" else image_seconds(model, device, frozen=False)
    return seen * each + tested * forward


def image_seconds(model: Model, device: torch.device, *, frozen: bool, batch: int = 8) -> float:
    """Seconds to train on one image, measured: the faster of two passes after one to warm up."""
    images = torch.randn(batch, 3, *model.config.image_size, device=device)
    model = model.to(device).train()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        with torch.set_grad_enabled(not frozen):
            out = model(images).float().sum()
        if not frozen:
            out.backward()
        out.item()  # waits for the device
        times.append(time.perf_counter() - began)
    model.zero_grad(set_to_none=True)
    return min(times[1:]) / batch


# ---- text


def data_warnings(data: Data, spec: str) -> list[str]:
    """Uneven and tiny classes; for a small set, also broken images and those in two splits."""
    if len(data.train) + len(data.test) <= DECODE_LIMIT:
        return class_warnings(data) + image_warnings(summarize(data))
    unchecked = f"a large set: whether images are in two splits was not checked (`vitlab data {spec}` does)"
    return [*class_warnings(data), unchecked]


def length(recipe: Recipe, images: int) -> str:
    if recipe.steps is not None:
        return f"{counted(recipe.steps, 'step')} ({recipe.steps * recipe.batch / images:.1f} epochs)"
    return counted(recipe.epochs or 0, "epoch")


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    count = torch.get_num_threads()
    return {"cpu": f"CPU ({counted(count, 'thread')})", "mps": "Mac's GPU"}[device.type]
