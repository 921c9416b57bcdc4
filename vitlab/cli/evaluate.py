"""`vitlab evaluate`: a model's scores on a data set."""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Option

from vitlab.cli.app import console, verb
from vitlab.cli.options import (
    Batch,
    ByPosition,
    Calibrate,
    Data,
    Device,
    JsonFile,
    Precision,
    RunOrGuest,
    Workers,
    check_json_file,
    describe_stop,
    numbers,
    pick_scales,
    print_guest,
    print_pairs,
)
from vitlab.errors import UserError
from vitlab.files import check_folder
from vitlab.signals import stoppable
from vitlab.terminal import printable

if TYPE_CHECKING:
    from vitlab.evaluation.multi_result import MultiEvaluation
    from vitlab.evaluation.real import RealScore
    from vitlab.evaluation.result import Evaluation
    from vitlab.evaluation.robustness import Robustness
    from vitlab.evaluation.scores import Rate

SHOWN = 10  # classes and pairs of classes in the terminal; files have all


@verb(
    "vitlab evaluate runs/digits digits",
    "vitlab evaluate runs/pets photos/ --split all --out scores",
    "vitlab evaluate vit.safetensors imagenet:/data/imagenet --real real.json",
    "vitlab evaluate vit.safetensors objectnet/ --split all --mapping objectnet_to_imagenet.json",
    "vitlab evaluate runs/pets photos/ --corrupt fog:3,jpeg",
)
def evaluate(
    run: RunOrGuest,
    data: Data,
    split: Annotated[str, Option(help="test, validation or train; all: every image of a set without splits.")] = "test",
    real: Annotated[Path | None, Option(help="ImageNet's ReaL labels, real.json: score by these too.")] = None,
    labels: Annotated[
        Path | None, Option(help="Names of the model's classes, one per line, in order, instead of its own.")
    ] = None,
    by_position: ByPosition = False,
    mapping: Annotated[
        Path | None, Option(help="A JSON file: for each class of the set, the model's class or classes that count.")
    ] = None,
    restrict: Annotated[
        bool, Option("--restrict", help="Choose among the classes of the set alone, as ImageNet-A and -R do.")
    ] = False,
    corrupt: Annotated[
        str | None, Option(help="Score the images under corruptions too: NAME:SEVERITY,... or NAME or all.")
    ] = None,
    seed: Annotated[int, Option(min=0, help="Of the random parts of corruptions.")] = 0,
    out: Annotated[Path | None, Option(help="A folder for tables, figures and all predictions.")] = None,
    json: JsonFile = None,
    keep: Annotated[
        Path | None, Option(help="A folder for computed class scores, to continue an interrupted command.")
    ] = None,
    batch: Batch = None,
    workers: Workers = None,
    device: Device = "auto",
    precision: Precision = "auto",
    calibrate: Calibrate = None,
) -> None:
    """Test a model: top-1 and top-5 accuracy, accuracy by class, confused classes, and calibration.

    A multi-label model: mean average precision and F1, of all labels and by class, at the model's thresholds.

    Every image counts once; broken ones are left out and counted. Classes are matched by name, ImageNet's also by
    synset or number. In brackets: 95 % intervals.
    """
    from vitlab.evaluation.classes import read_names
    from vitlab.evaluation.corrupted import parse_corruptions
    from vitlab.evaluation.evaluate import evaluate, evaluate_sets, open_split
    from vitlab.evaluation.mapping import read_mapping
    from vitlab.evaluation.real import read_real
    from vitlab.evaluation.robustness import evaluate_corrupted, write_sheet
    from vitlab.models.guest import Guest
    from vitlab.training.seen import unseen
    from vitlab.weights.guests import open_measured

    check_json_file(json)
    if out is not None:
        check_folder(out)
    corruptions = [] if corrupt is None else parse_corruptions(corrupt, seed)
    mapped = None if mapping is None else read_mapping(mapping)
    model = open_measured(run)
    print_guest(model)
    names = None if labels is None else read_names(labels, model.config.classes)
    lists = None if real is None else read_real(real)
    holdout, trained = find_holdout(run, data)
    left = partial(unseen, Path(run).expanduser())
    source, note = open_split(data, split, holdout, trained=trained, unseen=left)
    console.print(f"{len(source):,} images of {data}, {split}: {note}", soft_wrap=True)
    if trained and split in ("train", "all"):
        console.remark("note", "the model was trained on most of these images")
    scales = pick_scales(precision, calibrate, run, device, model)
    how: dict[str, Any] = {"batch": batch, "workers": workers, "device": device, "keep": keep, "scales": scales}
    result: Evaluation | MultiEvaluation
    about: dict[str, Any] = {"model": run, "data": data, "split": split, "note": note}
    about |= {"guest": model.title} if isinstance(model, Guest) else {}
    about |= {} if mapping is None else {"mapping": str(mapping)}
    about |= {"restricted": True} if restrict else {}
    robust: Robustness | None = None
    with stoppable(describe_stop(keep)):
        if model.card.thresholds is not None or source.label_sets is not None:
            given = {"--real": lists, "--mapping": mapped, "--restrict": restrict or None, "--corrupt": corrupt}
            for option, value in given.items():
                if value is not None:
                    why = "is about models of one class per image, and this one or its set is multi-label"
                    raise UserError(f"{option} {why}; leave it")
            result = evaluate_sets(model, source, labels=names, by_position=by_position, **how)
            print_set_scores(result)
        else:
            how |= {"labels": names, "by_position": by_position, "mapping": mapped, "restricted": restrict}
            result = evaluate(model, source, real=lists, **how)
            print_scores(result)
            if corruptions:
                robust = evaluate_corrupted(model, source, corruptions, **how)
                print_robustness(robust, result.top1.value)
                about |= {"corruptions": robust.to_json()}
    if json is not None:
        result.write_json(json, about)
        console.print(f"scores: {json}", soft_wrap=True)
    if out is not None:
        result.write_results(out, about)
        if robust is not None:
            robust.write_csv(out / "corruptions.csv")
            write_sheet(out / "corruptions.png", model, source, corruptions)
        console.print(f"tables, figures and predictions: {out}", soft_wrap=True)


