"""`vitlab probe`: a linear probe and nearest neighbors on frozen features."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Option

from vitlab.cli import options
from vitlab.cli.app import console, verb
from vitlab.signals import stoppable

if TYPE_CHECKING:
    from vitlab.evaluation.neighbors import Neighbors
    from vitlab.evaluation.probe import Probe


@verb(
    "vitlab probe runs/b16 oxford-pets",
    "vitlab probe weights.npz photos/ --keep features/ --json probe.json",
    "vitlab probe runs/b16 cifar100 --l2 0.0001,0.001,0.01 --k 5,20,200",
)
def probe(
    run: options.RunOrGuest,
    data: options.Data,
    l2: Annotated[
        str, Option(help="Penalties to choose from on validation images; a single one is used as it is.")
    ] = "1e-5,1e-4,1e-3,1e-2,1e-1",
    k: Annotated[str, Option("--k", help="Numbers of neighbors; each gets a row.")] = "10,20",
    temperature: Annotated[
        float, Option(help="Of the neighbors' votes: a small one favors the nearest neighbors.")
    ] = 0.07,
    resize: options.Resize = None,
    keep: options.KeepFeatures = None,
    json_file: options.JsonFile = None,
    batch: options.Batch = None,
    workers: options.Workers = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    calibrate: options.Calibrate = None,
) -> None:
    """Score the model's frozen features: a linear probe, and k nearest neighbors.

    The penalty is chosen on validation images, or on a fifth of each class; the final fit is to all training images.
    """
    from vitlab.device import pick_device
    from vitlab.evaluation import fewshot, neighbors
    from vitlab.evaluation.features import FeatureSet
    from vitlab.evaluation.probe import linear_probe

    penalties = options.parse_list(l2, "--l2", options.parse_amount)
    counts = options.parse_list(k, "--k", options.parse_count)
    options.check_json_file(json_file)
    features = FeatureSet(run, data, keep=keep, batch=batch, workers=workers, device=device, resize=resize)
    d = features.data
    neighbors.check_neighbors(counts, temperature, len(d.train))
    notes = fewshot.check_shots(d.train.labels, d.test.labels, classes=d.classes)
    own = d.validation if len(penalties) > 1 else None
    if own is not None:
        fewshot.check_shots(d.train.labels, own.labels, classes=d.classes, split="validation")
    torch_device = pick_device(device)
    torch_device = pick_device("cpu") if torch_device.type == "mps" else torch_device  # MPS has no float64
    options.print_guest(features.model)
    features.options["scales"] = options.pick_scales(precision, calibrate, run, device, features.model)
    console.print(features.describe(), soft_wrap=True)
    with stoppable(options.describe_stop(features.keep)):
        train, test = features.extract(d.train, "train"), features.extract(d.test, "test")
        validation = None if own is None else features.extract(own, "validation")
        linear = linear_probe(train, test, validation, l2=penalties, device=torch_device)
        near = list(neighbors.knn(train, test, k=counts, temperature=temperature, device=torch_device))
    if linear.tried:
        console.print(sweep_table(linear, "a fifth of each class" if own is None else "the validation images"))
    console.print(probe_table(linear, near))
    numbers = {"linear": probe_json(linear), "neighbors": [vars(r) | {"accuracy": r.accuracy} for r in near]}
    numbers = features.to_json(train, test) | numbers | {"temperature": temperature}
    options.write_numbers(notes + probe_notes(linear), json_file, numbers)


def sweep_table(linear: "Probe", images: str) -> Table:
    caption = f"The penalty, chosen on {images}: {linear.tried[0].images:,} images."
    table = Table(*options.numbers("l2", "accuracy", "correct"), caption=caption)
    for tried in linear.tried:
        table.add_row(f"{tried.l2:g}", f"{tried.hits / tried.images:.2%}", f"{tried.hits:,}")
    return table


def probe_table(linear: "Probe", near: Sequence["Neighbors"]) -> Table:
    columns = options.numbers("accuracy", "correct")
    table = Table("probe", "setting", *columns, caption=f"On {linear.images:,} test images.")
    table.add_row("linear", f"l2 {linear.linear.l2:g}", f"{linear.accuracy:.2%}", f"{linear.hits:,}")
    for r in near:
        table.add_row("nearest neighbors", f"k {r.k}", f"{r.accuracy:.2%}", f"{r.hits:,}")
    return table


def probe_notes(probe: "Probe") -> list[str]:
    notes = []
    linear, tried = probe.linear, [each.l2 for each in probe.tried]
    if not linear.converged:
        state = f"the probe did not converge in {linear.steps:,} steps: its slope is {linear.slope:.1e}"
        notes.append(f"{state}; a larger --l2 converges sooner")
    loose = [f"{each.l2:g}" for each in probe.tried if not each.converged]
    if loose:
        notes.append(f"while choosing, l2 {', '.join(loose)} did not converge; their numbers are close, not exact")
    if len(tried) > 1 and linear.l2 in (min(tried), max(tried)):
        side = "smaller" if linear.l2 == min(tried) else "larger"
        notes.append(f"the best l2, {linear.l2:g}, is the last of the list; a {side} one may be better")
    return notes


def probe_json(probe: "Probe") -> dict[str, Any]:
    linear = probe.linear
    numbers = {"l2": linear.l2, "accuracy": probe.accuracy, "hits": probe.hits, "images": probe.images}
    numbers |= {"steps": linear.steps, "slope": linear.slope, "converged": linear.converged}
    return numbers | {"tried": [vars(tried) for tried in probe.tried]}
