"""Recipes as data: the paper's tables of pre-training and fine-tuning, AugReg's settings, and runs for one machine.

A name is MODEL-DATA, with -EPOCHS where the paper has several lengths: B/16-jft, L/16-i21k-90, R50+B/16-jft. Those
that start from weights are called DATA-finetune.
"""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from vitlab.cost import BACKWARD, forward_flops, masked_flops
from vitlab.errors import UserError
from vitlab.models.config import ModelConfig, Preprocess, ViTConfig
from vitlab.models.names import SIZES, configure
from vitlab.settings import parse_settings
from vitlab.text import counted, flops_unit
from vitlab.training.recipe import Recipe, change, is_settled, keys, make_recipe, override

# Images in the training sets whose size a recipe's cost needs.
IMAGES = {
    "jft": 303_000_000,
    "imagenet21k": 14_000_000,
    "imagenet": 1_281_167,
    "cifar10": 50_000,
    "cifar100": 50_000,
    "oxford-pets": 3_680,
    "flowers102": 1_020,
    "vtab": 1_000,
    "digits": 1_198,
    "zh-plus/tiny-imagenet": 100_000,
}
# Sets that have no public copy to open by name: the recipe is complete once data= names yours.
PRIVATE = {
    "jft": "JFT-300M is not public",
    "imagenet21k": "ImageNet-21k has to be asked for",
    "imagenet": "ImageNet has to be asked for",
    "vtab": "VTAB is 19 sets of 1,000 images each",
}


@dataclass(frozen=True)
class Entry:
    """A recipe with its description, cost and expected result."""

    recipe: Recipe
    about: str
    group: str
    finetune: bool = False  # starts from weights=
    searched: tuple[float, ...] = field(default=())  # learning rates the paper tried
    time: str = ""  # measured, and on what
    expect: str = ""  # test accuracy to expect


def made(text: str, **settings: Any) -> Recipe:
    """A recipe from its settings as on a command line; `settings` are those that no text expresses."""
    return make_recipe(**parse_settings(text.split(), keys()), **settings)


def vary(base: Recipe, text: str) -> Recipe:
    """A recipe with other settings, as on a command line."""
    return override(base, text.split())


# ---- the paper's pre-training table: batch 4096, 224 px, Adam, warm-up 10k
#        models                                epochs    LR    (decay, weight decay and dropout by the data)
JFT = (
    (("B/16", "B/32"), (7,), 8e-4),
    (("L/32",), (7,), 6e-4),
    (("L/16",), (7, 14), 4e-4),
    (("H/14",), (14,), 3e-4),
    (("R50x1", "R50x2"), (7,), 1e-3),
    (("R101x1",), (7,), 8e-4),
    (("R152x1",), (7,), 6e-4),
    (("R152x2",), (7, 14), 6e-4),  # the 14 epochs and R200x3 are in the table of results only: the rate of the 7
    (("R200x3",), (14,), 6e-4),
    (("R50+B/16", "R50+B/32"), (7,), 8e-4),
    (("R50+L/32",), (7,), 2e-4),
    (("R50+L/16",), (7, 14), 4e-4),
)
I21K = (
    (("B/16", "B/32", "R26+B/32"), (90,), 1e-3),  # the hybrid's weights are public, its settings are not: B/32's
    (("L/16", "L/32"), (30, 90), 1e-3),
)
IMAGENET = ((("B/16", "B/32", "L/16", "L/32", "H/14"), (300,), 3e-3),)


def hidden(model: str) -> int | None:
    """The width of the pre-training head's tanh layer: the model's own; a ResNet has none."""
    return SIZES[model.partition("/")[0].rpartition("+")[2]][1] if "/" in model else None


def fresh(model: str) -> dict[str, Any]:
    """Settings of fresh weights as the authors' code has them; a ResNet has no choice of these."""
    return {"gelu": "tanh", "init": "lecun"} if "/" in model else {}


