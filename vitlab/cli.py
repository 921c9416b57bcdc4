"""The command line: thin verbs over the package. Nothing heavy is imported before a verb runs."""

import sys
from functools import partial
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vitlab.config import UserError

app = typer.Typer(
    name="vitlab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The Vision Transformer, whole: build, load, train, evaluate, look inside.",
    epilog="Start with: [bold]vitlab demo[/bold]",
)
console = Console()

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the model, as of vitlab.create: image_size=384 ..."),
]


def main() -> None:
    """Run a verb; what the user can mend is one sentence and exit code 1, never a traceback."""
    try:
        app()
    except UserError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        sys.exit(1)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show:
        from vitlab import __version__

        console.print(f"vitlab {__version__}", highlight=False)
        raise typer.Exit


@app.command(epilog="Example: [bold]vitlab demo[/bold]")
def demo() -> None:
    """The whole story on built-in data, offline: train a small ViT on handwritten digits and look at its mistakes."""
    from vitlab.demo import run

    run(console)


@app.command(epilog="Examples: [bold]vitlab models[/bold], [bold]vitlab models Ti/8 B/16 --image-size 384[/bold]")
def models(
    names: Annotated[list[str] | None, typer.Argument(help="Models to list; the paper's by default.")] = None,
    image_size: Annotated[int, typer.Option(help="Side of the image in pixels.")] = 224,
) -> None:
    """List models with parameters, FLOPs, sequence length and the memory an image takes in training."""
    from rich.live import Live

    from vitlab.cost import cost
    from vitlab.models.variants import LISTED, build, configure

    configs = {name: configure(name, {"image_size": image_size}) for name in names or LISTED}
    table = Table("model", caption="Memory: what training keeps of one image for the backward pass, in mixed bf16.")
    for heading in ("parameters", "GFLOPs, forward", "tokens", "MB per image"):
        table.add_column(heading, justify="right")
    with Live(table, console=console):
        for name, config in configs.items():
            c = cost(partial(build, config))
            gflops, megabytes = c.forward_flops / 1e9, c.activation_bytes / 1e6
            table.add_row(name, f"{c.parameters:,}", f"{gflops:.2f}", f"{c.length}", f"{megabytes:.1f}")


@app.command(
    name="cost",
    epilog="Examples: [bold]vitlab cost H/14 --images 303M --epochs 14 --tflops 400[/bold], "
    "[bold]vitlab cost B/16 image_size=384 positions=relative[/bold]",
)
def cost_(
    model: Annotated[str, typer.Argument(help="A model's name, such as B/16, R50+B/16 or R50x1.")],
    settings: Settings = None,
    images: Annotated[str, typer.Option(help="Images in the training set; 1.28M and 303e6 are numbers too.")] = "303M",
    epochs: Annotated[float, typer.Option(help="Passes over the set.")] = 7,
    tflops: Annotated[float | None, typer.Option(help="Sustained speed of your machine, TFLOP/s.")] = None,
) -> None:
    """What a training run costs: FLOPs of an image and of the run, and days on a machine of a given speed.

    A multiply-add counts as two; training an image costs three forward passes.
    """
    from vitlab.cost import cost, days
    from vitlab.models.variants import create

    count = number(images, "--images")
    if epochs <= 0:
        raise UserError(f"--epochs must be positive, not {epochs:g}")
    options = model_settings(settings or [])
    c = cost(lambda: create(model, **options))
    flops = c.run_flops(count, epochs)
    rows = [
        ("parameters", f"{c.parameters:,}"),
        ("tokens", f"{c.length}"),
        ("forward, one image", f"{c.forward_flops / 1e9:.2f} GFLOPs"),
        ("training, one image", f"{c.train_flops / 1e9:.2f} GFLOPs, {c.activation_bytes / 1e6:.1f} MB kept"),
        (f"the run, {count:,.0f} images x {epochs:g} epochs", f"{flops / 1e18:,.4g} exaFLOPs"),
    ]
    if tflops is not None:
        rows.append((f"at {tflops:g} TFLOP/s", f"{days(flops, tflops):,.4g} days"))
    table = Table(show_header=False, title=model)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def model_settings(pairs: list[str]) -> dict[str, Any]:
    """`key=value` words as arguments of `vitlab.create`."""
    from typing import get_type_hints

    from vitlab.config import Size, parse_settings
    from vitlab.models.variants import create

    hints = get_type_hints(create) | {"image_size": Size}
    return parse_settings(pairs, {key: hint for key, hint in hints.items() if key not in ("name", "return")})


def number(text: str, option: str) -> float:
    """A positive count, with k, M or G for short."""
    factor = {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1:], 1.0)
    try:
        value = float(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise UserError(f"{option} must be a positive number such as 1.28M, not '{text}'")
    return value
