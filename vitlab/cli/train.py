"""`vitlab train`: a model by a recipe."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from vitlab.cli.app import verb
from vitlab.cli.options import AcceptDataChanges, Out, RecipeSettings, Resume
from vitlab.cli.runs import STOPPED_EARLY, train_and_report
from vitlab.errors import UserError
from vitlab.signals import stoppable


@verb(
    "vitlab train digits --out runs/digits",
    "vitlab train B/16-imagenet data=imagenet:/data/imagenet --out runs/b16",
    "vitlab train --out runs/digits --resume",
    "torchrun --nproc-per-node 8 --no-python vitlab train L/16-i21k-90 data=SHARDS parallel=fsdp",
)
def train(
    recipe: Annotated[str | None, Argument(help="A recipe's name; `vitlab recipes` lists them.")] = None,
    settings: RecipeSettings = None,
    out: Out = Path("run"),
    resume: Resume = False,
    accept: AcceptDataChanges = False,
) -> None:
    """Train a model by a recipe: from scratch, from weights (weights=FILE), or by masked patch prediction.

    Ctrl-C saves a checkpoint first. The finished folder is a model that every other verb can read.
    """
    with stoppable(STOPPED_EARLY):
        from vitlab.training.parallel import is_restarted
        from vitlab.training.recipe import override
        from vitlab.training.recipes import check_ready, find
        from vitlab.training.setup import recipe_to_resume

        pairs, resume = settings or [], resume or is_restarted()
        if recipe is None or "=" in recipe:  # no name: the recipe is stored in the folder
            stored = recipe_to_resume(out, [recipe, *pairs] if recipe else pairs) if resume else None
            if stored is None:
                raise UserError("name a recipe, as in `vitlab train digits`; `vitlab recipes` lists them")
            train_and_report(stored, out, resume, accept)
        else:
            train_and_report(check_ready(recipe, override(find(recipe).recipe, pairs)), out, resume, accept)
