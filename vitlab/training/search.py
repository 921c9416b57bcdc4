"""Several runs of one recipe: settings chosen on held-out images, then the best of them with all images, once per seed.

DIR/search.json      the recipe, the values to choose from, the scores so far and the results
DIR/data.txt.gz      the images, so that scores and results of changed ones do not come together, see manifest.py
DIR/trials/...       a trial in progress; its folder is removed once its score is noted
DIR/seed-0, ...      the runs of the best settings, each the folder of a run

The trials are scored on the set's validation split or, where it has none, on a part of its training images; the test
split is used by the final runs alone. What is finished is not repeated, and what was interrupted resumes.
"""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from rich.console import Console

from vitlab.data.open import hold_out_validation
from vitlab.data.sharing import shared_sets
from vitlab.data.source import Data
from vitlab.device import free_device
from vitlab.errors import UserError
from vitlab.files import read_json, write_text
from vitlab.settings import Range, check_types, from_json, is_number, last_of, parse_settings, to_json
from vitlab.training.lock import run_lock
from vitlab.training.loop import TrainResult, train
from vitlab.training.manifest import check_data, list_images, write_manifest
from vitlab.training.parallel import Cluster, process_group
from vitlab.training.recipe import Recipe, change, difference, keys
from vitlab.training.recorder import Diverged
from vitlab.training.setup import RECIPE, open_recipe_data
from vitlab.weights.lora_base import name_base

T = TypeVar("T")

SEARCH = "search.json"
NOT_SEARCHED = ("seed", "holdout", "validation")  # with another value of these, scores are of other images
Scores = dict[str, float | None]  # by name; None: the run diverged


@dataclass(frozen=True)
class Repeats:
    """Settings of a command that runs a recipe more than once."""

    seeds: Annotated[int, Range(1, 1_000), "runs with the best settings, each with a seed of its own"] = 1

    def __post_init__(self) -> None:
        check_types(self)


@dataclass(frozen=True)
class Plan:
    """What to run: a recipe, for some of its keys the values to choose from, and the number of seeds at the end."""

    recipe: Recipe
    grid: dict[str, tuple[float, ...]]
    seeds: int

    @property
    def trials(self) -> dict[str, Recipe]:
        """The recipe with each combination of values, by name."""
        found = {}
        for values in itertools.product(*self.grid.values()):
            chosen = dict(zip(self.grid, values, strict=True))
            found[" ".join(f"{key}={value}" for key, value in chosen.items())] = change(self.recipe, **chosen)
        return found


def split_pairs(pairs: Iterable[str]) -> tuple[list[str], dict[str, tuple[float, ...]], int | None]:
    """`key=value` text as plain settings, those with several values (`lr=0.003,0.01`), and `seeds=`, where given."""
    plain: list[str] = []
    grid: dict[str, tuple[float, ...]] = {}
    seeds = None
    known = keys()
    for pair in last_of(pairs):
        key, _, text = pair.partition("=")
        if key == "seeds":
            seeds = Repeats(**parse_settings([pair], {"seeds": int})).seeds
        elif "," in text and key in known and is_number(known[key]):
            if key in NOT_SEARCHED:
                fix = "seeds=3 runs three seeds" if key == "seed" else f"give {key} one value"
                raise UserError(f"'{pair}' would compare scores of different images or luck; {fix}")
            values = (parse_settings([f"{key}={word.strip()}"], known)[key] for word in text.split(","))
            grid[key] = tuple(dict.fromkeys(values))
        else:
            plain.append(pair)
    return plain, grid, seeds


# ---- the parts that other studies share


def try_each(
    folders: Mapping[str, Path], scores: Scores, run: Callable[[str, Path], float], note: Callable[[], None]
) -> None:
    """Fill `scores` by name: a missing one is run in its folder, which is removed once `note` has stored the score."""
    for name, folder in folders.items():
        if name not in scores:
            try:
                scores[name] = run(name, folder)
            except Diverged:
                scores[name] = None
            note()
            shutil.rmtree(folder, ignore_errors=True)


def best_of(scores: Scores) -> str:
    """The name with the highest score, the first of equals; raises UserError where every run diverged."""
    finished = {name: score for name, score in scores.items() if score is not None}
    if not finished:
        raise UserError(f"every run diverged ({', '.join(scores)}); try lower values")
    return max(finished, key=lambda name: finished[name])


