"""Takes up the run in a folder, as one of torchrun's processes or alone, and tests its model without a step."""

import json
import sys
from pathlib import Path

from rich.console import Console

from vitlab.training.loop import Run
from vitlab.training.parallel import process_group
from vitlab.training.recipe import override
from vitlab.training.setup import prepare_run, stored_recipe

folder, target, *settings = sys.argv[1:]
recipe = stored_recipe(Path(folder))
assert recipe is not None
with process_group("cpu") as cluster:
    run = Run(prepare_run(override(recipe, settings), Path(folder), cluster, resume=True), cluster, Console(quiet=True))
    found = run.measure()
    if cluster.first:
        Path(target).write_text(json.dumps({"step": run.done, "world": cluster.world, **found}))
    run.close()
