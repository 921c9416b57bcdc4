"""Recipes: the paper's rows one by one, and settings that are read, refused or changed."""

import dataclasses
import json
from typing import Any

import pytest
from families import mostly_slow

from vitlab.cost import cost
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.models.names import configure
from vitlab.models.variants import build
from vitlab.settings import from_json, to_json
from vitlab.training.recipe import Recipe, change, is_settled, make_recipe, override, plain_from, resolve_length
from vitlab.training.recipes import AUGREG, IMAGES, RECIPES, check_ready, command, find, length, operations, run_flops

# The paper's table 3, written out: name, epochs, base LR, decay, weight decay, dropout.
PRETRAINING = """
B/16-jft      7   8e-4 linear 0.1  0
B/32-jft      7   8e-4 linear 0.1  0
L/32-jft      7   6e-4 linear 0.1  0
L/16-jft-7    7   4e-4 linear 0.1  0
L/16-jft-14   14  4e-4 linear 0.1  0
H/14-jft      14  3e-4 linear 0.1  0
R50x1-jft     7   1e-3 linear 0.1  0
R50x2-jft     7   1e-3 linear 0.1  0
R101x1-jft    7   8e-4 linear 0.1  0
R152x1-jft    7   6e-4 linear 0.1  0
R152x2-jft-7  7   6e-4 linear 0.1  0
R152x2-jft-14 14  6e-4 linear 0.1  0
R200x3-jft    14  6e-4 linear 0.1  0
R50+B/16-jft  7   8e-4 linear 0.1  0
R50+B/32-jft  7   8e-4 linear 0.1  0
R50+L/32-jft  7   2e-4 linear 0.1  0
R50+L/16-jft-7  7  4e-4 linear 0.1 0
R50+L/16-jft-14 14 4e-4 linear 0.1 0
B/16-i21k     90  1e-3 linear 0.03 0.1
B/32-i21k     90  1e-3 linear 0.03 0.1
R26+B/32-i21k 90  1e-3 linear 0.03 0.1
L/16-i21k-30  30  1e-3 linear 0.03 0.1
L/16-i21k-90  90  1e-3 linear 0.03 0.1
L/32-i21k-30  30  1e-3 linear 0.03 0.1
L/32-i21k-90  90  1e-3 linear 0.03 0.1
B/16-imagenet 300 3e-3 cosine 0.3  0.1
B/32-imagenet 300 3e-3 cosine 0.3  0.1
L/16-imagenet 300 3e-3 cosine 0.3  0.1
L/32-imagenet 300 3e-3 cosine 0.3  0.1
"""
ROWS = [line.split() for line in PRETRAINING.strip().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_pretraining_is_the_papers_table(row: list[str]) -> None:
    name, epochs, lr, decay, weight_decay, dropout = row
    r = find(name).recipe
    assert r.model == name.rsplit("-jft")[0].rsplit("-i21k")[0].rsplit("-imagenet")[0]
    assert (r.epochs, r.lr, r.decay) == (float(epochs), float(lr), decay)
    assert (r.weight_decay, r.model_settings.get("dropout", 0)) == (float(weight_decay), float(dropout))
    assert (r.batch, r.image_size, r.warmup) == (4096, (224, 224), 10_000)
    assert (r.optimizer, r.beta1, r.beta2) == ("adamw", 0.9, 0.999)
    assert r.clip == (1.0 if "imagenet" in name else 0.0)
    assert r.objective == ("softmax" if "imagenet" in name else "sigmoid")
    assert r.lr_end == 1e-5  # of the linear ones
    is_vit = "/" in r.model
    assert (r.init, r.model_settings.get("gelu")) == (("lecun", "tanh") if is_vit else ("xavier", None))


@pytest.mark.parametrize(
    ("name", "steps", "warmup", "rates"),
    [
        ("imagenet", 20_000, 500, (0.003, 0.01, 0.03, 0.06)),
        ("cifar100", 10_000, 500, (0.001, 0.003, 0.01, 0.03)),
        ("cifar10", 10_000, 500, (0.001, 0.003, 0.01, 0.03)),
        ("pets", 500, 100, (0.001, 0.003, 0.01, 0.03)),
        ("flowers", 500, 100, (0.001, 0.003, 0.01, 0.03)),
        ("vtab", 2_500, 500, (0.01,)),
    ],
)
def test_finetuning_is_the_papers_table(name: str, steps: int, warmup: int, rates: tuple[float, ...]) -> None:
    entry = find(f"{name}-finetune")
    r = entry.recipe
    assert (r.steps, r.warmup, entry.searched) == (steps, warmup, rates)
    assert r.lr in rates
    assert (r.optimizer, r.momentum, r.batch, r.decay) == ("sgd", 0.9, 512, "cosine")
    assert (r.weight_decay, r.clip, r.image_size) == (0.0, 1.0, (384, 384))


def test_large_models_at_high_resolution_are_averaged() -> None:
    for name, model, side in (("imagenet-finetune-512", "L/16", 512), ("imagenet-finetune-518", "H/14", 518)):
        r = find(name).recipe
        assert (r.model, r.image_size, r.ema) == (model, (side, side), 0.9999)


def test_augreg_levels() -> None:
    base = find("digits").recipe
    made = {name: override(change(base, augment=Augment()), text.split()).augment for name, text in AUGREG.items()}
    levels = {name: (a.mixup, *a.randaugment) for name, a in made.items()}
    assert levels == {
        "none": (0, 0, Augment().randaugment[1]),
        "light1": (0, 2, 0),
        "light2": (0.2, 2, 10),
        "medium1": (0.2, 2, 15),
        "medium2": (0.5, 2, 15),
        "strong1": (0.5, 2, 20),
        "strong2": (0.8, 2, 20),
    }


# The authors' later code, its two tables of pre-training: augmentation on ImageNet-21k and on ImageNet.
LEVELS = {
    "Ti/16": ("none", "light1"),
    "S/32": ("none", "medium1"),
    "S/16": ("light1", "medium2"),
    "B/32": ("light2", "medium2"),
    "B/16": ("light2", "medium2"),
    "L/16": ("medium2", "medium2"),
}


@pytest.mark.parametrize("model", LEVELS)
def test_augreg_is_the_authors_later_code(model: str) -> None:
    for data, level in zip(("i21k", "imagenet"), LEVELS[model], strict=True):
        entry = find(f"{model}-augreg-{data}")
        r, settings = entry.recipe, entry.recipe.model_settings
        assert r.augment == override(change(r, augment=Augment(mix_by="batch")), AUGREG[level].split()).augment
        assert (r.epochs, r.batch, r.lr, r.warmup, r.decay, r.clip) == (300, 4096, 1e-3, 10_000, "cosine", 1)
        assert r.weight_decay * r.lr == pytest.approx(1e-4)  # theirs is not multiplied by the rate
        assert (r.objective, r.init, settings["gelu"]) == ("sigmoid", "lecun", "tanh")
        width = {"Ti": 192, "S": 384, "B": 768, "L": 1024}[model.partition("/")[0]]
        expected = (-10.0, "mean", 0) if data == "i21k" else (-6.9, "token", width)
        assert (r.head_bias, settings.get("pool", "token"), settings.get("prelogits", 0)) == expected


def test_plain_baseline() -> None:
    r = find("S/16-plain-imagenet").recipe
    assert (r.epochs, r.batch, r.lr, r.warmup, r.decay, r.clip) == (90, 1024, 1e-3, 10_000, "cosine", 1)
    assert (r.objective, r.weight_decay) == ("softmax", 0.1)
    assert r.augment == Augment(mixup=0.2, randaugment=(2, 10), mix_by="batch")
    chosen = {"gelu": "tanh", "positions": "sincos2d", "pool": "mean", "prelogits": 384}
    assert {key: r.model_settings[key] for key in chosen} == chosen


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_builds_and_goes_through_json(name: str) -> None:
    recipe = find(name).recipe
    assert from_json(Recipe, json.loads(json.dumps(to_json(recipe)))) == recipe
    configure(recipe.model, recipe.model_settings | {"image_size": recipe.image_size, "classes": 10})
    assert name in command(name)
    assert operations(run_flops(recipe))
    assert length(recipe)


@pytest.mark.parametrize(
    "name", mostly_slow(["digits", "pets-96", "B/16-imagenet", "R50x1-jft", "R50+B/16-jft"], "digits", "R50+B/16-jft")
)
def test_costs_are_those_that_cost_counts(name: str) -> None:
    recipe = find(name).recipe
    settings = recipe.model_settings | {"image_size": recipe.image_size, "classes": 1000}
    images = recipe.steps * recipe.batch if recipe.steps else (recipe.epochs or 0) * IMAGES[recipe.data]
    assert run_flops(recipe) == cost(lambda: build(configure(recipe.model, settings))).run_flops(images, 1)


@pytest.mark.parametrize(
    ("name", "exaflops"),
    [("B/32-jft", 55), ("B/16-jft", 224), ("L/16-jft-14", 1567), ("H/14-jft", 4262), ("R200x3-jft", 3306)],
)
def test_costs_are_those_the_paper_prints(name: str, exaflops: float) -> None:
    assert run_flops(find(name).recipe) / 1e18 == pytest.approx(exaflops, rel=0.04)


# but those by the clock, whose cost is the machine's, and masked ones, whose model has another head (test_masked.py)
ONE_OF_EACH = {
    (recipe.model, recipe.image_size): name
    for name, entry in RECIPES.items()
    if is_settled(recipe := entry.recipe) and recipe.objective != "masked"
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_EACH.values())
def test_all_costs_are_those_that_cost_counts(name: str) -> None:
    test_costs_are_those_that_cost_counts(name)


# ---- settings


def test_override_reads_recipe_and_augmentation() -> None:
    r = override(
        find("digits").recipe, ["steps=120", "mixup=0.5", "area=0.2,0.9", "image_size=16", "ema=0", "workers=2"]
    )
    assert (r.steps, r.augment.mixup, r.augment.area) == (120, 0.5, (0.2, 0.9))
    assert (r.image_size, r.ema, r.workers) == ((16, 16), 0.0, 2)
    assert r.augment.flip == find("digits").recipe.augment.flip


def test_epochs_and_steps_replace_each_other() -> None:
    assert override(find("digits").recipe, ["epochs=3"]).steps is None
    assert override(find("B/16-jft").recipe, ["steps=3"]).epochs is None
    with pytest.raises(UserError, match="epochs or steps"):
        override(find("digits").recipe, ["epochs=3", "steps=3"])


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("stepz=3", "did you mean 'steps'"),
        ("mixop=3", "did you mean 'mixup'"),
        ("steps=many", "steps must be an integer"),
        ("optimizer=lion", "'adamw', 'sgd' or 'muon'"),
        ("steps", "key=value"),
        ("batch=0", "batch must be at least 1"),
        ("ema=1", "ema"),
        ("lr=-1", "lr"),
        ("lr=nan", "lr"),
    ],
)
def test_wrong_settings_are_named(pair: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        override(find("digits").recipe, [pair])


def test_names_are_guessed() -> None:
    with pytest.raises(UserError, match="did you mean 'digits'"):
        find("digit")
    with pytest.raises(UserError, match="did you mean 'B/16-imagenet'"):
        find("B16-imagenet")


def test_what_only_the_user_has_is_asked_for() -> None:
    with pytest.raises(UserError, match="data=SOURCE"):
        check_ready("B/16-jft", find("B/16-jft").recipe)
    with pytest.raises(UserError, match="weights=FILE"):
        check_ready("cifar10-finetune", find("cifar10-finetune").recipe)
    given: dict[str, Any] = {"weights": "x.npz"}
    recipe = dataclasses.replace(find("cifar10-finetune").recipe, **given)
    assert check_ready("cifar10-finetune", recipe) is recipe


def test_resolution_counts_steps() -> None:
    r = resolve_length(find("B/16-imagenet").recipe, images=1_281_167, tests=50_000, world=8)
    assert r.steps == round(300 * 1_281_167 / 4096)
    assert r.epochs is None
    assert r.evaluate_every == -(-r.steps // 10)
    short = resolve_length(find("digits").recipe, images=1198, tests=10**6, world=1)
    assert short.evaluate_every == short.steps  # a large test set is not gone through ten times for a small run
    with pytest.raises(UserError, match="multiple of 3"):
        resolve_length(find("B/16-imagenet").recipe, images=1_281_167, tests=50_000, world=3)


def test_where_the_plain_end_of_a_run_begins() -> None:
    recipe = make_recipe("Ti/4", "digits", steps=1000, batch=32, plain_end=0.1, mixup=0.2)
    assert plain_from(recipe) == 900 * 32
    assert plain_from(change(recipe, plain_end=0.0)) is None
    assert plain_from(change(recipe, minutes=3)) is None  # not yet
