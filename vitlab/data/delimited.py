"""CSV files as programs and spreadsheets write them: with commas, semicolons or tabs, and perhaps a byte-order mark."""

import csv
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from vitlab.errors import UserError
from vitlab.text import brief

DELIMITERS = (",", ";", "\t")  # spreadsheets write the second one where numbers have a decimal comma
HINT = re.compile(r'("?)sep=([,;|\t])\1\2*', re.IGNORECASE)  # a first line by which a spreadsheet notes its delimiter


def read_cells(path: Path, columns: Collection[str]) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line that has any, with its number, the heading first.

    The delimiter is the one by which the heading has most of the `columns`, unless a line before it names another.
    Raises UserError where there is no file, or it is no CSV in UTF-8.
    """
    if not path.is_file():  # nor a pipe or a device
        raise UserError(f"'{path}' is not a file" if path.exists() else f"there is no file '{path}'")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            first = next((line for line in file if line.strip()), "")
            hint = HINT.fullmatch(first.strip("\r\n"))
            delimiter = hint[2] if hint else max(DELIMITERS, key=lambda d: len(named(first, d) & {*columns}))
            file.seek(0)
            lines = csv.reader(file, delimiter=delimiter)
            for cells in lines:
                if not any(cell.strip() for cell in cells):
                    continue
                if not hint:
                    yield lines.line_num, cells
                hint = None  # it is one line
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"'{path}' cannot be read as CSV: {brief(error)}; save it as CSV in UTF-8") from None


def named(heading: str, delimiter: str) -> set[str]:
    """The columns of a heading, if that delimiter separates them."""
    return {cell.strip().lower() for cell in next(csv.reader([heading], delimiter=delimiter), [])}
