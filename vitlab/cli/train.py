"""`vitlab train`: a model by a recipe."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Argument

from vitlab.cli.app import console, verb
from vitlab.cli.options import AcceptDataChanges, Out, RecipeSettings, Resume
from vitlab.cli.training import STOPPED_EARLY, train_and_report
from vitlab.errors import UserError
from vitlab.signals import stoppable

if TYPE_CHECKING:
    from vitlab.training.recipe import Recipe
    from vitlab.training.search import Plan


@verb(
    "vitlab train digits --out runs/digits",
    "vitlab train B/16-imagenet data=imagenet:/data/imagenet --out runs/b16",
    "vitlab train --out runs/digits --resume",
    "vitlab train pets-finetune weights=FILE lr=0.003,0.01,0.03 seeds=3 --out runs/pets",
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

    A number with several values (lr=0.003,0.01) is chosen on held-out images, and the best is trained with all
    images; seeds=3 does that with three seeds and prints mean and deviation. To continue, add --resume.
    """
    with stoppable(STOPPED_EARLY):
        from vitlab.training.parallel import is_restarted
        from vitlab.training.search import SEARCH, Plan, split_pairs
        from vitlab.training.setup import recipe_to_resume

        pairs, resume = settings or [], resume or is_restarted()
        if recipe is not None and "=" in recipe:
            pairs, recipe = [recipe, *pairs], None
        plain, grid, seeds = split_pairs(pairs)
        if grid or seeds is not None:
            if recipe is None:
                raise UserError("name the recipe to search with, as in `vitlab train digits lr=0.003,0.01`")
            plan = Plan(named_recipe(recipe, plain, resume), grid, seeds or 1)
            search_and_print(plan, out, resume, accept)
        elif (out / SEARCH).exists():
            raise UserError(f"{out} holds a search; repeat its command with --resume, or choose another --out")
        elif recipe is None:  # the recipe is stored in the folder
            stored = recipe_to_resume(out, plain) if resume else None
            if stored is None:
                raise UserError("name a recipe, as in `vitlab train digits`; `vitlab recipes` lists them")
            train_and_report(stored, out, resume, accept)
        else:
            train_and_report(named_recipe(recipe, plain, resume), out, resume, accept)


def named_recipe(name: str, pairs: list[str], resume: bool) -> "Recipe":
    """A recipe with the user's settings; UserError where these contradict each other."""
    from vitlab.training.recipe import override
    from vitlab.training.recipes import check_ready, find
    from vitlab.training.start import check_named_model

    recipe = check_ready(name, override(find(name).recipe, pairs))
    if not resume and any(pair.startswith("model=") for pair in pairs):  # else the weights may be gone
        check_named_model(recipe)
    return recipe


def search_and_print(plan: "Plan", out: Path, resume: bool, accept: bool) -> None:
    """Choose settings and repeat the best, then print the results; of several processes only the first one prints."""
    from vitlab.report.runs import NAMES
    from vitlab.training.search import SEARCH, result_rows, run_search

    with stoppable("stopped between two runs; continue by the same command with --resume"):
        search = run_search(plan, out, resume=resume, accept=accept, console=console)
    if search.cluster.first:
        chosen = f", {search.best}, chosen on held-out images" if search.best else ""
        table = Table("", *(NAMES.get(key, key) for key in search.summary), title=f"test{chosen}", title_justify="left")
        for row in result_rows(search):
            table.add_row(*row)
        console.print(table)
        console.print(f"all numbers: {out / SEARCH}; a model: {out / f'seed-{search.seeds[0]}'}", soft_wrap=True)
