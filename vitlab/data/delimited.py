"""CSV files as programs and spreadsheets write them: with commas, semicolons or tabs, and perhaps a byte-order mark."""

import csv
from collections.abc import Iterator
from pathlib import Path

from vitlab.errors import UserError
from vitlab.text import brief

DELIMITERS = (",", ";", "\t")  # spreadsheets write the second one where numbers have a decimal comma


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """The cells of each line that has any, with its number; the delimiter is the one most frequent in the first line.

    Raises UserError where there is no file, or it is no CSV in UTF-8.
    """
    if not path.is_file():  # nor a pipe or a device
        raise UserError(f"'{path}' is not a file" if path.exists() else f"there is no file '{path}'")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            delimiter = max(DELIMITERS, key=file.readline().count)
            file.seek(0)
            lines = csv.reader(file, delimiter=delimiter)
            for cells in lines:
                if cells:
                    yield lines.line_num, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"'{path}' cannot be read as CSV: {brief(error)}; save it as CSV in UTF-8") from None
