"""The page of a report, rendered from page.html and sections.html with page.js; Jinja2 escapes every value."""

import base64
import functools
import hashlib
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from vitlab import __version__
from vitlab.evaluation.result import Evaluation
from vitlab.models.config import ResNetConfig
from vitlab.report import describe
from vitlab.report.collect import review_command
from vitlab.report.gallery import Gallery
from vitlab.report.images import Mistake, PageFigure
from vitlab.report.matrix import LEVELS, frequent_mistakes, make_matrix
from vitlab.report.review import LookGroup
from vitlab.report.subject import Subject, Tested
from vitlab.report.verdict import Verdict
from vitlab.training.recipe import Recipe, flat

SCRIPT = Path(__file__).with_name("page.js")


def render(
    subject: Subject,
    tested: Tested | None,
    verdict: Verdict | None,
    mistakes: list[Mistake],
    gallery: Gallery | None,
    figures: dict[str, PageFigure],
    groups: Sequence[LookGroup] = (),
    *,
    drawn: bool = True,
) -> str:
    """The page as HTML; characters that UTF-8 cannot encode, which file names may have, become question marks."""
    page, script = templates().get_template("page.html"), SCRIPT.read_text("utf-8")
    text = page.render(
        title=Path(subject.run).name or subject.run,
        script=script,
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),  # no other script may run
        subject=subject,
        tested=tested,
        verdict=verdict,
        mistakes=mistakes,
        gallery=gallery,
        figures=figures,
        groups=groups,
        drawn=drawn,
    )
    return text.encode("utf-8", "replace").decode()


@functools.cache
def templates() -> Environment:
    """The templates of this folder, with the functions they use."""
    loader = PackageLoader("vitlab.report", ".")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    functions: tuple[Callable[..., object], ...] = (
        class_options,
        confidence_gap,
        count_right,
        evaluate_command,
        draw_command,
        file_name,
        frequent_mistakes,
    )
    functions += (make_matrix, next_steps, review_command, setting_rows)
    pages.globals |= vars(describe) | {function.__name__: function for function in functions}
    pages.globals |= {"version": __version__, "LEVELS": LEVELS}
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


def class_options(scores: Evaluation, numbers: Iterable[int]) -> list[tuple[int, str]]:
    """(number, name) of classes, each once, by name."""
    return sorted(((number, scores.names[number]) for number in set(numbers)), key=lambda pair: (pair[1], pair[0]))


def file_name(path: str) -> str:
    """The last part of a path."""
    return path.replace("\\", "/").rpartition("/")[2]


def evaluate_command(subject: Subject) -> str:
    """How to list every answer."""
    words = ["vitlab", "evaluate", subject.run, subject.history.recipe.data, "--out", "scores"]
    return shlex.join(words)


def draw_command(subject: Subject) -> str:
    """How to write the report with its figures."""
    return shlex.join(["vitlab", "report", subject.run])


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
