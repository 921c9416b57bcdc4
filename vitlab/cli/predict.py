"""`vitlab predict`: the classes of images."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from vitlab.cli.app import verb
from vitlab.cli.options import Batch, Device, Refuse, Run, Workers
from vitlab.errors import UserError
from vitlab.terminal import Terminal, printable


@verb(
    "vitlab predict runs/pets cat.jpg",
    "vitlab predict runs/pets holiday/ 'scans/**/*.png' --top-k 3",
    "vitlab predict runs/pets photos/ --out photos.csv",
    "vitlab predict runs/pets - --json < cat.jpg",
    "torchrun --nproc-per-node 8 --no-python vitlab predict runs/pets photos/ --out photos.jsonl",
)
def predict(
    run: Run,
    paths: Annotated[
        list[str], Argument(metavar="PATH...", help="Files, folders (recursive), patterns, or - for stdin.")
    ],
    top_k: Annotated[int | None, Option(min=1, help="Classes for each image: 1, or 5 with --json.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print comma-separated values with a header.")] = False,
    out: Annotated[Path | None, Option(help="Write to this new file: .csv, .jsonl or, as a table, .txt.")] = None,
    strict: Annotated[bool, Option("--strict", help="Exit with 1 if any file could not be read.")] = False,
    allow_url: Annotated[bool, Option("--allow-url", help="Fetch http:// and https:// addresses.")] = False,
    refuse: Refuse = None,
    device: Device = "auto",
    batch: Batch = None,
    workers: Workers = None,
) -> None:
    """Classify images: the most likely classes of every file, in the order of the files.

    An image unlike all that the model was trained on is "none of these", if the model was fitted for it (see --refuse).

    Files that cannot be read are listed at the end. Ctrl-C keeps the predictions so far, in complete lines.

    Under torchrun each process reads its share and writes its own file: for --out x.csv, x.rank0.csv and so on.
    """
    from vitlab.prediction.files import predict_files
    from vitlab.prediction.formats import FormatName, format_of

    if as_json and as_csv:
        raise UserError("choose one of --json and --csv")
    kind: FormatName = "json" if as_json else "csv" if as_csv else "table" if out is None else format_of(out)
    how: dict[str, Any] = {"device": device, "batch": batch, "workers": workers, "allow_url": allow_url}
    summary = predict_files(run, paths, kind=kind, top=top_k, out=out, refuse=refuse, **how)
    if not summary.broken:
        return
    terminal = Terminal(stderr=True)
    terminal.remark("note", f"{summary.broken} of {summary.total} files could not be read:")
    for _, name, why in summary.first:
        terminal.print(f"  {printable(name)}: {printable(why)}", soft_wrap=True)
    if summary.broken > len(summary.first):
        terminal.print(f"  and {summary.broken - len(summary.first)} more")
    if strict:
        raise Exit(1)
