"""`report.html`: the run is read, its model tested once more image by image, and all of it set on one page.

The page asks nobody for anything: pictures are inside it, and it needs no script.
"""

import contextlib
import os
import secrets
import shlex
import time
from importlib.resources import files
from pathlib import Path
from string import Template

from vitlab import __version__
from vitlab.cost import cost
from vitlab.data.images import BrokenImage
from vitlab.data.open import open_data
from vitlab.data.source import Data
from vitlab.device import memory_errors
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import evaluate
from vitlab.evaluation.result import Evaluation
from vitlab.models.variants import Model, build
from vitlab.plots import curves, scores, style
from vitlab.plots.scores import NAMED
from vitlab.report import sections
from vitlab.report.history import History, read_history
from vitlab.report.images import MOST, Drawn, Mistake, drawn, worst_mistakes
from vitlab.report.sections import Subject, Tested
from vitlab.terminal import progress
from vitlab.training.recipe import Recipe
from vitlab.training.setup import RECIPE
from vitlab.training.trust import vet_data
from vitlab.weights import load
from vitlab.weights.formats.vitlab import WEIGHTS

NAME = "report.html"


def write_report(run: str | Path, data: str | Data | None = None, *, device: str = "auto") -> Path:
    """Write RUN/report.html, complete or not at all, and return its path.

    `data` is what the model is tested on, by default the test split of the set it was trained on, if it is a built-in
    one or this user started the run. A model without a head, as masked patch prediction leaves it, has nothing to
    test: its report is the shorter for it.
    """
    folder = Path(run).expanduser()
    with style.drawing():  # no work before it is known that figures can be drawn
        pass
    history = read_history(folder)
    if data is None:
        vet_data(history.recipe.data, folder / RECIPE, f"vitlab report {shlex.quote(str(run))} ")
    with memory_errors(f"making the report of {run}", "close other programs, or use --device cpu"):
        return make(str(run), folder, history, data, device)


def make(run: str, folder: Path, history: History, data: str | Data | None, device: str) -> Path:
    model = load(folder)
    opened = data if isinstance(data, Data) else open_set(history.recipe, data)
    size = (folder / WEIGHTS).stat().st_size
    subject = Subject(run, history, model.config, opened, cost(lambda: build(model.config)), size)
    tested = test(model, opened, device) if model.config.classes else None
    with progress("report", 5 + MOST) as done:
        mistakes = read_mistakes(tested.found, model, opened, device, done) if tested else []
        figures = draw(history, tested.found if tested else None)
        done(5)
    page = compose(subject, tested, mistakes, figures)
    write(folder / NAME, page)
    return folder / NAME


def open_set(recipe: Recipe, spec: str | None) -> Data:
    """The set named, split as the run split its own, so that it is tested on nothing it was trained on."""
    try:
        return open_data(
            spec or recipe.data,
            seed=recipe.seed,
            subset=recipe.subset,
            per_class=recipe.per_class,
            holdout=recipe.holdout,
        )
    except UserError as error:
        if spec is not None:
            raise
        raise UserError(f"{error}; if the run's data has moved, name it: vitlab report RUN DATA") from None


def test(model: Model, data: Data, device: str) -> Tested:
    began = time.monotonic()
    found = evaluate(model, data.test, device=device)
    return Tested(found, time.monotonic() - began)


def read_mistakes(found: Evaluation, model: Model, data: Data, device: str, done: sections.Heard) -> list[Mistake]:
    try:
        return worst_mistakes(found, model, data.test, device, done)
    except BrokenImage as broken:  # it could be read a moment ago
        raise UserError(f"'{broken.name}' cannot be read as an image any more: {broken.why}") from None


def draw(history: History, found: Evaluation | None) -> dict[str, Drawn]:
    """The figures that there is something to draw of."""
    figures: dict[str, Drawn] = {}
    if len(history.steps) > 1:
        figures["loss"] = drawn(curves.loss_figure(history.steps, history.loss))
        figures["rate"] = drawn(curves.rate_figure(history.steps, history.rate))
    if len(history.test_steps) > 1:
        tests = history.test_steps, history.accuracy, history.averaged
        figures["accuracy"] = drawn(curves.accuracy_figure(*tests))
    if found is not None:
        figures["calibration"] = drawn(scores.calibration_figure(**vars(found.calibration)))
        if len(found.names) <= NAMED:
            figures["confusion"] = drawn(scores.confusion_figure(found.matrix, found.names))
    return figures


def compose(subject: Subject, tested: Tested | None, mistakes: list[Mistake], figures: dict[str, Drawn]) -> str:
    parts = [sections.top(subject, tested), sections.made(subject), sections.course(subject, figures)]
    if tested is not None:
        parts += [
            sections.confusions(tested.found, figures.get("confusion")),
            sections.mistakes(tested.found, mistakes),
            sections.classes(tested.found),
            sections.confidence(tested.found, figures["calibration"]),
        ]
    parts += [sections.cost(subject, tested), sections.next_steps(subject)]
    template = Template((files("vitlab.report") / "template.html").read_text())
    title = sections.safe(Path(subject.run).name or subject.run)
    return template.substitute(title=title, body="\n".join(parts), version=__version__)


def write(path: Path, page: str) -> None:
    """The file, complete or not at all; an older one stays until the new one is there."""
    new = path.with_name(f".{secrets.token_hex(4)}.{path.name}")
    try:
        new.write_text(page, encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):  # after the rename it is gone, and a read-only disk never had it
            new.unlink()
