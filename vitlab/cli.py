"""The command line: thin verbs over the package. Nothing heavy is imported before a verb runs."""

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vitlab.config import Stopped, UserError

if TYPE_CHECKING:
    from vitlab.training.recipe import Recipe

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
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except Stopped as stop:
        Console(stderr=True).print(str(stop), highlight=False, markup=False, soft_wrap=True)
        sys.exit(stop.code)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show:
        from vitlab import __version__

        console.print(f"vitlab {__version__}", highlight=False)
        raise typer.Exit


@app.command(epilog="Examples: [bold]vitlab demo[/bold], [bold]vitlab demo --out runs/demo[/bold]")
def demo(out: Annotated[Path | None, typer.Option(help="Keep the run in this folder.")] = None) -> None:
    """The whole story on built-in data, offline: train a small ViT on handwritten digits and look at its mistakes."""
    from vitlab.demo import run

    run(console, out)


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


@app.command(
    epilog="Examples: [bold]vitlab data digits[/bold], [bold]vitlab data photos --picture photos.png[/bold], "
    "[bold]vitlab data 'shards/train-{000..009}.tar' --workers 8[/bold]",
)
def data(
    source: Annotated[str, typer.Argument(help="A folder, parquet files, tar shards, a hub id or a known set.")],
    picture: Annotated[Path, typer.Option(help="Where the picture of samples goes.")] = Path("samples.png"),
    workers: Annotated[int, typer.Option(help="Processes that decode.")] = 0,
) -> None:
    """Look at a set: classes, counts, sizes, broken files, duplicates across splits, and a picture of samples."""
    from vitlab.data.look import class_warnings, contact_sheet, image_warnings, summarise, tables
    from vitlab.data.sources import open_data

    opened = open_data(source)
    summary = summarise(opened, workers)
    for table in tables(summary):
        console.print(table)
    for line in class_warnings(opened) + image_warnings(summary):
        console.print(f"[yellow]note:[/] {escape(line)}", highlight=False, soft_wrap=True)
    try:
        contact_sheet(opened.train).save(picture)
    except (OSError, ValueError) as error:
        raise UserError(f"the picture of samples cannot be written to '{picture}': {error}") from None
    console.print(f"samples: {picture}", highlight=False)


RunSettings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the recipe: lr=0.001 epochs=5 mixup=0.2 ..."),
]
Out = Annotated[Path, typer.Option("--out", help="The run's folder.")]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in --out as if nothing had happened.")]


@app.command(
    epilog="Examples: [bold]vitlab train digits --out runs/digits[/bold], "
    "[bold]vitlab train B/16-imagenet data=imagenet:/data/imagenet --out runs/b16[/bold], "
    "[bold]vitlab train --out runs/digits --resume[/bold], "
    "[bold]torchrun --nproc-per-node 8 --no-python vitlab train L/16-i21k-90 data=SHARDS shard=fsdp[/bold]",
)
def train(
    recipe: Annotated[str | None, typer.Argument(help="A recipe's name; `vitlab recipes` lists them.")] = None,
    settings: RunSettings = None,
    out: Out = Path("run"),
    resume: Resume = False,
) -> None:
    """Train a model by a recipe: from scratch, from weights (weights=FILE), or by masked patches.

    Ctrl-C saves first. When it ends, the folder is a model that every other verb takes.
    """
    from vitlab.recipes import find, ready
    from vitlab.training.recipe import override
    from vitlab.training.start import stored_recipe

    pairs = settings or []
    if recipe is None or "=" in recipe:  # the folder knows its recipe
        pairs = [recipe, *pairs] if recipe else pairs
        stored = stored_recipe(out) if resume else None
        if stored is None:
            raise UserError("name a recipe, as in `vitlab train digits`; `vitlab recipes` lists them")
        run_recipe(override(stored, pairs), out, resume)
    else:
        run_recipe(ready(recipe, override(find(recipe).recipe, pairs)), out, resume)


