"""Evaluate a model on a data set: every image once, all scores from one pass.

Shapes: n images, K classes of the model.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import numpy as np
import torch
from numpy.typing import NDArray

from vitlab.data.imagenet import CLASSES
from vitlab.data.label_sets import make_sets
from vitlab.data.open import check_split, find_splits, make_data
from vitlab.data.rng import Ints
from vitlab.data.source import Data, ImageSource, Subset
from vitlab.errors import UserError
from vitlab.evaluation.classes import Names, imagenet_order, match_classes
from vitlab.evaluation.extract import ExtractOptions, extract_values
from vitlab.evaluation.mapping import ClassMapping, mapped_images, match_mapping, restrict, true_classes
from vitlab.evaluation.multi_result import MultiEvaluation, score_sets
from vitlab.evaluation.piece_cache import Values, What
from vitlab.evaluation.real import Lists, image_numbers, score_real
from vitlab.evaluation.result import Evaluation
from vitlab.evaluation.scores import Rate, calibration, calibration_interval, confusion, rate, softmax, top_hits
from vitlab.models.guest import Measured
from vitlab.text import listed

SPLITS = ("test", "validation", "train", "all")


def open_split(
    spec: str,
    split: str,
    holdout: float = 0.2,
    *,
    trained: bool = False,
    unseen: Callable[[Data], Data] = lambda data: data,
) -> tuple[ImageSource, str]:
    """Open one split (train, validation, test or all) of a data set; return its images and a note on their origin.

    A set without training images is a test set as it is, unless the model was `trained` on part of it. `unseen` leaves
    out test images that the model has learned from.
    """
    if split not in SPLITS:
        raise UserError(f"there is no split '{split}'; write {listed(SPLITS)}")
    splits, preferred = find_splits(spec)
    if split == "all":
        if len(splits) > 1:
            raise UserError(f"'{spec}' has the splits {listed(splits)}; choose one of them with --split")
        source = next(iter(splits.values()))
        check_split(source, spec, split)
        return source, "every image of the set"
    if "train" not in splits and split != "train" and not trained:
        own = split if split in splits else next(iter(splits))
        check_split(splits[own], spec, own)
        return splits[own], f"every image of the set's {own} split"
    every = make_data(spec, splits, preferred or holdout)
    data = unseen(every) if split == "test" else every
    chosen: ImageSource | None = getattr(data, split)
    if chosen is None:
        raise UserError(f"'{spec}' has no validation split of its own ({data.note}); use --split test or train")
    if split == "test" and len(splits) == 1 and not trained and len(data.test) == len(every.test):
        return chosen, f"{data.note}; for every image of a set that the model was not trained on: --split all"
    return chosen, data.note


def evaluate(
    model: Measured,
    source: ImageSource,
    *,
    labels: Names | None = None,
    by_position: bool = False,
    mapping: ClassMapping | None = None,
    restricted: bool = False,
    real: Lists | None = None,
    keep: Path | None = None,
    title: str = "evaluating",
    **options: Unpack[ExtractOptions],
) -> Evaluation:
    """Score a model on every image of a source that can be read.

    `labels` are names of the model's classes that replace those stored with it; `by_position` takes the source's
    classes for the model's in order where their names do not match; a `mapping` says which of the model's classes each
    of the source's stands for, and images of others are left out; `restricted` leaves all of the model's classes out
    that the source does not have. `real` are the lists of ImageNet ReaL; `keep` is a folder for finished pieces of the
    logits, from which an interrupted evaluation resumes.
    """
    count = model.config.classes
    if count == 0:
        raise UserError("this model has no head, so it names no classes; fine-tune it first, or use fewshot or probe")
    if source.label_sets is not None or model.card.thresholds is not None:
        raise UserError("evaluate() is for one label per image, as the model and the set have; use evaluate_sets()")
    if real is not None and (mapping is not None or restricted):
        raise UserError("ReaL is about ImageNet's own images and all of its classes; leave the mapping or ReaL")
    names = labels or model.card.labels
    if mapping is None:
        match = match_classes(names, count, source.classes, by_position=by_position)
    else:
        match = match_mapping(mapping, names, count, source.classes)
    everything, source = source, mapped_images(source, match)
    files = tuple(source.name(i) for i in range(len(source)))
    if real is not None:
        check_real(names, count)
    numbers = None if real is None else image_numbers(files, len(real))
    card = model.card
    what: What = "logits" if card.unknown is None else "features"
    found = extract_values(model, source, what=what, keep=keep, title=title, **options)
    read = found.index
    lists = None if real is None or numbers is None else (real, numbers[read])
    logits = found.values if card.unknown is None else head_logits(model, found.values)
    truth = true_classes(logits, source.labels[read], match)
    if restricted:
        logits, truth, match = restrict(logits, truth, match)
    about = (truth, match.names, match.note, names_at(files, read), lists)
    result = score(logits, *about, temperature=card.temperature)
    if card.unknown is not None:
        distances = card.unknown.distances(torch.from_numpy(found.values)).double().numpy()
        result = replace(result, distances=distances, refuse=card.unknown.rate)
    index = source.indices[read] if isinstance(source, Subset) and source is not everything else read
    return replace(result, index=index, broken=found.broken)


def evaluate_sets(
    model: Measured,
    source: ImageSource,
    *,
    labels: Names | None = None,
    by_position: bool = False,
    keep: Path | None = None,
    **options: Unpack[ExtractOptions],
) -> MultiEvaluation:
    """Score a multi-label model on every image of a source, whose images may also have one label each."""
    count, thresholds = model.config.classes, model.card.thresholds
    if thresholds is None:
        raise UserError("the set is multi-label and this model is not; fine-tune it on such a set first")
    match = match_classes(labels or model.card.labels, count, source.classes, by_position=by_position)
    sets = source.label_sets
    sets = make_sets(source.labels, np.ones(len(source), np.int64)) if sets is None else sets
    truth, known = np.zeros((len(source), count), bool), np.zeros(count, bool)
    truth[sets.rows, match.place[sets.numbers]] = True
    known[match.place] = True
    files = tuple(source.name(i) for i in range(len(source)))
    found = extract_values(model, source, what="logits", keep=keep, title="evaluating", **options)
    read, about = found.index, (match.names, match.note, names_at(files, found.index))
    return replace(score_sets(found.values, truth[read], known, thresholds, *about), broken=found.broken)


def names_at(files: Names, index: Ints) -> Names:
    return tuple(files[i] for i in index.tolist())


@torch.no_grad()
def head_logits(model: Measured, features: Values) -> Values:
    """Compute logits (n, K) of features (n, D), so that both come from one pass over the images."""
    assert model.head is not None
    weight, bias = (part.detach().float().cpu() for part in (model.head.weight, model.head.bias))
    return torch.nn.functional.linear(torch.from_numpy(features), weight, bias).numpy()


def check_real(labels: Names | None, count: int) -> None:
    """Raise UserError unless a model's classes can be ImageNet's, which ReaL's lists have by number."""
    if count != CLASSES:
        raise UserError(f"ReaL is about ImageNet's {CLASSES} classes, and this model has {count}")
    order = imagenet_order(labels, count)
    if order is not None and (order != np.arange(CLASSES)).any():
        raise UserError("ReaL has ImageNet's classes by number, and this model has them in another order")


