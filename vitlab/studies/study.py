"""What a study is: a question, rows of runs as data, numbers that are measured on them, one figure.

To write a study, write a function that returns its rows for one seed, a function that draws its table, and a `Study`
that names both; add it to the list in catalog.py. That is all:

    def rows(ask: Request, seed: int) -> Iterator[Row]:
        for rate in (0.0, 0.1):
            run = ask.pretrain(f"dropout-{rate:g}", seed, dropout=rate)
            numbers = ask.few_shots(run) | {"accuracy": Number(run, "accuracy")}
            yield Row(f"dropout-{rate:g}", {"dropout": f"{rate:g}"}, numbers, run)

    def figure(table: Table) -> Figure:
        return dots_figure(...)  # from vitlab/plots/studies.py

    STUDY = Study("dropout", "does dropout help?", "appendix B", rows, figure, paper="It helps on small data.")

A row names its numbers; each comes from a job. Jobs are what is run, claimed and stored, each in a folder of its own:

    Train      `vitlab train RECIPE key=value ...`; from the weights of another Train, it is fine-tuning
    FewShot    `vitlab fewshot RUN DATA`
    Measure    a function of the folders of other jobs' models, for what no verb prints

Jobs of the same name are the same job: rows that begin with the same pre-training name the same Train, and it is run
once. What a job does must follow from the request, the row and the seed alone, since each process makes its own rows.
`Request` (request.py) has the data, the settings of the command line and those of --quick, and makes the usual jobs.
"""

import json
import shlex
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from vitlab.errors import UserError
from vitlab.evaluation.extract import ExtractOptions
from vitlab.evaluation.features import FeatureSet
from vitlab.evaluation.fewshot import check_shots, few_shot
from vitlab.files import read_json, write_text
from vitlab.training.loop import train
from vitlab.training.recipe import Recipe, count_steps, override
from vitlab.training.recipes import check_ready, find, run_flops
from vitlab.training.setup import RECIPE, read_recipe
from vitlab.training.trust import is_trusted, remember_recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from vitlab.studies.request import Request
    from vitlab.studies.table import Table

JOBS, RUN = "jobs", "run"  # OUT/jobs/NAME/run is the run folder of a Train


@dataclass(frozen=True)
class Outcome:
    """What a job measured: named numbers, and what they are of."""

    numbers: dict[str, float]
    about: dict[str, float] = field(default_factory=dict)  # such as the number of images
    diverged: str = ""  # how, where a run did: there are no numbers then, and another attempt would give none


class Job(Protocol):
    """One thing that is run once, in the folder `job_folder(out, job)`."""

    @property
    def name(self) -> str:
        """Unique in the study, and the name of a folder."""

    @property
    def needs(self) -> "tuple[Train, ...]":
        """The runs whose models it uses."""

    def command(self, out: Path) -> str:
        """What to type to repeat it by hand."""

    def run(self, out: Path, console: Console) -> Outcome:
        """Do it, or continue it; raises UserError where it fails."""

    def clean(self, out: Path) -> None:
        """Remove what a finished job needs no more."""


def job_folder(out: Path, job: Job) -> Path:
    return out / JOBS / job.name


@dataclass(frozen=True)
class Train:
    """A training run by a recipe with other settings, from fresh weights or from those of another run."""

    name: str
    recipe: str
    pairs: tuple[str, ...]
    start: "Train | None" = None

    @property
    def needs(self) -> "tuple[Train, ...]":
        return () if self.start is None else (self.start,)

    def folder(self, out: Path) -> Path:
        """The run's folder, from which its model can be loaded."""
        return job_folder(out, self) / RUN

    def words(self, out: Path) -> tuple[str, ...]:
        return self.pairs if self.start is None else (*self.pairs, f"weights={self.start.folder(out)}")

    def settings(self) -> Recipe:
        """The recipe of the run, without the place of its weights; its model is that of the weights."""
        recipe = override(find(self.recipe).recipe, self.pairs)
        if self.start is None:
            return recipe
        first = self.start.settings()
        return replace(recipe, model=first.model, model_settings=first.model_settings | recipe.model_settings)

    @property
    def flops(self) -> float:
        """Operations of the run, by closed forms."""
        return run_flops(self.settings())

    @property
    def steps(self) -> int:
        return count_steps(self.settings(), 0)

    def command(self, out: Path) -> str:
        return shlex.join(["vitlab", "train", self.recipe, *self.words(out), "--out", str(self.folder(out))])

    def run(self, out: Path, console: Console) -> Outcome:
        recipe = check_ready(self.recipe, override(find(self.recipe).recipe, self.words(out)))
        if self.start is not None:
            follow_weights(self.folder(out), self.start.folder(out))
        done = train(recipe, self.folder(out), resume=True, console=console)
        return Outcome(done.report, {"images": len(done.data.train), "tested": len(done.data.test)})

    def clean(self, out: Path) -> None:
        shutil.rmtree(self.folder(out) / "checkpoints", ignore_errors=True)  # the model is beside them


def follow_weights(run: Path, weights: Path) -> None:
    """Let an interrupted run name its weights where they are now: a study's folder may have moved, or be spelled in
    another way, and the run of the same name in it is the same run."""
    stored = read_recipe(run)
    if stored is None or stored.weights is None or stored.weights == str(weights):
        return
    if Path(stored.weights).parts[-3:] == weights.parts[-3:]:
        path = run / RECIPE
        mine, about = is_trusted(path), read_json(path)
        about["recipe"]["weights"] = str(weights)
        write_text(path, json.dumps(about, indent=1) + "\n")
        if mine:
            remember_recipe(path)


