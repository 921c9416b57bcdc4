"""`vitlab inspect`: figures of what a model has learned and where it looks."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import Device, Run, parse_count, parse_list
from vitlab.errors import UserError


@verb(
    "vitlab inspect runs/mine photo.jpg",
    "vitlab inspect google/vit-base-patch16-224 photos/ --figures distance",
    "vitlab inspect runs/mine photo.jpg --figures classes --class beagle --class boxer",
    "vitlab inspect runs/mine photo.jpg --figures heads --layer 1,6,12 --head 2",
)
def inspect(
    run: Run,
    images: Annotated[list[str] | None, Argument(metavar="IMAGE", help="Image files, or folders of them.")] = None,
    out: Annotated[Path, Option(help="The folder for figures and arrays.")] = Path("inside"),
    figures: Annotated[
        str | None,
        Option(help="Some of filters, positions, distance, classes, rollout, layers, heads, steps; all by default."),
    ] = None,
    classes: Annotated[
        list[str] | None,
        Option("--class", help="A class in the figure of classes; repeatable. The three most probable by default."),
    ] = None,
    layer: Annotated[str | None, Option(help="Layers in the figure of heads, from 1: 1,6,12. Six by default.")] = None,
    head: Annotated[str | None, Option(help="Heads in it, from 1: 2,3. All by default.")] = None,
    image_size: Annotated[
        str | None, Option(help="Another resolution, such as 384 or 224x320; positions are resampled.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Draw what a model has learned and where it looks: PNG, SVG and the arrays behind them.

    Of the model: the patch filters' principal components, the similarity of its position embeddings, the attention
    distance of each head. Of each image, in a folder of its own: evidence for each class, attention rollout,
    attention by layer, single heads, the five steps.
    """
    from vitlab.analysis.gallery import FIGURES, Gallery, find_class, find_images
    from vitlab.device import pick_device
    from vitlab.files import check_folder
    from vitlab.models.config import Size
    from vitlab.models.resnet import ResNet
    from vitlab.settings import parse_value
    from vitlab.weights import load

    layers, heads = parse_indices(layer, "--layer"), parse_indices(head, "--head")
    names = None if figures is None else tuple(word.strip() for word in figures.split(","))
    size: Size | None = None if image_size is None else tuple(parse_value(image_size, Size, "--image-size"))
    check_folder(out)
    paths = find_images(images or [])
    place = pick_device(device)
    model = load(run, image_size=size)
    names = names or (("classes",) if isinstance(model, ResNet) else FIGURES)
    if isinstance(model, ResNet) and set(names) & set(FIGURES) - {"classes"}:
        raise UserError(f"{run} is a ResNet; only transformers have the other figures: draw --figures classes of it")
    chosen = None if not classes else [find_class(model, word) for word in classes]
    gallery = Gallery(model.float().to(place), out, names, layers, heads, chosen)
    gallery.write(paths, lambda line: console.print(line, soft_wrap=True))
    console.print(f"all figures are in {out}", soft_wrap=True)


def parse_indices(text: str | None, option: str) -> list[int] | None:
    """Indices from 0 of a list such as `1,6,12`, which counts from 1."""
    return None if text is None else [number - 1 for number in parse_list(text, option, parse_count)]
