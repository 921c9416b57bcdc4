"""`vitlab finetune`: a trained model learns other classes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import AcceptDataChanges, Data, Out, RecipeSettings, Resume
from vitlab.cli.runs import STOPPED_EARLY, train_and_report, train_run, write_run_report
from vitlab.signals import stoppable

if TYPE_CHECKING:
    from vitlab.training.recipe import Recipe


@verb(
    "vitlab finetune photos/ --weights google/vit-base-patch16-224",
    "vitlab finetune oxford-pets --weights weights.npz epochs=3 lr=0.003 --out runs/pets",
)
def finetune(
    data: Data,
    settings: RecipeSettings = None,
    weights: Annotated[
        str | None, Option(help="Weights to start from; without them, training is from scratch.")
    ] = None,
    apply: Annotated[
        Path | None, Option(help="A review.csv with decisions: labels to change and images to leave out.")
    ] = None,
    out: Out = Path("run"),
    resume: Resume = False,
    accept: AcceptDataChanges = False,
) -> None:
    """Fine-tune a model on your classes. Settings that you leave out are chosen to fit the data and this machine."""
    with stoppable(STOPPED_EARLY):
        from vitlab.device import memory_errors
        from vitlab.training.parallel import is_restarted, process_group
        from vitlab.training.setup import recipe_to_resume

        pairs, resume = [*(settings or []), *([f"review={apply}"] if apply else [])], resume or is_restarted()
        given = [f"data={data}", *([f"weights={weights}"] if weights else []), *pairs]
        if resume and (stored := recipe_to_resume(out, given)) is not None:
            train_and_report(stored, out, resume, accept)
            return
        device = next((pair.removeprefix("device=") for pair in reversed(pairs) if pair.startswith("device=")), "auto")
        fix = "give smaller weights with --weights, or set a smaller image_size"
        with process_group(device) as cluster, memory_errors("looking at the data and the model", fix):
            recipe = cluster.agree(lambda: choose_recipe(data, weights, pairs))
            result = train_run(recipe, out, resume, accept)
        write_run_report(result, recipe.device)


def choose_recipe(data: str, weights: str | None, pairs: list[str]) -> "Recipe":
    """A recipe for these images and this machine; the reasons for its settings are printed."""
    from vitlab.training.auto import finetune_recipe

    advice = finetune_recipe(data, weights, pairs)
    for line in advice.lines:
        console.print(line, soft_wrap=True)
    for line in advice.warnings:
        console.remark("warning", line)
    return advice.recipe
