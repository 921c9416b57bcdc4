"""Predictions as text: a table to read, JSON lines and CSV for programs. Each line is complete in itself."""

import csv
import io
import itertools
import json
from pathlib import Path
from typing import Literal, Protocol

from rich.cells import cell_len, set_cell_size

from vitlab.errors import UserError
from vitlab.prediction.classifier import REFUSED, Prediction
from vitlab.prediction.inputs import Inputs
from vitlab.terminal import printable

FormatName = Literal["table", "json", "csv"]
TOP: dict[FormatName, int] = {"table": 1, "json": 5, "csv": 1}  # classes per image by default
FORMAT_OF_SUFFIX: dict[str, FormatName] = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv"}
FORMAT_OF_SUFFIX |= {".txt": "table", "": "table"}
NAME_WIDTH, LABEL_WIDTH = 60, 30  # the most columns of a terminal for a path and for a class


class Format(Protocol):
    """How predictions are written."""

    def head(self) -> str: ...

    def line(self, prediction: Prediction) -> str: ...


class Table:
    """Aligned columns, as wide as the names need; a path too long for its column loses its beginning."""

    def __init__(self, inputs: Inputs, labels: tuple[str, ...], top: int | None, refuses: bool) -> None:
        labels = (*labels, REFUSED) if refuses else labels
        longest = max(cell_len(printable(inputs.name(i))) for i in range(len(inputs)))
        self.name = max(len("image"), min(NAME_WIDTH, longest))
        self.label = max(len("class"), min(LABEL_WIDTH, max(cell_len(printable(label)) for label in labels)))
        self.top = top

    def head(self) -> str:
        return self.row("image", "class", "probability", "then" if self.top is None or self.top > 1 else "")

    def line(self, prediction: Prediction) -> str:
        shown = [f"{printable(label)} {value:.1%}" for label, value in prediction.top]
        if prediction.refused:
            return self.row(printable(prediction.file), REFUSED, "", "nearest " + ", ".join(shown))
        first = (printable(prediction.label), f"{prediction.probability:.1%}") if prediction.labels else ("(none)", "")
        return self.row(printable(prediction.file), *first, ", ".join(shown[1:]))

    def row(self, name: str, label: str, value: str, then: str) -> str:
        name = set_cell_size(shorten_start(name, self.name), self.name)
        return "  ".join((name, set_cell_size(label, self.label), f"{value:>11}", then)).rstrip() + "\n"


class JsonLines:
    """One object a line: {"path": ..., "classes": [{"name": ..., "probability": ...}, ...]}.

    The classes of a multi-label model have their "threshold" too. Of a model that can refuse, there are "refused" and
    the "distance", above 1 where the image is none of the classes; these are then the ones that it resembles.
    """

    def head(self) -> str:
        return ""

    def line(self, prediction: Prediction) -> str:
        classes = [{"name": label, "probability": seven_digits(value)} for label, value in prediction.top]
        for one, threshold in zip(classes, prediction.thresholds or (), strict=False):
            one["threshold"] = seven_digits(threshold)
        entry: dict[str, object] = {"path": prediction.file}
        if prediction.distance is not None:
            entry |= {"refused": prediction.refused, "distance": seven_digits(prediction.distance)}
        return json.dumps({**entry, "classes": classes}) + "\n"


class Csv:
    """path, class, probability; with more classes also class_2, probability_2 and so on.

    Of a model that can refuse, also nearest and distance: a refused image has "none of these" as its class, without a
    probability and further classes, and nearest is the class that it resembles most.
    """

    def __init__(self, top: int, refuses: bool = False) -> None:
        self.top, self.refuses = top, refuses

    def head(self) -> str:
        more = [f"{column}_{i}" for i in range(2, self.top + 1) for column in ("class", "probability")]
        return self.row("path", "class", "probability", *more, *(("nearest", "distance") if self.refuses else ()))

    def line(self, prediction: Prediction) -> str:
        classes = ((label, seven_digits(value)) for label, value in prediction.top)
        cells: list[object] = list(itertools.chain.from_iterable(classes))
        if prediction.refused:
            cells = [REFUSED, *[""] * (2 * self.top - 1)]
        if prediction.distance is not None:
            cells += [prediction.labels[0], seven_digits(prediction.distance)]
        return self.row(prediction.file, *cells)

    def row(self, *cells: object) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerow(cells)
        return text.getvalue()


class CsvLists(Csv):
    """path, labels, probabilities of a multi-label model, separated by ";": a CSV file that a data set may be."""

    def head(self) -> str:
        return self.row("path", "labels", "probabilities")

    def line(self, prediction: Prediction) -> str:
        values = ";".join(str(seven_digits(value)) for value in prediction.probabilities)
        return self.row(prediction.file, ";".join(prediction.labels), values)


def format_of(out: Path) -> FormatName:
    """The format that the name of a file asks for; UserError for a kind of file that is not written."""
    suffix = out.suffix.lower()
    if suffix not in FORMAT_OF_SUFFIX:
        fix = "--out with .csv, .jsonl or .txt, or add --csv or --json for any other name"
        raise UserError(f"{out} ends in {out.suffix}, which is not written; use {fix}")
    return FORMAT_OF_SUFFIX[suffix]


def make_format(
    kind: FormatName, inputs: Inputs, labels: tuple[str, ...], top: int | None, refuses: bool = False
) -> Format:
    """The format for predictions of so many classes each; None: of a multi-label model, any number of them.

    `refuses`: an image may be none of the classes.
    """
    if kind == "table":
        return Table(inputs, labels, top, refuses)
    if kind == "json":
        return JsonLines()
    return CsvLists(0) if top is None else Csv(top, refuses)


def seven_digits(value: float) -> float:
    """The digits that a float32 has; more would be noise."""
    return float(f"{value:.7g}")


def shorten_start(text: str, width: int) -> str:
    """The end of a text, at most `width` columns of a terminal."""
    if cell_len(text) <= width:
        return text
    while cell_len(text) > width - 3:
        text = text[1:]
    return "..." + text
