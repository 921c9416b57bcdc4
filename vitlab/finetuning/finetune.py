"""Fine-tuning from the command line or from Python: which way a run goes, and what is printed on it."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitlab.data.python_images import is_path
from vitlab.device import memory_errors
from vitlab.errors import UserError
from vitlab.evaluation.result import Evaluation
from vitlab.finetuning.plan import Plan, make_plan
from vitlab.finetuning.run import run_stages
from vitlab.finetuning.run_folder import Run
from vitlab.report.runs import train_and_report, train_run, write_run_report
from vitlab.settings import to_pairs
from vitlab.terminal import Terminal
from vitlab.training.auto import finetune_recipe
from vitlab.training.parallel import is_first, is_restarted, process_group
from vitlab.training.recipe import Recipe
from vitlab.training.setup import check_new_folder, recipe_to_resume
from vitlab.training.stages import is_staged

FIX = "give smaller weights with --weights, or set a smaller image_size"


def finetune(
    data: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    minutes: float | None = None,
    out: str | os.PathLike[str] = "run",
    *,
    paper: bool = False,
    resume: bool = False,
    accept_data_changes: bool = False,
    **settings: Any,
) -> Run:
    """Make a classifier of your classes: a head on frozen features first, then fine-tuning in the time that is left.

    Args:
        data: a folder with one folder of photos per class, or any other data set: a CSV or parquet file, tar shards, a
            hub id or a built-in set such as "digits".
        weights: the weights to start from: a hub id, a file or a run's folder; by default public ones that fit the
            machine, from the hub, or else "box", the small model in the package. "none" trains from scratch.
        minutes: time for everything, 10 by default; with 1, a CPU fits a head alone.
        out: the run's folder, a new one.
        paper: one stage by the paper's recipe, or what of it fits.
        resume: continue the run in `out` as if it had not been interrupted.
        accept_data_changes: continue although files of the data changed.
        settings: of the recipe, such as `lr=0.003`, `epochs=5` or `device="cpu"`; `vitlab recipes --keys` lists them.
            `review="run/review.csv"` applies decisions on labels.

    Returns:
        The run, with its `model`, `report`, `scores` and `accuracy` on test images, and `predict`.

    Raises:
        UserError: a wrong setting, data or weights that cannot be used, or an `out` that holds a run already.
        Stopped: after an interruption; the same call with `resume=True` continues.

    >>> run = vitlab.finetune("photos/", minutes=5, out="runs/new", lr=0.003)  # doctest: +SKIP
    >>> run.predict("cat.jpg").label  # doctest: +SKIP
    'cat'
    """
    if weights is not None and not is_path(weights):
        raise UserError(f"weights are a path or a hub id, not a {type(weights).__name__}; vitlab.save writes a model")
    request = Request(
        os.fspath(data),
        Path(out),
        None if weights is None else os.fspath(weights),
        minutes,
        tuple(to_pairs(settings)),
        paper=paper,
        resume=resume,
        accept=accept_data_changes,
    )
    run_request(request, Terminal())
    return Run(request.out)


@dataclass(frozen=True)
class Request:
    """What is asked for; settings are `key=value`.

    `began` is when a program that starts for it alone began to, on the clock of time.monotonic.
    """

    data: str
    out: Path
    weights: str | None
    minutes: float | None
    settings: tuple[str, ...]
    paper: bool = False
    resume: bool = False
    accept: bool = False
    began: float | None = None

    @property
    def device(self) -> str:
        found = (pair.removeprefix("device=") for pair in reversed(self.settings) if pair.startswith("device="))
        return next(found, "auto")


def run_request(request: Request, console: Terminal) -> None:
    """Fine-tune into the folder of the request, in stages or in one, and print how it goes."""
    r, pairs, resume = request, list(request.settings), request.resume or is_restarted()
    given = [f"data={r.data}", *([f"weights={r.weights}"] if r.weights else []), *pairs]
    check_new_folder(r.out, resume=resume)
    if any(pair.partition("=")[0] == "minutes" for pair in pairs):
        raise UserError("the time of fine-tuning is an option, not a setting; write --minutes 10")
    if resume and not is_staged(r.out) and (stored := recipe_to_resume(r.out, given)) is not None:
        train_and_report(stored, r.out, resume, r.accept, console)
        return
    with memory_errors("looking at the data and the model", FIX):
        plan = None if r.paper else make_plan(r.data, r.weights, pairs, r.minutes, r.began)
    if plan is None:
        finetune_in_one(r, resume, console)
    else:
        finetune_in_stages(plan, r, resume, console)


def finetune_in_stages(plan: Plan, request: Request, resume: bool, console: Terminal) -> None:
    if is_first():
        show(plan.lines, plan.warnings, console)
    done = run_stages(plan, request.out, resume=resume, accept=request.accept, console=console)
    if done.report is not None and isinstance(scores := done.report.scores, Evaluation):
        images, out = len(scores.labels), request.out
        console.print(
            f"test: accuracy {scores.top1.value:.2%} of {images} images; the model is in {out}", soft_wrap=True
        )
        console.print(f"report: {done.report.path}", soft_wrap=True)


def finetune_in_one(request: Request, resume: bool, console: Terminal) -> None:
    """Fine-tuning without a first stage: several labels per image, no weights, or the paper's recipe."""
    with process_group(request.device) as cluster, memory_errors("looking at the data and the model", FIX):
        recipe = cluster.agree(lambda: choose_recipe(request, console))
        result = train_run(recipe, request.out, resume, request.accept, console)
    write_run_report(result, recipe.device, console)


def choose_recipe(request: Request, console: Terminal) -> Recipe:
    """A recipe for these images and this machine; the reasons for its settings are printed."""
    advice = finetune_recipe(request.data, request.weights, list(request.settings))
    show(advice.lines, advice.warnings, console)
    return advice.recipe


def show(lines: tuple[str, ...], warnings: tuple[str, ...], console: Terminal) -> None:
    for line in lines:
        console.print(line, soft_wrap=True)
    for line in warnings:
        console.remark("warning", line)