def find_holdout(run: str, data: str) -> tuple[float, bool]:
    """The share of `data` that a run held out for testing, and whether the run was trained on the rest of it."""
    from vitlab.training.recipe import Recipe
    from vitlab.training.setup import read_recipe

    recipe = read_recipe(Path(run).expanduser())
    trained = recipe is not None and full_name(recipe.data) == full_name(data)
    return (recipe.holdout if recipe is not None and trained else Recipe.holdout), trained


def full_name(data: str) -> str:
    """The name of a data set in one spelling, however its path is written: photos/, ./photos, ~/photos."""
    from vitlab.training.trust import BUILT_IN

    if data in BUILT_IN:  # and a folder of that name is another set
        return data
    kind, colon, path = data.rstrip("/").rpartition(":")  # as in imagenet:photos
    place = os.path.expanduser(path)
    return kind + colon + (os.path.realpath(place) if os.path.exists(os.path.dirname(place) or place) else path)


def print_scores(result: "Evaluation") -> None:
    console.print(f"classes are matched {result.note}", soft_wrap=True)
    rates = {"top-1": result.top1, "top-5": result.top5, "calibration error": result.calibration_error}
    rows = [("images", f"{len(result.labels):,}"), *broken_rows(result.broken)]
    rows += [(name, percent_text(rate)) for name, rate in rates.items() if rate is not None]
    if result.error_before is not None:
        before = f"{result.error_before:.2%}, with temperature {result.temperature:.3g} as above"
        rows.append(("before calibration", before))
    if (refused := result.refusals()) is not None:
        share, promised = refused["share"], refused["promised"]
        words = (
            f"{share['value']:.2%}  ({100 * share['low']:.2f} to {100 * share['high']:.2f}), {promised:.1%} promised"
        )
        rows.append(("none of these", words))
    if result.real is not None:
        rows.append(("ReaL", percent_text(result.real.accuracy) + f" of {result.real.images:,} images"))
    print_pairs(rows, box=None, pad_edge=False)
    if result.real is not None:
        print_real(result.real)
    print_classes(result)
    print_confused(result)


