"""Measuring a classifier: its scores on a set, and how it learns the 19 tasks of VTAB."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vitlab.cli.app import app, console
from vitlab.errors import UserError
from vitlab.terminal import printable

if TYPE_CHECKING:
    from vitlab.evaluation.result import Evaluation, RealScore
    from vitlab.evaluation.scores import Rate
    from vitlab.studies.vtab import Study

SHOWN = 10  # classes and pairs of classes in the terminal; files have all


# ---- one set


@app.command(
    epilog="Examples: [bold]vitlab evaluate runs/digits digits[/bold], "
    "[bold]vitlab evaluate runs/pets photos/ --split all --out scores[/bold], "
    "[bold]vitlab evaluate vit.safetensors imagenet:/data/imagenet --real real.json[/bold]",
)
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run folder, a file of weights or a hub id.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder of class folders, or any other set of images.")],
    split: Annotated[str, typer.Option(help="test, validation, train; all: a set that has no splits, whole.")] = "test",
    real: Annotated[Path | None, typer.Option(help="ImageNet's ReaL labels, real.json: score by these too.")] = None,
    labels: Annotated[
        Path | None, typer.Option(help="Names of the model's classes, one a line, in its order, instead of its own.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A folder for tables, figures and all predictions.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file for all scores, as JSON.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Where class scores stay, to go on after a stop.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Images at a time; by default what suits the device.")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that read images; by default what suits the machine.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Test a model: top-1 and top-5, classes worst first, what is taken for what, and whether its confidence is earned.

    Every image counts once; a broken one is an error. Classes are matched by name. In brackets: 95 % intervals.
    """
    from vitlab.cli.representation import check_writable, stopping
    from vitlab.evaluation.classes import read_names
    from vitlab.evaluation.evaluate import evaluate, open_split
    from vitlab.evaluation.real import read_real
    from vitlab.weights import load

    check_writable(json)
    model = load(run)
    names = None if labels is None else read_names(labels, model.config.classes)
    lists = None if real is None else read_real(real)
    holdout, trained = training_of(run, data)
    source, note = open_split(data, split, holdout)
    console.print(f"{len(source):,} images of {data}, {split}: {note}", soft_wrap=True)
    if trained and split in ("train", "all"):
        console.remark("note", "the model was trained on most of these images")
    with stopping(keep):
        found = evaluate(
            model, source, labels=names, real=lists, batch=batch, workers=workers, device=device, keep=keep
        )
    show(found)
    about = {"model": run, "data": data, "split": split, "note": note}
    if json is not None:
        found.write_json(json, about)
        console.print(f"scores: {json}", soft_wrap=True)
    if out is not None:
        found.write_results(out, about)
        console.print(f"tables, figures and predictions: {out}", soft_wrap=True)


def training_of(run: str, data: str) -> tuple[float, bool]:
    """The share that a run held out of this very set, to test it on no image it was trained on; and whether it has."""
    from vitlab.training.recipe import Recipe
    from vitlab.training.setup import stored_recipe

    recipe = stored_recipe(Path(run).expanduser())
    trained = recipe is not None and recipe.data.rstrip("/") == data.rstrip("/")
    return (recipe.holdout if recipe is not None and trained else Recipe.holdout), trained


