"""Arguments and options that several verbs share, and how their values are parsed and checked."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from vitlab.cli.app import console
from vitlab.errors import UserError
from vitlab.files import write_text

T = TypeVar("T")
UNITS = {"k": 1e3, "M": 1e6, "G": 1e9}

Run = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, a file of weights or a hub id.")]
Data = Annotated[str, typer.Argument(metavar="DATA", help="A folder with one folder per class, or any other data set.")]
RecipeSettings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the recipe: lr=0.001 epochs=5 mixup=0.2 ..."),
]
Out = Annotated[Path, typer.Option("--out", help="The run's folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out as if it had not been interrupted.")]
AcceptDataChanges = Annotated[
    bool, typer.Option("--accept-data-changes", help="Continue although files of the data changed.")
]
KeepFeatures = Annotated[
    Path | None,
    typer.Option(
        "--keep",
        help="A folder for computed features, so that an interrupted command continues and the next one need not "
        "compute them; by default RUN/features if RUN is a folder, else none.",
        show_default=False,
    ),
]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all numbers to this file.", show_default=False)]
Batch = Annotated[int | None, typer.Option("--batch", min=1, help="Images per batch; by default fits the device.")]
Workers = Annotated[
    int | None, typer.Option("--workers", min=0, help="Processes that decode images; by default fits the machine.")
]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]


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


def check_json_file(path: Path | None) -> None:
    """Raise before the work rather than after it if `--json` cannot be written."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UserError(f"--json {path} cannot be written: name a file in a folder that exists")


def write_json_file(path: Path | None, numbers: dict[str, Any]) -> None:
    """Write what `--json` asks for."""
    if path is not None:
        write_text(path, json.dumps(numbers, indent=2) + "\n")
        console.print(f"the numbers are in {path}", soft_wrap=True)


def describe_stop(keep: Path | None) -> str:
    """What to print when Ctrl-C or SIGTERM ends a verb that has `--keep`."""
    rest = "nothing was kept; use --keep FOLDER" if keep is None else f"the same command continues from {keep}"
    return f"stopped; {rest}"