@app.command(
    epilog="Examples: [bold]vitlab finetune photos/ --from google/vit-base-patch16-224[/bold], "
    "[bold]vitlab finetune oxford-pets --from weights.npz epochs=3 lr=0.003 --out runs/pets[/bold]",
)
def finetune(
    data: Annotated[str, typer.Argument(help="A folder of class folders, or any other source of images.")],
    settings: RunSettings = None,
    weights: Annotated[str | None, typer.Option("--from", help="Weights to start from; none: from scratch.")] = None,
    out: Out = Path("run"),
    resume: Resume = False,
) -> None:
    """Teach a trained model your classes. What you do not set is chosen to fit the data and this machine."""
    from vitlab.training.advise import finetune_recipe
    from vitlab.training.start import stored_recipe

    stored = stored_recipe(out) if resume else None
    if stored is not None:
        from vitlab.training.recipe import override

        run_recipe(override(stored, settings or []), out, resume)
        return
    advice = finetune_recipe(data, weights, settings or [])
    for line in advice.lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    for line in advice.warnings:
        console.print(f"[yellow]warning:[/] {escape(line)}", highlight=False, soft_wrap=True)
    run_recipe(advice.recipe, out, resume)


def run_recipe(recipe: "Recipe", out: Path, resume: bool) -> None:
    """Train, and say how it ended."""
    from vitlab.training.loop import train
    from vitlab.training.progress import duration

    outcome = train(recipe, out, resume=resume, console=console)
    shown = [f"{key} {value:.2%}" if "acc" in key else f"{key} {value:.4f}" for key, value in outcome.report.items()]
    said = ", ".join(shown)
    line = f"test: {said}; {duration(outcome.seconds)}; the model is in {out}"
    console.print(line, highlight=False, markup=False, soft_wrap=True)


@app.command(epilog="Examples: [bold]vitlab recipes[/bold], [bold]vitlab recipes digits[/bold]")
def recipes(
    name: Annotated[str | None, typer.Argument(help="One recipe, with all its settings.")] = None,
) -> None:
    """List the recipes with what they cost: the paper's tables, AugReg, and runs for one machine."""
    from vitlab.recipes import RECIPES, command, find, length, operations, run_flops

    if name is not None:
        entry = find(name)
        table = Table(show_header=False, title=f"{name}: {entry.about}")
        rows = {"command": command(name), "cost": operations(run_flops(entry.recipe)), **settings_of(entry.recipe)}
        rows |= {"LR searched": entry.searched, "time": entry.time, "accuracy to expect": entry.expect}
        for key, value in rows.items():
            if value not in (None, "", ()):
                table.add_row(key, str(value))
        console.print(table)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("recipe", "model", "data", "length", "LR", "decay", "exaFLOPs"):
        table.add_column(heading, no_wrap=True)
    for name, entry in RECIPES.items():
        r = entry.recipe
        cost = f"{run_flops(r) / 1e18:.3g}" if run_flops(r) < 1e21 else f"{run_flops(r) / 1e18:,.0f}"
        table.add_row(name, r.model, r.data.rpartition("/")[2], length(r), f"{r.lr:g}", r.decay, cost)
    console.print(table)
    console.print("The cost is that of the whole run. `vitlab recipes NAME` shows one with all its settings.")


def settings_of(recipe: "Recipe") -> dict[str, object]:
    """A recipe's settings and those of its augmentation, as `key=value` would set them."""
    from vitlab.config import to_json

    said = to_json(recipe)
    return {**said, **said.pop("augment"), "augment": None}


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

    from vitlab.config import Size, parse_settings
    from vitlab.weights.convert import convert
    from vitlab.weights.reading import Traits

    hints = {key: hint for key, hint in get_type_hints(Traits).items() if key != "preprocess"} | {"image_size": Size}
    convert(source, target, to, format=format, **parse_settings(settings or [], hints))
    console.print(f"{target} is written", highlight=False, markup=False)


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