def show(found: "Evaluation") -> None:
    console.print(f"classes are matched {found.note}", soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("images", f"{len(found.labels):,}")
    table.add_row("top-1", percent(found.top1))
    if found.top5 is not None:
        table.add_row("top-5", percent(found.top5))
    table.add_row("calibration error", percent(found.calibration_error))
    if found.real is not None:
        table.add_row("ReaL", percent(found.real.accuracy) + f" of {found.real.counts.images:,} images")
    console.print(table)
    if found.real is not None:
        show_real(found.real)
    show_classes(found)
    show_confused(found)


def percent(rate: "Rate") -> str:
    return f"{rate.value:.2%}  ({100 * rate.low:.2f} to {100 * rate.high:.2f})"


def show_real(real: "RealScore") -> None:
    own = real.own / real.counts.images
    line = f"ReaL: {real.counts.skipped:,} images have no label and are skipped; the set's own labels score {own:.2%}"
    console.print(line, soft_wrap=True)
    if own < 0.5:
        console.remark(
            "warning",
            "most images' own labels are not in their ReaL lists: these are hardly ImageNet's validation images in "
            "its order of classes",
        )


def show_classes(found: "Evaluation") -> None:
    rows = found.class_table()
    some = f"the {SHOWN} worst of {len(rows)} classes" if len(rows) > SHOWN else "classes, worst first"
    table = Table("class", title=some, title_justify="left")
    for heading in ("images", "found", "recall", "95 %", "precision"):
        table.add_column(heading, justify="right")
    for row in rows[:SHOWN]:
        span = "-" if row["recall"] is None else f"{100 * row['recall_low']:.0f} to {100 * row['recall_high']:.0f}"
        recall, precision = ("-" if row[key] is None else f"{row[key]:.1%}" for key in ("recall", "precision"))
        table.add_row(printable(row["class"]), f"{row['images']}", f"{row['correct']}", recall, span, precision)
    console.print(table)
    empty = sum(row["images"] == 0 for row in rows)
    if empty:
        console.print(f"{empty} of the model's classes have no image here")


def show_confused(found: "Evaluation") -> None:
    pairs = found.confused[:SHOWN]
    if not pairs:
        return
    table = Table("truth", "taken for", title="most confused", title_justify="left")
    table.add_column("images", justify="right")
    for truth, guess, images in pairs:
        table.add_row(printable(truth), printable(guess), f"{images}")
    console.print(table)


# ---- VTAB


@app.command(
    epilog="Examples: [bold]vitlab vtab vit-b16.npz --data vtab-1k --out runs/vtab[/bold], "
    "[bold]vitlab vtab runs/mine --tasks natural,kitti --steps 500 image_size=224[/bold], "
    "[bold]vitlab vtab runs/mine --tune 0.003,0.01,0.03[/bold]",
)
def vtab(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Weights to start from: a run folder, a file or a hub id.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Other settings of the recipe: lr=0.003 image_size=224 ..."),
    ] = None,
    tasks: Annotated[str, typer.Option(help="all, natural, specialized, structured, or names of tasks.")] = "all",
    data: Annotated[Path | None, typer.Option(help="The folder of tasks; none: vtab-1k in the cache folder.")] = None,
    out: Annotated[Path, typer.Option(help="Where results grow, task by task.")] = Path("vtab"),
    steps: Annotated[int, typer.Option(help="Steps of each task.")] = 2500,
    tune: Annotated[str | None, typer.Option(help="Learning rates to choose from, on 200 of the images.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the fine-tuned model of every task.")] = False,
) -> None:
    """Fine-tune a model on the 19 tasks of VTAB-1k, 1,000 images each, by the paper's recipe, and test it.

    A task's folder holds its images and the lists train800val200.txt and test.txt, lines of a path and a class number.
    Tasks that are not there are named with their source, and the rest runs. Ctrl-C loses nothing: the same command
    goes on, and finished tasks are not run again.
    """
    import os

    from vitlab.files import cache_folder
    from vitlab.studies.vtab import run_vtab
    from vitlab.studies.vtab_tasks import choose

    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "vtab uses one device; to use many, start one on each without torchrun, with its own --tasks and --out"
        )
    study = run_vtab(
        run,
        data if data is not None else cache_folder() / "vtab-1k",
        out,
        choose(tasks),
        steps=steps,
        settings=tuple(settings or ()),
        rates=() if tune is None else rates_of(tune),
        keep=keep,
        console=console,
    )
    show_vtab(study)
    if study.failed:
        names = ", ".join(study.failed)
        count = "1 task" if len(study.failed) == 1 else f"{len(study.failed)} tasks"
        raise UserError(f"{count} did not finish ({names}); mend what is said of each above, then run again")


def rates_of(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < float("inf") for rate in rates):
        raise UserError(f"--tune takes learning rates such as 0.003,0.01,0.03, not '{text}'")
    return rates


def show_vtab(study: "Study") -> None:
    from vitlab.studies.vtab import RESULTS, means
    from vitlab.studies.vtab_tasks import GROUPS, TASKS

    found = means(study.results)
    if not found:
        return
    table = Table("task")
    for heading in ("classes", "images", "lr", "accuracy", "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for group in GROUPS:
        for task in TASKS:
            result = study.results.get(task.name)
            if result is not None and task.group == group:
                rate = result.rate
                span = f"{100 * rate.low:.1f} to {100 * rate.high:.1f}"
                cells = f"{task.classes}", f"{result.images:,}", f"{result.lr:g}", f"{rate.value:.2%}", span
                table.add_row(task.name, *cells)
        if group in found:
            table.add_row(
                f"{group}, {found[group]['done']} of {found[group]['of']}",
                *mean_cells(found[group]["mean"]),
                style="bold",
            )
            table.add_section()
    every = found["all"]
    table.add_row(f"mean of {every['done']} of the {every['of']}", *mean_cells(every["mean"]), style="bold")
    console.print(table)
    console.print(f"results: {study.out / RESULTS}", soft_wrap=True)


def mean_cells(mean: float) -> tuple[str, ...]:
    return "", "", "", f"{mean:.2%}", ""
