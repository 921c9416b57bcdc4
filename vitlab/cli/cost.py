"""`vitlab cost`: what a training run costs."""

from typing import Annotated

from typer import Argument, Option

from vitlab.cli.app import verb
from vitlab.cli.options import KeyValues, key_values, parse_size, print_pairs
from vitlab.errors import UserError
from vitlab.text import counted

PHOTO = 110e3  # bytes of a photo, ImageNet's mean


@verb(
    "vitlab cost H/14 --images 303M --epochs 14 --tflops 400 --gpus 64",
    "vitlab cost B/16 image_size=384 positions=relative",
)
def cost(
    model: Annotated[str, Argument(help="A model's name, such as B/16, R50+B/16 or R50x1.")],
    settings: Annotated[KeyValues, key_values("Settings of the model, as of vitlab.create: image_size=384 ...")] = None,
    images: Annotated[str, Option(help="Images in the training set; 1.28M and 303e6 are numbers too.")] = "303M",
    epochs: Annotated[float, Option(help="Passes over the training set.")] = 7,
    tflops: Annotated[float | None, Option(help="Sustained speed of your machine, or of each GPU, TFLOP/s.")] = None,
    gpus: Annotated[int, Option(min=1, help="GPUs that share the work.")] = 1,
    batch: Annotated[int, Option(min=1, help="Images per step, over all GPUs.")] = 4096,
    micro: Annotated[int, Option(min=1, help="Images per GPU at a time.")] = 64,
) -> None:
    """Compute what a training run costs: FLOPs, days at a given speed, memory, and images to read per second.

    A multiply-add counts as two; training an image costs three forward passes. Memory is for mixed bf16 with Adam.
    """
    from vitlab.cost import days, quick_cost
    from vitlab.models.names import configure, create_keys
    from vitlab.settings import parse_settings
    from vitlab.text import flops_unit

    count = parse_size(images, "--images")
    if epochs <= 0:
        raise UserError(f"--epochs must be positive, not {epochs:g}")
    options = parse_settings(settings or [], create_keys())
    c = quick_cost(configure(model, options))
    flops = c.run_flops(count, epochs)
    unit, size = flops_unit(flops)
    rows = [
        ("parameters", f"{c.parameters:,}"),
        ("tokens", f"{c.length}"),
        ("forward, one image", f"{c.forward_flops / 1e9:.2f} GFLOPs"),
        ("training, one image", f"{c.train_flops / 1e9:.2f} GFLOPs, {c.activation_bytes / 1e6:.1f} MB kept"),
        (f"the run, {count:,.0f} images x {counted(epochs, 'epoch')}", f"{flops / size:,.4g} {unit}"),
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
    print_pairs(rows, title=model)
