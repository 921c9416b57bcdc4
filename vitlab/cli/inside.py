"""Looking inside a model."""

from pathlib import Path
from typing import Annotated

import typer

from vitlab.cli.app import app, console
from vitlab.errors import UserError


@app.command(
    epilog="Examples: [bold]vitlab inspect runs/mine photo.jpg[/bold], "
    "[bold]vitlab inspect google/vit-base-patch16-224 photos/ --figures distance[/bold], "
    "[bold]vitlab inspect runs/mine photo.jpg --figures heads --layer 1,6,12 --head 2[/bold]",
)
def inspect(
    run: Annotated[str, typer.Argument(help="A run folder, a file of weights or a hub id.")],
    images: Annotated[
        list[str] | None, typer.Argument(metavar="IMAGE", help="Image files, or folders of them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder for figures and arrays.")] = Path("inside"),
    figures: Annotated[
        str | None,
        typer.Option(help="Some of filters, positions, distance, rollout, layers, heads, steps; all by default."),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Layers in the figure of heads, from 1: 1,6,12. Six by default.")
    ] = None,
    head: Annotated[str | None, typer.Option(help="Heads in it, from 1: 2,3. All by default.")] = None,
    image_size: Annotated[
        str | None, typer.Option(help="Another resolution, such as 384 or 224x320; positions are resampled.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Draw what a model has learned and where it looks: PNG, SVG and the arrays behind them.

    Of the model: the patch filters' principal components, the likeness of its positions, how far each head looks.
    Of each image, in a folder of its own: attention rollout, attention by layer, single heads, the five steps.
    """
    from vitlab.analysis.gallery import FIGURES, Gallery, find_images
    from vitlab.device import pick_device
    from vitlab.models.config import Size
    from vitlab.models.resnet import ResNet
    from vitlab.settings import parse_value
    from vitlab.weights import load

    layers, heads = numbers(layer, "--layer"), numbers(head, "--head")
    chosen = FIGURES if figures is None else tuple(word.strip() for word in figures.split(","))
    size: Size | None = None if image_size is None else tuple(parse_value(image_size, Size, "--image-size"))
    paths = find_images(images or [])
    place = pick_device(device)
    model = load(run, image_size=size)
    if isinstance(model, ResNet):
        raise UserError(f"{run} is a ResNet: it has no patches, positions or attention to look at; inspect takes a ViT")
    gallery = Gallery(model.float().to(place), out, chosen, layers, heads)
    gallery.write(paths, lambda line: console.print(line, soft_wrap=True))
    console.print(f"all of it is in {out}", soft_wrap=True)


def numbers(text: str | None, option: str) -> list[int] | None:
    """`1,6,12`, counted from 1, as indices."""
    if text is None:
        return None
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = [0]
    if min(found) < 1:
        raise UserError(f"{option} takes numbers from 1, such as 1,6,12, not '{text}'")
    return [number - 1 for number in found]
