"""Transfer: a model fine-tuned on all of the paper's targets that are in a folder, by the rows of its table.

DIR/pets/search.json, DIR/pets/seed-0, ...   a target: the learning rates tried on held-out images, then the best on all
                                             training images, once for each seed, see training/search.py
DIR/vtab/seed-0/results.json, ...            VTAB's 19 tasks, once for each seed, see vtab.py
DIR/results.json, table.md, table.csv        the results so far

What is finished is not repeated, and what was interrupted resumes. A target that fails does not stop the others.
"""

import dataclasses
import difflib
import functools
import json
import shutil
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from vitlab.data.open import open_data
from vitlab.errors import Stopped, UserError
from vitlab.evaluation.piece_cache import model_key
from vitlab.evaluation.result import csv_text
from vitlab.files import read_json, write_text
from vitlab.models.variants import Model
from vitlab.settings import last_of, parse_settings
from vitlab.studies.vtab import means, run_vtab
from vitlab.studies.vtab_tasks import TASKS
from vitlab.text import listed
from vitlab.training.auto import higher
from vitlab.training.lock import folder_lock
from vitlab.training.recipe import LENGTHS, LOOSE, change, keys, override
from vitlab.training.recipes import find
from vitlab.training.search import Plan, run_search, split_pairs
from vitlab.weights import load

RESULTS, TABLE, CSV, ERROR = "results.json", "table.md", "table.csv", "error.txt"
SEEDS = 3
FIXED = ("model", "data", "weights", "objective", "subset", "holdout", "validation", "epochs", "minutes")
ENDINGS = ("", ".parquet", ".csv", ".tar")
# settings of --quick: enough to run every step, far too few to learn anything
QUICK = ("steps=4", "batch=16", "per_class=8", "lr=0.01,0.03", "seeds=2", "compile=no")


@dataclass(frozen=True)
class Target:
    """A row of the paper's table, and the names that its data may have in a folder."""

    name: str
    title: str
    recipe: str
    places: tuple[str, ...]

    def find(self, root: Path) -> str | None:
        """Where its data is, or None."""
        paths = [root / f"{place}{ending}" for place in self.places for ending in ENDINGS]
        return next((str(path) for path in paths if path.exists()), None)


CIFAR = ("cifar-{0}", "cifar-{0}-python", "cifar-{0}-python.tar.gz", "cifar-{0}-batches-py", "cifar{0}")
PETS = ("pets", "oxford-pets", "oxford-iiit-pet", "oxford-iiit-pets")
FLOWERS = ("flowers", "flowers102", "flowers-102", "oxford-flowers", "oxford-flowers-102")
TARGETS = (
    Target("imagenet", "ImageNet", "imagenet-finetune", ("imagenet", "imagenet-1k", "ILSVRC2012")),
    Target("cifar10", "CIFAR-10", "cifar10-finetune", tuple(place.format(10) for place in CIFAR)),
    Target("cifar100", "CIFAR-100", "cifar100-finetune", tuple(place.format(100) for place in CIFAR)),
    Target("pets", "Oxford-IIIT Pets", "pets-finetune", PETS),
    Target("flowers", "Oxford Flowers-102", "flowers-finetune", FLOWERS),
    Target("vtab", "VTAB (19 tasks)", "vtab-finetune", ("vtab-1k", "vtab")),
)
VTAB = TARGETS[-1]
DIGITS = Target("digits", "digits", "pets-finetune", ())  # of --quick


def choose_targets(text: str) -> tuple[Target, ...]:
    """The targets of `pets,flowers` or `all`."""
    words = [word.strip() for word in text.split(",")]
    names = [target.name for target in TARGETS]
    for word in words:
        if word != "all" and word not in names:
            near = difflib.get_close_matches(word, names, 1, 0.4)
            hint = f"; did you mean '{near[0]}'?" if near else ""
            raise UserError(f"there is no target '{word}'{hint}; there are {listed([*names, 'all'])}")
    return tuple(target for target in TARGETS if target.name in words or "all" in words)


@dataclass(frozen=True)
class Transferred:
    """The result of a target: test accuracy with each seed."""

    title: str
    images: int  # tested; of VTAB, the tasks
    lr: float | None  # None: each task of VTAB has its own
    accuracies: tuple[float, ...]
    trials: dict[str, float | None] = field(default_factory=dict)  # accuracy on held-out images; None: it diverged

    @property
    def mean(self) -> float:
        return float(np.mean(self.accuracies))

    @property
    def std(self) -> float | None:
        """The sample's deviation over the seeds, where there are several."""
        return float(np.std(self.accuracies, ddof=1)) if len(self.accuracies) > 1 else None


