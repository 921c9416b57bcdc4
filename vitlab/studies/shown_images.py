"""Images that a run has not trained on, as its model sees them."""

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from vitlab.data.loader import Batch, EvalLoader
from vitlab.data.source import Subset
from vitlab.models.variants import Model
from vitlab.studies.request import PRETRAIN
from vitlab.studies.study import Train
from vitlab.training.recipe import override
from vitlab.training.recipes import find
from vitlab.training.setup import open_recipe_data

KEYS = ("data", "seed", "subset", "per_class", "holdout", "validation", "review")  # of a recipe, that choose images


def data_pairs(run: Train) -> tuple[str, ...]:
    """The settings of a run that choose its images, from the request: those in its folder may be a stranger's."""
    return tuple(pair for pair in run.pairs if pair.partition("=")[0] in KEYS)


def shown_batches(
    model: Model, pairs: Iterable[str], device: torch.device, *, most: int, batch: int
) -> Iterator[Batch]:
    """Up to `most` test images of a run's data (`data_pairs`), evenly over the set, in batches on the device."""
    test = open_recipe_data(override(find(PRETRAIN).recipe, pairs)).test
    chosen = np.unique(np.linspace(0, len(test) - 1, min(most, len(test))).astype(np.int64))
    preprocess, size = model.card.preprocess, model.config.image_size
    loader = EvalLoader(Subset(test, chosen), size, preprocess, batch=batch, workers=0, device=device, resident=False)
    yield from loader.batches()