def pretraining() -> Iterator[tuple[str, Entry]]:
    about = "pre-training, the paper's table"
    base = made(
        "model=B/16 data=jft epochs=7 batch=4096 warmup=10000 decay=linear lr_end=1e-5 objective=sigmoid "
        "weight_decay=0.1"
    )
    large = vary(base, "data=imagenet21k weight_decay=0.03 dropout=0.1")
    small = vary(base, "data=imagenet objective=softmax decay=cosine weight_decay=0.3 dropout=0.1 clip=1")
    for name, start, table in (("jft", base, JFT), ("i21k", large, I21K), ("imagenet", small, IMAGENET)):
        for models, lengths, lr in table:
            for model, epochs in itertools.product(models, lengths):
                recipe = change(start, model=model, epochs=epochs, lr=lr, prelogits=hidden(model), **fresh(model))
                suffix = f"-{epochs}" if len(lengths) > 1 else ""
                yield f"{model}-{name}{suffix}", Entry(recipe, about, "paper")
    masked = vary(base, "objective=masked masking=exact steps=1000000 lr=2e-4 decay=cosine gelu=tanh init=lecun")
    yield "B/16-masked-jft", Entry(masked, "masked patch prediction, the paper's appendix", "paper")


# ---- the paper's fine-tuning table: SGD, batch 512, cosine, clip 1, 384 px

HIGH = (0.003, 0.01, 0.03, 0.06)
LOW = (0.001, 0.003, 0.01, 0.03)
#        name        data          steps  learning rates
FINETUNE = (
    ("imagenet", "imagenet", 20_000, HIGH),
    ("cifar100", "cifar100", 10_000, LOW),
    ("cifar10", "cifar10", 10_000, LOW),
    ("pets", "oxford-pets", 500, LOW),
    ("flowers", "flowers102", 500, LOW),
    ("vtab", "vtab", 2_500, (0.01,)),
)


def finetuning() -> Iterator[tuple[str, Entry]]:
    about = "fine-tuning, the paper's table"
    base = made(
        "model=B/16 data=imagenet image_size=384 steps=20000 batch=512 optimizer=sgd lr=0.01 warmup=500 "
        "decay=cosine clip=1"
    )
    for name, data, steps, rates in FINETUNE:
        recipe = change(base, data=data, steps=steps, warmup=100 if steps == 500 else 500)
        yield f"{name}-finetune", Entry(recipe, about, "paper", finetune=True, searched=rates)
    for model, side in (("L/16", 512), ("H/14", 518)):
        recipe = change(base, model=model, image_size=(side, side), ema=0.9999)
        entry = Entry(recipe, f"{about}, Polyak 0.9999", "paper", finetune=True, searched=HIGH)
        yield f"imagenet-finetune-{side}", entry


# ---- AugReg: pre-training with augmentation by the size of the model

AUGREG = {
    "none": "",
    "light1": "randaugment=2,0",
    "light2": "mixup=0.2 randaugment=2,10",
    "medium1": "mixup=0.2 randaugment=2,15",
    "medium2": "mixup=0.5 randaugment=2,15",
    "strong1": "mixup=0.5 randaugment=2,20",
    "strong2": "mixup=0.8 randaugment=2,20",
}
#            on ImageNet-21k, on ImageNet
AUGREG_FOR = {
    "Ti/16": ("none", "light1"),
    "S/32": ("none", "medium1"),
    "S/16": ("light1", "medium2"),
    "B/32": ("light2", "medium2"),
    "B/16": ("light2", "medium2"),
    "L/16": ("medium2", "medium2"),
}


def augreg() -> Iterator[tuple[str, Entry]]:
    base = made(
        "model=B/16 data=imagenet21k epochs=300 lr=0.001 warmup=10000 decay=cosine weight_decay=0.1 clip=1 "
        "objective=sigmoid mix_by=batch gelu=tanh init=lecun"
    )
    for model, (large, small) in AUGREG_FOR.items():
        recipe = vary(base, f"model={model} pool=mean {AUGREG[large]}")
        yield f"{model}-augreg-i21k", Entry(recipe, f"AugReg, {large} augmentation", "augreg")
        recipe = vary(base, f"model={model} data=imagenet head_bias=-6.9 prelogits={hidden(model)} {AUGREG[small]}")
        yield f"{model}-augreg-imagenet", Entry(recipe, f"AugReg, {small} augmentation", "augreg")
    plain = vary(base, f"model=S/16 data=imagenet epochs=90 batch=1024 objective=softmax prelogits={hidden('S/16')}")
    plain = vary(plain, f"positions=sincos2d pool=mean {AUGREG['light2']}")
    about = "the authors' plain baseline: 2-D sinusoids, mean pooling"
    yield "S/16-plain-imagenet", Entry(plain, about, "augreg", expect="76.5 %, published")


