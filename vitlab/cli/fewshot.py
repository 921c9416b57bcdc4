"""`vitlab fewshot`: a linear classifier from a few labeled images per class, on frozen features."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Option

from vitlab.cli import options
from vitlab.cli.app import console, verb
from vitlab.signals import stoppable

if TYPE_CHECKING:
    from vitlab.evaluation.fewshot import FewShot


@verb(
    "vitlab fewshot runs/b16 oxford-pets",
    "vitlab fewshot google/vit-base-patch16-224 photos/ --shots 1,5 --seeds 5 --json fewshot.json",
    "vitlab fewshot runs/b16 oxford-pets --shots 10,all --l2 2^6,2^10,2^14",
    "vitlab fewshot vit.npz oxford-pets --resize 256  # as the authors",
    "vitlab fewshot torchvision:resnet50:resnet50-11ad3fa6.pth oxford-pets",
)
def fewshot(
    run: options.RunOrGuest,
    data: options.Data,
    shots: Annotated[str, Option(help="Training images per class; `all` is every one.")] = "1,5,10,25",
    l2: Annotated[str, Option(help="Penalties on the weights, 1024 or 2^10; each gets a row.")] = "2^10",
    seeds: Annotated[int, Option(min=1, help="Random draws of the training images.")] = 3,
    resize: options.Resize = None,
    keep: options.KeepFeatures = None,
    json_file: options.JsonFile = None,
    batch: options.Batch = None,
    workers: options.Workers = None,
    device: options.Device = "auto",
    precision: options.Precision = "auto",
    calibrate: options.Calibrate = None,
) -> None:
    """Score a linear classifier that learns from a few labeled images per class, on the model's frozen features.

    Features are computed once; each draw is then solved in closed form, so there is no training and no tuning.
    """
    from vitlab.evaluation.features import FeatureSet
    from vitlab.evaluation.fewshot import check_shots, few_shot
    from vitlab.terminal import track

    counts = options.parse_list(shots, "--shots", parse_shots)
    penalties = options.parse_list(l2, "--l2", options.parse_amount)
    options.check_json_file(json_file)
    features = FeatureSet(run, data, keep=keep, batch=batch, workers=workers, device=device, resize=resize)
    classes = features.data.classes
    notes = check_shots(features.data.train.labels, features.data.test.labels, counts, classes)
    options.print_guest(features.model)
    features.options["scales"] = options.pick_scales(precision, calibrate, run, device, features.model)
    console.print(features.describe(), soft_wrap=True)
    with stoppable(options.describe_stop(features.keep)):
        train, test = features.extract(features.data.train, "train"), features.extract(features.data.test, "test")
        solved = few_shot(train, test, shots=counts, l2=penalties, seeds=seeds, classes=classes)
        results = list(track(solved, "solving", len(counts) * len(penalties)))
    console.print(shots_table(results, seeds))
    numbers = {"results": [shots_json(result) for result in results]}
    options.write_numbers(notes, json_file, features.to_json(train, test) | numbers)


def parse_shots(word: str, option: str) -> int | None:
    return None if word == "all" else options.parse_count(word, option)


def shots_table(results: Sequence["FewShot"], seeds: int) -> Table:
    has_draws = any(r.shots is not None for r in results)
    draws = "" if not has_draws else f", mean ± deviation over {seeds} draws" if seeds > 1 else ", one draw"
    columns = options.numbers("images per class", "l2", "accuracy")
    table = Table(*columns, caption=f"Accuracy on {results[0].images:,} test images{draws}.")
    for r in results:
        spread = "" if r.std is None else f" ± {r.std:.2%}"
        table.add_row("all" if r.shots is None else f"{r.shots}", f"{r.l2:g}", f"{r.mean:.2%}{spread}")
    return table


def shots_json(r: "FewShot") -> dict[str, Any]:
    numbers = {"shots": r.shots or "all", "l2": r.l2, "accuracy": r.mean, "std": r.std}
    return numbers | {"accuracies": r.accuracies, "hits": r.hits, "images": r.images}