def print_set_scores(result: "MultiEvaluation") -> None:
    """Print the scores of a multi-label model."""
    console.print(f"classes are matched {result.note}", soft_wrap=True)
    scores, names = result.overall(), {"mAP": "map", "F1, all labels": "f1_micro", "F1, mean of classes": "f1_macro"}
    rows = [("images", f"{len(result.files):,}"), *broken_rows(result.broken)]
    rows += [(name, f"{scores[key]:.2%}") for name, key in names.items()]
    print_pairs([*rows, ("images without mistakes", f"{scores['exact']:.2%}")], box=None, pad_edge=False)
    table_rows = result.class_table()
    title = f"the {SHOWN} worst of {len(table_rows)} classes" if len(table_rows) > SHOWN else "classes, worst first"
    columns = numbers("images", "average precision", "F1", "precision", "recall", "threshold")
    table = Table("class", *columns, title=title, title_justify="left")
    for row in table_rows[:SHOWN]:
        keys = ("average_precision", "f1", "precision", "recall", "threshold")
        shares = ["-" if row[key] is None else f"{row[key]:.1%}" for key in keys]
        table.add_row(printable(row["class"]), f"{row['images']}", *shares)
    console.print(table)


def broken_rows(broken: tuple[str, ...]) -> list[tuple[str, str]]:
    return [("left out, broken", f"{len(broken):,}")] if broken else []


def percent_text(rate: "Rate") -> str:
    return f"{rate.value:.2%}  ({100 * rate.low:.2f} to {100 * rate.high:.2f})"


def print_robustness(robust: "Robustness", clean: float) -> None:
    """Print top-1 accuracy by corruption and severity, and the means."""
    rows = robust.by_name
    shown = sorted({how.severity for how in robust.corruptions})
    title = f"top-1 accuracy under corruptions, by severity; without any {clean:.2%}"
    columns = numbers(*map(str, shown), "mean", no_wrap=True)
    table = Table("corruption", *columns, title=title, title_justify="left")
    for name, row in rows.items():
        cells = [f"{row[level]:.1%}" if level in row else "-" for level in shown]
        table.add_row(name, *cells, f"{sum(row.values()) / len(row):.1%}")
    table.add_section()
    table.add_row(f"mean of {len(rows)}", *[""] * len(shown), f"{robust.mean:.2%}", style="bold")
    console.print(table)


def print_real(real: "RealScore") -> None:
    own = real.own / real.images
    line = f"ReaL: {real.skipped:,} images have no label and are skipped; the set's own labels score {own:.2%}"
    console.print(line, soft_wrap=True)
    if own < 0.5:
        line = "most images' own labels are not in their ReaL lists: these are probably not ImageNet's"
        console.remark("warning", f"{line} validation images in its order of classes")


def print_classes(result: "Evaluation") -> None:
    rows = result.class_table()
    title = f"the {SHOWN} worst of {len(rows)} classes" if len(rows) > SHOWN else "classes, worst first"
    columns = numbers("images", "correct", "recall", "95 %", "precision")
    table = Table("class", *columns, title=title, title_justify="left")
    for row in rows[:SHOWN]:
        span = "-" if row["recall"] is None else f"{100 * row['recall_low']:.0f} to {100 * row['recall_high']:.0f}"
        recall, precision = ("-" if row[key] is None else f"{row[key]:.1%}" for key in ("recall", "precision"))
        table.add_row(printable(row["class"]), f"{row['images']}", f"{row['correct']}", recall, span, precision)
    console.print(table)
    if empty := sum(row["images"] == 0 for row in rows):
        console.print(f"{empty} of the model's classes have no image here")


def print_confused(result: "Evaluation") -> None:
    if not result.confused:
        return
    table = Table("true class", "predicted", *numbers("images"), title="most confused", title_justify="left")
    for label, predicted, images in result.confused[:SHOWN]:
        table.add_row(printable(label), printable(predicted), f"{images}")
    console.print(table)
