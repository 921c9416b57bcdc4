"""`vitlab convert`: weights in another library's format."""

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import KeyValues, key_values
from vitlab.errors import UserError


@verb(
    "vitlab convert ViT-B_16.npz vit-base --to vitlab",
    "vitlab convert google/vit-base-patch16-224 vit.safetensors --to timm norm_eps=1e-6",
    "vitlab convert runs/pets pets-hub --to huggingface --push-to-hub me/pets",
)
def convert(
    source: Annotated[str, Argument(help="A run folder, a file of weights, a hub id or a hub's folder.")],
    target: Annotated[Path, Argument(help="The file or folder to write; it must not exist.")],
    to: Annotated[str, Option("--to", help="vitlab, huggingface, timm, torchvision or google.")],
    settings: Annotated[KeyValues, key_values("What the source does not store: heads=12 gelu=tanh ...")] = None,
    format: Annotated[str | None, Option(help="The source's format, if it could be two.")] = None,
    fold: Annotated[bool, Option("--fold", help="Fold the normalization into the patch projection.")] = False,
    names: Annotated[str | None, Option(help="For google: published, linen or big_vision names.")] = None,
    push: Annotated[
        str | None,
        Option("--push-to-hub", metavar="REPO", help="Upload the folder with a model card; a new REPO is private."),
    ] = None,
) -> None:
    """Write weights in another library's format, tensor for tensor. A model that it cannot express is an error."""
    from vitlab.models.config import Size
    from vitlab.settings import annotations, parse_settings
    from vitlab.weights.convert import convert
    from vitlab.weights.formats.base import FormatDefaults
    from vitlab.weights.load import load
    from vitlab.weights.push import check_push, push_to_hub

    if push is not None:
        if to != "huggingface":
            raise UserError(f"--push-to-hub uploads transformers' format; use --to huggingface, not {to}")
        check_push(push)
    known = {key: hint for key, hint in annotations(FormatDefaults).items() if key != "preprocess"}
    values = parse_settings(settings or [], known | {"image_size": Size})
    convert(source, target, to, format=format, names=names, fold=fold, **values)
    console.print(f"{target} is written")
    if push is not None:
        provenance = load(source, format=format, **values).card.provenance
        console.print(f"uploaded: {push_to_hub(target, push, provenance or {})}", soft_wrap=True)