def trial_data(data: Data, share: float | None) -> Data:
    """The data of a trial: it is tested on the validation split, or on the fraction `share` of the training images."""
    data = hold_out_validation(data, share)
    if data.validation is None:
        raise UserError(f"no class of {data.name} has two training images, so there is nothing to choose on")
    return dataclasses.replace(data, test=data.validation, validation=None)


# ---- the search


@dataclass
class Search:
    """A search in its folder, and what is known so far."""

    plan: Plan
    out: Path
    cluster: Cluster
    console: Console
    accept: bool = False  # data that changed since a run was finished or interrupted
    mended: bool = False  # data that changed since a run was interrupted, as when a broken image was replaced
    scores: Scores = field(default_factory=dict)
    runs: dict[int, dict[str, float]] = field(default_factory=dict)  # the test report of each seed
    base: str = ""  # the sha256 of the weights to start from, where there are some

    def run(self) -> None:
        """Run or resume everything."""
        with shared_sets():
            self.run_all()

    def run_all(self) -> None:
        plan, trials = self.plan, self.plan.trials
        share = plan.recipe.validation or None  # 0 would leave nothing to choose on
        best = plan.recipe
        if plan.grid:

            def score(name: str, folder: Path) -> float:
                recipe = change(trials[name], validation=0.0)
                data = trial_data(open_recipe_data(recipe), share)
                place = f"{len(self.scores) + 1}/{len(trials)}"
                self.print(f"[{place}] {name}: {len(data.train):,} images to train on, {len(data.test):,} held out")
                return self.train(recipe, folder, data).score

            folders = {name: self.out / "trials" / name.replace(" ", "_") for name in trials}
            try_each(folders, self.scores, score, self.write)
            shutil.rmtree(self.out / "trials", ignore_errors=True)
            for name in trials:
                self.print(f"{name}: {self.show(self.scores[name])}")
            best = trials[best_of({name: self.scores[name] for name in trials})]
        for seed in self.seeds:
            if seed not in self.runs:
                self.print(f"seed {seed}: {self.best or 'the recipe'} with all training images")
                result = self.train(change(best, seed=seed, validation=0.0), self.out / f"seed-{seed}", None)
                self.runs[seed] = result.report
                self.write()

    @property
    def seeds(self) -> list[int]:
        first = self.plan.recipe.seed
        return list(range(first, first + self.plan.seeds))

    @property
    def is_done(self) -> bool:
        trials = self.plan.trials if self.plan.grid else {}
        return {*trials} <= {*self.scores} and {*self.seeds} <= {*self.runs}

    @property
    def best(self) -> str:
        """The settings that were chosen; empty where nothing is to be chosen, or not yet."""
        done = all(name in self.scores for name in self.plan.trials)
        return best_of({name: self.scores[name] for name in self.plan.trials}) if self.plan.grid and done else ""

    @property
    def summary(self) -> dict[str, dict[str, float | None]]:
        """Mean and standard deviation (n - 1) over the seeds of every number of their test reports."""
        reports = [self.runs[seed] for seed in self.seeds if seed in self.runs]
        table: dict[str, dict[str, float | None]] = {}
        for key in reports[0] if reports else ():
            values = [report[key] for report in reports]
            std = float(np.std(values, ddof=1)) if len(values) > 1 else None
            table[key] = {"mean": float(np.mean(values)), "std": std}
        return table

    def train(self, recipe: Recipe, folder: Path, data: Data | None) -> TrainResult:
        try:
            accept = self.accept or self.mended
            return train(recipe, folder, resume=True, accept_data_changes=accept, console=self.console, data=data)
        finally:
            free_device()

    def show(self, score: float | None) -> str:
        if score is None:
            return "diverged"
        shown = f"a loss of {-score:.4f}" if self.plan.recipe.objective == "masked" else f"{score:.2%}"
        return f"{shown} on the held-out images"

    def print(self, line: str) -> None:
        if self.cluster.first:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    # ---- files

    def check_inputs(self) -> None:
        """Note the images and the weights that all runs have in common; UserError where others are finished already."""
        recipe, begun = self.plan.recipe, bool(self.scores or self.runs)
        base = self.base
        if (weights := recipe.weights) is not None:
            base = self.open(lambda: name_base(weights, rank=0).sha256) or base
        if begun and self.base and base != self.base:
            fix = "put them back, or use a new --out"
            raise UserError(f"the weights {recipe.weights} are not those that {self.out} was begun with; {fix}")
        self.base = base
        if (data := self.open(lambda: open_recipe_data(recipe))) is None:
            return
        hashed = recipe.hash_data
        kept = check_data(self.out, data, hashed=hashed, accept=self.accept) if begun else list_images(data, hashed)
        write_manifest(self.out, kept)

    def open(self, find: Callable[[], T]) -> T | None:
        """What `find` returns; None, with a note, where it cannot be opened and is not needed, as all is done."""
        try:
            return find()
        except UserError as error:
            if not self.is_done:
                raise
            self.print(f"finished already, and not compared with what is there now: {error}")
            return None

    def write(self) -> None:
        if self.cluster.first:
            about = {
                "format": "vitlab/1",
                "recipe": to_json(self.plan.recipe),
                "weights": self.base,
                "grid": self.plan.grid,
                "trials": self.scores,
                "best": self.best,
                "runs": self.runs,
                "summary": self.summary,
            }
            write_text(self.out / SEARCH, json.dumps(about, indent=1) + "\n")

    def read(self, resume: bool) -> tuple[Scores, dict[int, dict[str, float]], str]:
        """The scores, the results and the weights' sha256 in the folder; UserError for those of another recipe or other
        values."""
        path = self.out / SEARCH
        if (self.out / RECIPE).exists():
            raise UserError(f"{self.out} holds a single run; choose another --out for a search")
        if not path.exists():
            return {}, {}, ""
        if not resume:
            raise UserError(f"{self.out} holds a search already; continue it with --resume, or choose another --out")
        try:
            about = read_json(path)
            stored = from_json(Recipe, about["recipe"])
            grid = {key: tuple(values) for key, values in about["grid"].items()}
            scores = {str(name): None if score is None else float(score) for name, score in about["trials"].items()}
            runs = {int(seed): {k: float(v) for k, v in report.items()} for seed, report in about["runs"].items()}
            base = str(about.get("weights", ""))
        except (UserError, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}); use another --out") from None
        odd = difference(self.plan.recipe, stored)
        if odd is None and grid != self.plan.grid:
            odd = f"values to choose from ({grid_text(grid) or 'none'})"
        if odd is not None:
            raise UserError(f"the search in {self.out} has another {odd}; continue it as it was, or use a new --out")
        return scores, runs, base