@dataclass(frozen=True)
class FewShot:
    """Few-shot accuracy of a run's model on a data set: the mean over draws of the images to learn from."""

    name: str
    of: Train
    data: str
    shots: int = 5
    draws: int = 3
    device: str = "auto"
    workers: int | None = None

    @property
    def needs(self) -> tuple[Train, ...]:
        return (self.of,)

    def command(self, out: Path) -> str:
        words = ["vitlab", "fewshot", str(self.of.folder(out)), self.data, "--shots", f"{self.shots}"]
        words += ["--seeds", f"{self.draws}"] if self.draws != 3 else []
        return shlex.join(words + (["--device", self.device] if self.device != "auto" else []))

    def run(self, out: Path, console: Console) -> Outcome:
        keep = job_folder(out, self) / "features"
        options: ExtractOptions = {"device": self.device, "workers": self.workers}
        features = FeatureSet(str(self.of.folder(out)), self.data, keep=keep, **options)
        data = features.data
        check_shots(data.train.labels, data.test.labels, (self.shots,), data.classes)
        train_set, test_set = features.extract(data.train, "train"), features.extract(data.test, "test")
        (found,) = few_shot(train_set, test_set, shots=(self.shots,), seeds=self.draws, classes=data.classes)
        return Outcome({"accuracy": found.mean, "std": found.std or 0.0}, {"tested": found.images})

    def clean(self, out: Path) -> None:
        shutil.rmtree(job_folder(out, self) / "features", ignore_errors=True)


@dataclass(frozen=True)
class Measure:
    """A function of runs' folders, for what no verb prints: it returns numbers, and may leave files in its own folder.

    `repeat` are the words of the command that a reader would type, before those of the runs' folders. What is `timed`
    needs the machine for itself: no other process of the command works meanwhile.
    """

    name: str
    of: tuple[Train, ...]
    function: "Callable[[tuple[Path, ...], Path], Mapping[str, float]]"  # (folders of runs, own folder) -> numbers
    repeat: tuple[str, ...]
    timed: bool = False

    @property
    def needs(self) -> tuple[Train, ...]:
        return self.of

    def command(self, out: Path) -> str:
        return shlex.join([*self.repeat, *(str(run.folder(out)) for run in self.of)])

    def run(self, out: Path, console: Console) -> Outcome:
        folder = job_folder(out, self)
        folder.mkdir(parents=True, exist_ok=True)
        return Outcome(dict(self.function(tuple(run.folder(out) for run in self.of), folder)))

    def clean(self, out: Path) -> None:
        pass


def python(module: str, name: str, function: str) -> tuple[str, ...]:
    """The `repeat` of a `Measure` by what only Python calls: `function` of runs' folders and this one."""
    runs = "tuple(map(Path, sys.argv[1:]))"
    code = f"import sys; from pathlib import Path; from {module} import {name}; print({function}({runs}, Path()))"
    return "python", "-c", code


# ---- rows


@dataclass(frozen=True)
class Number:
    """One number of a job's outcome; `unit` "%" is a share, shown in per cent."""

    job: Job
    key: str
    unit: str = "%"


@dataclass(frozen=True)
class Row:
    """A line of the table, for one seed: what differs in it, and its numbers by heading.

    A heading with several numbers shows their mean. `trained` is the run whose images, steps and operations the table
    shows. `paper` has the paper's own numbers by heading, shares as shares.
    """

    name: str
    about: dict[str, str]
    numbers: dict[str, Number | tuple[Number, ...]]
    trained: Train | None = None
    paper: dict[str, float] = field(default_factory=dict)
    others: tuple[Job, ...] = ()  # jobs that the figure uses, without a number in the table

    @property
    def jobs(self) -> list[Job]:
        """All jobs of the row and the runs they need, those first."""
        return in_order([number.job for each in self.numbers.values() for number in several(each)] + [*self.others])


@dataclass(frozen=True)
class Study:
    """An experiment of the paper: its question, its rows, its figure."""

    name: str
    question: str
    place: str  # in the paper
    rows: "Callable[[Request, int], Iterable[Row]]"  # by request and seed
    figure: "Callable[[Table], Figure]"
    paper: str = ""  # what the paper found, in a few words
    seeds: int = 3
    note: str = ""  # how this differs from the paper's experiment
    published: tuple[tuple[str, ...], ...] = ()  # the paper's table, headings first, where its rows are not ours


def several(numbers: Number | tuple[Number, ...]) -> tuple[Number, ...]:
    return numbers if isinstance(numbers, tuple) else (numbers,)


def in_order(jobs: Iterable[Job]) -> list[Job]:
    """Jobs with the runs they need before them, each name once; two jobs of one name are a bug of the study."""
    found: dict[str, Job] = {}
    for job in with_needs(jobs):
        if found.setdefault(job.name, job) != job:
            raise UserError(f"the study has two different jobs called '{job.name}'; give them names of their own")
    return list(found.values())


def with_needs(jobs: Iterable[Job]) -> Iterator[Job]:
    for job in jobs:
        yield from with_needs(job.needs)
        yield job
