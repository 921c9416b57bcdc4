"""A study's results as a table: a line for each row, over its seeds; CSV and Markdown."""

import csv
import io
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vitlab.studies.place import RESULT, Place
from vitlab.studies.request import Request
from vitlab.studies.study import JOBS, Number, Row, Study, several
from vitlab.text import flops_unit

NO_CLAIM = "± is the standard deviation over seeds; no claim is drawn from a difference smaller than it."
ONE_SEED = "One seed: the spread of these numbers is not known, so no claim is drawn from small differences."
PROVES_NOTHING = "Made with --quick: built-in data, tiny models, a few steps. It shows that everything runs and proves "
PROVES_NOTHING += "nothing."
ROUNDING = 1e-12  # of a number: what several additions may differ by


@dataclass(frozen=True)
class Line:
    """A row over all its seeds: values by heading, one for each seed that is finished."""

    name: str
    about: dict[str, str]
    values: dict[str, list[float]]
    units: dict[str, str]
    paper: dict[str, float]
    images: int | None  # to train on
    steps: int | None
    batch: int | None
    flops: float | None  # of pre-training, or whatever run the row is about
    seeds: int  # with all numbers
    over: int  # seeds of which nothing is left to do: with all numbers, or without some since runs diverged
    diverged: dict[str, int]  # by heading, seeds without a number since a run diverged
    commands: tuple[str, ...]  # of the first seed
    errors: tuple[str, ...]

    def mean(self, key: str) -> float | None:
        found = self.values.get(key)
        return float(np.mean(found)) if found else None

    def std(self, key: str) -> float | None:
        found = self.values.get(key, [])
        return float(np.std(found, ddof=1)) if len(found) > 1 else None


@dataclass(frozen=True)
class Table:
    """All lines of a study, finished or not, and the folder they are from."""

    study: Study
    request: Request
    out: Path
    lines: list[Line] = field(default_factory=list)

    @property
    def headings(self) -> list[str]:
        return list(dict.fromkeys(key for line in self.lines for key in line.values))

    @property
    def abouts(self) -> list[str]:
        return list(dict.fromkeys(key for line in self.lines for key in line.about))

    @property
    def papers(self) -> list[str]:
        return list(dict.fromkeys(key for line in self.lines for key in line.paper))

    @property
    def cost(self) -> tuple[str, float]:
        """The unit of the runs' costs, by the dearest, and its size in operations."""
        return flops_unit(max((line.flops or 0.0 for line in self.lines), default=0.0))

    @property
    def counts(self) -> list[str]:
        """The last headings: how much the row's run learned from, how long, and what it cost, if there are runs."""
        trained = any(line.flops is not None for line in self.lines)
        return ["images", "steps", "batch", "seeds", self.cost[0]] if trained else ["seeds"]

    @property
    def done(self) -> list[Line]:
        """The lines that have a number."""
        return [line for line in self.lines if any(line.values.values())]

    def files(self, pattern: str) -> list[Path]:
        """Files that finished jobs left in their folders, in order; a killed job may have left some too."""
        found = sorted(self.out.glob(f"{JOBS}/{pattern}"))
        return [path for path in found if (path.parent / RESULT).is_file()]

    @property
    def notes(self) -> list[str]:
        several_seeds = any(line.seeds > 1 for line in self.lines)
        return [*([PROVES_NOTHING] if self.request.quick else []), NO_CLAIM if several_seeds else ONE_SEED]


def make_table(study: Study, request: Request, place: Place, rows: Sequence[Sequence[Row]]) -> Table:
    """The table from the results there are; `rows` of each seed."""
    lines = [make_line(same, place) for same in zip(*rows, strict=True)]  # one row, by seed
    return Table(study, request, place.out, lines)


def make_line(same: Sequence[Row], place: Place) -> Line:
    first = same[0]
    run = first.trained
    result = None if run is None else place.result(run)
    recipe = None if run is None else run.settings()
    failed = [(job, place.error(job)) for row in same for job in row.jobs if place.result(job) is None]
    found = [{key: number_of(place, numbers) for key, numbers in row.numbers.items()} for row in same]
    lost = [{key: has_diverged(place, numbers) for key, numbers in row.numbers.items()} for row in same]
    is_over = [
        all(there[key] is not None or gone[key] for key in there) for there, gone in zip(found, lost, strict=True)
    ]
    return Line(
        name=first.name,
        about=first.about,
        values={key: [value for each in found if (value := each[key]) is not None] for key in first.numbers},
        units={key: several(numbers)[0].unit for key, numbers in first.numbers.items()},
        paper=first.paper,
        images=None if result is None or "images" not in result.about else int(result.about["images"]),
        steps=None if run is None else run.steps,
        batch=None if recipe is None else recipe.batch,
        flops=None if run is None else run.flops,
        seeds=sum(None not in each.values() for each in found),
        over=sum(is_over),
        diverged={key: sum(each[key] for each in lost) for key in first.numbers},
        commands=tuple(job.command(place.out) for job in first.jobs),
        errors=tuple(f"{job.name}: {error}" for job, error in failed if error is not None),
    )


