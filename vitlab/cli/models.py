"""`vitlab models`: the models and their sizes."""

from typing import Annotated

from rich.table import Table
from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import numbers


@verb("vitlab models", "vitlab models Ti/8 B/16 --image-size 384")
def models(
    names: Annotated[list[str] | None, Argument(help="Models to list; the paper's by default.")] = None,
    image_size: Annotated[int, Option(help="Side of the image in pixels.")] = 224,
) -> None:
    """List models with parameters, FLOPs, sequence length and the training memory per image."""
    from vitlab.cost import quick_cost
    from vitlab.models.names import LISTED, configure

    configs = {name: configure(name, {"image_size": image_size}) for name in names or LISTED}
    columns = numbers("parameters", "GFLOPs, forward", "tokens", "MB per image")
    caption = "Memory: activations of one image kept for the backward pass, in mixed bf16."
    table = Table("model", *columns, caption=caption)
    for name, config in configs.items():
        c = quick_cost(config)
        gflops, megabytes = c.forward_flops / 1e9, c.activation_bytes / 1e6
        table.add_row(name, f"{c.parameters:,}", f"{gflops:.2f}", f"{c.length}", f"{megabytes:.1f}")
    console.print(table)
