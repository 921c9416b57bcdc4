"""`vitlab recipes`: the recipes and their settings."""

from typing import Annotated

from rich.table import Column, Table
from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import print_pairs


@verb("vitlab recipes", "vitlab recipes digits", "vitlab recipes --keys")
def recipes(
    name: Annotated[str | None, Argument(help="One recipe, with all its settings.")] = None,
    keys: Annotated[bool, Option("--keys", help="List every setting that key=value can change.")] = False,
) -> None:
    """List the recipes with their costs: the paper's tables, AugReg, and runs for one machine."""
    if keys:
        print_keys()
    elif name is not None:
        print_recipe(name)
    else:
        print_list()


def print_keys() -> None:
    from vitlab.settings import describe
    from vitlab.training.recipe import describe_keys
    from vitlab.training.search import Repeats

    several = "several runs; a number may have several values too, as in lr=0.003,0.01"
    tables = describe_keys() | {several: describe(Repeats)}
    for title, settings in tables.items():
        table = Table("key", "value", "default", "meaning", title=title, title_justify="left")
        for setting in settings:
            table.add_row(setting.name, setting.type, setting.default, setting.help)
        console.print(table)


def print_recipe(name: str) -> None:
    from vitlab.training.recipe import flat
    from vitlab.training.recipes import command, find, operations, run_flops

    entry = find(name)
    rows: dict[str, object] = {"command": command(name), "cost": operations(run_flops(entry.recipe))}
    rows |= {"time": entry.time, "accuracy to expect": entry.expect, "LR searched": entry.searched}
    rows |= flat(entry.recipe)
    given = [(key, str(value)) for key, value in rows.items() if value not in (None, "", ())]
    print_pairs(given, title=f"{name}: {entry.about}")


def print_list() -> None:
    from vitlab.training.recipes import RECIPES, length, run_flops

    headings = ("recipe", "model", "data", "length", "LR", "exaFLOPs")
    table = Table(*(Column(heading, no_wrap=True) for heading in headings), box=None, pad_edge=False)
    for name, entry in RECIPES.items():
        r = entry.recipe
        cost = f"{run_flops(r) / 1e18:.3g}" if run_flops(r) < 1e21 else f"{run_flops(r) / 1e18:,.0f}"
        cost = "" if r.minutes else cost
        table.add_row(name, r.model, r.data.rpartition("/")[2], length(r), f"{r.lr:g}", cost)
    console.print(table)
    console.print("The cost is that of the complete run. `vitlab recipes NAME` shows one with all its settings.")
