"""VTAB-1k: a model is fine-tuned on 1,000 images of each of 19 tasks by one recipe, and tested.

The recipe is the paper's: SGD with momentum 0.9, batch 512, 2,500 steps, learning rate 0.01, cosine, 384 pixels.
Images are stretched to a square; training cuts a random 6/7 of it and flips, where the task's labels allow it.

Results are added to results.json task by task: a task in it is not run again, and one that was stopped resumes.
"""

import dataclasses
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from vitlab.data.source import Data
from vitlab.data.transforms import Augment
from vitlab.device import free_device, pick_device
from vitlab.errors import Stopped, UserError
from vitlab.evaluation.piece_cache import model_key
from vitlab.evaluation.scores import Rate, rate
from vitlab.files import write_text
from vitlab.models.variants import Model
from vitlab.settings import from_json, to_json
from vitlab.studies.vtab_tasks import BOTH, GROUPS, SIZES, TASKS, GoneError, Task, missing_lists, open_task
from vitlab.text import duration
from vitlab.training.auto import higher, machine, run_seconds
from vitlab.training.loop import train
from vitlab.training.manifest import digest
from vitlab.training.recipe import LENGTHS, Recipe, difference, override
from vitlab.training.recipes import find
from vitlab.training.search import Scores, best_of, try_each
from vitlab.weights import load

RESULTS = "results.json"
STEPS = 2500
CROP = 6 / 7  # of the square's sides: 384 of 448 pixels
# settings that the study itself fixes; the rest of a recipe is open to key=value
FIXED = ["model", "data", "weights", *LENGTHS, "evaluate_every", "objective"]
FIXED += ["subset", "per_class", "holdout", "validation"]


@dataclass(frozen=True)
class Result:
    """The result of a finished task."""

    accuracy: float
    images: int  # tested
    lr: float
    seconds: float
    trials: Scores = field(default_factory=dict)  # learning rate to accuracy on the 200, where tuned
    data: str = ""  # the digest of its images

    @property
    def rate(self) -> Rate:
        return rate(round(self.accuracy * self.images), self.images)


