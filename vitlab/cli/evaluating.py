"""Measuring a classifier: its scores on a set, and how it learns the 19 tasks of VTAB."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from vitlab.cli.app import app, console
from vitlab.config import UserError

if TYPE_CHECKING:
    from vitlab.evaluation.evaluate import Evaluation, Rate, RealScore
    from vitlab.studies.vtab import Study

SHOWN = 10  # classes and pairs of classes in the terminal; files have all


# ---- one set


@app.command(
    epilog="Examples: [bold]vitlab evaluate runs/digits digits[/bold], "
    "[bold]vitlab evaluate runs/pets photos/ --split all --out scores[/bold], "
    "[bold]vitlab evaluate vit.safetensors imagenet:/data/imagenet --real real.json[/bold]",
)
def evaluate(
    run: Annotated[str, typer.Argument(help="A model: a run folder, a file of weights or a hub id.")],
    data: Annotated[str, typer.Argument(help="A folder of class folders, or any other source of images.")],
    split: Annotated[str, typer.Option(help="test, validation, train; all: a set that has no splits, whole.")] = "test",
    real: Annotated[Path | None, typer.Option(help="ImageNet's ReaL labels, real.json: score by these too.")] = None,
    by_position: Annotated[bool, typer.Option("--by-position", help="Match classes by order, whatever names.")] = False,
    out: Annotated[Path | None, typer.Option(help="A folder for tables, figures and all predictions.")] = None,
    json: Annotated[Path | None, typer.Option(help="A file for all scores, as JSON.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    batch: Annotated[int | None, typer.Option(help="Images at a time; none: what suits the device.")] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that decode; none: by the machine.")] = None,
) -> None:
    """Test a model: top-1 and top-5, classes worst first, what is taken for what, and whether its confidence is earned.

    Every image counts once; a broken one is an error. Classes are matched by name. In brackets: 95 % bootstrap
    intervals.
    """
    from vitlab.evaluation.evaluate import evaluate, open_split, write_json, write_results
    from vitlab.evaluation.real import read_real
    from vitlab.weights import load

    lists = None if real is None else read_real(real)
    source, note = open_split(data, split, held_out(run, data))
    console.print(f"{len(source):,} images of {data}, {split}: {note}", highlight=False, markup=False, soft_wrap=True)
    found = evaluate(
        load(run), source, real=lists, by_position=by_position, batch=batch, workers=workers, device=device
    )
    show(found)
    about = {"model": run, "data": data, "split": split, "note": note}
    if json is not None:
        write_json(found, json, about)
        console.print(f"scores: {json}", highlight=False, markup=False, soft_wrap=True)
    if out is not None:
        write_results(found, out, about)
        console.print(f"tables, figures and predictions: {out}", highlight=False, markup=False, soft_wrap=True)


def held_out(run: str, data: str) -> float:
    """The share that a run held out of this very set, so that it is not tested on what it was trained on."""
    from vitlab.training.recipe import Recipe
    from vitlab.training.start import stored_recipe

    recipe = stored_recipe(Path(run).expanduser())
    return recipe.holdout if recipe is not None and recipe.data == data else Recipe.holdout


def show(found: "Evaluation") -> None:
    console.print(f"classes are matched {found.note}", highlight=False, markup=False, soft_wrap=True)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("images", f"{len(found.labels):,}")
    table.add_row("top-1", percent(found.top1))
    if found.top5 is not None:
        table.add_row("top-5", percent(found.top5))
    table.add_row("calibration error", percent(found.calibration_error))
    if found.real is not None:
        table.add_row("ReaL", percent(found.real.accuracy) + f" of {found.real.counts.images:,} images")
    console.print(table, highlight=False)
    if found.real is not None:
        show_real(found.real)
    show_classes(found)
    show_confused(found)


def percent(rate: "Rate") -> str:
    return f"{rate.value:.2%}  ({100 * rate.low:.2f} to {100 * rate.high:.2f})"


def show_real(real: "RealScore") -> None:
    own = real.own / real.counts.images
    line = f"ReaL: {real.counts.skipped:,} images have no label and are skipped; the set's own labels score {own:.2%}"
    console.print(line, highlight=False, soft_wrap=True)
    if own < 0.5:
        console.print(
            "[yellow]warning:[/] most images' own labels are not in their ReaL lists: these are hardly ImageNet's "
            "validation images in its order of classes",
            highlight=False,
            soft_wrap=True,
        )


def show_classes(found: "Evaluation") -> None:
    from vitlab.evaluation.evaluate import class_table

    rows = class_table(found)
    some = f"the {SHOWN} worst of {len(rows)} classes" if len(rows) > SHOWN else "classes, worst first"
    table = Table("class", title=some, title_justify="left")
    for heading in ("images", "found", "recall", "95 %", "precision"):
        table.add_column(heading, justify="right")
    for row in rows[:SHOWN]:
        span = "-" if row["recall"] is None else f"{100 * row['recall_low']:.0f} to {100 * row['recall_high']:.0f}"
        recall, precision = ("-" if row[key] is None else f"{row[key]:.1%}" for key in ("recall", "precision"))
        table.add_row(escape(row["class"]), f"{row['images']}", f"{row['correct']}", recall, span, precision)
    console.print(table, highlight=False)
    empty = sum(row["images"] == 0 for row in rows)
    if empty:
        console.print(f"{empty} of the model's classes have no image here", highlight=False)


def show_confused(found: "Evaluation") -> None:
    pairs = found.confused[:SHOWN]
    if not pairs:
        return
    table = Table("truth", "taken for", title="most confused", title_justify="left")
    table.add_column("images", justify="right")
    for truth, guess, images in pairs:
        table.add_row(escape(truth), escape(guess), f"{images}")
    console.print(table, highlight=False)


# ---- VTAB


@app.command(
    epilog="Examples: [bold]vitlab vtab vit-b16.npz --data vtab-1k --out runs/vtab[/bold], "
    "[bold]vitlab vtab runs/mine --tasks natural,kitti --steps 500 image_size=224[/bold], "
    "[bold]vitlab vtab runs/mine --tune 0.003,0.01,0.03[/bold]",
)
def vtab(
    run: Annotated[str, typer.Argument(help="Weights to start from: a run folder, a file or a hub id.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Other settings of the recipe: lr=0.003 image_size=224 ..."),
    ] = None,
    tasks: Annotated[str, typer.Option(help="all, natural, specialised, structured, or names of tasks.")] = "all",
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

    from vitlab.data.splits import cache_folder
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
        raise UserError(
            f"{len(study.failed)} tasks did not finish ({names}); mend what is said of each above, then run again"
        )


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
    from vitlab.studies.vtab_tasks import TASKS

    table = Table("group", "task")
    for heading in ("classes", "test images", "lr", "accuracy", "95 %"):
        table.add_column(heading, justify="right")
    for task in TASKS:
        result = study.results.get(task.name)
        if result is not None:
            rate = result.rate
            span = f"{100 * rate.low:.1f} to {100 * rate.high:.1f}"
            cells = f"{task.classes}", f"{result.images:,}", f"{result.lr:g}", f"{rate.value:.2%}", span
            table.add_row(task.group, task.name, *cells)
    found = means(study.results)
    table.add_section()
    for group, mean in found.items():
        some = "all" if mean["done"] == mean["of"] else f"{mean['done']} of"
        table.add_row(group, f"mean of {some} {mean['of']} tasks", "", "", "", f"{mean['mean']:.2%}", "")
    if found:
        console.print(table, highlight=False)
        console.print(f"results: {study.out / RESULTS}", highlight=False, markup=False, soft_wrap=True)
