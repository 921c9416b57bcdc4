"""Turn a finished run into the model in the box: fp16 weights, short class names and a model card.

    python benchmarks/make_box.py RUN TINY-IMAGENET
    vitlab evaluate box TINY-IMAGENET --json scores.json
    python benchmarks/make_box.py RUN TINY-IMAGENET --scores scores.json --row "Oxford pets at 96 px=75.2 ± 0.3 %"

The data is the run's, whose held-out images say how sure the model may be: a student of a soft teacher is more often
right than it thinks. The second time the weights are the same, and the card has the numbers. Paths in the run's files
are cut to their last part. A model above 12 MB, or one with weights that fp16 cannot hold, is refused.
"""

import argparse
import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from vitlab.data import imagenet
from vitlab.errors import UserError
from vitlab.evaluation.extract import extract
from vitlab.evaluation.temperature import Temperature, fit_temperature
from vitlab.files import sha256, write_text
from vitlab.models.vit import ViT
from vitlab.report.describe import describe_recipe
from vitlab.settings import to_pairs
from vitlab.training.recipe import Recipe, count_steps, flat
from vitlab.training.setup import StoredRun, open_recipe_data, read_run
from vitlab.training.start import describe_training
from vitlab.weights import box, load, save

MOST_BYTES = 12_000_000
FOLDERS = re.compile(r"(?<![\w.~-])(\w+:)?(~|\.{1,2})?[/\\]([^\s;,/\\]+[/\\])*")  # of a path, also after `imagenet:`
IMAGES = 64  # of noise, on which both precisions are compared

CARD = """\
# The model in the box

A small Vision Transformer that is part of vitlab: `vitlab predict photo.jpg`, `vitlab serve` and `vitlab.load("box")`
use it, and `vitlab finetune` starts from it where nothing can be downloaded.

| | |
|---|---|
{facts}

## Data and terms

Trained on {data}. Tiny-ImageNet is 100,000 photos of 200 of ImageNet's classes at 64 x 64 pixels. ImageNet's terms of
access allow non-commercial research and education only; the project cannot give more rights to weights that were
learned from it. {teacher}

## Training

{training}

Settings that differ from the defaults: `{settings}`

## Limits

- It knows these {classes} classes and no others, and answers with one of them whatever the photo shows{refusing}.
- It sees {size} pixels: small objects and fine differences, as between breeds, are lost.
- Its photos are from the web of about 2010; it is less accurate on photos unlike them, and how it treats photos of
  different people and places has not been measured.
- It is for trying things out, and for starting where there is no network. Do not decide anything about people with it.

## Classes

{names}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("data", help="the data that the run was trained on, where it is now")
    parser.add_argument("--teacher", default="", metavar="TEXT", help="what the teacher is, for the card")
    parser.add_argument("--scores", type=Path, help="what `vitlab evaluate box DATA --json` wrote")
    parser.add_argument("--row", action="append", default=[], metavar="NAME=TEXT", help="another row; repeatable")
    parser.add_argument("--out", type=Path, default=box.PACKAGED)
    given = parser.parse_args()
    scores = None if given.scores is None else json.loads(given.scores.read_text())
    rows = [tuple(row.split("=", 1)) for row in given.row]
    make_box(given.run, given.data, given.out, scores, rows, given.teacher)


def make_box(
    run: Path,
    data: str,
    out: Path,
    scores: dict[str, Any] | None = None,
    rows: Sequence[tuple[str, ...]] = (),
    teacher: str = "",
) -> None:
    """Write model.safetensors, config.json and README.md into a folder, which may hold other files."""
    model, stored = load(run), read_run(run)
    if not isinstance(model, ViT) or model.head is None or stored is None:
        raise UserError(f"{run} is not the folder of a run that trained a ViT with a head")
    before = answers(model)
    size = sum(tensor.numel() * 2 for tensor in model.state_dict().values())
    if size > MOST_BYTES:
        raise UserError(f"{run} has {size:,} bytes in fp16, more than {MOST_BYTES:,}; train a smaller model")
    largest = max(float(tensor.abs().max()) for tensor in model.state_dict().values())
    if not largest <= torch.finfo(torch.float16).max:
        raise UserError(f"{run} has a weight of {largest:g}, which fp16 cannot hold")
    known = {**(model.card.provenance or {}), "data": data, "training": describe_training(stored.recipe)}
    provenance = {key: last_part(value) for key, value in known.items()}
    stored = dataclasses.replace(stored, recipe=dataclasses.replace(stored.recipe, data=data))
    sure = fit_confidence(model, stored.recipe)
    labels = short_labels(model.labels)
    model.card = dataclasses.replace(model.card, labels=labels, provenance=provenance, temperature=sure.value)
    save(model.half(), out)
    rounded = load(out)
    assert isinstance(rounded, ViT)
    write_text(out / "README.md", make_card(rounded, stored, out, scores, rows, teacher))
    after = answers(rounded)
    same = float((before.argmax(-1) == after.argmax(-1)).double().mean())
    apart = float((before - after).abs().max())
    print(f"temperature {sure.value:.3g}: calibration error {sure.before:.2%} without, {sure.after:.2%} with it")
    print(f"{out}: {(out / box.WEIGHTS).stat().st_size:,} bytes")
    print(
        f"{IMAGES} images of noise: logits differ by {apart:.2g} at most from float32's; the same class in {same:.1%}"
    )


@torch.no_grad()
def answers(model: ViT) -> torch.Tensor:
    noise = torch.randn(IMAGES, 3, *model.config.image_size, generator=torch.Generator().manual_seed(0))
    return model(noise)


def fit_confidence(model: ViT, recipe: Recipe) -> Temperature:
    """The temperature that fits the images that the run held out."""
    held = open_recipe_data(recipe).validation
    if held is None:
        raise UserError(f"a run with validation={recipe.validation:g} held no images out; train one that does")
    found = extract(model, held, what="logits", title="held-out images")
    return fit_temperature(found.values, found.labels)


def short_labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    """ImageNet's classes by one name each; others as they are."""
    numbers = imagenet.class_numbers(labels)
    return labels if numbers is None else tuple(imagenet.short_names()[number] for number in numbers.tolist())