@dataclass
class Study:
    """The study of one model: its settings, and its results in a folder."""

    out: Path
    root: Path
    recipe: Recipe  # of every task, apart from data and augmentation
    settings: tuple[str, ...]  # key=value, applied last
    rates: tuple[float, ...]  # learning rates to choose from on the 200 images; none: the recipe's
    key: str  # of the weights
    keep: bool  # whether the fine-tuned models stay
    console: Console
    results: dict[str, Result] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    # ---- one task

    def open(self, task: Task) -> Data | None:
        """Open a task's data; None, with a recorded failure, where something is wrong with its lists."""
        try:
            if self.rates:
                open_task(self.root, task, tuning=True)
            return open_task(self.root, task)
        except UserError as error:
            self.fail(task, error)
            return None

    def fail(self, task: Task, error: UserError) -> None:
        self.failed[task.name] = str(error)
        self.print(f"{task.name} did not finish: {error}")

    def run(self, task: Task, data: Data, number: str) -> None:
        """Run or resume a task to its result; a UserError ends this task only."""
        self.introduce(task, data, number)
        try:
            trials = self.tune(task) if self.rates else {}
            lr = float(best_of(trials)) if trials else self.recipe.lr
            folder = self.out / task.name
            report, seconds = self.train(task, data, lr, folder)
        except UserError as error:
            self.fail(task, error)
            return
        about = (report["accuracy"], len(data.test), lr, seconds, trials, digest(data))
        self.results[task.name] = result = Result(*about)
        self.write()
        if not self.keep:  # a run's checkpoints and fine-tuned weights take 19 times the size of the model in all
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            for name in ("model.safetensors", "config.json"):
                (folder / name).unlink(missing_ok=True)
        self.print(f"{task.name}: {result.accuracy:.2%} of {result.images:,} test images, {duration(seconds)}")

    def introduce(self, task: Task, data: Data, number: str) -> None:
        images = f"{len(data.train):,} images to train on, {len(data.test):,} to test"
        self.print(f"{number} {task.name} ({task.about}): {task.classes} classes, {images}")
        if (len(data.train), len(data.test)) != (SIZES[BOTH], task.tests):
            usual = f"{SIZES[BOTH]:,} and {task.tests:,}"
            self.print(f"note: the benchmark has {usual}, so this is not comparable to published numbers")

    def tune(self, task: Task) -> Scores:
        """Train every learning rate on the 800 images and return its accuracy on the 200, by rate as text."""
        data = open_task(self.root, task, tuning=True)
        notes, images = self.out / task.name / "tuning.json", digest(data)
        found = json.loads(notes.read_text()) if notes.is_file() else {}
        trials: Scores = found["trials"] if found.get("data") == images else {}
        keys = {f"{lr:g}": lr for lr in self.rates}
        if found and found.get("data") != images:
            self.print(f"{task.name}: its images have changed, so all learning rates are tried again")

        def run(key: str, folder: Path) -> float:
            return self.train(task, data, keys[key], folder)[0]["accuracy"]

        def note() -> None:
            write_text(notes, json.dumps({"data": images, "trials": trials}) + "\n")
            key, score = list(trials.items())[-1]
            shown = "diverged" if score is None else f"{score:.2%} of {len(data.test)} images set aside"
            self.print(f"{task.name}: learning rate {key}: {shown}")

        folders = {key: notes.parent / f"lr-{key}-{images[:8]}" for key in keys}  # no trial goes on with other images
        try_each(folders, trials, run, note)
        return {key: trials[key] for key in keys}

    def train(self, task: Task, data: Data, lr: float, folder: Path) -> tuple[dict[str, float], float]:
        recipe = dataclasses.replace(self.task_recipe(task), lr=lr)
        try:
            # a broken image may have been replaced since the last attempt
            outcome = train(recipe, folder, resume=True, accept_data_changes=True, console=self.console, data=data)
        except Stopped as stop:
            message = str(stop).replace("continue with --resume", "the same command resumes from here")
            raise Stopped(stop.code - 128, f"{task.name}: {message}") from None
        finally:
            free_device()
        return outcome.report, outcome.seconds

    def task_recipe(self, task: Task) -> Recipe:
        augment = Augment(crop="resize" if task.crop else "none", flip=task.flip)
        data = str(self.root / task.name)
        recipe = dataclasses.replace(self.recipe, data=data, augment=augment, broken_limit=0.0)  # every image counts
        return override(recipe, self.settings)

    def print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    # ---- results.json

    def write(self) -> None:
        data = {
            "format": "vitlab/1",
            "weights": self.key,
            "recipe": to_json(self.recipe),
            "rates": self.rates,
            "means": means(self.results),
            "tasks": {name: dataclasses.asdict(result) for name, result in self.results.items()},
        }
        write_text(self.out / RESULTS, json.dumps(data, indent=1) + "\n")

    def resume(self) -> None:
        """Read the results in the folder; those of another model or recipe are a UserError."""
        path = self.out / RESULTS
        if not path.exists():
            return
        try:
            data = json.loads(path.read_text())
            stored = from_json(Recipe, data["recipe"])
            done = {name: Result(**result) for name, result in data["tasks"].items()}
            key, rates = data["weights"], tuple(data["rates"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}); remove it, or use another --out") from None
        other = difference(self.recipe, stored)
        if key != self.key:
            other = "other weights"
        elif rates != self.rates:
            other = f"other learning rates to tune ({', '.join(f'{r:g}' for r in rates) or 'none'})"
        if other is not None:
            raise UserError(f"the results in {path} were made with {other}; use another --out")
        self.results = done

    def check_data(self, tasks: Iterable[Task], *, accept: bool) -> None:
        """Raise UserError where the images of a finished task, if they are still there, are others by now; with
        `accept`, its result stands for these from now on."""
        for task in tasks:
            result = self.results.get(task.name)
            if result is None or not result.data or missing_lists(self.root, task):
                continue
            try:
                now = digest(open_task(self.root, task))
            except GoneError:  # and the result is not
                continue
            except UserError as error:
                self.print(f"{task.name}: its data could not be compared with that of its result: {error}")
                continue
            if result.data != now and not accept:
                fix = "use another --out, or keep the result with --accept-data-changes"
                raise UserError(f"the data of {task.name} has changed since its result in {self.out}; {fix}")
            if result.data != now:
                self.results[task.name] = dataclasses.replace(result, data=now)
                self.write()


def means(results: dict[str, Result]) -> dict[str, dict[str, float | int]]:
    """Compute the mean accuracy of each group and of all tasks, over those that are done, with their number."""
    groups = {group: [task for task in TASKS if task.group == group] for group in GROUPS} | {"all": list(TASKS)}
    summary = {}
    for name, tasks in groups.items():
        done = [results[task.name].accuracy for task in tasks if task.name in results]
        if done:
            summary[name] = {"mean": float(np.mean(done)), "done": len(done), "of": len(tasks)}
    return summary


