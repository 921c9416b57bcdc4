"""Measuring what a model's features know: few-shot and probes."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from vitlab.cli.app import app, console
from vitlab.errors import UserError
from vitlab.signals import stoppable

if TYPE_CHECKING:
    from vitlab.data.source import ImageSource
    from vitlab.evaluation.extract import Features as Features_
    from vitlab.evaluation.fewshot import FewShot
    from vitlab.evaluation.neighbors import Neighbors
    from vitlab.evaluation.probe import Probe

RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run folder, a file of weights or a hub id.")]
DataName = Annotated[str, typer.Argument(metavar="DATA", help="A folder of class folders, or any other set of images.")]
Keep = Annotated[
    Path | None,
    typer.Option(
        help="Where finished features stay, so that a run that was stopped goes on and the next one need not compute "
        "them; by default in RUN/features where RUN is a folder, else nowhere.",
        show_default=False,
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write the numbers to this file too.", show_default=False)]
Batch = Annotated[int | None, typer.Option(min=1, help="Images at a time; by default what suits the device.")]
Workers = Annotated[
    int | None, typer.Option(min=0, help="Processes that read images; by default what suits the machine.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]


@app.command(
    epilog="Examples: [bold]vitlab fewshot runs/b16 oxford-pets[/bold], "
    "[bold]vitlab fewshot google/vit-base-patch16-224 photos/ --shots 1,5 --seeds 5 --json fewshot.json[/bold], "
    "[bold]vitlab fewshot runs/b16 oxford-pets --shots 10,all --l2 2^6,2^10,2^14[/bold]",
)
def fewshot(
    run: RunName,
    data: DataName,
    shots: Annotated[str, typer.Option(help="Images of each class to learn from; `all` is every one.")] = "1,5,10,25",
    l2: Annotated[str, typer.Option(help="Penalties on the weights, 1024 or 2^10; each gets a row.")] = "2^10",
    seeds: Annotated[int, typer.Option(min=1, help="Draws of the images to learn from.")] = 3,
    keep: Keep = None,
    json_file: Json = None,
    batch: Batch = None,
    workers: Workers = None,
    device: Device = "auto",
) -> None:
    """How well a few labelled images teach a linear classifier on the model's frozen features.

    Features are computed once; each draw is then solved in closed form, so nothing is trained and nothing tuned.
    """
    from vitlab.evaluation.fewshot import check, few_shot
    from vitlab.terminal import progress

    numbers = [None if word == "all" else count(word, "--shots") for word in words(shots, "--shots")]
    penalties = [amount(word, "--l2") for word in words(l2, "--l2")]
    check_writable(json_file)
    features = Features(run, data, keep, batch, workers, device)
    classes = features.data.classes
    notes = check(features.data.train.labels, features.data.test.labels, numbers, classes)
    features.introduce()
    with stopping(features.keep):
        train, test = features.of(features.data.train, "train"), features.of(features.data.test, "test")
        results = []
        with progress("solving", len(numbers) * len(penalties)) as advance:
            for result in few_shot(train, test, shots=numbers, l2=penalties, seeds=seeds, classes=classes):
                results.append(result)
                advance(1)
    console.print(shots_table(results, seeds))
    say(notes)
    write_json(json_file, features.about(train, test) | {"results": [shots_json(r) for r in results], "notes": notes})


def shots_table(results: Sequence["FewShot"], seeds: int) -> Table:
    drawn = any(r.shots is not None for r in results)
    draws = "" if not drawn else f", mean ± deviation over {seeds} draws" if seeds > 1 else ", one draw"
    table = Table(caption=f"Accuracy on {results[0].images:,} test images{draws}.")
    for heading in ("images per class", "l2", "accuracy"):
        table.add_column(heading, justify="right")
    for r in results:
        spread = "" if r.std is None else f" ± {r.std:.2%}"
        table.add_row("all" if r.shots is None else f"{r.shots}", f"{r.l2:g}", f"{r.mean:.2%}{spread}")
    return table


def shots_json(r: "FewShot") -> dict[str, Any]:
    said = {"shots": r.shots or "all", "l2": r.l2, "accuracy": r.mean, "std": r.std}
    return said | {"accuracies": r.accuracies, "hits": r.hits, "images": r.images}


@app.command(
    epilog="Examples: [bold]vitlab probe runs/b16 oxford-pets[/bold], "
    "[bold]vitlab probe weights.npz photos/ --keep features/ --json probe.json[/bold], "
    "[bold]vitlab probe runs/b16 cifar100 --l2 0.0001,0.001,0.01 --k 5,20,200[/bold]",
)
def probe(
    run: RunName,
    data: DataName,
    l2: Annotated[
        str, typer.Option(help="Penalties to choose from, on images set aside; one is taken as it is.")
    ] = "1e-5,1e-4,1e-3,1e-2,1e-1",
    k: Annotated[str, typer.Option("--k", help="Numbers of neighbors; each gets a row.")] = "10,20",
    temperature: Annotated[float, typer.Option(help="Of the neighbors' votes: small trusts the nearest.")] = 0.07,
    keep: Keep = None,
    json_file: Json = None,
    batch: Batch = None,
    workers: Workers = None,
    device: Device = "auto",
) -> None:
    """What the model's frozen features know: a linear probe, and k nearest neighbors.

    The penalty is chosen on validation images, or on a fifth of each class; the final fit is to all training images.
    """
    from vitlab.device import pick_device
    from vitlab.evaluation import fewshot, neighbors
    from vitlab.evaluation.probe import linear_probe

    penalties = [amount(word, "--l2") for word in words(l2, "--l2")]
    numbers = [count(word, "--k") for word in words(k, "--k")]
    check_writable(json_file)
    features = Features(run, data, keep, batch, workers, device)
    d = features.data
    neighbors.check(numbers, temperature, len(d.train))
    notes = fewshot.check(d.train.labels, d.test.labels, classes=d.classes)
    own = d.validation if len(penalties) > 1 else None
    if own is not None:
        fewshot.check(d.train.labels, own.labels, classes=d.classes, split="validation")
    place = pick_device(device)
    place = pick_device("cpu") if place.type == "mps" else place  # which has no float64
    features.introduce()
    with stopping(features.keep):
        train, test = features.of(d.train, "train"), features.of(d.test, "test")
        validation = None if own is None else features.of(own, "validation")
        linear = linear_probe(train, test, validation, l2=penalties, device=place)
        near = list(neighbors.knn(train, test, k=numbers, temperature=temperature, device=place))
    if linear.tried:
        console.print(sweep_table(linear, "a fifth of each class" if own is None else "the validation images"))
    console.print(probe_table(linear, near))
    notes += probe_notes(linear)
    say(notes)
    found = {"linear": linear_json(linear), "neighbors": [vars(r) | {"accuracy": r.accuracy} for r in near]}
    write_json(json_file, features.about(train, test) | found | {"temperature": temperature, "notes": notes})


def sweep_table(linear: "Probe", judge: str) -> Table:
    table = Table(caption=f"The penalty, chosen on {judge}: {linear.tried[0].images:,} images.")
    for heading in ("l2", "accuracy", "right"):
        table.add_column(heading, justify="right")
    for tried in linear.tried:
        table.add_row(f"{tried.l2:g}", f"{tried.hits / tried.images:.2%}", f"{tried.hits:,}")
    return table


def probe_table(linear: "Probe", near: Sequence["Neighbors"]) -> Table:
    table = Table("probe", "setting", caption=f"On {linear.images:,} test images.")
    for heading in ("accuracy", "right"):
        table.add_column(heading, justify="right")
    table.add_row("linear", f"l2 {linear.linear.l2:g}", f"{linear.accuracy:.2%}", f"{linear.hits:,}")
    for r in near:
        table.add_row("nearest neighbors", f"k {r.k}", f"{r.accuracy:.2%}", f"{r.hits:,}")
    return table


def probe_notes(probe: "Probe") -> list[str]:
    notes = []
    linear, tried = probe.linear, [each.l2 for each in probe.tried]
    if not linear.converged:
        notes.append(
            f"the probe did not converge in {linear.steps:,} steps: its slope is {linear.slope:.1e}; "
            "a larger --l2 converges sooner"
        )
    loose = [f"{each.l2:g}" for each in probe.tried if not each.converged]
    if loose:
        notes.append(f"while choosing, l2 {', '.join(loose)} did not converge; their numbers are close, not exact")
    if len(tried) > 1 and linear.l2 in (min(tried), max(tried)):
        side = "smaller" if linear.l2 == min(tried) else "larger"
        notes.append(f"the best l2, {linear.l2:g}, is the last of the list; a {side} one may be better")
    return notes


def linear_json(probe: "Probe") -> dict[str, Any]:
    linear = probe.linear
    said = {"l2": linear.l2, "accuracy": probe.accuracy, "hits": probe.hits, "images": probe.images}
    said |= {"steps": linear.steps, "slope": linear.slope, "converged": linear.converged}
    return said | {"tried": [vars(tried) for tried in probe.tried]}


# ---- what both do


class Features:
    """A model and a set, and the model's features of the set's splits, kept where the user wants them."""

    def __init__(
        self, run: str, data: str, keep: Path | None, batch: int | None, workers: int | None, device: str
    ) -> None:
        from vitlab.data.open import open_data
        from vitlab.weights import load

        self.run, self.name, self.model, self.data = run, data, load(run), open_data(data)
        self.batch, self.workers, self.device = batch, workers, device
        folder = Path(run).expanduser()
        own = folder / "features" if folder.is_dir() and os.access(folder, os.W_OK) else None
        self.keep = own if keep is None else keep

    def introduce(self) -> None:
        d, where = self.data, "not kept (--keep FOLDER keeps them)" if self.keep is None else f"kept in {self.keep}"
        line = f"{d.name}: {len(d.train):,} training and {len(d.test):,} test images, {d.note}; features are {where}"
        console.print(line, soft_wrap=True)

    def of(self, source: "ImageSource", split: str) -> "Features_":
        from vitlab.evaluation.extract import extract

        return extract(
            self.model,
            source,
            batch=self.batch,
            workers=self.workers,
            device=self.device,
            keep=self.keep,
            title=f"{split} features",
        )

    def about(self, train: "Features_", test: "Features_") -> dict[str, Any]:
        images = {"train": len(train.labels), "test": len(test.labels)}
        return {"run": self.run, "data": self.name, "images": images, "width": train.values.shape[1]}


@contextmanager
def stopping(keep: Path | None) -> Iterator[None]:
    """Ctrl-C and SIGTERM end with a sentence that says what is left."""
    left = "nothing was kept; --keep FOLDER would" if keep is None else f"the same command goes on from {keep}"
    with stoppable(f"stopped; {left}"):
        yield


def words(text: str, option: str) -> list[str]:
    found = [word.strip() for word in text.split(",")]
    if "" in found:
        raise UserError(f"{option} must be a list such as 1,5,10, not '{text}'")
    return list(dict.fromkeys(found))  # each once


def count(word: str, option: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", word) or int(word) < 1:
        raise UserError(f"{option} must be whole numbers from 1 on, as in 1,5,10, not '{word}'")
    return int(word)


def amount(word: str, option: str) -> float:
    """A positive number; 2^10 is one too."""
    base, power, exponent = word.partition("^")
    try:
        value = float(base) ** float(exponent) if power else float(base)
    except (ValueError, OverflowError, ZeroDivisionError):
        value = 0.0
    if isinstance(value, complex) or not 0 < value < float("inf"):
        raise UserError(f"{option} must be positive numbers such as 1024, 2^10 or 1e-3, not '{word}'")
    return value


def say(notes: Sequence[str]) -> None:
    for note in notes:
        console.remark("note", note)


def check_writable(path: Path | None) -> None:
    """Before the work rather than after it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UserError(f"--json {path} cannot be written: name a file in a folder that exists")


def write_json(path: Path | None, said: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        path.write_text(json.dumps(said, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    console.print(f"the numbers are in {path}", soft_wrap=True)