def number_of(place: Place, numbers: Number | tuple[Number, ...]) -> float | None:
    """A number, or the mean of several; None where one is not there yet."""
    found = []
    for number in several(numbers):
        result = place.result(number.job)
        if result is None or number.key not in result.numbers:
            return None
        found.append(result.numbers[number.key])
    return float(np.mean(found))


def has_diverged(place: Place, numbers: Number | tuple[Number, ...]) -> bool:
    """Whether a run that a number is of diverged, so that there will be none."""
    results = [place.result(number.job) for number in several(numbers)]
    return any(result is not None and result.diverged for result in results)


# ---- as text


def shown(value: float | None, unit: str, std: float | None = None) -> str:
    """A number for people, with its spread: 12.34 for a share in per cent; four digits otherwise, or as many as the
    spread leaves a meaning, and no spread where it is that of rounding, as with what is counted."""
    if value is None:
        return ""
    if unit == "%":
        return f"{100 * value:.2f}" + ("" if std is None else f" ± {100 * std:.2f}")
    if std is None or std <= ROUNDING * abs(value):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    places = max(0, 1 - math.floor(math.log10(std)))  # two digits of it
    return f"{value:,.{places}f} ± {std:,.{places}f}"


def cell(line: Line, key: str) -> str:
    """The number of a heading, and the seeds that have none since their runs diverged."""
    number, lost = shown(line.mean(key), line.units.get(key, ""), line.std(key)), line.diverged.get(key, 0)
    return f"{number}, {lost} diverged" if number and lost else "diverged" if lost else number


def heading(key: str, unit: str) -> str:
    return f"{key}, {unit}" if unit else key


def cells(table: Table) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of text, for Markdown, the page and the terminal."""
    units = {key: unit for line in table.lines for key, unit in line.units.items()}
    heads = ["row", *table.abouts, *(heading(key, units[key]) for key in table.headings)]
    heads += [f"paper: {key}" for key in table.papers]
    heads += table.counts
    rows = []
    for line in table.lines:
        numbers = [cell(line, key) for key in table.headings]
        papers = [shown(line.paper.get(key), "%") for key in table.papers]
        counts = count_cells(line, *table.cost)
        about = [line.about.get(key, "") for key in table.abouts]
        rows.append([line.name, *about, *numbers, *papers, *(counts[key] for key in table.counts)])
    return heads, rows


def count_cells(line: Line, unit: str, size: float) -> dict[str, str]:
    """The last cells of a row, by heading; empty where it has no run."""
    whole = {"images": line.images, "steps": line.steps, "batch": line.batch, "seeds": line.seeds}
    counts = {key: "" if count is None else f"{count:,}" for key, count in whole.items()}
    return counts | {unit: "" if line.flops is None else f"{line.flops / size:.3g}"}


def markdown(table: Table) -> str:
    """The table with its question and notes."""
    heads, rows = cells(table)
    text = [f"# {table.study.name}: {table.study.question}", "", f"The paper: {table.study.place}. {table.study.paper}"]
    text += ["", table_line(heads), table_line(["---"] * len(heads)), *map(table_line, rows), ""]
    text += [f"{note}\n" for note in table.notes]
    if table.study.published:
        head, *published = table.study.published
        text += ["The paper's numbers:", "", table_line(head), table_line(["---"] * len(head))]
        text += [*map(table_line, published), ""]
    failures = [f"- {error}" for line in table.lines for error in line.errors]
    text += ["Failed so far:", "", *failures] if failures else []
    return "\n".join(text).rstrip() + "\n"


def table_line(words: Iterable[str]) -> str:
    return "| " + " | ".join(word.replace("|", "\\|").replace("\n", " ") for word in words) + " |"


def comma_separated(table: Table) -> str:
    """All digits: mean, standard deviation and number of values of everything measured."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    measured = [f"{key} {what}" for key in table.headings for what in ("mean", "std", "n")]
    counts = ["images", "steps", "batch", "seeds", "diverged", "flops"]
    writer.writerow(["row", *table.abouts, *measured, *(f"paper {key}" for key in table.papers), *counts])
    for line in table.lines:
        numbers = [n for key in table.headings for n in (line.mean(key), line.std(key), len(line.values.get(key, [])))]
        papers = [line.paper.get(key) for key in table.papers]
        about = [line.about.get(key, "") for key in table.abouts]
        counted = [line.images, line.steps, line.batch, line.seeds, line.over - line.seeds, line.flops]
        writer.writerow([line.name, *about, *numbers, *papers, *counted])
    return file.getvalue()