# ---- running the study


def run_vtab(
    weights: str,
    root: Path,
    out: Path,
    tasks: tuple[Task, ...] = TASKS,
    *,
    steps: int = STEPS,
    settings: tuple[str, ...] = (),
    rates: tuple[float, ...] = (),
    keep: bool = False,
    accept: bool = False,
    console: Console | None = None,
) -> Study:
    """Fine-tune `weights` on every task whose data is in `root`; results go to `out`, task by task.

    Tasks whose data is missing are printed with its source. `rates` are learning rates to choose from for each task, on
    200 of its 1,000 images. Results of images that have changed since are refused, unless with `accept`.
    """
    if (found := out.resolve()).is_dir() and root.is_dir() and found.samefile(root):
        raise UserError(f"the results would be written among the data in {root}; name another folder with --out")
    model = load(weights)
    recipe = base_recipe(weights, model, steps, settings)
    key = model_key(model, "features", half=False)
    study = Study(out, root, recipe, settings, rates, key, keep, console or Console())
    study.resume()
    study.check_data(tasks, accept=accept)
    absent = {task: missing_lists(root, task, tuning=bool(rates)) for task in tasks if task.name not in study.results}
    for task, lists in absent.items():
        if lists:
            reason = f"has no {' and no '.join(f'{name}.txt' for name in lists)}"
            reason = reason if (root / task.name).is_dir() else "is missing"
            study.print(f"{task.name} is left out: {root / task.name} {reason}; its source: {task.origin}")
    todo = [task for task, lists in absent.items() if not lists]
    if not todo and not study.results:
        raise UserError(
            f"none of these tasks is in '{root}'; each needs a folder there with its images and lists, as the public "
            "VTAB-1k copies for PyTorch have it (--data names another folder)"
        )
    if done := [task.name for task in tasks if task.name in study.results]:
        study.print(f"{len(done)} of the {len(tasks)} tasks are done already: {', '.join(done)}")
    ready = {task: data for task in todo if (data := study.open(task)) is not None}
    if ready:
        study.write()  # from here on the folder is of this model and recipe
        print_estimate(study, model, list(ready.values()))
    for number, (task, data) in enumerate(ready.items(), 1):
        study.run(task, data, f"[{number}/{len(ready)}]")
    return study


def base_recipe(weights: str, model: Model, steps: int, settings: tuple[str, ...]) -> Recipe:
    """The paper's recipe for these weights and this length: its warm-up is at most a fifth of the run."""
    for pair in settings:
        if (key := pair.partition("=")[0]) in FIXED:
            how = "--steps" if key in LENGTHS else "--data and --tasks" if key == "data" else "the study"
            raise UserError(f"'{key}' cannot be set here: {how} sets it")
    if steps < 1:
        raise UserError(f"--steps must be at least 1, not {steps}")
    paper = find("vtab-finetune").recipe
    recipe = dataclasses.replace(
        paper,
        weights=weights,
        head="new",  # classes are numbers here, and each task's mean something else
        data="vtab",
        steps=steps,
        warmup=min(paper.warmup, steps // 5),
        evaluate_every=steps,  # once, at the end: the test set chooses nothing
        image_size=higher((1, 1), model),
        # the weights' normalization, and the complete image stretched to a square, so that tests crop nothing
        preprocess=dataclasses.replace(model.card.preprocess, fit="stretch", crop=CROP),
        validation=0.0,  # the study has its own 200 images to choose on, and trains on all 1,000 in the end
    )
    return override(recipe, settings)


def print_estimate(study: Study, model: Model, todo: list[Data]) -> None:
    """Print how long the tasks will take, estimated from the first."""
    recipe = study.recipe
    device = pick_device(recipe.device)
    model.resize(recipe.image_size)
    seconds = run_seconds(recipe, model, todo[0], device) * len(todo) * (1 + len(study.rates))
    what = "1 task" if len(todo) == 1 else f"{len(todo)} tasks"
    what += f" of {recipe.steps} steps, batch {recipe.batch}, {recipe.image_size[0]}x{recipe.image_size[1]} px"
    study.print(f"{what}: about {duration(seconds)} on this {machine(device)}")
