"""Answers as text: a table to read, JSON lines and CSV for programs. Each line is complete in itself."""

import csv
import io
import json
from collections.abc import Iterable
from typing import Literal, Protocol

from rich.cells import cell_len, set_cell_size

from vitlab.predict.inputs import Inputs
from vitlab.predict.stream import Prediction
from vitlab.terminal import printable

Kind = Literal["table", "json", "csv"]
TOP: dict[Kind, int] = {"table": 1, "json": 5, "csv": 1}  # classes given where nothing is said
ENDINGS: dict[str, Kind] = {".json": "json", ".jsonl": "json", ".ndjson": "json", ".csv": "csv"}
NAME, LABEL = 60, 30  # the most columns of a terminal for a path and for a class


class Format(Protocol):
    """How answers are written."""

    def head(self) -> str: ...

    def lines(self, answers: Iterable[Prediction]) -> str: ...


class Table:
    """Columns for the eye, as wide as the names there are; a path too long for its column loses its beginning."""

    def __init__(self, inputs: Inputs, labels: tuple[str, ...], top: int) -> None:
        longest = max(cell_len(printable(inputs.name(i))) for i in range(len(inputs)))
        self.name = max(len("image"), min(NAME, longest))
        self.label = max(len("class"), min(LABEL, max(cell_len(printable(label)) for label in labels)))
        self.top = top

    def head(self) -> str:
        return self.row("image", "class", "probability", "then" if self.top > 1 else "")

    def lines(self, answers: Iterable[Prediction]) -> str:
        return "".join(self.line(answer) for answer in answers)

    def line(self, answer: Prediction) -> str:
        (label, value), *others = answer.classes
        then = ", ".join(f"{printable(name)} {percent(p)}" for name, p in others)
        return self.row(printable(answer.path), printable(label), percent(value), then)

    def row(self, name: str, label: str, value: str, then: str) -> str:
        cells = set_cell_size(tail(name, self.name), self.name), set_cell_size(label, self.label), f"{value:>11}", then
        return "  ".join(cells).rstrip() + "\n"


class JsonLines:
    """One object a line: {"path": ..., "classes": [{"name": ..., "probability": ...}, ...]}."""

    def head(self) -> str:
        return ""

    def lines(self, answers: Iterable[Prediction]) -> str:
        return "".join(json.dumps(self.plain(answer)) + "\n" for answer in answers)

    def plain(self, answer: Prediction) -> dict[str, object]:
        classes = [{"name": name, "probability": digits(value)} for name, value in answer.classes]
        return {"path": answer.path, "classes": classes}


class Csv:
    """path, class, probability; with more classes also class_2, probability_2 and so on."""

    def __init__(self, top: int) -> None:
        self.top = top

    def head(self) -> str:
        more = [f"{word}_{i}" for i in range(2, self.top + 1) for word in ("class", "probability")]
        return self.rows([["path", "class", "probability", *more]])

    def lines(self, answers: Iterable[Prediction]) -> str:
        return self.rows(
            [answer.path, *(cell for name, value in answer.classes for cell in (name, digits(value)))]
            for answer in answers
        )

    def rows(self, rows: Iterable[list[object]]) -> str:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(rows)
        return text.getvalue()


def make_format(kind: Kind, inputs: Inputs, labels: tuple[str, ...], top: int) -> Format:
    if kind == "table":
        return Table(inputs, labels, top)
    return JsonLines() if kind == "json" else Csv(top)


def digits(value: float) -> float:
    """A float32 has seven digits; the rest would be noise."""
    return float(f"{value:.7g}")


def percent(value: float) -> str:
    return f"{value:.1%}"


def tail(text: str, width: int) -> str:
    """The end of a text, at most `width` columns of a terminal."""
    if cell_len(text) <= width:
        return text
    while cell_len(text) > width - 3:
        text = text[1:]
    return "..." + text
