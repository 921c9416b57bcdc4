"""review.csv: the images of a set that are worth a look, and what was decided about each.

A line has the image's path, its problem and an empty `decision`, to be filled in with a spreadsheet or an editor:
`keep` or nothing leaves the image as it is, `remove` leaves it out, and the name of a class is its label from then on.
`apply_review` changes an opened data set accordingly. Images stay in the split they are in, and classes stay as they
are, so that models trained before and after can be compared.
"""

import csv
import difflib
import io
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from vitlab.data.delimited import read_cells
from vitlab.data.rng import Ints
from vitlab.data.source import Data, ImageSource, Subset
from vitlab.errors import UserError
from vitlab.files import write_text
from vitlab.text import listed, valid_text

NAME = "review.csv"
KEEP, REMOVE = "keep", "remove"
FORMULA = ("=", "+", "-", "@", "\t", "\r")  # a cell that begins so would be computed by a spreadsheet
SHOWN = 5  # classes that an error names
GONE = -1  # the decision to leave an image out, among class numbers


@dataclass(frozen=True)
class Finding:
    """An image that is worth a look: a line of review.csv."""

    path: str
    split: str = ""
    label: str = ""
    suggested: str = ""  # the class that it may be instead
    problem: str = ""
    score: float = 0.0  # from 0 to 1, higher is worse; comparable among findings of the same problem
    other: str = ""  # path of the image that it is a copy of
    decision: str = ""


# ---- the file


def write_review(path: Path, findings: Iterable[Finding]) -> None:
    """Write a review that spreadsheets open: with a byte-order mark, for theirs, and no cell that is a formula."""
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\r\n")
    lines.writerow(field.name for field in fields(Finding))
    for finding in findings:
        row = asdict(finding) | {"score": f"{finding.score:.4f}"}
        lines.writerow(protect(valid_text(value)) for value in row.values())
    write_text(path, "\ufeff" + text.getvalue())


def read_review(path: Path) -> list[Finding]:
    """Read a review, with whatever columns beside path; raises UserError where it is none."""
    return [finding for _, finding in read_lines(path)]


def read_lines(path: Path) -> Iterator[tuple[int, Finding]]:
    """The findings of a review with their line numbers."""
    known = {field.name for field in fields(Finding)}
    lines = read_cells(path, known)
    columns = [cell.strip().lower() for cell in next(lines, (0, []))[1]]
    missing = next((name for name in ("path", "decision") if name not in columns), None)
    if missing is not None:
        raise UserError(f"the first line of '{path}' names no column {missing}; it should be that of a {NAME}")
    for line, cells in lines:
        row = {name: unprotect(cell) for name, cell in zip(columns, cells, strict=False) if name in known}
        if row.get("path"):
            yield line, Finding(**row | {"score": number(row.get("score", ""))})  # type: ignore[arg-type]


def protect(cell: str) -> str:
    """A cell that no spreadsheet takes for a formula."""
    return f"'{cell}" if cell.startswith(FORMULA) else cell


def unprotect(cell: str) -> str:
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA) else cell


def number(text: str) -> float:
    """A score, which a spreadsheet may have written with a comma; 0 where it is none."""
    try:
        return float(text.replace(",", "."))
    except ValueError:
        return 0.0


# ---- the decisions


class Reviewed(Subset):
    """The images of a source that were not removed, with labels as they were decided."""

    def __init__(self, source: ImageSource, indices: Ints, labels: Ints) -> None:
        super().__init__(source, indices)
        self.truth = labels


def apply_review(data: Data, path: Path) -> Data:
    """The data with the decisions of a review applied; raises UserError for one that cannot be.

    Call it on data whose splits are made: which image is in which split must not depend on decisions.
    """
    decided = read_decisions(path, data.classes)
    changed, removed, seen, parts = 0, 0, set[str](), dict[str, Any]()
    for split, source in data.splits.items():
        labels, names = source.labels.copy(), [name_key(source.name(i)) for i in range(len(source))]
        for i, name in enumerate(names):
            labels[i] = decided[name][1] if name in decided else labels[i]
        seen.update(decided.keys() & names)
        left = np.flatnonzero(labels != GONE)
        removed += len(labels) - len(left)
        changed += int((labels[left] != source.labels[left]).sum())
        if not len(left):
            kind = {"train": "training "}.get(split, f"{split} ")
            raise UserError(f"'{path}' removes every {kind}image of {data.name}")
        parts[split] = Reviewed(source, left, labels[left]) if (labels != source.labels).any() else source
    for name, (line, _) in decided.items():
        if name not in seen:
            raise UserError(f"line {line} of '{path}' names '{name}', which is no image of {data.name} as it is opened")
    relabeled = "1 label is" if changed == 1 else f"{changed} labels are"
    left_out = "1 image" if removed == 1 else f"{removed} images"
    note = f"{data.note}; by {path.name}, {relabeled} changed and {left_out} left out"
    return replace(data, **parts, note=note)


def read_decisions(path: Path, classes: Sequence[str]) -> dict[str, tuple[int, int]]:
    """The line and the label, or GONE, of every image for which something was decided, by name_key."""
    numbers, decided = {valid_text(name): i for i, name in enumerate(classes)}, dict[str, tuple[int, int]]()
    named = {KEEP, REMOVE} & {name.lower() for name in numbers}  # such a word could mean either
    for line, finding in read_lines(path):
        word = finding.decision.strip()
        if word.lower() in named:
            raise UserError(
                f"line {line} of '{path}' decides '{word}', which is also the name of a class; rename that class, or "
                "leave the cell empty to keep the image as it is"
            )
        if word.lower() in ("", KEEP):
            continue
        label = GONE if word.lower() == REMOVE else numbers.get(word)
        if label is None:
            raise UserError(f"line {line} of '{path}' decides '{word[:80]}'; write {choices(word, list(numbers))}")
        name = name_key(finding.path)
        before = decided.setdefault(name, (line, label))
        if before[1] != label:
            raise UserError(f"lines {before[0]} and {line} of '{path}' decide differently about '{finding.path}'")
    return decided


def choices(word: str, classes: list[str]) -> str:
    """What a decision can be, with the classes that are most like what was written."""
    near = difflib.get_close_matches(word, classes, SHOWN, 0.6) or classes[:SHOWN]
    return listed([KEEP, REMOVE, *(f"'{name}'" for name in near)]) + (" …" if len(classes) > len(near) else "")


def name_key(name: str) -> str:
    """By what an image of a set and a line of its review are compared: the same file, from any folder."""
    return os.path.abspath(valid_text(name))
