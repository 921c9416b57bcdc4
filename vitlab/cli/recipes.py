"""`vitlab recipes`: the recipes and their settings."""

from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from vitlab.cli.app import app, console, examples

if TYPE_CHECKING:
    from vitlab.training.recipe import Recipe


@app.command(epilog=examples("vitlab recipes", "vitlab recipes digits"))
def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, with all its settings.")] = None,
) -> None:
    """List the recipes with their costs: the paper's tables, AugReg, and runs for one machine."""
    from vitlab.training.recipes import RECIPES, command, find, length, operations, run_flops

    if name is not None:
        entry = find(name)
        table = Table(show_header=False, title=f"{name}: {entry.about}")
        rows: dict[str, object] = {"command": command(name), "cost": operations(run_flops(entry.recipe))}
        rows |= {"time": entry.time, "accuracy to expect": entry.expect, "LR searched": entry.searched}
        rows |= recipe_settings(entry.recipe)
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
    console.print("The cost is that of the complete run. `vitlab recipes NAME` shows one with all its settings.")


def recipe_settings(recipe: "Recipe") -> dict[str, object]:
    """A recipe's settings and those of its augmentation, as `key=value` would set them."""
    from vitlab.settings import to_json

    settings = to_json(recipe)
    return {**settings, **settings.pop("augment"), "augment": None}
