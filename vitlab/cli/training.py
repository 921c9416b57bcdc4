"""Making models: the demo, pre-training, fine-tuning, and the recipes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vitlab.cli.app import app, console
from vitlab.errors import Stopped, UserError
from vitlab.signals import stoppable

if TYPE_CHECKING:
    from vitlab.training.loop import TrainResult
    from vitlab.training.recipe import Recipe


@app.command(epilog="Examples: [bold]vitlab demo[/bold], [bold]vitlab demo --out runs/digits[/bold]")
def demo(out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("runs/demo")) -> None:
    """The whole story on built-in data, offline: train a small ViT on handwritten digits, test it, look at its report.

    Two minutes on a CPU. The run stays in its folder, with digits as files to try the other verbs on; what is there
    already is not done again.
    """
    with stoppable("stopped; the same command goes on from there"):
        from vitlab import demo

        recipe, resume = demo.begin(console, out)
        try:
            run_recipe(recipe, out, resume)
        except Stopped as stop:
            raise Stopped(stop.code - 128, "stopped and saved; the same command goes on from there") from None
        demo.tell(console, out)


RunSettings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the recipe: lr=0.001 epochs=5 mixup=0.2 ..."),
]
Out = Annotated[Path, typer.Option("--out", help="The run's folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out as if nothing had happened.")]
Accept = Annotated[bool, typer.Option("--accept-data-changes", help="Continue although files of the data changed.")]
SMALLER = "give smaller weights with --weights, or set a smaller image_size"
EARLY = "stopped before the first step; the same command starts again"


@app.command(
    epilog="Examples: [bold]vitlab train digits --out runs/digits[/bold], "
    "[bold]vitlab train B/16-imagenet data=imagenet:/data/imagenet --out runs/b16[/bold], "
    "[bold]vitlab train --out runs/digits --resume[/bold], "
    "[bold]torchrun --nproc-per-node 8 --no-python vitlab train L/16-i21k-90 data=SHARDS parallel=fsdp[/bold]",
)
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name; `vitlab recipes` lists them.")] = None,
    settings: RunSettings = None,
    out: Out = Path("run"),
    resume: Resume = False,
    accept: Accept = False,
) -> None:
    """Train a model by a recipe: from scratch, from weights (weights=FILE), or by masked patches.

    Ctrl-C saves first. When it ends, the folder is a model that every other verb takes.
    """
    with stoppable(EARLY):
        from vitlab.training.parallel import restarted
        from vitlab.training.recipe import override
        from vitlab.training.recipes import check_ready, find
        from vitlab.training.setup import continued_recipe

        pairs, resume = settings or [], resume or restarted()
        if recipe is None or "=" in recipe:  # the folder knows its recipe
            stored = continued_recipe(out, [recipe, *pairs] if recipe else pairs) if resume else None
            if stored is None:
                raise UserError("name a recipe, as in `vitlab train digits`; `vitlab recipes` lists them")
            run_recipe(stored, out, resume, accept)
        else:
            run_recipe(check_ready(recipe, override(find(recipe).recipe, pairs)), out, resume, accept)


@app.command(
    epilog="Examples: [bold]vitlab finetune photos/ --weights google/vit-base-patch16-224[/bold], "
    "[bold]vitlab finetune oxford-pets --weights weights.npz epochs=3 lr=0.003 --out runs/pets[/bold]",
)
def finetune(
    data: Annotated[str, typer.Argument(help="A folder of class folders, or any other source of images.")],
    settings: RunSettings = None,
    weights: Annotated[str | None, typer.Option("--weights", help="Weights to start from; none: from scratch.")] = None,
    out: Out = Path("run"),
    resume: Resume = False,
    accept: Accept = False,
) -> None:
    """Teach a trained model your classes. What you do not set is chosen to fit the data and this machine."""
    with stoppable(EARLY):
        from vitlab.device import memory_errors
        from vitlab.training.parallel import process_group, restarted
        from vitlab.training.setup import continued_recipe

        pairs, resume = settings or [], resume or restarted()
        given = [f"data={data}", *([f"weights={weights}"] if weights else []), *pairs]
        if resume and (stored := continued_recipe(out, given)) is not None:
            run_recipe(stored, out, resume, accept)
            return
        with process_group(device_of(pairs)) as cluster, memory_errors("looking at the data and the model", SMALLER):
            recipe = cluster.agree(lambda: advised(data, weights, pairs))
            outcome = go(recipe, out, resume, accept)
        report_on(outcome, recipe.device)


def advised(data: str, weights: str | None, pairs: list[str]) -> "Recipe":
    """A recipe for these images and this machine, and why it is that one."""
    from vitlab.training.auto import finetune_recipe

    advice = finetune_recipe(data, weights, pairs)
    for line in advice.lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in advice.warnings:
        console.remark("warning", line)
    return advice.recipe


def device_of(pairs: list[str]) -> str:
    """The device that settings ask for."""
    return next((pair.removeprefix("device=") for pair in reversed(pairs) if pair.startswith("device=")), "auto")


def run_recipe(recipe: "Recipe", out: Path, resume: bool, accept: bool = False) -> None:
    """Train, say how it ended, and write the report."""
    report_on(go(recipe, out, resume, accept), recipe.device)


def go(recipe: "Recipe", out: Path, resume: bool, accept: bool) -> "TrainResult":
    """Train, and say how it ended; of many processes, the first one speaks."""
    from vitlab.text import duration
    from vitlab.training.loop import train

    outcome = train(recipe, out, resume=resume, accept_data_changes=accept, console=console)
    if outcome.first:
        shown = [
            f"{key} {value:.2%}" if "acc" in key else f"{key} {value:.4f}" for key, value in outcome.report.items()
        ]
        line = f"test: {', '.join(shown)}; {duration(outcome.seconds)}; the model is in {out}"
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return outcome


def report_on(outcome: "TrainResult", device: str) -> None:
    """Write the report. The run itself is safe by now: what goes wrong here changes nothing.

    It is for the first of many processes, when they have parted: it takes its time, and nobody should wait for it.
    """
    from vitlab.report import write_report

    if not outcome.first:
        return
    again = f"`vitlab report {outcome.folder}` makes it later"
    with stoppable(f"the model is saved, the report is not finished; {again}"):
        try:
            path = write_report(outcome.folder, outcome.data, device=device)
            console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
        except (UserError, OSError) as error:
            console.remark("note", f"the model is saved, but there is no report: {error}; {again}")


@app.command(
    epilog="Examples: [bold]vitlab bench digits[/bold], "
    "[bold]vitlab bench B/16-imagenet 'data=shards/train-{000..099}.tar' batch=512[/bold]",
)
def bench(
    recipe: Annotated[str, typer.Argument(help="A recipe's name; `vitlab recipes` lists them.")],
    settings: RunSettings = None,
    seconds: Annotated[float, typer.Option(help="How long to measure each of the three speeds.")] = 10,
) -> None:
    """How fast a recipe trains on this machine, and whether the data or the model is what it waits for."""
    from vitlab.training.bench import bench as measure
    from vitlab.training.recipe import override
    from vitlab.training.recipes import find

    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds must be positive, not {seconds:g}")
    with console.status("measuring: loader and step together, loader alone, step alone"):
        found = measure(override(find(recipe).recipe, settings or []), seconds)
    table = Table(show_header=False, title=f"{recipe}, images per second")
    used = "" if found.used is None else f", {found.used:.0%} of the device's peak"
    table.add_row("the loader alone", f"{found.loader:,.0f}")
    table.add_row("the training step alone, on data in memory", f"{found.step:,.0f}{used}")
    table.add_row("training: both together", f"{found.both:,.0f}")
    if found.memory is not None:
        table.add_row("most memory of the device", f"{found.memory / 1e9:.1f} GB, {found.micro} images at a time")
    console.print(table)
    console.print(found.verdict(), highlight=False, soft_wrap=True)


@app.command(epilog="Examples: [bold]vitlab recipes[/bold], [bold]vitlab recipes digits[/bold]")
def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, with all its settings.")] = None,
) -> None:
    """List the recipes with what they cost: the paper's tables, AugReg, and runs for one machine."""
    from vitlab.training.recipes import RECIPES, command, find, length, operations, run_flops

    if name is not None:
        entry = find(name)
        table = Table(show_header=False, title=f"{name}: {entry.about}")
        rows: dict[str, object] = {"command": command(name), "cost": operations(run_flops(entry.recipe))}
        rows |= {"time": entry.time, "accuracy to expect": entry.expect, "LR searched": entry.searched}
        rows |= settings_of(entry.recipe)
        for key, value in rows.items():
            if value not in (None, "", ()):
                table.add_row(key, str(value))
        console.print(table)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "model", "data", "length", "LR", "exaFLOPs"):
        table.add_column(heading, no_wrap=True)
    for name, entry in RECIPES.items():
        r = entry.recipe
        cost = f"{run_flops(r) / 1e18:.3g}" if run_flops(r) < 1e21 else f"{run_flops(r) / 1e18:,.0f}"
        table.add_row(name, r.model, r.data.rpartition("/")[2], length(r), f"{r.lr:g}", cost)
    console.print(table)
    console.print("The cost is that of the whole run. `vitlab recipes NAME` shows one with all its settings.")


def settings_of(recipe: "Recipe") -> dict[str, object]:
    """A recipe's settings and those of its augmentation, as `key=value` would set them."""
    from vitlab.settings import to_json

    said = to_json(recipe)
    return {**said, **said.pop("augment"), "augment": None}
