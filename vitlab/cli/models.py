"""Models as they are: what there is, what it costs, and its weights in other programs' formats."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from vitlab.cli.app import app, console
from vitlab.errors import UserError

PHOTO = 110e3  # bytes of a photo, ImageNet's mean

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the model, as of vitlab.create: image_size=384 ..."),
]


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
    epilog="Examples: [bold]vitlab cost H/14 --images 303M --epochs 14 --tflops 400 --gpus 64[/bold], "
    "[bold]vitlab cost B/16 image_size=384 positions=relative[/bold]",
)
def cost_(
    model: Annotated[str, typer.Argument(help="A model's name, such as B/16, R50+B/16 or R50x1.")],
    settings: Settings = None,
    images: Annotated[str, typer.Option(help="Images in the training set; 1.28M and 303e6 are numbers too.")] = "303M",
    epochs: Annotated[float, typer.Option(help="Passes over the set.")] = 7,
    tflops: Annotated[
        float | None, typer.Option(help="Sustained speed of your machine, or of each GPU, TFLOP/s.")
    ] = None,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs that share the work.")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="Images of a step, over all GPUs.")] = 4096,
    micro: Annotated[int, typer.Option(min=1, help="Images that a GPU takes at a time.")] = 64,
) -> None:
    """What a training run costs: FLOPs, days on machines of a given speed, memory, and the images it must be fed.

    A multiply-add counts as two; training an image costs three forward passes. Memory is for mixed bf16 with Adam.
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
    each = [c.gpu_bytes(micro, gpus, sharded) / 1e9 for sharded in (False, True)]
    rows.append((f"memory, {micro} images at a time", f"{each[0]:.1f} GB" if gpus == 1 else f"{each[0]:.1f} GB a GPU"))
    if gpus > 1:
        rows.append((f"the same, parallel=fsdp on {gpus} GPUs", f"{each[1]:.1f} GB a GPU"))
    if tflops is not None:
        speed = gpus * tflops * 1e12 / c.train_flops
        rows.append((f"at {gpus * tflops:g} TFLOP/s", f"{days(flops, gpus * tflops):,.4g} days"))
        rows.append((f"steps of {batch:,} images", f"{count * epochs / batch:,.0f}, {batch / speed:.3g} s each"))
        rows.append(("images to read and decode", f"{speed:,.0f} a second, {speed * PHOTO / 1e6:,.0f} MB"))
    table = Table(show_header=False, title=model)
    for row in rows:
        table.add_row(*row)
    console.print(table)


@app.command(
    epilog="Examples: [bold]vitlab convert ViT-B_16.npz vit-base --to vitlab[/bold], "
    "[bold]vitlab convert google/vit-base-patch16-224 vit.safetensors --to timm norm_eps=1e-6[/bold]",
)
def convert(
    source: Annotated[str, typer.Argument(help="A run folder, a file of weights, a hub id or a hub's folder.")],
    target: Annotated[Path, typer.Argument(help="The file or folder to write; it must not exist.")],
    to: Annotated[str, typer.Option("--to", help="vitlab, huggingface, timm, torchvision or google.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="What the source does not say: heads=12 gelu=tanh ..."),
    ] = None,
    format: Annotated[str | None, typer.Option(help="The source's format, if it fits two.")] = None,
) -> None:
    """Write weights in another program's format, tensor for tensor. What that cannot express is refused."""
    from typing import get_type_hints

    from vitlab.models.config import Size
    from vitlab.settings import parse_settings
    from vitlab.weights.convert import convert
    from vitlab.weights.formats.base import FormatDefaults

    hints = {key: hint for key, hint in get_type_hints(FormatDefaults).items() if key != "preprocess"} | {
        "image_size": Size
    }
    convert(source, target, to, format=format, **parse_settings(settings or [], hints))
    console.print(f"{target} is written", highlight=False, markup=False)


def model_settings(pairs: list[str]) -> dict[str, Any]:
    """`key=value` words as arguments of `vitlab.create`."""
    from typing import get_type_hints

    from vitlab.models.config import Size
    from vitlab.models.variants import create
    from vitlab.settings import parse_settings

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
