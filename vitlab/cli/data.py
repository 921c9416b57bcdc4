"""Looking at data."""

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.app import app, console
from vitlab.errors import UserError


@app.command(
    epilog="Examples: [bold]vitlab data digits[/bold], [bold]vitlab data photos --picture photos.png[/bold], "
    "[bold]vitlab data 'shards/train-{000..009}.tar' --workers 8[/bold]",
)
def data(
    source: Annotated[str, typer.Argument(help="A folder, parquet files, tar shards, a hub id or a known set.")],
    picture: Annotated[Path, typer.Option(help="Where the picture of samples goes.")] = Path("samples.png"),
    workers: Annotated[int, typer.Option(help="Processes that decode.")] = 0,
) -> None:
    """Look at a set: classes, counts, sizes, broken files, duplicates across splits, and a picture of samples."""
    from vitlab.data.open import open_data
    from vitlab.data.summary import class_warnings, contact_sheet, image_warnings, summarize, tables

    opened = open_data(source)
    summary = summarize(opened, workers)
    for table in tables(summary):
        console.print(table)
    for line in class_warnings(opened) + image_warnings(summary):
        console.remark("note", line)
    try:
        contact_sheet(opened.train).save(picture)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture of samples cannot be written to '{picture}': {error}") from None
    console.print(f"samples: {picture}", soft_wrap=True)
