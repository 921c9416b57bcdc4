"""`vitlab bench`: the speed of a recipe on this machine."""

from typing import Annotated

from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import RecipeSettings, print_pairs
from vitlab.errors import UserError


@verb("vitlab bench digits", "vitlab bench B/16-imagenet 'data=shards/train-{000..099}.tar' batch=512")
def bench(
    recipe: Annotated[str, Argument(help="A recipe's name; `vitlab recipes` lists them.")],
    settings: RecipeSettings = None,
    seconds: Annotated[float, Option(help="Seconds to measure each of the three speeds.")] = 10,
) -> None:
    """Measure how fast a recipe trains on this machine, and whether the data loader or the model limits it."""
    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds must be positive, not {seconds:g}")
    from vitlab.training.bench import bench as measure
    from vitlab.training.recipe import override
    from vitlab.training.recipes import find

    with console.status("measuring: loader and step together, loader alone, step alone"):
        result = measure(override(find(recipe).recipe, settings or []), seconds)
    used = "" if result.used is None else f", {result.used:.0%} of the device's peak"
    rows = [
        ("the loader alone", f"{result.loader:,.0f}"),
        ("the training step alone, on data in memory", f"{result.step:,.0f}{used}"),
        ("training: both together", f"{result.both:,.0f}"),
    ]
    if result.memory is not None:
        rows.append(("peak memory of the device", f"{result.memory / 1e9:.1f} GB, {result.micro} images at a time"))
    print_pairs(rows, title=f"{recipe}, images per second")
    console.print(result.verdict(), soft_wrap=True)
