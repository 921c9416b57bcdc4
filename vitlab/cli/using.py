"""Using a model: predictions of pictures, and the model as a file for other programs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli.app import app, console
from vitlab.errors import UserError
from vitlab.terminal import Terminal, printable

if TYPE_CHECKING:
    from vitlab.predict.files import PredictSummary
    from vitlab.predict.formats import Kind

Run = Annotated[str, typer.Argument(help="A run folder, a file of weights or a hub id.")]


@app.command(
    epilog="Examples: [bold]vitlab predict runs/pets cat.jpg[/bold], "
    "[bold]vitlab predict runs/pets holiday/ 'scans/**/*.png' --top-k 3[/bold], "
    "[bold]vitlab predict runs/pets photos/ --out photos.csv[/bold], "
    "[bold]vitlab predict runs/pets - --json < cat.jpg[/bold], "
    "[bold]torchrun --nproc-per-node 8 --no-python vitlab predict runs/pets photos/ --out photos.jsonl[/bold]",
)
def predict(
    run: Run,
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, folders (with all below), patterns, or - for stdin.")
    ],
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Classes for each image: 1, or 5 with --json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Comma-separated values with a header.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write to this new file; .csv and .jsonl choose the format themselves.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any file could not be read.")] = False,
    allow_url: Annotated[bool, typer.Option("--allow-url", help="Fetch http:// and https:// addresses.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    batch: Annotated[int | None, typer.Option(min=1, help="Images at a time; chosen to fit the device.")] = None,
    workers: Annotated[int | None, typer.Option(min=0, help="Processes that decode; chosen by the cores.")] = None,
) -> None:
    """Say what is in pictures: the likeliest classes of every file, in the order of the files.

    Files that cannot be read are named at the end. Ctrl-C leaves the answers so far, in whole lines.

    Under torchrun each process takes its share and writes a part of its own: for --out x.csv, x.rank0.csv and so on.
    """
    from vitlab.predict.files import predict_files

    outcome = predict_files(
        run,
        paths,
        kind=chosen_format(as_json, as_csv, out),
        top=top_k,
        out=out,
        device=device,
        batch=batch,
        workers=workers,
        allow_url=allow_url,
    )
    tell_broken(outcome)
    if strict and outcome.broken:
        raise typer.Exit(1)


def chosen_format(as_json: bool, as_csv: bool, out: Path | None) -> "Kind":
    from vitlab.predict.formats import ENDINGS

    if as_json and as_csv:
        raise UserError("choose one of --json and --csv")
    if as_json or as_csv:
        return "json" if as_json else "csv"
    return "table" if out is None else ENDINGS.get(out.suffix.lower(), "table")


def tell_broken(outcome: "PredictSummary") -> None:
    """On the standard error, after everything else: how many files could not be read, and which."""
    if not outcome.broken:
        return
    terminal = Terminal(stderr=True)
    terminal.remark("note", f"{outcome.broken} of {outcome.total} files could not be read:")
    for _, name, why in outcome.first:
        terminal.print(f"  {printable(name)}: {printable(why)}", soft_wrap=True)
    if outcome.broken > len(outcome.first):
        terminal.print(f"  and {outcome.broken - len(outcome.first)} more")


@app.command(
    epilog="Examples: [bold]vitlab export runs/pets pets.onnx[/bold], "
    "[bold]vitlab export runs/pets pets.onnx --dynamic-size --check photos/[/bold], "
    "[bold]vitlab export runs/pets pets8.onnx --int8 --calibrate photos/[/bold], "
    "[bold]vitlab export runs/pets pets.pt2[/bold]",
)
def export(
    run: Run,
    target: Annotated[Path, typer.Argument(help="The new file: .onnx, or .pt2 for torch.export.")],
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Take images of any size, not only the model's.")
    ] = False,
    fp16: Annotated[bool, typer.Option("--fp16", help="Store and compute in half precision.")] = False,
    int8: Annotated[bool, typer.Option("--int8", help="Quantize dense layers; needs --calibrate.")] = False,
    calibrate: Annotated[
        str | None, typer.Option(metavar="IMAGES", help="Pictures for --int8: a folder, a pattern or a data set.")
    ] = None,
    check: Annotated[
        str | None, typer.Option(metavar="IMAGES", help="Pictures to check on; generated ones by default.")
    ] = None,
    least_agreement: Annotated[
        float, typer.Option(help="Least share of images on which int8 keeps the best class.")
    ] = 0.95,
) -> None:
    """Write a model as one file for other programs: ONNX or torch.export, for batches of any size.

    The file is run on pictures and compared with the model before it appears; labels and preprocessing are in it.
    """
    from vitlab.export import export

    if fp16 and int8:
        raise UserError("choose one of --fp16 and --int8")
    report = export(
        run,
        target,
        dynamic_size=dynamic_size,
        precision="fp16" if fp16 else "int8" if int8 else "fp32",
        check=check,
        calibrate=calibrate,
        least=least_agreement,
    )
    for line in report.lines():
        console.print(line, soft_wrap=True)
