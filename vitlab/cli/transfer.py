"""`vitlab transfer`: fine-tuning on all of the paper's targets that are there."""

import os
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import AcceptDataChanges, KeyValues, key_values, numbers
from vitlab.errors import UserError
from vitlab.signals import stoppable


@verb(
    "vitlab transfer vit-b16.npz --data sets/ --out runs/transfer",
    "vitlab transfer runs/mine --data sets/ --targets pets,flowers lr=0.003,0.01,0.03 image_size=224",
    "vitlab transfer runs/mine --quick",
)
def transfer(
    run: Annotated[str, Argument(metavar="RUN", help="Weights to start from: a run folder, a file or a hub id.")],
    settings: Annotated[KeyValues, key_values("Settings of all recipes: steps=200 image_size=224 seeds=1 ...")] = None,
    data: Annotated[Path | None, Option(help="A folder that holds the data sets by name, in any form.")] = None,
    targets: Annotated[str, Option(help="all, or some of imagenet, cifar10, cifar100, pets, flowers, vtab.")] = "all",
    out: Annotated[Path, Option(help="The folder for results, written target by target.")] = Path("transfer"),
    quick: Annotated[
        bool, Option("--quick", help="A few steps on the built-in digits: all runs, nothing learns.")
    ] = False,
    keep: Annotated[bool, Option("--keep", help="Keep the fine-tuned models.")] = False,
    accept: AcceptDataChanges = False,
) -> None:
    """Fine-tune a model on the paper's targets and print the table: mean ± deviation of three seeds.

    Each target has its row of the paper's table: its length, and learning rates, of which the best on held-out training
    images is used. Targets whose data is missing are listed, and the others run. Ctrl-C loses nothing: the same command
    continues, and what is finished is not run again.
    """
    with stoppable("stopped between two runs; the same command continues"):
        from vitlab.files import check_folder
        from vitlab.studies.transfer import CSV, RESULTS, TABLE, choose_targets, run_transfer, table_rows

        if os.environ.get("WORLD_SIZE", "1") != "1":
            fix = "to use many, start one on each without torchrun, with its own --targets and --out"
            raise UserError(f"transfer uses one device; {fix}")
        check_folder(out)
        pairs, chosen = tuple(settings or ()), choose_targets(targets)
        how = {"quick": quick, "keep": keep, "accept": accept}
        done = run_transfer(run, data, out, chosen, settings=pairs, console=console, **how)
    if done.results:
        table = Table("data", *numbers("tested", "lr", "seeds", "accuracy", no_wrap=True))
        for row in table_rows(done.results.values()):
            table.add_row(*row)
        console.print(table)
        console.print(f"results: {out / RESULTS}, {TABLE}, {CSV}", soft_wrap=True)
    if done.failed:
        names = ", ".join(done.failed)
        raise UserError(f"some targets did not finish ({names}); fix the errors above, then run the same command again")
