"""`vitlab embed`: the features of every image of a set, as a file."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from vitlab.cli.app import console, verb
from vitlab.cli.options import (
    Batch,
    Calibrate,
    Device,
    Precision,
    RunOrGuest,
    Workers,
    pick_scales,
    print_guest,
)
from vitlab.signals import stoppable


@verb(
    "vitlab embed runs/pets photos/ photos.parquet",
    "vitlab embed google/vit-base-patch16-224 oxford-pets pets.parquet",
)
def embed(
    run: RunOrGuest,
    data: Annotated[
        str, Argument(metavar="DATA", help="A folder of photos, with class folders or without, or any data set.")
    ],
    out: Annotated[Path, Argument(metavar="FILE", help="The file to write, FILE.parquet.")],
    batch: Batch = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    calibrate: Calibrate = None,
) -> None:
    """Write the model's features of every image to a parquet file, with paths, splits and labels.

    `vitlab search` finds images in it, and other programs read it. An interrupted command continues where it was.
    """
    with stoppable("stopped; the same command continues from there"):
        from vitlab.evaluation.embed import embed
        from vitlab.weights.guests import open_measured
        from vitlab.weights.open import is_guest

        model = open_measured(run) if is_guest(run) else run
        print_guest(model)
        scales = pick_scales(precision, calibrate, run, device)
        done = embed(model, data, out, batch=batch, workers=workers, device=device, scales=scales)
    left_out = f"; {len(done.broken)} could not be read" if done.broken else ""
    console.print(f"{done.images:,} images, {done.width} features each: {done.path}{left_out}", soft_wrap=True)