# ---- runs for one machine

# a third of S/8's weights
THIN = "model=S/8 depth=9 width=256 mlp=1024 heads=4 pool=mean"
# one thread: so small a model gains little from two, and loses much where they wait for other programs
DIGITS = made(
    "model=Ti/2 data=digits image_size=8 depth=4 width=64 mlp=128 heads=4 steps=1200 batch=128 lr=0.005 warmup=50 "
    "weight_decay=0.05 clip=1 ema=0.99 area=0.8,1 flip=false mixup=0.3 checkpoint_every=200 threads=1",
    preprocess=Preprocess(crop=1.0),
)
# one command, one GPU, ten minutes from the process's start to its test accuracy
TINY = made(
    "model=S/8 data=zh-plus/tiny-imagenet image_size=64 pool=mean drop_path=0.2 minutes=9.2 batch=512 optimizer=muon "
    "lr=0.004 warmup=200 decay=linear weight_decay=0.1 clip=1 ema=0.998 cuda_graph=true area=0.3,1 randaugment=2,9 "
    "mixup=0.8 cutmix=1 label_smoothing=0.1 plain_end=0.03 checkpoint_every=5000 log_every=100",
    preprocess=Preprocess(crop=1.0),
)
CIFAR = made(
    "model=S/4 data=cifar10 image_size=32 pool=mean drop_path=0.1 minutes=9.5 batch=512 optimizer=muon lr=0.004 "
    "warmup=200 decay=linear weight_decay=0.1 clip=1 ema=0.998 cuda_graph=true area=0.4,1 randaugment=2,9 mixup=0.8 "
    "cutmix=1 label_smoothing=0.1 plain_end=0.07 checkpoint_every=5000 log_every=100",
    preprocess=Preprocess(crop=1.0),
)
MASKED = made(
    f"{THIN} data=zh-plus/tiny-imagenet image_size=64 objective=masked epochs=20 batch=512 lr=0.001 warmup=2000 "
    "weight_decay=0.05 clip=1 drop_path=0 area=0.3,1 checkpoint_every=10000 log_every=100",
    preprocess=Preprocess(crop=1.0),
)
# small sets of photos at 96 px, from weights or from scratch; over sooner than compiling would take
PHOTOS = made(
    f"{THIN} data=oxford-pets image_size=96 drop_path=0.1 epochs=40 batch=128 lr=5e-4 warmup=100 weight_decay=0.05 "
    "clip=1 ema=0.99 cuda_graph=true area=0.3,1 randaugment=2,9 mixup=0.2 label_smoothing=0.1 compile=no "
    "checkpoint_every=10000 log_every=100",
    preprocess=Preprocess(crop=1.0),
)
# the runs of the studies: as plain as the paper's, and the same for every model that is compared. Fine-tuning is over
# sooner than compiling, which is for one number of classes; its steps are recorded as they are.
STUDY = made(
    "model=Ti/8 data=zh-plus/tiny-imagenet image_size=64 steps=5000 batch=256 lr=0.001 warmup=500 weight_decay=0.1 "
    "clip=1 area=0.3,1 validation=0 cuda_graph=true log_every=50",
    preprocess=Preprocess(crop=1.0),
)
STUDY_FINETUNE = vary(
    STUDY,
    "data=oxford-pets steps=500 optimizer=sgd lr=0.03 warmup=50 weight_decay=0 head=new compile=no "
    "checkpoint_every=250",
)
SMALL_SET = made(
    "model=Ti/16 data=oxford-pets epochs=5 batch=32 optimizer=sgd lr=0.01 warmup=50 decay=cosine clip=1 area=0.3,1"
)


