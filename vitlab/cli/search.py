"""`vitlab search`: the images of a feature file that are most like another."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import Device, RunOrGuest, numbers
from vitlab.signals import stoppable

if TYPE_CHECKING:
    from vitlab.evaluation.search import Hit


@verb(
    "vitlab search runs/pets cat.jpg --in photos.parquet",
    "vitlab search runs/pets cat.jpg --in photos.parquet --top 50 --out similar.csv --sheet similar.png",
)
def search(
    run: RunOrGuest,
    image: Annotated[str, Argument(metavar="PHOTO", help="An image file.")],
    index: Annotated[Path, Option("--in", metavar="FILE", help="Features that `vitlab embed` wrote with this model.")],
    top: Annotated[int, Option(min=1, help="Images to find.")] = 10,
    out: Annotated[Path | None, Option(help="Write to this new file, .jsonl or .csv, instead of a table.")] = None,
    sheet: Annotated[Path | None, Option(help="Draw the images to this new file, .png or .jpg.")] = None,
    device: Device = "auto",
) -> None:
    """Find the photos most like another one, by the cosine of the model's features.

    All images of the file are compared, a few thousand at a time.
    """
    with stoppable("stopped"):
        from vitlab.data.python_images import to_image
        from vitlab.evaluation.hits_sheet import hits_sheet
        from vitlab.evaluation.search import search
        from vitlab.evaluation.search_output import check_outputs, write_hits, write_sheet

        check_outputs(out, sheet)
        hits = search(run, image, index, top=top, device=device)
        if out is not None:
            write_hits(hits, out)
        if sheet is not None:
            write_sheet(hits_sheet(to_image(image), hits), sheet)
    if out is None:
        console.print(hits_table(hits))
    for path in filter(None, (out, sheet)):
        console.print(f"{len(hits)} images: {path}", soft_wrap=True)


def hits_table(hits: "list[Hit]") -> Table:
    """A row for each image; labels and splits where one has them."""
    known = {"class": any(hit.labels for hit in hits), "split": any(hit.split for hit in hits)}
    table = Table(*numbers("similarity", no_wrap=True), *(name for name in known if known[name]), "image", box=None)
    for hit in hits:
        cells = {"class": hit.label, "split": hit.split or ""}
        table.add_row(f"{hit.similarity:.4f}", *(cells[name] for name in known if known[name]), hit.path)
    return table
