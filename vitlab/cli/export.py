"""`vitlab export`: a model as one file for other programs."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import Run
from vitlab.errors import UserError
from vitlab.signals import ending
from vitlab.terminal import printable


@verb(
    "vitlab export runs/pets pets.onnx",
    "vitlab export runs/pets pets.onnx --dynamic-size --check photos/",
    "vitlab export runs/pets pets8.onnx --int8 --calibrate photos/",
    "vitlab export runs/pets pets.pt2",
)
def export(
    run: Run,
    target: Annotated[Path, Argument(help="The new file: .onnx, or .pt2 for torch.export.")],
    dynamic_size: Annotated[
        bool, Option("--dynamic-size", help="Accept images of any size, not only the model's.")
    ] = False,
    fp16: Annotated[bool, Option("--fp16", help="Store and compute in half precision.")] = False,
    int8: Annotated[bool, Option("--int8", help="Quantize dense layers; needs --calibrate.")] = False,
    calibrate: Annotated[
        str | None, Option(metavar="IMAGES", help="Images for --int8: a folder, a pattern or a data set.")
    ] = None,
    check: Annotated[
        str | None, Option(metavar="IMAGES", help="Images to check on; by default generated ones.")
    ] = None,
    least_agreement: Annotated[
        float, Option(help="Smallest share of images on which int8 must keep the best class.")
    ] = 0.95,
) -> None:
    """Write a model as one file for other programs: ONNX or torch.export, for batches of any size.

    The file holds labels and preprocessing. Before it appears, it is run on images and compared with the model.
    """
    if fp16 and int8:
        raise UserError("choose one of --fp16 and --int8")
    with ending(printable(f"stopped; {target} is not written")):  # the exporters import and trace for seconds
        from vitlab.export import export
        from vitlab.export.run import Precision

        precision: Precision = "fp16" if fp16 else "int8" if int8 else "fp32"
        images = {"check": check, "calibrate": calibrate}
        report = export(run, target, dynamic_size=dynamic_size, precision=precision, least=least_agreement, **images)
    for line in report.lines():
        console.print(line, soft_wrap=True)
