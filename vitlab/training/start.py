"""What a run takes from the weights it starts from: their head or a new one, and a record of where they came from."""

import dataclasses
import logging
from collections.abc import Mapping

from vitlab.data.source import Data
from vitlab.errors import UserError
from vitlab.models.meta import fill_model
from vitlab.models.names import configure
from vitlab.models.variants import Model
from vitlab.training.recipe import Recipe
from vitlab.training.teacher import name_teacher
from vitlab.weights.load import Checkpoint, find_origin, load, replace_head

log = logging.getLogger("vitlab")


def choose_head(model: Model, recipe: Recipe, classes: tuple[str, ...]) -> Model:
    """Loaded weights with their own head if its classes have the data's names, in any order; else with one of zeros.

    `head=keep` and `head=new` choose without comparing names. A new head is on the features, without pre-logits.
    """
    own = model.card.labels
    if recipe.head == "keep":
        if model.config.classes != len(classes):
            has = f"{recipe.weights} has a head of {model.config.classes} classes and the data has {len(classes)}"
            raise UserError(f"{has}, so head=keep is not possible; use head=new")
        return model
    if recipe.head == "auto" and own is not None and have_same_names(own, classes):
        log.info("kept: the head of %d classes, whose names are the data's", len(own))
        return reorder_head(model, own, classes)
    why = "head=new" if recipe.head == "new" else "it has no class names" if own is None else "its classes are others"
    old = Checkpoint(model.config, dict(model.state_dict()), model.card)
    changed = replace_head(old, len(classes), why if model.config.classes else "")
    new = fill_model(changed.config, changed.tensors)
    new.card = changed.card
    return new


def check_named_model(recipe: Recipe) -> None:
    """Raise UserError where a model that the user named is not that of the weights, which decide what is trained."""
    if recipe.weights is None:
        return
    shape = ("depth", "width", "heads", "mlp", "patch", "stages")
    given = {key: value for key, value in recipe.model_settings.items() if key in shape}
    found, named = load(recipe.weights).config, configure(recipe.model, given)
    if type(found) is not type(named):
        raise UserError(f"{recipe.weights} is no {recipe.model}; leave model, or start without weights")
    for key in shape:
        if getattr(found, key, None) != getattr(named, key, None):
            has = f"it has {key}={getattr(found, key)}, not {getattr(named, key)}"
            raise UserError(f"{recipe.weights} is no {recipe.model}: {has}; leave model, or start without weights")


def have_same_names(own: tuple[str, ...], classes: tuple[str, ...]) -> bool:
    return own == classes or (sorted(own) == sorted(classes) and len(set(own)) == len(own))


def reorder_head(model: Model, own: tuple[str, ...], classes: tuple[str, ...]) -> Model:
    """The model with the rows of its head in the order of `classes`."""
    if own != classes and model.head is not None:
        rows = [own.index(name) for name in classes]
        for tensor in (model.head.weight, model.head.bias):
            tensor.data = tensor.data[rows]
        model.card = dataclasses.replace(model.card, labels=classes)
    return model


def make_provenance(recipe: Recipe, data: Data, start: Model | None) -> dict[str, str]:
    """How a trained model came about: the file that it started from, the data, the training, and what was before."""
    training = {"data": data.name, "training": describe_training(recipe), **name_teacher(recipe)}
    if recipe.weights is None or start is None:
        return {"source": "from scratch", **training}
    origin = find_origin(recipe.weights)
    earlier = start.card.provenance or {}
    before = {} if earlier == origin else {"before": describe(earlier)}
    return {**origin, **training, **before}


def describe_training(recipe: Recipe) -> str:
    """In a line, for provenance; a run by the clock has its number of steps once its speed is known."""
    steps = f"{recipe.steps} steps of {recipe.batch} images, {recipe.objective}, {recipe.optimizer}"
    return f"{steps}, lr {recipe.lr:g}, seed {recipe.seed}"


def describe(provenance: Mapping[str, str]) -> str:
    return "; ".join(f"{key}: {value}" for key, value in provenance.items())