def grid_text(grid: Mapping[str, tuple[float, ...]]) -> str:
    return " ".join(f"{key}={','.join(map(str, values))}" for key, values in grid.items())


def run_search(
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    accept: bool = False,
    mended: bool = False,
    console: Console | None = None,
) -> Search:
    """Run a plan in the folder `out`, or continue it with `resume`; the results are also in its search.json."""
    trials = plan.trials if plan.grid else {}  # made now, so that a wrong value is an error before the first run
    with process_group(plan.recipe.device) as cluster, run_lock(out, cluster):
        search = Search(plan, out, cluster, console or Console(), accept, mended)
        search.scores, search.runs, search.base = cluster.agree(lambda: search.read(resume))
        cluster.agree(search.check_inputs)
        parts = [f"{len(trials)} trials on held-out images"] if trials else []
        parts.append(f"{plan.seeds} run{'s' * (plan.seeds > 1)} with all training images")
        search.print(", then ".join(parts))
        if resume:
            search.print(f"finished already: {len(search.scores)} trials, {len(search.runs)} runs")
        search.write()
        search.run()
    return search


def result_rows(search: Search) -> list[tuple[str, ...]]:
    """The final runs as rows of a table: seed, then every number of the test; last the means and deviations."""

    def shown(key: str, value: float) -> str:
        return f"{value:.2%}" if "accuracy" in key else f"{value:.4f}"

    rows = [(f"seed {seed}", *(shown(key, value) for key, value in search.runs[seed].items())) for seed in search.seeds]
    means: list[Any] = []
    for key, row in search.summary.items():
        mean, std = row["mean"] or 0.0, row["std"]
        means.append(shown(key, mean) + ("" if std is None else f" ± {shown(key, std)}"))
    return [*rows, ("mean", *means)]
