"""`vitlab bench`: the speed of a recipe on this machine; `vitlab bench compare`: of models beside other packages'."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import Device, JsonFile, RecipeSettings, check_json_file, print_pairs
from vitlab.errors import UserError
from vitlab.files import write_text
from vitlab.terminal import progress

if TYPE_CHECKING:
    from vitlab.bench.cases import Axis
    from vitlab.bench.compare import Outcome

PEERS = ("timm", "transformers", "torchvision")


@verb("vitlab bench digits", "vitlab bench B/16-imagenet 'data=shards/train-{000..099}.tar' batch=512")
def bench(
    recipe: Annotated[str, Argument(help="A recipe's name; `vitlab recipes` lists them.")],
    settings: RecipeSettings = None,
    seconds: Annotated[float, Option(help="Seconds to measure each of the three speeds.")] = 10,
) -> None:
    """Measure how fast a recipe trains on this machine, and whether the data loader or the model limits it."""
    check_seconds(seconds)
    from vitlab.bench.recipe import bench as measure
    from vitlab.training.recipe import override
    from vitlab.training.recipes import find

    with console.status("measuring: loader and step together, loader alone, step alone"):
        result = measure(override(find(recipe).recipe, settings or []), seconds)
    used = "" if result.used is None else f", {result.used:.0%} of the device's peak"
    rows = [
        ("the loader alone", f"{result.loader:,.0f}"),
        ("the training step alone, on data in memory", f"{result.step:,.0f}{used}"),
        ("training: both together", f"{result.both:,.0f}"),
    ]
    if result.memory is not None:
        rows.append(("peak memory of the device", f"{result.memory / 1e9:.1f} GB, {result.micro} images at a time"))
    print_pairs(rows, title=f"{recipe}, images per second")
    console.print(result.verdict(), soft_wrap=True)


@verb(
    "vitlab bench compare Ti/16 --what infer",
    "vitlab bench compare B/16 L/16 --json speeds.json --plot speeds.png",
    "vitlab bench compare B/16 --against timm --what infer --grow batch,size,depth",
    name="bench compare",
)
def compare(
    models: Annotated[list[str], Argument(metavar="MODEL...", help="Names of models, such as B/16.")],
    against: Annotated[str, Option(help="Packages to compare with, of those that are installed.")] = ",".join(PEERS),
    what: Annotated[str, Option(help="Any of train, infer and latency, of one image.")] = "train,infer,latency",
    mode: Annotated[
        str | None, Option(help="Any of eager and compiled; by default both on a GPU, eager elsewhere.")
    ] = None,
    grow: Annotated[str | None, Option(help="How speed changes along any of batch, size and depth.")] = None,
    batch: Annotated[int | None, Option(min=1, help="Images per batch; by default suits model and device.")] = None,
    image_size: Annotated[int, Option(min=1, help="Side of the image in pixels.")] = 224,
    precision: Annotated[str, Option(help="float32, bfloat16, or auto: bfloat16 where the GPU has it.")] = "auto",
    rounds: Annotated[int, Option(min=1, help="Turns of each contestant.")] = 10,
    seconds: Annotated[float, Option(help="Seconds of a turn, about.")] = 0.5,
    device: Device = "auto",
    json_file: JsonFile = None,
    plot: Annotated[Path | None, Option(help="Draw the speeds to this PNG file.", show_default=False)] = None,
) -> None:
    """Measure the same models of vitlab, timm, transformers and torchvision side by side on this machine.

    All run in one process and take turns, with the same batch, precision and optimizer. Speeds are medians of the
    rounds; "of matmul" is the share of what this machine reaches in large matrix products, which take turns too.
    """
    from vitlab.bench.cases import AXES, MODES, WHATS, pick, plan

    check_seconds(seconds)
    check_json_file(json_file)
    check_plot_file(plot)
    whats, axes = pick(what, "--what", WHATS), [] if grow is None else pick(grow, "--grow", AXES)
    modes, peers = [] if mode is None else pick(mode, "--mode", MODES), pick(against, "--against", PEERS)
    from vitlab.bench.compare import count_parts, describe_machine, make_terms, measure_case

    terms = make_terms(device, precision, peers, rounds, seconds)
    gpu = terms.device.type == "cuda"
    modes = modes or list(MODES if gpu else MODES[:1])
    groups = plan(models, whats, modes, axes, batch=batch, image_size=image_size, gpu=gpu)
    machine = describe_machine(terms)
    words = "{device}, {precision}, {threads} CPU thread(s), torch {torch}"
    console.print(words.format(**machine), soft_wrap=True)
    done = []
    for group in groups:
        outcomes = []
        for case in group.cases:
            with progress(case.title, count_parts(case, terms)) as advance:
                outcomes.append(measure_case(case, terms, advance))
        done.append((outcomes, group.axis))
        print_outcomes(outcomes, group.axis)
        write_results(done, machine, json_file, plot)  # after each group: a long comparison may be interrupted
    for path in (json_file, plot):
        if path is not None:
            console.print(f"written: {path}", soft_wrap=True)


def check_seconds(seconds: float) -> None:
    if not 0 < seconds < float("inf"):
        raise UserError(f"--seconds must be positive, not {seconds:g}")


def check_plot_file(path: Path | None) -> None:
    """Raise before the work rather than after it if `--plot` cannot be drawn."""
    if path is None:
        return
    from vitlab.plots.style import drawing

    if path.suffix != ".png" or not path.absolute().parent.is_dir():
        raise UserError(f"--plot {path} cannot be written: name a file that ends in .png, in a folder that exists")
    with drawing():  # raises without matplotlib
        pass


def print_outcomes(outcomes: "list[Outcome]", axis: "Axis | None") -> None:
    from vitlab.bench.output import case_table, growth_table

    console.print(case_table(outcomes[0]) if axis is None else growth_table(outcomes, axis))
    for line in dict.fromkeys(line for outcome in outcomes for line in outcome.left_out):
        console.remark("left out", line)


def write_results(
    done: "list[tuple[list[Outcome], Axis | None]]", machine: dict[str, Any], json_file: Path | None, plot: Path | None
) -> None:
    """Write all that was measured until now."""
    from vitlab.bench.output import outcome_json, panel

    if json_file is not None:
        results = [outcome_json(outcome, axis) for outcomes, axis in done for outcome in outcomes]
        write_text(json_file, json.dumps({"machine": machine, "results": results}, indent=2) + "\n")
    if plot is not None:
        from vitlab.plots.speed import speed_figure
        from vitlab.plots.style import write

        write(speed_figure([panel(*group) for group in done]), plot)