def score(
    logits: Values,
    labels: Ints,
    names: Names,
    note: str,
    files: Names,
    real: tuple[Lists, Ints] | None = None,
    *,
    temperature: float = 1.0,
) -> Evaluation:
    """Score logits (n, K) computed before; `real` holds the ReaL lists and the number (n,) of each image in them.

    Confidences are softmax(logits / temperature).
    """
    guesses = logits.argmax(1)
    probabilities = softmax(logits / np.float32(temperature))
    calibrated = calibration(probabilities, labels)
    return Evaluation(
        names=names,
        note=note,
        files=files,
        labels=labels,
        guesses=guesses,
        confidence=probabilities.max(1).astype(np.float64),
        top1=rate_of(guesses == labels),
        top5=rate_of(top_hits(logits, labels, 5)) if len(names) > 5 else None,
        matrix=confusion(guesses, labels, len(names)),
        calibration=calibrated,
        calibration_error=Rate(calibrated.error, *calibration_interval(probabilities, labels)),
        real=None if real is None else score_real(guesses, labels, *real),
        temperature=temperature,
        error_before=None if temperature == 1 else calibration(softmax(logits), labels).error,
    )


def rate_of(hits: NDArray[np.bool_]) -> Rate:
    return rate(int(hits.sum()), len(hits))
