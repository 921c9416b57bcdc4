"""The facts of a run that its verdict is made of, and the commands that a verdict may recommend."""

import shlex
from collections.abc import Sequence
from math import ceil
from pathlib import Path

import numpy as np

from vitlab.data.review_file import NAME as REVIEW
from vitlab.data.review_file import Finding
from vitlab.data.rng import Ints
from vitlab.data.source import Data
from vitlab.evaluation.multi_result import MultiEvaluation
from vitlab.evaluation.result import Evaluation
from vitlab.evaluation.review import LABEL, TWO_LABELS
from vitlab.models.unknown import Unknown
from vitlab.report.facts import Curve, Facts, Stage
from vitlab.report.history import History
from vitlab.report.subject import Subject, Tested
from vitlab.report.verdict import Commands
from vitlab.training.stages import Stages

TENTH = 10  # the least confident images are a tenth
LEAST = 5  # of them
PHOTO = 64  # pixels: smaller images are not what public weights were trained on
SEEN = 2_000  # images: as many steps of fine-tuning bring most of what it can, see docs/finetuning.md
TRAIN = 3.2  # seconds of a training step on an image, in those of its forward pass


def collect(
    subject: Subject, tested: Tested, findings: Sequence[Finding], own: bool, unknown: Unknown | None = None
) -> Facts:
    """The facts; `own` is whether the images are of the set that the run was trained on."""
    scores, data, history = tested.scores, subject.data, subject.history
    stage = stage_of(subject.stages)
    right, found, images, matrix = count(scores)
    refused = scores.refusals() if isinstance(scores, Evaluation) else None
    return Facts(
        split=tested.split,
        names=scores.names,
        right=right,
        total=len(scores.files),
        found=found,
        images=images,
        matrix=matrix,
        stage=stage,
        curve=curve_of(history) if stage == "trained" else None,
        train_loss=last_loss(history),
        train_images=count_training(data, scores.names) if own else None,
        validation=held_out(subject) if own else None,
        refused=None if refused is None else (refused["images"], refused["promised"]),
        refused_before=(0, 0) if unknown is None else beyond_limit(unknown),
        unsure=least_confident(scores) if isinstance(scores, Evaluation) else None,
        doubtful=sum(f.problem in (LABEL, TWO_LABELS) and not f.decision for f in findings),
        scratch=subject.start is None and min(subject.config.image_size) >= PHOTO,
    )


def count(scores: Evaluation | MultiEvaluation) -> tuple[int, Ints, Ints, Ints | None]:
    """Images without a mistake; of each class those found and all; and the confusion matrix, if there is one."""
    if isinstance(scores, Evaluation):
        matrix = scores.matrix
        return int(np.trace(matrix)), np.diagonal(matrix), matrix.sum(1), matrix
    truth, guesses = scores.truth, scores.guesses
    return int((truth == guesses).all(1).sum()), (truth & guesses).sum(0), truth.sum(0), None


def stage_of(stages: Stages | None) -> Stage:
    """How far the model has come."""
    if stages is None or stages.kept:
        return "trained"
    if stages.tuned is not None:
        return "dropped"
    return "pending" if stages.steps else "head"


def curve_of(history: History) -> Curve | None:
    """The curve on the validation images; None where nothing was logged, or test images were used."""
    if not len(history.steps) or history.split != "validation":
        return None
    return Curve(
        steps=history.recipe.steps or int(history.steps[-1]),
        done=int(history.steps[-1]),
        patience=history.recipe.patience,
        evaluated=history.evaluated,
        score=history.newest,
        loss=history.held_loss,
        metric="mAP" if history.metric == "map" else "accuracy",
    )


