"""`vitlab predict`: the classes of images."""

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Exit, Option

from vitlab.cli.app import verb
from vitlab.cli.options import Batch, Calibrate, Device, Precision, Refuse, Workers, pick_scales
from vitlab.errors import UserError
from vitlab.terminal import Terminal, printable

LOOKED = Path("looked")  # the folder of pictures where no model and no folder is named
FEW = 20  # photos, each named, up to which there are pictures without asking
WORDS = "The model: a run folder, a file of weights or a hub id; if left out, box, the small one of the package. "
WORDS += "Then the images: files, folders (recursive), patterns, or - for stdin."


@verb(
    "vitlab predict cat.jpg",
    "vitlab predict runs/pets cat.jpg",
    "vitlab predict runs/pets holiday/ 'scans/**/*.png' --top-k 3",
    "vitlab predict runs/pets photos/ --out photos.csv",
    "vitlab predict runs/pets - --json < cat.jpg",
    "torchrun --nproc-per-node 8 --no-python vitlab predict runs/pets photos/ --out photos.jsonl",
)
def predict(
    words: Annotated[list[str], Argument(metavar="[RUN] PATH...", help=WORDS)],
    top_k: Annotated[int | None, Option(min=1, help="Classes for each image: 1, or 5 with --json.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object per line.")] = False,
    as_csv: Annotated[bool, Option("--csv", help="Print comma-separated values with a header.")] = False,
    out: Annotated[Path | None, Option(help="Write to this new file: .csv, .jsonl or, as a table, .txt.")] = None,
    look: Annotated[
        Path | None, Option(help="A folder for pictures of where the model looked: NAME-looked.png of each image.")
    ] = None,
    strict: Annotated[bool, Option("--strict", help="Exit with 1 if any file could not be read.")] = False,
    allow_url: Annotated[bool, Option("--allow-url", help="Fetch http:// and https:// addresses.")] = False,
    refuse: Refuse = None,
    device: Device = "auto",
    batch: Batch = None,
    workers: Workers = None,
    precision: Precision = "auto",
    calibrate: Calibrate = None,
) -> None:
    """Classify images: the most likely classes of every file, in the order of the files.

    The first argument is the model, unless it is an image or the only one: then the small model of the package answers,
    and up to 20 named photos get a picture of where it looked, in looked/.

    An image unlike all that the model was trained on is "none of these", if the model was fitted for it (see --refuse).

    Files that cannot be read are listed at the end. Ctrl-C keeps the predictions so far, in complete lines.

    Under torchrun each process reads its share and writes its own file: for --out x.csv, x.rank0.csv and so on.
    """
    from vitlab.files import check_folder
    from vitlab.prediction.files import predict_files
    from vitlab.prediction.formats import FormatName, format_of
    from vitlab.weights import box

    if as_json and as_csv:
        raise UserError("choose one of --json and --csv")
    kind: FormatName = "json" if as_json else "csv" if as_csv else "table" if out is None else format_of(out)
    run, paths = split_words(words)
    terminal = Terminal(stderr=True)
    if look is not None:
        check_folder(look, "--look")
    if run is None:
        terminal.remark("note", box.describe())
        look = unasked_folder(paths) if look is None and kind == "table" and out is None else look
    scales = pick_scales(precision, calibrate, run or box.NAME, device)
    how: dict[str, Any] = {
        "scales": scales,
        "device": device,
        "batch": batch,
        "workers": workers,
        "allow_url": allow_url,
    }
    summary = predict_files(run or box.NAME, paths, kind=kind, top=top_k, out=out, refuse=refuse, look=look, **how)
    if summary.looked:
        one = len(summary.looked) == 1
        terminal.remark("note", f"where it looked: {summary.looked[0] if one else look}")
    if not summary.broken:
        return
    terminal.remark("note", f"{summary.broken} of {summary.total} files could not be read:")
    for _, name, why in summary.first:
        terminal.print(f"  {printable(name)}: {printable(why)}", soft_wrap=True)
    if summary.broken > len(summary.first):
        terminal.print(f"  and {summary.broken - len(summary.first)} more")
    if strict:
        raise Exit(1)


def split_words(words: list[str]) -> tuple[str | None, list[str]]:
    """The model, None where none is named, and the images; a UserError for a model without images."""
    from vitlab.weights.box import NAME, WEIGHTS

    first, *rest = words
    if rest and not is_image(first):
        return first, rest
    path = Path(first).expanduser()
    if not rest and (first == NAME or (path / WEIGHTS).is_file() or path.suffix in (".safetensors", ".npz", ".pth")):
        raise UserError(f"{first} is a model; name images after it: vitlab predict {first} photo.jpg")
    return None, words


def is_image(word: str) -> bool:
    """Whether this is no model: standard input, an address, or the ending of an image."""
    from vitlab.data.images import EXTENSIONS, HEIC

    path = Path(word).expanduser()
    return word == "-" or "://" in word or (path.suffix.lower() in EXTENSIONS | HEIC and not path.is_dir())


def unasked_folder(paths: list[str]) -> Path | None:
    """The folder for pictures of a few photos that are named; None for more, for folders, or where none can be made."""
    from vitlab.files import check_folder

    if len(paths) > FEW or not all(Path(path).expanduser().is_file() for path in paths):
        return None
    try:
        check_folder(LOOKED)
    except UserError:
        return None
    return LOOKED
