"""Results side by side: the paper's, marked as published, and those that folders of runs hold.

A folder may be a run (recipe.json, with scores.json or its log), a search or several seeds (search.json), a transfer or
VTAB (results.json), or what `vitlab evaluate --out` wrote (scores.json). Nothing is computed but the cost of a run,
from its recipe. Files may come from anywhere, so all of them are read with care.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitlab.errors import UserError
from vitlab.evaluation.result import csv_text
from vitlab.files import read_json, write_text
from vitlab.report.history import read_history
from vitlab.report.make import SCORES, SCORES_LIMIT
from vitlab.studies.published import DATA, PUBLISHED, Score
from vitlab.studies.table import table_line
from vitlab.studies.transfer import RESULTS, TARGETS
from vitlab.studies.vtab_tasks import TASKS
from vitlab.text import counted
from vitlab.training.log import LOG, last_report
from vitlab.training.recipe import is_settled
from vitlab.training.recipes import run_flops
from vitlab.training.search import SEARCH
from vitlab.training.setup import StoredRun, read_run

MAPPED = "ObjectNet"  # whose published numbers are of models with ImageNet's classes, too
COST = ("TPUv3-core-days", "exaFLOPs", "hours here")


@dataclass(frozen=True)
class Column:
    """A model in the table: its accuracies in percent by data set, and what it cost."""

    name: str
    scores: dict[str, Score]
    published: bool = False
    core_days: float | None = None
    exaflops: float | None = None  # of the paper's pre-training; of a run, its own training alone
    hours: float | None = None  # of training steps, on the machine of the run
    note: str = ""
    data: str = field(default="")

    @property
    def source(self) -> str:
        return "published" if self.published else "yours"

    def cells(self, data: Sequence[str]) -> list[str]:
        """Accuracy on each data set, then the costs, as text."""
        scores = [self.scores.get(name) for name in data]
        shown = ["-" if s is None else f"{s[0]:.2f}" + ("" if s[1] is None else f" ± {s[1]:.2f}") for s in scores]
        costs = (self.core_days, self.exaflops, self.hours)
        return shown + ["-" if cost is None else f"{cost:,.0f}" if cost >= 100 else f"{cost:.3g}" for cost in costs]


def published_columns() -> list[Column]:
    return [Column(published=True, **dataclasses.asdict(each)) for each in PUBLISHED]


def data_names(columns: Sequence[Column]) -> list[str]:
    """The paper's data sets, then those of the runs, in order."""
    return list(dict.fromkeys([*DATA, *(name for column in columns for name in column.scores)]))


# ---- folders


def read_column(place: str) -> Column:
    """The results in a folder; UserError where it holds none."""
    folder = Path(place).expanduser()
    readers: dict[str, Callable[[str, Path], Column]] = {RESULTS: read_results, SEARCH: read_search}
    try:
        found = next((read for file, read in readers.items() if (folder / file).is_file()), None)
        if found is not None:
            return found(place, folder)
        stored = read_run(folder)
        if stored is not None:
            return read_one(place, folder, stored)
        if (folder / SCORES).is_file():
            scores = read_json(folder / SCORES, SCORES_LIMIT)
            return Column(place, evaluated(scores, str(scores["data"])), note=f"{scores['model']}, by evaluate")
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(f"the results in {place} cannot be read ({type(error).__name__}: {error})") from None
    fix = "name the folder of a run, a search, a transfer, or one that `vitlab evaluate --out` wrote"
    raise UserError(f"{place} holds no results; {fix}")


def read_results(place: str, folder: Path) -> Column:
    """results.json, of a transfer or of VTAB."""
    about = read_json(folder / RESULTS)
    if "targets" in about:
        scores = {str(each["title"]): percent(each["mean"], each["std"]) for each in about["targets"].values()}
        tasks = about["targets"].get("vtab", {}).get("images")
        part = "" if tasks in (None, len(TASKS)) else f"; VTAB: {tasks} of {len(TASKS)} tasks"
        return Column(place, scores, note=f"transfer of {about['weights']}{part}")
    mean = about["means"].get("all")
    if mean is None and "tasks" in about:
        return Column(place, {}, note="VTAB: no task is done yet")
    note = "" if mean["done"] == mean["of"] else f"VTAB: {mean['done']} of {mean['of']} tasks"
    return Column(place, {"VTAB (19 tasks)": percent(mean["mean"], None)}, note=note)


