"""`vitlab predict`: the classes of images."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vitlab.cli.app import app, examples
from vitlab.cli.options import Batch, Device, Run, Workers
from vitlab.errors import UserError
from vitlab.terminal import Terminal, printable

if TYPE_CHECKING:
    from vitlab.predict.files import PredictSummary
    from vitlab.predict.formats import FormatName


@app.command(
    epilog=examples(
        "vitlab predict runs/pets cat.jpg",
        "vitlab predict runs/pets holiday/ 'scans/**/*.png' --top-k 3",
        "vitlab predict runs/pets photos/ --out photos.csv",
        "vitlab predict runs/pets - --json < cat.jpg",
        "torchrun --nproc-per-node 8 --no-python vitlab predict runs/pets photos/ --out photos.jsonl",
    )
)
def predict(
    run: Run,
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Files, folders (recursive), patterns, or - for stdin.")
    ],
    top_k: Annotated[
        int | None, typer.Option("--top-k", min=1, help="Classes for each image: 1, or 5 with --json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values with a header.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write to this new file; .csv and .jsonl select the format.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if any file could not be read.")] = False,
    allow_url: Annotated[bool, typer.Option("--allow-url", help="Fetch http:// and https:// addresses.")] = False,
    device: Device = "auto",
    batch: Batch = None,
    workers: Workers = None,
) -> None:
    """Classify images: the most likely classes of every file, in the order of the files.

    Files that cannot be read are listed at the end. Ctrl-C keeps the predictions so far, in complete lines.

    Under torchrun each process reads its share and writes its own file: for --out x.csv, x.rank0.csv and so on.
    """
    from vitlab.predict.files import predict_files

    summary = predict_files(
        run,
        paths,
        kind=choose_format(as_json, as_csv, out),
        top=top_k,
        out=out,
        device=device,
        batch=batch,
        workers=workers,
        allow_url=allow_url,
    )
    print_broken(summary)
    if strict and summary.broken:
        raise typer.Exit(1)


def choose_format(as_json: bool, as_csv: bool, out: Path | None) -> "FormatName":
    from vitlab.predict.formats import FORMAT_OF_SUFFIX

    if as_json and as_csv:
        raise UserError("choose one of --json and --csv")
    if as_json or as_csv:
        return "json" if as_json else "csv"
    return "table" if out is None else FORMAT_OF_SUFFIX.get(out.suffix.lower(), "table")


def print_broken(summary: "PredictSummary") -> None:
    """Print to stderr how many files could not be read, and which."""
    if not summary.broken:
        return
    terminal = Terminal(stderr=True)
    terminal.remark("note", f"{summary.broken} of {summary.total} files could not be read:")
    for _, name, why in summary.first:
        terminal.print(f"  {printable(name)}: {printable(why)}", soft_wrap=True)
    if summary.broken > len(summary.first):
        terminal.print(f"  and {summary.broken - len(summary.first)} more")
