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
    picture: Annotated[Path, Option(help="The file for a picture of samples; replaced only if it is one.")] = Path(
        "samples.png"
    ),
    workers: Annotated[int, Option(help="Processes that decode images.")] = 0,
) -> None:
    """Summarize a data set: classes, counts, sizes, broken files, duplicates, two labels; and draw samples."""
    from vitlab.data.open import open_data
    from vitlab.data.summary import (
        check_picture,
        class_warnings,
        contact_sheet,
        image_warnings,
        save_picture,
        summarize,
        tables,
    )

    check_picture(picture)
    dataset = open_data(source)
    summary = summarize(dataset, workers)
    for table in tables(summary):
        console.print(table)
    for line in class_warnings(dataset) + image_warnings(summary):
        console.remark("note", line)
    try:
        save_picture(contact_sheet(dataset.train, dataset.name), picture)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture of samples cannot be written to '{picture}': {error}") from None
    console.print(f"samples: {picture}", soft_wrap=True)
