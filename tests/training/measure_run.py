"""Loads the run in a folder, as one of torchrun's processes or alone, and tests its model without a step."""

import json
import sys
from pathlib import Path

from vitlab.training.parallel import process_group
from vitlab.training.recipe import override
from vitlab.training.setup import prepare_run, read_recipe
from vitlab.training.trainer import Trainer

folder, target, *settings = sys.argv[1:]
recipe = read_recipe(Path(folder))
assert recipe is not None
with process_group("cpu") as cluster:
    trainer = Trainer(prepare_run(override(recipe, settings), Path(folder), cluster, resume=True), cluster)
    report = trainer.objective.report(trainer.measure("test"))
    if cluster.first:
        Path(target).write_text(json.dumps({"step": trainer.restored.step, "world": cluster.world, **report}))
