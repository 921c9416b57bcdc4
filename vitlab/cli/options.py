"""Arguments and options that several verbs share, and how their values are parsed and checked."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from rich.table import Column, Table
from typer import Argument, Option

from vitlab.cli.app import console
from vitlab.errors import UserError
from vitlab.files import write_text

if TYPE_CHECKING:
    from vitlab.inference.int8 import EightBits
    from vitlab.models.guest import Measured

T = TypeVar("T")
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}
KeyValues = list[str] | None


def key_values(help: str) -> Any:
    """The arguments `key=value` that end a command."""
    return Argument(metavar="[KEY=VALUE]...", help=help)


RUN = "A run folder, a file of weights or a hub id."
Run = Annotated[str, Argument(metavar="RUN", help=RUN)]
GUEST = f"{RUN[:-1]}; or torchvision:NAME:FILE, a guest."
RunOrGuest = Annotated[str, Argument(metavar="RUN", help=GUEST)]
Data = Annotated[str, Argument(metavar="DATA", help="A folder with one folder per class, or any other data set.")]
RecipeSettings = Annotated[KeyValues, key_values("Settings of the recipe: lr=0.001 epochs=5 mixup=0.2 ...")]
Out = Annotated[Path, Option("--out", help="The run's folder.")]
Resume = Annotated[bool, Option("--resume", help="Continue the run in --out as if it had not been interrupted.")]
AcceptDataChanges = Annotated[
    bool, Option("--accept-data-changes", help="Continue although files of the data changed.")
]
KEEP = "A folder for computed features, so that an interrupted command continues and the next one need not compute "
KEEP += "them; by default in ~/.cache/vitlab/features (VITLAB_DATA moves it)."
KeepFeatures = Annotated[Path | None, Option("--keep", help=KEEP, show_default=False)]
ByPosition = Annotated[
    bool,
    Option("--by-position", help="Take the set's classes for the model's in order where their names do not match."),
]
JsonFile = Annotated[Path | None, Option("--json", help="Write all numbers to this file.", show_default=False)]
Batch = Annotated[int | None, Option("--batch", min=1, help="Images per batch; by default fits the device.")]
RESIZE = "Stretch images to this many pixels on both sides and crop the model's size from the center, as the authors "
RESIZE += "do with 256 for 224; by default the model's own preprocessing."
Resize = Annotated[int | None, Option("--resize", min=1, help=RESIZE, show_default=False)]
Workers = Annotated[
    int | None, Option("--workers", min=0, help="Processes that decode images; by default fits the machine.")
]
REFUSE = 'Share of images of the model\'s own classes that may become "none of these", so that others do; 0: none.'
Refuse = Annotated[
    float | None, Option("--refuse", min=0, max=0.99, help=REFUSE + " By default the model's.", show_default=False)
]
PRECISION = "auto: bf16 on GPUs that have it, else float32; bf16: also on CPUs that have it; dense layers in 8 bits, "
PRECISION += "checked on images (--calibrate): fp8 on newer GPUs, int8 on CPUs."
Precision = Annotated[str, Option("--precision", metavar="PRECISION", help=PRECISION)]
CALIBRATE = "Images like those the model will see, for fp8 or int8; what is found is kept in the run's folder."
Calibrate = Annotated[str | None, Option("--calibrate", metavar="IMAGES", help=CALIBRATE, show_default=False)]
Device = Annotated[str, Option("--device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1 or mps.")]


def pick_scales(
    precision: str, calibrate: str | None, run: str, device: str, model: "Measured | None" = None
) -> "EightBits | None":
    """What computes a run in fewer bits, by `--precision`, which may be made here; None for `auto`."""
    if precision not in ("auto", "bf16", "fp8", "int8"):
        raise UserError(f"--precision must be auto, bf16, fp8 or int8, not '{precision}'")
    if calibrate is not None and precision in ("auto", "bf16"):
        raise UserError("--calibrate goes with --precision fp8 or int8")
    if precision == "auto":
        return None
    from vitlab.device import pick_device
    from vitlab.weights.guests import open_measured

    measured, place = open_measured(run) if model is None else model, pick_device(device)
    if precision == "bf16":
        from vitlab.inference.half import find_half

        return find_half(measured, place)
    if precision == "fp8":
        from vitlab.export.scales_file import find_scales

        return find_scales(run, measured, calibrate, place)
    from vitlab.export.int8_file import find_int8

    return find_int8(run, measured, calibrate, place)


def parse_list(text: str, option: str, parse: Callable[[str, str], T]) -> list[T]:
    """The values of `1,5,10`, each once, in order."""
    words = [word.strip() for word in text.split(",")]
    if "" in words:
        raise UserError(f"{option} must be a list such as 1,5,10, not '{text}'")
    return [parse(word, option) for word in dict.fromkeys(words)]


def parse_count(word: str, option: str) -> int:
    """A positive integer."""
    if not re.fullmatch("[0-9]{1,9}", word) or int(word) < 1:
        raise UserError(f"{option} must be integers from 1 on, as in 1,5,10, not '{word}'")
    return int(word)


def parse_amount(word: str, option: str) -> float:
    """A positive number; 2^10 is one too."""
    base, power, exponent = word.partition("^")
    try:
        value = float(base) ** float(exponent) if power else float(base)
    except (ValueError, OverflowError, ZeroDivisionError):
        value = 0.0
    if isinstance(value, complex) or not 0 < value < float("inf"):
        raise UserError(f"{option} must be positive numbers such as 1024, 2^10 or 1e-3, not '{word}'")
    return value


def parse_size(text: str, option: str) -> float:
    """A positive number, with k, M or G as a unit: 1.28M."""
    factor = UNITS.get(text[-1:], 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"{option} must be a positive number such as 1.28M, not '{text}'")
    return value


def numbers(*headings: str, no_wrap: bool = False) -> list[Column]:
    """Columns of a table whose cells are numbers."""
    return [Column(heading, justify="right", no_wrap=no_wrap) for heading in headings]


def print_pairs(rows: Iterable[tuple[str, str]], **options: Any) -> None:
    """Print a table of names and values; the options are those of rich's Table."""
    table = Table(show_header=False, **options)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def check_json_file(path: Path | None) -> None:
    """Raise before the work rather than after it if `--json` cannot be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UserError(f"--json {path} cannot be written: name a file in a folder that exists")


def write_numbers(notes: list[str], path: Path | None, numbers: dict[str, Any]) -> None:
    """Print the notes; write them and the numbers to the file of `--json`."""
    for note in notes:
        console.remark("note", note)
    if path is not None:
        write_text(path, json.dumps(numbers | {"notes": notes}, indent=2) + "\n")
        console.print(f"the numbers are in {path}", soft_wrap=True)


def print_guest(model: object) -> None:
    """Label a guest as one, before the numbers."""
    from vitlab.models.guest import Guest

    if isinstance(model, Guest):
        size = model.config.image_size
        console.remark(
            "guest", f"{model.title}; images of {size[0]}x{size[1]} pixels, preprocessed as torchvision does"
        )


def describe_stop(keep: Path | None) -> str:
    """What to print when Ctrl-C or SIGTERM ends a verb that has `--keep`."""
    rest = "nothing was kept; use --keep FOLDER" if keep is None else f"the same command continues from {keep}"
    return f"stopped; {rest}"