def last_part(text: str) -> str:
    """The text with every path in it cut to its last part; hub ids stay."""
    return FOLDERS.sub("", text.rstrip("/\\"))


def make_card(
    model: ViT,
    stored: StoredRun,
    out: Path,
    scores: dict[str, Any] | None,
    rows: Sequence[tuple[str, ...]],
    teacher: str,
) -> str:
    config, recipe, weights = model.config, stored.recipe, out / box.WEIGHTS
    height, width = config.image_size
    size = f"{height} x {width}"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    facts = [
        (
            "model",
            f"ViT, {config.depth} layers of width {config.width}, patches of {config.stride} px, input {size} px",
        ),
        ("size", f"{parameters:,} parameters, {config.classes} classes"),
        ("file", f"{weights.stat().st_size:,} bytes, fp16, sha256 `{sha256(weights)}`"),
        ("accuracy", "not measured yet" if scores is None else describe_scores(scores)),
        *rows,
    ]
    return CARD.format(
        facts="\n".join(f"| {name} | {text} |" for name, text in facts),
        data=last_part(recipe.data),
        teacher=describe_teacher(recipe, stored.provenance, teacher),
        training=describe_recipe(recipe, stored.images, count_steps(recipe, stored.images)),
        settings=" ".join(changed(recipe)),
        classes=config.classes,
        refusing=", unless it refuses the photo as none of them" if model.card.unknown is not None else "",
        size=size,
        names=", ".join(model.labels),
    )


def describe_scores(scores: dict[str, Any]) -> str:
    rate, where = scores["top1"], f"{last_part(scores['data'])}, {scores['split']} split"
    interval = f"{rate['low']:.1%} to {rate['high']:.1%}"
    return f"{rate['value']:.2%} of {scores['images']:,} images ({where}); 95 % interval {interval}"


def describe_teacher(recipe: Recipe, provenance: dict[str, str], about: str) -> str:
    if recipe.teacher is None:
        return "No other model was used."
    digest = f" (sha256 `{provenance['teacher_sha256']}`)" if "teacher_sha256" in provenance else ""
    return f"It also learned from a teacher, {about or last_part(recipe.teacher)}{digest}."


def changed(recipe: Recipe) -> list[str]:
    """The settings that are not the defaults, as `key=value`."""
    usual = flat(Recipe(recipe.model, recipe.data, steps=1))
    own = {key: value for key, value in flat(recipe).items() if key not in usual or value != usual[key]}
    own.pop("preprocess", None)  # of several values; config.json has them
    paths = {key: last_part(own[key]) for key in ("weights", "teacher") if own.get(key)}
    return to_pairs({"model": recipe.model, "data": last_part(recipe.data), **own, **paths})


if __name__ == "__main__":
    main()
