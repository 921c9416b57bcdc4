"""`report.html`: read a run, test its model once more image by image, and write the result as one page.

The page loads nothing from elsewhere: images and its script are part of it.
"""

import contextlib
import shlex
import time
from dataclasses import dataclass, replace
from pathlib import Path

from vitlab.cost import forward_flops
from vitlab.data.images import BrokenImage
from vitlab.data.review_file import NAME as REVIEW
from vitlab.data.review_file import Finding, read_review
from vitlab.data.samples import write_samples
from vitlab.data.source import Data, ImageSource
from vitlab.device import memory_errors
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import evaluate, evaluate_sets
from vitlab.evaluation.multi_result import MultiEvaluation
from vitlab.evaluation.result import Evaluation
from vitlab.files import write_text
from vitlab.models.variants import Model
from vitlab.plots import curves, scores, style
from vitlab.report.collect import collect, commands_for
from vitlab.report.gallery import WRONG, make_gallery
from vitlab.report.history import History, read_history
from vitlab.report.images import MOST, PageFigure, embed_figure, worst_mistakes
from vitlab.report.page import render
from vitlab.report.review import worth_a_look
from vitlab.report.subject import Subject, Tested
from vitlab.report.verdict import judge
from vitlab.terminal import progress, warn
from vitlab.training.recipe import Recipe
from vitlab.training.seen import unseen
from vitlab.training.setup import RECIPE, open_recipe_data
from vitlab.training.stages import read_stages
from vitlab.training.trust import check_trusted_data, check_trusted_review
from vitlab.weights import load
from vitlab.weights.formats.vitlab import WEIGHTS

NAME, SCORES = "report.html", "scores.json"
SCORES_LIMIT = 100_000_000  # bytes: of 20,000 classes and every pair that was confused


@dataclass(frozen=True)
class Report:
    """A report's file, and the scores in it; None for a model without a head."""

    path: Path
    scores: Evaluation | MultiEvaluation | None


def write_report(
    run: str | Path,
    data: str | Data | None = None,
    *,
    split: str = "test",
    device: str = "auto",
    keep: Path | None = None,
    drawn: bool = True,
) -> Report:
    """Write RUN/report.html, complete or not at all, its scores as RUN/scores.json, and samples.json, a few images.

    `data` is what the model is tested on, by default the test split of the set it was trained on, if it is a built-in
    one or this user started the run. A model without a head, as from masked patch prediction, is not tested, and its
    report is shorter. `split` names the images that `data.test` holds. `keep` is a folder of features that are
    computed already. Without `drawn`, figures and where the model looked, which cost the most time, are left out, and
    the page has a line on it. Raises UserError if the run is not finished, or its data or the report cannot be opened.
    """
    folder = Path(run).expanduser()
    if drawn:
        with style.drawing():  # fail early where matplotlib is missing
            pass
    history = read_history(folder)
    if data is None:
        check_trusted_data(history.recipe.data, folder / RECIPE, f"vitlab report {shlex.quote(str(run))} ")
        if history.recipe.review is not None:
            check_trusted_review(history.recipe.review, folder / RECIPE)
    with memory_errors(f"making the report of {run}", "close other programs, or use --device cpu"):
        page, scores = make_page(str(run), folder, history, data, split, device, keep, drawn)
    write_text(folder / NAME, page)
    if scores is not None:
        scores.write_json(folder / SCORES, {"split": split})
    return Report(folder / NAME, scores)


def make_page(
    run: str,
    folder: Path,
    history: History,
    data: str | Data | None,
    split: str,
    device: str,
    keep: Path | None,
    drawn: bool,
) -> tuple[str, Evaluation | MultiEvaluation | None]:
    model = load(folder)
    opened = data if isinstance(data, Data) else unseen(folder, open_run_data(history.recipe, data))
    numbers = sum(p.numel() for p in model.parameters()), forward_flops(model.config), (folder / WEIGHTS).stat().st_size
    subject = Subject(run, history, model.config, opened, *numbers, read_stages(folder))
    start = time.monotonic()
    scores = score_model(model, opened.test, device, keep) if model.config.classes else None
    tested = Tested(scores, time.monotonic() - start, split) if scores else None
    single = scores if isinstance(scores, Evaluation) else None
    wrong = int((single.guesses != single.labels).sum()) if single else 0
    with progress("report", 5 + min(wrong, MOST) + min(wrong, WRONG)) as done:
        try:
            mistakes = worst_mistakes(single, model, opened.test, device, done, attention=drawn) if single else []
        except BrokenImage as broken:  # it could be read a moment ago
            raise UserError(f"'{broken.name}' cannot be read as an image any more: {broken.why}") from None
        gallery = make_gallery(single, opened.test, done) if single else None
        figures = draw_figures(history, single) if drawn else {}
        done(5)
    with contextlib.suppress(UserError):  # where they cannot be written, neither can the report, which comes next
        write_samples(folder, opened.test)  # for the page of `vitlab serve`
    findings = find_review(folder)
    verdict = None
    if tested:
        own = not isinstance(data, str)
        verdict = judge(collect(subject, tested, findings, own, model.card.unknown), commands_for(subject))
    groups = worth_a_look(findings, opened)
    return render(subject, tested, verdict, mistakes, gallery, figures, groups, drawn=drawn), scores


def find_review(folder: Path) -> list[Finding]:
    """The run's review.csv; a warning where it cannot be read, as a spreadsheet may have saved it in its own way."""
    try:
        return read_review(folder / REVIEW) if (folder / REVIEW).exists() else []
    except UserError as error:
        warn(f"{error}; the report leaves it out")
        return []


def score_model(
    model: Model, source: ImageSource, device: str, keep: Path | None = None
) -> Evaluation | MultiEvaluation:
    """Scores on the images that can be read, however few: a finished run has a report."""
    if model.card.thresholds is not None:
        return evaluate_sets(model, source, device=device, broken_limit=1)
    keep = keep if model.card.unknown is not None else None  # other models are scored by logits
    return evaluate(model, source, device=device, keep=keep, broken_limit=1)


def open_run_data(recipe: Recipe, spec: str | None) -> Data:
    """The named set, or the run's own, split as the run split it, so that no training image is tested on."""
    try:
        return open_recipe_data(recipe if spec is None else replace(recipe, data=spec, review=None))
    except UserError as error:
        if spec is not None:
            raise
        raise UserError(f"{error}; if the run's data has moved, name it: vitlab report RUN DATA") from None


def draw_figures(history: History, tested: Evaluation | None) -> dict[str, PageFigure]:
    """The figures for which there is data; those of scores for a model of one class per image."""
    figures: dict[str, PageFigure] = {}
    if len(history.steps) > 1:
        figures["loss"] = embed_figure(curves.loss_figure(history.steps, history.loss))
        figures["rate"] = embed_figure(curves.rate_figure(history.steps, history.rate))
    if len(history.evaluated) > 1:
        lines = history.evaluated, history.accuracy, history.averaged
        title = f"{history.split} {'mAP' if history.metric == 'map' else 'accuracy'}"
        figures["accuracy"] = embed_figure(curves.accuracy_figure(title, *lines))
    if tested is not None:
        figures["calibration"] = embed_figure(scores.calibration_figure(**vars(tested.calibration)))
    return figures
