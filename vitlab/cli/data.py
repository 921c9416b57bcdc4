"""`vitlab data`: a summary of a data set; `vitlab data shrink`: a copy of one that is read faster."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.errors import UserError
from vitlab.signals import stoppable


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


@verb(
    "vitlab data shrink imagenet:/data/imagenet imagenet-320 --workers 16",
    "vitlab data shrink photos/ photos-256 --size 256 --quality 85",
    name="data shrink",
)
def shrink(
    source: Annotated[str, Argument(help="A folder, CSV or parquet files, tar shards, a hub id or a built-in set.")],
    out: Annotated[Path, Argument(metavar="FOLDER", help="The new folder for the shards.")],
    size: Annotated[int, Option(help="Pixels of the shorter side, at most.")] = 320,
    quality: Annotated[int, Option(help="JPEG's, 50 to 100.")] = 90,
    workers: Annotated[int, Option(min=0, help="Processes that decode images.")] = 0,
) -> None:
    """Copy a data set with photos no larger than training needs, as tar shards that are read faster.

    Splits, classes, labels and order stay; a JPEG that would not become smaller stays byte for byte. The folder appears
    when it is complete, and an interrupted command continues where it was.
    """
    with stoppable("stopped; the same command continues from there"):
        from vitlab.data.loader import describe_broken
        from vitlab.data.shrink import Shrinking, shrink_set

        done = shrink_set(source, out, Shrinking(size, quality), workers)
    if done.broken:
        console.remark("note", f"{describe_broken(done.broken, done.images)}; they are empty files in the copy")
    console.print(f"{done.images:,} images, {done.bytes / 1e6:,.1f} MB: {done.path}", soft_wrap=True)
