"""`vitlab study`: the paper's experiments, each one command."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import KeyValues, key_values, numbers
from vitlab.errors import UserError
from vitlab.signals import stoppable

if TYPE_CHECKING:
    from vitlab.studies.table import Table as StudyTable


@verb(
    "vitlab study",
    "vitlab study positions --quick",
    "vitlab study positions data=tiny-imagenet targets=pets,flowers --out runs/positions",
    "vitlab study data seeds=3 steps=20000 --jobs 4",
    "vitlab study positions --only 1d-stem,none",
)
def study(
    name: Annotated[str | None, Argument(help="A study; without one, all are listed with their costs.")] = None,
    settings: Annotated[
        KeyValues,
        key_values("data=DIR, targets=A,B, seeds=N, tune_steps=N, or any setting of a recipe: steps=20000 ..."),
    ] = None,
    out: Annotated[
        Path | None, Option("--out", help="The study's folder; by default runs/study-NAME.", show_default=False)
    ] = None,
    quick: Annotated[bool, Option("--quick", help="Minutes on two cores, on built-in data; proves nothing.")] = False,
    only: Annotated[str | None, Option("--only", metavar="ROWS", help="Run these rows only: A,B.")] = None,
    jobs: Annotated[int, Option("--jobs", min=1, help="Processes that share the device.")] = 1,
) -> None:
    """Run an experiment of the paper at the size of this machine: its table, its figure and a page.

    Finished rows are kept: the same command goes on where it was stopped or killed. Several processes, or a job array,
    may run the same command in one folder and share the rows. A row that fails is noted, and the others run.
    """
    if name is None or "=" in name:
        given = {"--out": out is not None, "--only": only is not None, "--jobs": jobs > 1}
        if option := next((option for option, is_given in given.items() if is_given), None):
            raise UserError(f"{option} needs the name of a study; `vitlab study` alone lists them")
        print_studies([*([name] if name else []), *(settings or [])], quick=quick)
        return
    with stoppable("stopped before the first run; the same command starts again"):
        from vitlab.files import check_folder
        from vitlab.studies.catalog import find_study
        from vitlab.studies.request import make_request
        from vitlab.studies.run import run_study

        chosen = find_study(name)
        request = make_request(chosen, settings or [], quick=quick)
        folder = out or Path("runs") / f"study-{name}{'-quick' * quick}"
        if os.environ.get("WORLD_SIZE", "1") != "1":
            raise UserError("a study uses one device a process; start it on each without torchrun, with the same --out")
        check_folder(folder)
        rows = [] if only is None else [word.strip() for word in only.split(",")]
        if quick:
            line = "--quick: built-in data, tiny models, a few steps; it shows that all runs and proves nothing"
            console.print(line, soft_wrap=True)
        table, failed = run_study(chosen, request, folder, only=rows, jobs=jobs, console=console)
    print_table(table)
    if failed:
        count = "1 job" if len(failed) == 1 else f"{len(failed)} jobs"
        names = ", ".join(list(failed)[:3]) + (" ..." if len(failed) > 3 else "")
        raise UserError(
            f"{count} of the study did not finish ({names}); the reasons are above and in {folder}/study.html"
        )


def print_table(table: "StudyTable") -> None:
    from vitlab.studies.table import cells

    heads, rows = cells(table)
    measured = range(1 + len(table.abouts), heads.index(table.counts[0]))  # the rest is in the files
    columns = [0, *measured, heads.index("seeds")]
    shown = Table(heads[0], *numbers(*(heads[i] for i in columns[1:])), box=None, pad_edge=False)
    for row in rows:
        shown.add_row(*(row[i] for i in columns))
    console.print(shown)
    for note in table.notes:
        console.print(note, soft_wrap=True)
    files = ", ".join(name for name in ("table.md", "figure.png", "study.html") if (table.out / name).exists())
    console.print(f"in {table.out}: {files}", soft_wrap=True)
    if table.done and not (table.out / "figure.png").exists():
        console.remark(
            "note", "there is no figure without matplotlib: pip install 'vitlab[plots]', and the same command"
        )


def print_studies(settings: list[str], *, quick: bool) -> None:
    """List the studies, with what each costs here under these settings, or why it cannot have them."""
    from vitlab.device import pick_device
    from vitlab.studies.catalog import STUDIES, count_runs, machine_flops
    from vitlab.studies.request import make_request
    from vitlab.text import counted, duration
    from vitlab.training.auto import machine
    from vitlab.training.recipes import operations

    requests = {name: make_request(one, settings, quick=quick) for name, one in STUDIES.items()}
    device = next(iter(requests.values())).device
    speed = machine_flops(device)
    table = Table("study", "what it answers, and its cost", box=None, pad_edge=False)
    for name, one in STUDIES.items():
        try:
            runs, flops = count_runs(one, requests[name])
            cost = f"{counted(runs, 'run')}, {operations(flops)}, about {duration(flops / speed)} here"
            cost = cost if runs else "nothing is trained"
        except UserError as error:
            cost = f"not with these settings: {error}"
        table.add_row(name, Text.assemble(one.question, ("\n" + f"{one.place}: {cost}", "dim")))
    console.print(table)
    where = machine(pick_device(device))
    console.print(f"Times are for this {where} at about {speed / 1e12:.3g} TFLOP/s. `vitlab study NAME` runs one.")
