"""`vitlab vtab`: transfer to the 19 tasks of VTAB-1k."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import AcceptDataChanges, KeyValues, key_values, numbers, parse_amount, parse_list
from vitlab.errors import UserError

if TYPE_CHECKING:
    from vitlab.studies.vtab import Study


@verb(
    "vitlab vtab vit-b16.npz --data vtab-1k --out runs/vtab",
    "vitlab vtab runs/mine --tasks natural,kitti --steps 500 image_size=224",
    "vitlab vtab runs/mine --tune 0.003,0.01,0.03",
)
def vtab(
    run: Annotated[str, Argument(metavar="RUN", help="Weights to start from: a run folder, a file or a hub id.")],
    settings: Annotated[KeyValues, key_values("Other settings of the recipe: lr=0.003 image_size=224 ...")] = None,
    tasks: Annotated[str, Option(help="all, natural, specialized, structured, or names of tasks.")] = "all",
    data: Annotated[Path | None, Option(help="The folder of tasks; vtab-1k in the cache by default.")] = None,
    out: Annotated[Path, Option(help="The folder for results, written task by task.")] = Path("vtab"),
    steps: Annotated[int, Option(help="Training steps per task.")] = 2500,
    tune: Annotated[str | None, Option(help="Learning rates to choose from, on 200 of the images.")] = None,
    keep: Annotated[bool, Option("--keep", help="Keep the fine-tuned model of every task.")] = False,
    accept: AcceptDataChanges = False,
) -> None:
    """Fine-tune a model on the 19 tasks of VTAB-1k, 1,000 images each, by the paper's recipe, and test it.

    A task's folder holds its images and the lists train800val200.txt and test.txt, lines of a path and a class number.
    Missing tasks are listed with their source, and the others run. Ctrl-C loses nothing: the same command continues,
    and finished tasks are not run again.
    """
    from vitlab.files import cache_folder, check_folder
    from vitlab.studies.vtab import run_vtab
    from vitlab.studies.vtab_tasks import choose

    if os.environ.get("WORLD_SIZE", "1") != "1":
        fix = "to use many, start one on each without torchrun, with its own --tasks and --out"
        raise UserError(f"vtab uses one device; {fix}")
    check_folder(out)
    folder, chosen, pairs = data or cache_folder() / "vtab-1k", choose(tasks), tuple(settings or ())
    rates = () if tune is None else tuple(parse_list(tune, "--tune", parse_amount))
    how: dict[str, Any] = {"keep": keep, "accept": accept, "console": console}
    study = run_vtab(run, folder, out, chosen, steps=steps, settings=pairs, rates=rates, **how)
    print_results(study)
    if study.failed:
        names = ", ".join(study.failed)
        count = "1 task" if len(study.failed) == 1 else f"{len(study.failed)} tasks"
        raise UserError(f"{count} did not finish ({names}); fix the errors above, then run the same command again")


def print_results(study: "Study") -> None:
    from vitlab.studies.vtab import RESULTS, means
    from vitlab.studies.vtab_tasks import GROUPS, TASKS

    groups = means(study.results)
    if not groups:
        return
    table = Table("task", *numbers("classes", "images", "lr", "accuracy", "95 %", no_wrap=True))
    for group in (*GROUPS, "all"):
        for task in TASKS:
            result = study.results.get(task.name)
            if result is not None and task.group == group:
                rate = result.rate
                span = f"{100 * rate.low:.1f} to {100 * rate.high:.1f}"
                cells = f"{task.classes}", f"{result.images:,}", f"{result.lr:g}", f"{rate.value:.2%}", span
                table.add_row(task.name, *cells)
        if group in groups:
            done, of, mean = (groups[group][key] for key in ("done", "of", "mean"))
            title = f"mean of {done} of the {of}" if group == "all" else f"{group}, {done} of {of}"
            table.add_row(title, "", "", "", f"{mean:.2%}", "", style="bold", end_section=True)
    console.print(table)
    console.print(f"results: {study.out / RESULTS}", soft_wrap=True)