def read_search(place: str, folder: Path) -> Column:
    about = read_json(folder / SEARCH)
    recipe, runs = about["recipe"], len(about["runs"])
    summary = {key: (each["mean"], each["std"]) for key, each in about["summary"].items()}
    scores = reported(str(recipe["data"]), recipe.get("objective"), summary)
    first = next((stored for seed in about["runs"] if (stored := read_run(folder / f"seed-{int(seed)}"))), None)
    note = f"{counted(runs, 'seed')}; cost of one" if runs else "no seed is done yet"
    return Column(place, scores, exaflops=None if first is None else exaflops(first), note=note)


def read_one(place: str, folder: Path, stored: StoredRun) -> Column:
    recipe = stored.recipe
    report = {key: (value, None) for key, value in last_report(folder / LOG).items()}
    scores = reported(recipe.data, recipe.objective, report)
    if (folder / SCORES).is_file():  # of the report, or of `vitlab evaluate --out`, then perhaps of another set
        found = read_json(folder / SCORES, SCORES_LIMIT)
        scores |= evaluated(found, str(found.get("data", recipe.data)), recipe.data)
    try:
        hours = read_history(folder).seconds / 3600
    except UserError:  # a run in progress, or whose weights were removed
        hours = None
    start = f"from {recipe.weights}, whose cost is not in it" if recipe.weights else ""
    return Column(place, scores, exaflops=exaflops(stored), hours=hours, note=start)


def reported(data: str, objective: str | None, numbers: Mapping[str, Score]) -> dict[str, Score]:
    """What the log says of a run's test images; masked patch prediction classifies none: its accuracy is of colors."""
    found = {"accuracy": title_of(data), "map": f"{title_of(data)}, mAP"}
    known = {title: numbers[key] for key, title in found.items() if key in numbers and objective != "masked"}
    return {title: percent(*score) for title, score in known.items()}


def evaluated(scores: dict[str, Any], data: str, trained: str = "") -> dict[str, Score]:
    """The accuracies in scores.json, of a model that was trained on the set `trained`."""
    title, split = title_of(data), str(scores.get("split", "test"))
    if split != "test" and (split != "all" or title == title_of(trained)):
        title = f"{title}, {split}"
    if scores.get("restricted"):  # with fewer to choose from, which is another task
        title = f"{title}, among {len(scores['classes'])} classes"
    elif scores.get("mapping") and title != MAPPED:
        title = f"{title}, mapped"
    if scores.get("multi_label"):
        return {f"{title}, mAP": percent(scores["map"], None)}
    found = {title: percent(scores["top1"]["value"], None)}
    if scores.get("real"):
        found["ImageNet ReaL"] = percent(scores["real"]["value"], None)
    return found


def percent(share: float, std: float | None) -> Score:
    """A share and its deviation in per cent; ValueError or OverflowError where a file has something else."""
    found = 100 * float(share), None if std is None else 100 * float(std)
    if not all(math.isfinite(number) for number in found if number is not None):
        raise ValueError(f"{share} is no share")
    return found


def title_of(data: str) -> str:
    """A data set as the paper calls it, where its name shows which it is; else its own name."""
    name = Path(data.removeprefix("imagenet:").rstrip("/")).name
    plain = name.removesuffix(".parquet").removesuffix(".csv").removesuffix(".tar")
    is_target = (target.title for target in TARGETS if plain in (target.name, *target.places))
    is_published = next((title for title in DATA if title.lower() == plain.lower()), plain)  # ObjectNet
    return "ImageNet" if data.startswith("imagenet:") else next(is_target, is_published)


def exaflops(stored: StoredRun) -> float | None:
    """Operations of a run's training steps; None while the steps of a run by the clock are not known."""
    return run_flops(stored.recipe, stored.model) / 1e18 if is_settled(stored.recipe) else None


# ---- files


def write_tables(folder: Path, columns: Sequence[Column]) -> None:
    """Write table.md and table.csv, a line for each model."""
    data = data_names(columns)
    heads = ["model", "source", "pre-trained on", *data, *COST, "note"]
    rows = [[c.name, c.source, c.data or "-", *c.cells(data), c.note or "-"] for c in columns]
    lines = [heads, ["---"] * len(heads), *rows]
    write_text(folder / "table.md", "".join(f"{table_line(line)}\n" for line in lines))
    write_text(folder / "table.csv", csv_text(heads, rows))
