"""The page of a report, rendered from page.html and sections.html; Jinja2 escapes every value."""

import functools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from vitlab import __version__
from vitlab.cost import Cost
from vitlab.data.review_file import NAME as REVIEW
from vitlab.data.source import Data
from vitlab.evaluation.multi_result import MultiEvaluation
from vitlab.evaluation.result import Evaluation
from vitlab.models.config import ModelConfig, ResNetConfig
from vitlab.plots.scores import COUNTED
from vitlab.report import describe
from vitlab.report.history import History
from vitlab.report.images import Mistake, PageFigure
from vitlab.report.review import LookGroup
from vitlab.training.recipe import Recipe, flat
from vitlab.training.stages import Stages


@dataclass(frozen=True)
class Subject:
    """What the report is about; `data` is what the model was tested on, `size` the bytes of its file."""

    run: str
    history: History
    config: ModelConfig
    data: Data
    cost: Cost
    size: int
    stages: Stages | None = None  # of a run in stages

    @property
    def start(self) -> str | None:
        """The weights that training started from, if any."""
        return self.history.recipe.weights if self.stages is None else self.stages.weights

    @property
    def is_trained(self) -> bool:
        """Whether the model is that of the recipe, and not of a stage before it."""
        return self.stages is None or self.stages.kept

    @property
    def run_flops(self) -> int:
        """Operations of all training steps; a frozen body has no backward pass."""
        recipe = self.history.recipe
        flops = self.cost.forward_flops if recipe.freeze == "body" else self.cost.train_flops
        return flops * self.steps * recipe.batch

    @property
    def steps(self) -> int:
        """Those that were done: a run may end early."""
        steps = self.history.steps
        return int(steps[-1]) if len(steps) else self.history.recipe.steps or 0


@dataclass(frozen=True)
class Tested:
    """The scores on some images, how long the test took, and which split they are."""

    scores: Evaluation | MultiEvaluation
    seconds: float
    split: str = "test"

    @property
    def is_multi_label(self) -> bool:
        return isinstance(self.scores, MultiEvaluation)


def render(
    subject: Subject,
    tested: Tested | None,
    mistakes: list[Mistake],
    figures: dict[str, PageFigure],
    groups: Sequence[LookGroup] = (),
) -> str:
    """The page as HTML; characters that UTF-8 cannot encode, which file names may have, become question marks."""
    page = templates().get_template("page.html")
    title = Path(subject.run).name or subject.run
    text = page.render(title=title, subject=subject, tested=tested, mistakes=mistakes, figures=figures, groups=groups)
    return text.encode("utf-8", "replace").decode()


@functools.cache
def templates() -> Environment:
    """The templates of this folder, with the functions they use."""
    loader = PackageLoader("vitlab.report", ".")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    functions = (confidence_gap, count_right, next_steps, review_command, setting_rows)
    pages.globals |= vars(describe) | {function.__name__: function for function in functions}
    pages.globals |= {"version": __version__, "COUNTED": COUNTED}
    return pages


# ---- functions for the templates


def count_right(scores: Evaluation) -> int:
    return int((scores.guesses == scores.labels).sum())


def confidence_gap(scores: Evaluation) -> str:
    """How the mean confidence compares with the accuracy."""
    gap = float(scores.confidence.mean()) - scores.top1.value
    if abs(gap) < 0.01:
        return "well calibrated on average"
    return f"{'slightly' if abs(gap) < 0.05 else 'far'} {'overconfident' if gap > 0 else 'underconfident'}"


def setting_rows(recipe: Recipe) -> list[tuple[str, str]]:
    """(name, value) of every setting that has a value."""
    settings = flat(recipe)
    if recipe.weights is not None:
        del settings["model"]  # the weights decide
    settings |= {f"preprocess: {key}": value for key, value in (settings.pop("preprocess") or {}).items()}
    return [(key, value_text(value)) for key, value in settings.items() if value is not None]


def value_text(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(value_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def review_command(subject: Subject) -> str:
    """How to train again with what was decided about the images that are worth a look."""
    data, review = subject.history.recipe.data, Path(subject.run) / REVIEW
    return f"vitlab finetune {shlex.quote(data)} --apply {shlex.quote(str(review))} --out runs/reviewed"


def next_steps(subject: Subject) -> list[tuple[str, str]]:
    """(what, command) of what to do with the model."""
    run, classes = shlex.quote(subject.run), subject.config.classes > 0
    rows = [
        (not classes, "fine-tune it on your classes", f"vitlab finetune photos/ --weights {run} --out runs/mine"),
        (classes, "predict images", f"vitlab predict {run} photo.jpg"),
        (classes, "serve it on a web page", f"vitlab serve {run}"),
        (classes, "export it", f"vitlab export {run} model.onnx"),
        (not isinstance(subject.config, ResNetConfig), "look inside", f"vitlab inspect {run} photo.jpg"),
        (classes, "test it on other images", f"vitlab evaluate {run} other-photos/ --split all"),
    ]
    return [(what, command) for shown, what, command in rows if shown]