def last_loss(history: History) -> float | None:
    """The mean training loss of the last pass; None unless it is a plain softmax loss, or nothing was logged."""
    recipe, augment = history.recipe, history.recipe.augment
    soft = augment.mixup or augment.cutmix or augment.label_smoothing or recipe.teacher is not None
    if recipe.objective != "softmax" or soft or recipe.balance == "weights" or not len(history.steps):
        return None
    first = history.steps[-1] - ceil(history.images / recipe.batch)
    return float(history.loss[history.steps > first].mean())


def count_training(data: Data, names: tuple[str, ...]) -> Ints | None:
    """The training images of each class; None where classes are not those of the model."""
    if data.is_multi_label or tuple(data.classes) != names:
        return None
    return np.bincount(data.train.labels, minlength=len(names))


def held_out(subject: Subject) -> tuple[int, int] | None:
    """The validation images that the model got right, and all of them."""
    held, history, stages = subject.data.validation, subject.history, subject.stages
    if held is None or history.metric != "accuracy":
        return None
    if stages is not None:
        share = stages.tuned if stages.kept and stages.tuned is not None else stages.head
    elif history.split == "validation" and len(history.newest):
        share = float(history.newest[-1])
    else:
        return None
    return round(share * len(held)), len(held)


def beyond_limit(unknown: Unknown) -> tuple[int, int]:
    """Of the held-out images that set the limit for refusals, those beyond it, and all."""
    return int((unknown.held_out > unknown.limit).sum()), len(unknown.held_out)


def least_confident(scores: Evaluation) -> tuple[int, int, float] | None:
    """Of the least confident tenth of the images: those that are right, all, and the least confidence of the others."""
    number = len(scores.labels) // TENTH
    if number < LEAST:
        return None
    order = np.argsort(scores.confidence, kind="stable")
    first = order[:number]
    right = int((scores.guesses[first] == scores.labels[first]).sum())
    return right, number, float(scores.confidence[order[number]])


# ---- commands


def commands_for(subject: Subject) -> Commands:
    """The commands that go with the steps of a verdict."""
    recipe, again = subject.history.recipe, finetune_command(subject)
    passes = (recipe.steps or 0) * recipe.batch / max(1, subject.history.images)
    local = Path(recipe.data).expanduser().exists()  # images can be added to it
    staged = subject.stages is not None
    return Commands(
        again=f"{again} --out runs/more" if staged and local else None,
        longer=f"{again} {longer(subject.stages, passes)} --out runs/longer" if subject.stages else None,
        stronger=f"{again} randaugment=2,10 --out runs/augmented"
        if staged and not recipe.augment.randaugment[0]
        else None,
        review=review_command(subject),
        pretrained=f"vitlab finetune {shlex.quote(recipe.data)} --out runs/pretrained",
        predict=f"vitlab predict {shlex.quote(subject.run)} photos/ --out answers.csv",
        setting=f"epochs={2 * passes:.3g}",
    )


def finetune_command(subject: Subject, apply: str | None = None) -> str:
    """The command of a run in stages, without its folder; with the decisions of a review if it had some."""
    recipe, stages = subject.history.recipe, subject.stages
    words = ["vitlab", "finetune", recipe.data]
    words += ["--weights", stages.weights] if stages is not None else []
    review = apply or recipe.review
    return shlex.join(words + (["--apply", review] if review else []))


def review_command(subject: Subject) -> str:
    """How to train again with what was decided about the images that are worth a look."""
    return f"{finetune_command(subject, str(Path(subject.run) / REVIEW))} --out runs/reviewed"


def longer(stages: Stages, passes: float) -> str:
    """The option with which a run in stages takes longer: more minutes, or passes where it had minutes left."""
    minutes = stages.seconds / 60
    if stages.tuned is None:  # a head alone
        needed = (stages.spent + (stages.image or 0) * TRAIN * SEEN) / 60
        return f"--minutes {max(2 * minutes, ceil(needed)):g}"
    return f"--minutes {2 * minutes:g}" if stages.spent > 0.75 * stages.seconds else f"epochs={2 * passes:.3g}"
