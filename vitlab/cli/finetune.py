"""`vitlab finetune`: a trained model learns other classes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import AcceptDataChanges, Data, Out, RecipeSettings, Resume
from vitlab.cli.runs import STOPPED_EARLY, train_and_report, train_run, write_run_report
from vitlab.signals import stoppable

if TYPE_CHECKING:
    from vitlab.finetuning.plan import Plan
    from vitlab.training.recipe import Recipe


@verb(
    "vitlab finetune photos/",
    "vitlab finetune photos/ --weights google/vit-base-patch16-224 --minutes 30",
    "vitlab finetune oxford-pets --weights weights.npz epochs=3 lr=0.003 --out runs/pets",
)
def finetune(
    data: Data,
    settings: RecipeSettings = None,
    weights: Annotated[
        str | None,
        Option(help="Weights to start from, by default from the hub; none: train from scratch."),
    ] = None,
    minutes: Annotated[
        float | None, Option(help="Time for everything; with 1, a CPU fits a head alone.", show_default="10")
    ] = None,
    paper: Annotated[bool, Option("--paper", help="One stage by the paper's recipe, or what of it fits.")] = False,
    apply: Annotated[
        Path | None, Option(help="A review.csv with decisions: labels to change and images to leave out.")
    ] = None,
    out: Out = Path("run"),
    resume: Resume = False,
    accept: AcceptDataChanges = False,
) -> None:
    """Make a classifier of your classes: a head on frozen features first, then fine-tuning in the time that is left.

    The model and its report are there after the first stage. Fine-tuning is kept unless it is worse on held-out images.
    """
    with stoppable(STOPPED_EARLY):
        from vitlab.device import memory_errors
        from vitlab.training.parallel import is_restarted
        from vitlab.training.setup import check_new_folder, recipe_to_resume
        from vitlab.training.stages import is_staged

        pairs, resume = [*(settings or []), *([f"review={apply}"] if apply else [])], resume or is_restarted()
        given = [f"data={data}", *([f"weights={weights}"] if weights else []), *pairs]
        check_new_folder(out, resume=resume)
        if resume and not is_staged(out) and (stored := recipe_to_resume(out, given)) is not None:
            train_and_report(stored, out, resume, accept)
            return
        fix = "give smaller weights with --weights, or set a smaller image_size"
        with memory_errors("looking at the data and the model", fix):
            plan = None if paper else make_plan(data, weights, pairs, minutes)
        if plan is None:
            finetune_in_one(data, weights, pairs, out, resume, accept)
        else:
            run_stages(plan, out, resume, accept)


def make_plan(data: str, weights: str | None, pairs: list[str], minutes: float | None) -> "Plan | None":
    """A plan in stages for these images and this machine, printed; None where there are no stages."""
    from vitlab.finetuning import plan as plans
    from vitlab.training.parallel import is_first

    plan = plans.make_plan(data, weights, pairs, minutes)
    if plan is not None and is_first():
        show(plan.lines, plan.warnings)
    return plan


def run_stages(plan: "Plan", out: Path, resume: bool, accept: bool) -> None:
    from vitlab.evaluation.result import Evaluation
    from vitlab.finetuning.run import finetune as run

    done = run(plan, out, resume=resume, accept=accept, console=console)
    if done.report is not None and isinstance(scores := done.report.scores, Evaluation):
        line = f"test: accuracy {scores.top1.value:.2%} of {len(scores.labels)} images; the model is in {out}"
        console.print(line, soft_wrap=True)
        console.print(f"report: {done.report.path}", soft_wrap=True)


def finetune_in_one(data: str, weights: str | None, pairs: list[str], out: Path, resume: bool, accept: bool) -> None:
    """Fine-tuning without a first stage: several labels per image, no weights, or the paper's recipe."""
    from vitlab.device import memory_errors
    from vitlab.training.parallel import process_group

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
    show(advice.lines, advice.warnings)
    return advice.recipe


def show(lines: tuple[str, ...], warnings: tuple[str, ...]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)
    for line in warnings:
        console.remark("warning", line)
