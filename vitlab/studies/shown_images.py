"""Images that a run has not trained on, as its model sees them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from vitlab.data.loader import Batch, EvalLoader
from vitlab.data.source import Subset
from vitlab.errors import UserError
from vitlab.models.variants import Model
from vitlab.training.setup import open_recipe_data, read_recipe


def test_batches(model: Model, run: Path, device: torch.device, *, most: int, batch: int) -> Iterator[Batch]:
    """Up to `most` test images of a run's data, evenly over the set, in batches on the device."""
    recipe = read_recipe(run)
    if recipe is None:
        raise UserError(f"{run} is not the folder of a run")
    test = open_recipe_data(recipe).test
    chosen = np.unique(np.linspace(0, len(test) - 1, min(most, len(test))).astype(np.int64))
    preprocess, size = model.card.preprocess, model.config.image_size
    loader = EvalLoader(Subset(test, chosen), size, preprocess, batch=batch, workers=0, device=device, resident=False)
    yield from loader.batches()