@dataclass
class Transfer:
    """One model on its way to all targets."""

    weights: str
    model: Model
    out: Path
    settings: tuple[str, ...]  # key=value for all targets
    keep: bool  # whether the fine-tuned models stay
    accept: bool  # data that changed since the last attempt
    console: Console
    results: dict[str, Transferred] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def run(self, target: Target, data: str, number: str) -> None:
        """Run or resume a target to its result; an error ends this target only."""
        self.print(f"{number} {target.title}: {data}")
        try:
            result = self.run_tasks(target, Path(data)) if target == VTAB else self.run_target(target, data)
        except Stopped as stop:
            message = str(stop).replace("continue with --resume", "the same command resumes from here")
            raise Stopped(stop.code - 128, f"{target.name}: {message}") from None
        except Exception as error:
            self.fail(target, error)
            return
        self.results[target.name] = result
        self.write()
        title, tested, *_, accuracy = next(iter(table_rows([result])))
        self.print(f"{title}: {accuracy}, {tested} tested")

    def fail(self, target: Target, error: Exception) -> None:
        """Note that a target failed; an error that is none of the user's leaves its traceback for a report."""
        why = str(error)
        if not isinstance(error, UserError):
            path = self.out / target.name / ERROR
            write_text(path, "".join(traceback.format_exception(error)))
            why = f"{type(error).__name__}: {error} (see {path})"
        self.failed[target.name] = why
        self.print(f"{target.name} did not finish: {why}")

    def run_target(self, target: Target, data: str) -> Transferred:
        """Choose the learning rate on held-out images, then train with each seed."""
        plan, folder = self.plan(target, data), self.out / target.name
        images = len(open_data(data, holdout=plan.recipe.holdout).test)
        search = run_search(plan, folder, resume=True, accept=self.accept, mended=True, console=self.console)
        if not self.keep:  # a run's checkpoints and weights take many times the size of the model
            for seed in search.seeds:
                drop_models(folder / f"seed-{seed}")
        lr = float(search.best.removeprefix("lr=")) if plan.grid else plan.recipe.lr
        accuracies = tuple(search.runs[seed]["accuracy"] for seed in search.seeds)
        return Transferred(target.title, images, lr, accuracies, dict(search.scores))

    def run_tasks(self, target: Target, root: Path) -> Transferred:
        """VTAB, once for each seed: the mean of the tasks that are there, which are the same for all."""
        plan = self.plan(target, str(root))
        plain = tuple(pair for pair in self.plain if pair.partition("=")[0] not in ("seed", "steps"))
        scores, done = [], 0
        for seed in range(plan.recipe.seed, plan.recipe.seed + plan.seeds):
            study = run_vtab(
                self.weights,
                root,
                self.out / target.name / f"seed-{seed}",
                steps=plan.recipe.steps or 1,
                settings=(*plain, f"seed={seed}"),
                rates=plan.grid.get("lr", ()),
                keep=self.keep,
                accept=self.accept,
                console=self.console,
            )
            if study.failed:
                raise UserError(f"{', '.join(study.failed)} did not finish with seed {seed}")
            mean = means(study.results)["all"]
            scores.append(float(mean["mean"]))
            done = int(mean["done"])
        return Transferred(target.title, done, None if plan.grid else plan.recipe.lr, tuple(scores))

    @property
    def plain(self) -> list[str]:
        return split_pairs(self.settings)[0]

    def plan(self, target: Target, data: str) -> Plan:
        """The paper's row for a target, with the settings of the command; its warm-up is at most a fifth of it."""
        entry = find(target.recipe)
        plain, grid, seeds = split_pairs(self.settings)
        given = parse_settings(plain, keys())
        side = self.model.config.image_size if target == DIGITS else higher((1, 1), self.model)
        steps = int(given.get("steps") or entry.recipe.steps or 1)
        base = dataclasses.replace(entry.recipe, data=data, weights=self.weights, head="new", image_size=side)
        base = change(base, steps=steps, warmup=min(entry.recipe.warmup, steps // 5), evaluate_every=steps)
        rates = {"lr": entry.searched} if len(entry.searched) > 1 and "lr" not in given else {}
        return Plan(override(base, plain), grid or rates, SEEDS if seeds is None else seeds)

    def print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    # ---- files

    @functools.cached_property
    def key(self) -> str:
        """Of the weights."""
        return model_key(self.model, "features", half=False)

    def resume(self) -> None:
        """Read the results in the folder; UserError for those of other weights or settings."""
        path = self.out / RESULTS
        if not path.exists():
            return
        try:
            about = read_json(path)
            key, settings = about["key"], tuple(about["settings"])
            fields = [each.name for each in dataclasses.fields(Transferred)]
            done = {n: Transferred(**{key: r[key] for key in fields}) for n, r in about["targets"].items()}
        except (UserError, OSError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}); remove it, or use another --out") from None
        (mine, seeds), (theirs, before) = lasting(self.settings), lasting(settings)
        reasons = {
            "other weights": key != self.key,
            "other settings": mine != theirs,
            f"{before} seeds, not {seeds}": seeds < before,
        }
        if other := next((reason for reason, holds in reasons.items() if holds), None):
            raise UserError(f"the results in {path} were made with {other}; use another --out")
        self.results = {name: dataclasses.replace(r, accuracies=tuple(r.accuracies)) for name, r in done.items()}

    def write(self) -> None:
        about = {
            "format": "vitlab/1",
            "key": self.key,
            "weights": self.weights,
            "settings": self.settings,
            "targets": {
                name: dataclasses.asdict(r) | {"mean": r.mean, "std": r.std} for name, r in self.results.items()
            },
        }
        write_text(self.out / RESULTS, json.dumps(about, indent=1) + "\n")
        if self.results:
            heads, rows = ("data", "tested", "lr", "seeds", "accuracy"), list(table_rows(self.results.values()))
            lines = [heads, ("---",) * len(heads), *rows]
            write_text(self.out / TABLE, "".join(f"| {' | '.join(line)} |\n" for line in lines))
            spread = [(n, r.images, r.lr, len(r.accuracies), r.mean, r.std) for n, r in self.results.items()]
            write_text(self.out / CSV, csv_text((*heads[:4], "mean", "std"), spread))


def lasting(settings: Iterable[str]) -> tuple[tuple[object, ...], int]:
    """What all calls that share a folder have in common, in any order; and the seeds, of which there may be more."""
    plain, grid, seeds = split_pairs(settings)
    return (sorted(pair for pair in plain if pair.partition("=")[0] not in LOOSE), grid), seeds or SEEDS


def table_rows(results: Iterable[Transferred]) -> Iterable[tuple[str, ...]]:
    for r in results:
        tested = f"{r.images} of {len(TASKS)} tasks" if r.title == VTAB.title else f"{r.images:,}"
        yield r.title, tested, "by task" if r.lr is None else f"{r.lr:g}", f"{len(r.accuracies)}", percent(r)


def percent(result: Transferred) -> str:
    return f"{result.mean:.2%}" + ("" if result.std is None else f" ± {100 * result.std:.2f}")


def drop_models(folder: Path) -> None:
    """Remove the weights and checkpoints of a finished run; its log and its recipe stay."""
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for name in ("model.safetensors", "config.json"):
        (folder / name).unlink(missing_ok=True)


def run_transfer(
    weights: str,
    root: Path | None,
    out: Path,
    targets: tuple[Target, ...] = TARGETS,
    *,
    settings: tuple[str, ...] = (),
    quick: bool = False,
    keep: bool = False,
    accept: bool = False,
    console: Console | None = None,
) -> Transfer:
    """Fine-tune `weights` on every target whose data is in `root`; with `quick`, shortly on the built-in digits alone.

    `settings` are `key=value` for all targets: `seeds=`, the learning rates to choose from (`lr=0.003,0.01`), and any
    other of a recipe. Results in `out` of images that have changed since are refused, unless with `accept`.
    """
    settings = tuple(last_of(settings))
    for pair in settings:
        if (key := pair.partition("=")[0]) in FIXED:
            how = "steps= sets the length" if key in LENGTHS else "the paper's table and --data set it"
            raise UserError(f"'{key}' cannot be set here: {how}")
    if others := [key for key in split_pairs(settings)[1] if key != "lr"]:
        raise UserError(f"only lr can have several values here, not {', '.join(others)}; give {others[0]} one value")
    given = {pair.partition("=")[0] for pair in settings}
    short = tuple(pair for pair in QUICK if pair.partition("=")[0] not in given) if quick else ()
    transfer = Transfer(weights, load(weights), out, (*short, *settings), keep, accept, console or Console())
    if quick:
        transfer.print("quick: a few steps on the built-in digits, to see that everything runs; it proves nothing")
        found = {DIGITS: "digits"}
    else:
        found = find_targets(transfer, root, targets)
    for target, data in found.items():  # a wrong setting is an error before the first run
        transfer.plan(target, data)
    with folder_lock(out):  # a second process would write its own results over these
        transfer.resume()
        transfer.write()  # from here on the folder is of these weights
        for number, (target, data) in enumerate(found.items(), 1):
            transfer.run(target, data, f"[{number}/{len(found)}]")
    return transfer


def find_targets(transfer: Transfer, root: Path | None, targets: tuple[Target, ...]) -> dict[Target, str]:
    """The data of the targets that are in a folder; those that are not are printed."""
    if root is None or not root.is_dir():
        where = "name the folder of data sets with --data FOLDER, or try --quick"
        raise UserError(where if root is None else f"there is no folder '{root}'; {where}")
    found = {target: place for target in targets if (place := target.find(root)) is not None}
    missing = [target for target in targets if target not in found]
    if not found:
        names = ", ".join(f"{target.name} ({' or '.join(target.places[:2])})" for target in missing)
        raise UserError(f"none of the targets is in '{root}': it should hold {names}")
    for target in missing:
        transfer.print(f"{target.title} is left out: there is no {' or '.join(target.places[:3])} in {root}")
    return found
