"""`vitlab bench`: the speed of a recipe on this machine."""

from typing import Annotated

import typer
from rich.table import Table

from vitlab.cli.app import app, console, examples
from vitlab.cli.options import RecipeSettings
from vitlab.errors import UserError


@app.command(
    epilog=examples("vitlab bench digits", "vitlab bench B/16-imagenet 'data=shards/train-{000..099}.tar' batch=512")
)
def bench(
    recipe: Annotated[str, typer.Argument(help="A recipe's name; `vitlab recipes` lists them.")],
    settings: RecipeSettings = None,
    seconds: Annotated[float, typer.Option(help="Seconds to measure each of the three speeds.")] = 10,
) -> None:
    """Measure how fast a recipe trains on this machine, and whether the data loader or the model limits it."""
    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds must be positive, not {seconds:g}")
    from vitlab.training.bench import bench as measure
    from vitlab.training.recipe import override
    from vitlab.training.recipes import find

    with console.status("measuring: loader and step together, loader alone, step alone"):
        result = measure(override(find(recipe).recipe, settings or []), seconds)
    table = Table(show_header=False, title=f"{recipe}, images per second")
    used = "" if result.used is None else f", {result.used:.0%} of the device's peak"
    table.add_row("the loader alone", f"{result.loader:,.0f}")
    table.add_row("the training step alone, on data in memory", f"{result.step:,.0f}{used}")
    table.add_row("training: both together", f"{result.both:,.0f}")
    if result.memory is not None:
        table.add_row("peak memory of the device", f"{result.memory / 1e9:.1f} GB, {result.micro} images at a time")
    console.print(table)
    console.print(result.verdict(), soft_wrap=True)
