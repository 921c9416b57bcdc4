"""`vitlab results`: the paper's results beside your own."""

import json as json_text
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Column as Head
from rich.table import Table
from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import JsonFile, check_json_file, numbers
from vitlab.terminal import printable

if TYPE_CHECKING:
    from vitlab.studies.results import Column

FIRST, EACH = 20, 15  # characters of the first column and of a model's


@verb(
    "vitlab results",
    "vitlab results runs/pets runs/transfer --json results.json",
    "vitlab results --compute",
)
def results(
    runs: Annotated[
        list[str] | None, Argument(metavar="[RUN]...", help="Folders of runs, searches, transfers or evaluations.")
    ] = None,
    compute: Annotated[bool, Option("--compute", help="Print the paper's table of pre-training costs too.")] = False,
    out: Annotated[Path | None, Option(help="A folder for the table as table.md and table.csv.")] = None,
    json: JsonFile = None,
) -> None:
    """Show the paper's results, which are marked as published, beside those of your runs, with their costs.

    The numbers of your runs are read from their folders. Accuracies are percentages, with deviations over seeds where
    there are several; the cost of a run is that of its own training.
    """
    from vitlab.files import check_folder, write_text
    from vitlab.studies.published import COMPUTE
    from vitlab.studies.results import data_names, published_columns, read_column, write_tables

    check_json_file(json)
    if out is not None:
        check_folder(out)
    columns = [*published_columns(), *(read_column(run) for run in runs or ())]
    many = max(1, (console.width - FIRST) // EACH)
    for first in range(0, len(columns), many):
        console.print(models_table(columns[first : first + many], data_names(columns)))
    for column in columns:
        if column.note:
            console.print(printable(f"{column.name}: {column.note}"), soft_wrap=True)
    if compute:
        table = Table("pre-trained on JFT-300M", *numbers("epochs", "exaFLOPs", "ImageNet"), title="published")
        for row in COMPUTE:
            table.add_row(row.model, f"{row.epochs}", f"{row.exaflops:,.0f}", f"{row.imagenet:.2f}")
        console.print(table)
    if json is not None:
        models = [asdict(column) | {"source": column.source} for column in columns]
        numbers_of = {"models": models, "compute": [asdict(row) for row in COMPUTE]}
        write_text(json, json_text.dumps(numbers_of, indent=2) + "\n")
        console.print(f"the numbers are in {json}", soft_wrap=True)
    if out is not None:
        write_tables(out, columns)
        console.print(f"the table: {out / 'table.md'}, table.csv", soft_wrap=True)


def models_table(columns: Sequence["Column"], data: list[str]) -> Table:
    """Models side by side, as the paper has them: data sets, then costs."""
    from vitlab.studies.results import COST

    heads = [f"{printable(c.name)}\n{c.data or ' '}\n({c.source})" for c in columns]
    table = Table("accuracy, %", *(Head(head, justify="right", overflow="fold") for head in heads))
    cells = [column.cells(data) for column in columns]
    for i, name in enumerate([*data, *COST]):
        table.add_row(printable(name), *(each[i] for each in cells), end_section=name == data[-1])
    return table