def lab() -> Iterator[tuple[str, Entry]]:
    about = "built-in handwritten digits, from scratch"
    yield "digits", Entry(DIGITS, about, "lab", time="70 s on a CPU core", expect="98 to 99 %")
    about = "10 classes of 32x32 photos, from scratch by Muon"
    yield "cifar10-fast", Entry(CIFAR, about, "lab", time="9.5 min on an H200", expect="95 %")
    about = "200 classes of 64x64 photos, from scratch by Muon"
    yield "tiny-imagenet", Entry(TINY, about, "lab", time="9 min on an H200", expect="63 %")
    yield "tiny-imagenet-masked", Entry(MASKED, "masked patch prediction on the same", "lab")
    about = "at 96 px, from weights=box, from weights=RUN of tiny-imagenet, or from scratch"
    took = "1 min on an H200"
    yield "pets-96", Entry(PHOTOS, f"37 breeds {about}", "lab", time=took, expect="77 %, from scratch 9 %")
    longer = change(PHOTOS, data="flowers102", epochs=300, optimizer="muon", lr=1e-3)
    yield "flowers-96", Entry(longer, f"102 flowers {about}", "lab", time="3 min on an H200", expect="83 %")
    yield "study", Entry(STUDY, "pre-training in `vitlab study`: short and plain, for comparisons", "lab")
    about = "fine-tuning in `vitlab study`, the paper's at a small size"
    yield "study-finetune", Entry(STUDY_FINETUNE, about, "lab")
    yield "pets", Entry(SMALL_SET, "37 breeds, from weights, minutes on a CPU", "lab", finetune=True)
    flowers = change(SMALL_SET, data="flowers102", epochs=15)
    yield "flowers", Entry(flowers, "102 flowers, from weights, minutes on a CPU", "lab", finetune=True)


RECIPES: dict[str, Entry] = dict(itertools.chain(lab(), pretraining(), finetuning(), augreg()))


def find(name: str) -> Entry:
    """A recipe by name; UserError names the nearest to an unknown one."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, 1, 0.4)
        hint = f"did you mean '{near[0]}'?" if near else "`vitlab recipes` lists them"
        raise UserError(f"there is no recipe '{name}'; {hint}")
    return RECIPES[name]


def check_ready(name: str, recipe: Recipe) -> Recipe:
    """Refuse a recipe that still lacks what only the user has: data of their own, weights to start from."""
    if recipe.data in PRIVATE:
        raise UserError(f"{PRIVATE[recipe.data]}, so {name} needs data=SOURCE: a folder, parquet files or tar shards")
    if find(name).finetune and recipe.weights is None:
        raise UserError(f"{name} starts from trained weights; set weights=FILE, or a run folder, or a hub id")
    return recipe


# ---- what a recipe costs, as text


def run_flops(recipe: Recipe, model: ModelConfig | None = None) -> float:
    """Operations of a complete run: a training image costs three forward passes.

    `model` is the run's, where it is known; None: the recipe's, with a head of 1,000 classes. Not a number for a run by
    the clock.
    """
    if not is_settled(recipe):
        return math.nan
    images = recipe.steps * recipe.batch if recipe.steps else (recipe.epochs or 0) * IMAGES[recipe.data]
    settings = {"classes": 1000, "image_size": recipe.image_size}
    config = configure(recipe.model, recipe.model_settings | settings) if model is None else model
    each: float = image_flops(recipe, config)
    if recipe.small_size is not None:
        small = image_flops(recipe, dataclasses.replace(config, image_size=recipe.small_size))
        each += recipe.small_start * (small - each)
    return (1 + BACKWARD) * each * images


def image_flops(recipe: Recipe, config: ModelConfig) -> int:
    """Operations of a forward pass in training; masked patches have a head of their own in place of the model's."""
    if recipe.objective == "masked" and isinstance(config, ViTConfig):
        return masked_flops(config, recipe.masked_target)
    return forward_flops(config)


def length(recipe: Recipe) -> str:
    if recipe.minutes is not None:
        return counted(recipe.minutes, "minute")
    if recipe.steps is None:
        return counted(recipe.epochs or 0, "epoch")
    short = {10**6: "M", 10**3: "k"}
    size = next((size for size in short if recipe.steps % size == 0), 1)
    return f"{recipe.steps // size}{short.get(size, '')} steps"


def operations(flops: float) -> str:
    """In the unit that fits: 224 exaFLOPs, 12 petaFLOPs."""
    if math.isnan(flops):
        return "what the machine computes in its time"
    unit, size = flops_unit(flops)
    count = flops / size
    return f"{count:,.0f} {unit}" if count >= 100 else f"{count:.3g} {unit}"


def command(name: str) -> str:
    """What to type to run it."""
    entry = RECIPES[name]
    words = ["vitlab", "train", name]
    words += ["data=SOURCE"] if entry.recipe.data in PRIVATE else []
    words += ["weights=FILE"] if entry.finetune else []
    return " ".join([*words, "--out", "runs/" + name.replace("/", "")])
