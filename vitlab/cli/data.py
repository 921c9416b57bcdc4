"""`vitlab data`: a summary of a data set."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.errors import UserError


@verb(
    "vitlab data digits",
    "vitlab data photos --picture photos.png",
    "vitlab data 'shards/train-{000..009}.tar' --workers 8",
)
def data(
    source: Annotated[str, Argument(help="A folder, CSV or parquet files, tar shards, a hub id or a built-in set.")],
    picture: Annotated[Path, Option(help="The file for a picture of samples.")] = Path("samples.png"),
    workers: Annotated[int, Option(help="Processes that decode images.")] = 0,
) -> None:
    """Summarize a data set: classes, counts, sizes, broken files, duplicates, two labels; and draw samples."""
    from vitlab.data.open import open_data
    from vitlab.data.summary import class_warnings, contact_sheet, image_warnings, summarize, tables

    dataset = open_data(source)
    summary = summarize(dataset, workers)
    for table in tables(summary):
        console.print(table)
    for line in class_warnings(dataset) + image_warnings(summary):
        console.remark("note", line)
    try:
        contact_sheet(dataset.train).save(picture)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture of samples cannot be written to '{picture}': {error}") from None
    console.print(f"samples: {picture}", soft_wrap=True)
