"""Fine-tuning in stages, each of which leaves a usable model and a report.

RUN/model.safetensors, report.html            the best model so far
RUN/features                                  features of the images, computed once
RUN/review.csv                                images that are worth a look
RUN/start                                     the weights with a soft head, from which fine-tuning starts
                                              (with lora= both models are what they add to the weights)
RUN/recipe.json, log.jsonl, checkpoints/...   the fine-tuning, an ordinary run
RUN/stages.json                               the budget, and what each stage brought

The stages are compared on the validation images. The test images are used once, by the report of the last stage.
Killed at any moment, a run continues with what is in its folder; the first stage begins again with the features there.
"""

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from vitlab.data.open import subset_indices
from vitlab.data.review_file import NAME as REVIEW
from vitlab.data.review_file import read_review, write_review
from vitlab.data.source import Data, ImageSource, Subset
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import head_logits
from vitlab.evaluation.extract import ExtractOptions, extract
from vitlab.evaluation.probe import Linear
from vitlab.evaluation.review import Part, make_part, review, review_test
from vitlab.evaluation.temperature import fit_temperature
from vitlab.evaluation.unknown import fit_unknown
from vitlab.finetuning.budget import SPEED, Budget, count_images
from vitlab.finetuning.head import (
    FrozenFeatures,
    Heads,
    fit_device,
    fit_head,
    fit_heads,
    frozen_features,
    image_seconds,
    set_head,
    soft_head,
)
from vitlab.finetuning.plan import Plan
from vitlab.models.card import Card
from vitlab.models.variants import Model
from vitlab.report import Report, write_report
from vitlab.signals import stoppable
from vitlab.text import counted, duration
from vitlab.training.checkpoint import check_own_files
from vitlab.training.lock import run_lock
from vitlab.training.log import LOG
from vitlab.training.loop import Stage, train
from vitlab.training.manifest import write_manifest
from vitlab.training.parallel import Cluster, process_group
from vitlab.training.recipe import Recipe, difference, resolve_length
from vitlab.training.recorder import Diverged
from vitlab.training.seen import seen_since, without_seen
from vitlab.training.setup import RECIPE, check_data, prepare_run, read_run
from vitlab.training.stages import Stages, read_stages, write_stages
from vitlab.training.trust import quote
from vitlab.weights import load, save
from vitlab.weights.load import find_origin, read_updates
from vitlab.weights.lora_base import name_base
from vitlab.weights.save import write_folder

START = "start"
CHANCE = 0.1  # probability of as great a loss by chance, below which fine-tuning is dropped

Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Finetuned:
    """A finished run: its folder, its stages, and the report on the test images."""

    folder: Path
    stages: Stages
    report: Report | None  # None: it could not be written


def run_stages(
    plan: Plan, out: Path, *, resume: bool = False, accept: bool = False, console: Console | None = None
) -> Finetuned:
    """Run the stages of a plan in the folder `out`, or continue them with `resume`.

    The last report is written by the first of several processes, after their group has ended: no other one waits.
    """
    with stoppable(f"stopped; what is done is in {out}, and the same command with --resume continues"):
        with process_group(plan.recipe.device) as cluster, run_lock(out, cluster):
            run = StagedRun(plan, out, cluster, console or Console(), accept)
            stages = cluster.agree(lambda: run.begin(resume))
            if stages.steps and stages.tuned is None:
                stages = run.tune(stages)
        if not cluster.first:
            return Finetuned(out, stages, None)
        with run_lock(out, Cluster(cluster.device)):
            return run.finish(stages)


class StagedRun:
    """The stages of one run, in its folder."""

    def __init__(self, plan: Plan, out: Path, cluster: Cluster, console: Console, accept: bool) -> None:
        self.plan, self.out, self.cluster, self.console, self.accept = plan, out, cluster, console, accept
        self.earlier = 0.0  # seconds that the run took before it was interrupted
        r = plan.recipe
        self.options: ExtractOptions = {"device": r.device, "workers": r.workers, "broken_limit": r.broken_limit}

    def spent(self) -> float:
        return self.earlier + time.monotonic() - self.plan.began

    def features(self, *, tuned: bool) -> Path:
        """Where features of the frozen or the fine-tuned weights are kept."""
        return self.out / "features" / ("tuned" if tuned else "frozen")

    def budget(self, stages: Stages) -> Budget:
        assert stages.image is not None
        return Budget(stages.seconds, stages.image, stages.start, stages.measured)

    def known(self, stages: Stages) -> Data:
        """The data with as many images of each split as there is time to compute features of."""
        data = self.plan.data
        assert data.validation is not None
        if not stages.timed:
            return data
        budget = self.budget(stages)
        share, tests = budget.rows(data) / count_images(data), budget.tests(data) / len(data.test)
        train, held = draw(data.train, share), draw(data.validation, share)
        return replace(data, train=train, validation=held, test=draw(data.test, tests))

    def recipe(self, stages: Stages) -> Recipe:
        return self.plan.tuning(max(1, stages.steps), stages.balanced)

    # ---- the first stage

    def begin(self, resume: bool) -> Stages:
        """The first stage, or what is known of it where it is done; only the first process comes here."""
        stages = read_stages(self.out)
        if stages is not None and not resume:
            raise UserError(f"{self.out} holds a run already; continue it with --resume, or choose another --out")
        if stages is None:
            if (self.out / RECIPE).exists():
                raise UserError(f"{self.out} holds a run of another kind; choose another --out")
            resolve_length(self.recipe(self.new_stages), 1, 1, self.cluster.world)  # such as a batch that is odd
            return self.first_stage(self.new_stages)
        self.check(stages)
        self.earlier = stages.spent
        if not stages.ready:
            return self.first_stage(stages)
        self.print(f"the head is there already: {stages.head:.1%} of the validation images")
        return stages

    @property
    def new_stages(self) -> Stages:
        return Stages(weights=self.plan.weights, seconds=self.plan.seconds, timed=self.plan.steps is None)

    def check(self, stages: Stages) -> None:
        """Raise UserError unless this plan is that of the run in the folder."""
        plan, out = self.plan, self.out
        check_own_files(out)
        if plan.weights != stages.weights:
            raise UserError(f"the run in {out} started from {quote(stages.weights)}; name them with --weights")
        if plan.timed and plan.seconds != stages.seconds:
            raise UserError(
                f"the run in {out} has {stages.seconds / 60:g} minutes; leave --minutes, or use a new --out"
            )
        if plan.steps is not None and (stages.timed or (stages.ready and plan.steps != stages.steps)):
            raise UserError(f"the run in {out} has another length; leave epochs and steps, or use a new --out")
        if stages.ready and (stages.tuned is not None or not stages.steps):  # else the training compares them
            stored, data = read_run(out), plan.data
            if stored is None:
                raise UserError(f"{out / RECIPE} is missing; start again in a new --out")
            images = check_data(stored, out, data, hashed=plan.recipe.hash_data, accept=self.accept)
            recipe = resolve_length(self.recipe(stages), len(data.train), len(data.validation or data.test), 1)
            if (key := difference(recipe, stored.recipe)) is not None:
                raise UserError(f"the run in {out} has another {key}; continue it with its own settings")
            write_manifest(out, images)

    def first_stage(self, stages: Stages) -> Stages:
        """Features, heads, the model and its report, the review."""
        plan, data, model, keep = self.plan, self.plan.data, self.plan.model, self.features(tuned=False)
        write_stages(self.out, stages)
        if stages.image is None:
            image = image_seconds(model, data, keep, self.options, SPEED * stages.seconds)
            stages = replace(stages, image=image, start=plan.start, measured=self.spent())
            write_stages(self.out, stages)
        known = self.known(stages)
        count, total = count_images(known), count_images(data)
        if count < total or len(known.test) < len(data.test):
            tests = f"to test {len(known.test):,} of {len(data.test):,}"
            self.print(f"there is time to learn from {count:,} of {total:,} images and {tests}; --minutes gives more")
        features = frozen_features(model, known, keep, self.options)
        heads = fit_heads(features, len(data.classes), balance=plan.balance, device=plan.recipe.device)
        stages = self.measured(stages, heads, count)
        write_stages(self.out, stages)
        card = self.new_card(heads, count)
        self.begin_tuning(stages, soft_head(features.train, heads, self.epochs(stages)), card)
        self.print(
            f"head: {heads.accuracy:.1%} of {len(features.validation.labels)} validation images, "
            f"{heads.chosen.accuracy:.1%} by cross-validation; {duration(self.spent())}"
            + ("; every class weighs the same, which helps the rare ones" if heads.balanced else "")
        )
        temperature = fit_temperature(heads.chosen.logits, features.train.labels).value
        card = replace(card, temperature=temperature)
        if stages.steps:  # the report is about validation images, so its model has not seen them
            self.save_head(heads.alone, replace(card, unknown=fit_unknown(features.train)), self.out)
            self.report(stages, replace(data, test=known.validation or data.test), "validation", keep)
        else:
            self.print(f"{duration(plan.seconds)} are too short to fine-tune as well: the head is the result")
        # frozen features: every image is new to them, so each can be held out in turn
        self.save_head(heads.final, replace(card, unknown=fit_unknown(features.all)), self.out)
        findings = review(parts_of(known, features, heads), data.classes)
        write_review(self.out / REVIEW, findings)
        if findings:
            self.print(f"worth a look: {counted(len(findings), 'image')} in {self.out / REVIEW}; use it with --apply")
        stages = replace(stages, ready=True, spent=self.spent())
        write_stages(self.out, stages)
        return stages

    def new_card(self, heads: Heads, images: int) -> Card:
        about = f"logistic head on frozen features of {images} images, l2 {heads.chosen.l2:g}"
        provenance = {**find_origin(self.plan.weights), "data": self.plan.data.name, "training": about}
        return replace(self.plan.model.card, labels=self.plan.data.classes, provenance=provenance)

    def epochs(self, stages: Stages) -> float:
        return stages.steps * self.plan.recipe.batch / len(self.plan.data.train)

    def begin_tuning(self, stages: Stages, head: Linear, card: Card) -> None:
        """Write what the second stage starts from, and its recipe, which the report describes."""
        self.save_head(head, card, self.out / START)
        (self.out / RECIPE).unlink(missing_ok=True)  # of a first stage that was interrupted
        single = Cluster(self.cluster.device)
        prepare_run(self.recipe(stages), self.out, single, resume=False, data=self.plan.data, start=self.out / START)
        (self.out / LOG).touch()

    def save_head(self, head: Linear, card: Card, to: Path) -> None:
        """Write the model with this head to a folder; of a run with low-rank updates, the head and the base's name."""
        model = self.plan.model
        set_head(model, head)
        model.card = card
        if not self.plan.recipe.lora:
            save(model, to)
            return
        own = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items() if name.startswith("head.")}
        write_folder(model.config, own, card, to, name_base(self.plan.weights, rank=0))

    def measured(self, stages: Stages, heads: Heads, images: int) -> Stages:
        """The stages with what the first one brought, and the length of the second."""
        plan, spent = self.plan, self.spent()
        by_time = self.budget(stages).steps(plan.data, images, spent, plan.recipe.batch)
        return replace(
            stages,
            spent=spent,
            l2=heads.chosen.l2,
            cross_validation=heads.chosen.accuracy,
            head=heads.accuracy,
            balanced=heads.balanced,
            steps=by_time if plan.steps is None else plan.steps,
        )

    # ---- the second stage

    def tune(self, stages: Stages) -> Stages:
        """Fine-tune all weights in the time that is left; keep the result if it is no worse on validation images."""
        data, recipe, deadline = self.plan.data, self.recipe(stages), None
        if stages.timed:
            left = self.budget(stages).deadline(data, count_images(self.known(stages)), self.spent())
            deadline = time.monotonic() + left
        self.print(f"fine-tuning: up to {counted(stages.steps, 'step')} of {recipe.batch} images")
        stage = Stage(self.out / START, deadline)
        options = {"resume": True, "accept_data_changes": self.accept}
        try:
            train(recipe, self.out, console=self.console, data=data, stage=stage, **options)
        except Diverged as error:
            self.print(f"{error}; so the head is the result")
            return self.cluster.agree(lambda: self.judged(stages, 0.0, kept=False))
        return self.cluster.agree(lambda: self.judge(stages))

    def judge(self, stages: Stages) -> Stages:
        """Compare the best checkpoint with the head on the validation images."""
        known, keep = self.known(stages), self.features(tuned=True)
        assert known.validation is not None
        best = load(self.out / "checkpoints" / "best")
        held = extract(best, known.validation, keep=keep, title="validation features", **self.options)
        logits = head_logits(best, held.values)
        right = logits.argmax(1) == held.labels
        kept = not is_worse(right, self.head_hits(stages))
        if kept:
            seen = extract(best, known.train, keep=keep, title="training features", **self.options)
            temperature, unknown = fit_temperature(logits, held.labels).value, fit_unknown(seen, held)
            if unknown is None:
                self.print(f'{len(held.labels)} validation images are too few to answer "none of these"')
            best.card = replace(best.card, temperature=temperature, unknown=unknown)
            self.save_best(best)
        stages = self.judged(stages, float(right.mean()), kept)
        verdict = "kept" if kept else "dropped: the head is better"
        self.print(
            f"fine-tuning: {right.mean():.1%} of the validation images, the head had {stages.head:.1%}; {verdict}"
        )
        return stages

    def save_best(self, best: Model) -> None:
        """Write the best checkpoint, with its new card, into the run's folder: the model or its low-rank updates."""
        if not self.plan.recipe.lora:
            save(best, self.out)
            return
        own = read_updates(self.out / "checkpoints" / "best")
        write_folder(own.config, own.tensors, best.card, self.out, own.adapter)

    def head_hits(self, stages: Stages) -> Bools:
        """Whether the head that was fitted to the training images is right about each validation image."""
        found = frozen_features(self.plan.model, self.known(stages), self.features(tuned=False), self.options)
        classes, device = len(self.plan.data.classes), self.plan.recipe.device
        place = fit_device(device, len(found.train.labels) * classes)
        head = fit_head(found.train, classes, stages.l2, stages.balanced, place)
        return head.guesses(found.validation.values) == found.validation.labels

    def judged(self, stages: Stages, accuracy: float, kept: bool) -> Stages:
        stages = replace(stages, tuned=accuracy, kept=kept, spent=self.spent())
        write_stages(self.out, stages)
        return stages

    # ---- the end

    def finish(self, stages: Stages) -> Finetuned:
        """The report on the test images, by the first process."""
        keep, stages = self.features(tuned=stages.kept), replace(stages, finished=True)
        known = self.known(stages)
        known = without_seen(known, seen_since(self.out, known))
        try:
            self.review_test(known, keep)
        except (UserError, OSError) as error:
            self.print(f"the test images were not compared with the others: {error}")
        report = self.report(stages, known, "test", keep)
        write_stages(self.out, stages)
        return Finetuned(self.out, stages, report)

    def review_test(self, known: Data, keep: Path) -> None:
        """Add copies of test images to the review, to which the user may have added decisions by now."""
        model, parts, path = load(self.out), [], self.out / REVIEW
        options: ExtractOptions = {**self.options, "broken_limit": 1}
        for split, source in known.splits.items():  # all but those of the test are there already
            found = extract(model, source, keep=keep, title=f"{split} features", **options)
            parts.append(make_part(split, source, found, None))
        *others, test = parts
        old = read_review(path) if path.exists() else []
        listed = {(finding.path, finding.other) for finding in old}
        new = [f for f in review_test(others, test, known.classes) if (f.path, f.other) not in listed]
        if new:
            write_review(path, [*old, *new])
            self.print(f"copies of test images among the others make the test too easy: {len(new)} lines in {path}")

    def report(self, stages: Stages, data: Data, split: str, keep: Path) -> Report | None:
        """Write the report, with drawings if there is time. The model is saved by now, so an error here is a note."""
        drawn = not stages.timed or self.budget(stages).draws(self.spent())
        if not drawn:
            self.print(f"there is no time left to draw the report's figures; `vitlab report {self.out}` draws them")
        try:
            device = self.plan.recipe.device
            return write_report(self.out, data, split=split, device=device, keep=keep, drawn=drawn)
        except (UserError, OSError) as error:
            later = f"`vitlab report {self.out}` writes it later"
            self.print(f"the model is saved, but there is no report: {error}; {later}")
            return None

    def print(self, line: str) -> None:
        if self.cluster.first:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def is_worse(new: Bools, old: Bools) -> bool:
    """Whether fewer images are right than before, and that is hardly chance: the sign test on those that changed.

    Few validation images differ by chance alone, and fine-tuning is better nearly every time; see docs/finetuning.md.
    """
    lost, won = int((old & ~new).sum()), int((new & ~old).sum())
    tail = sum(math.comb(lost + won, k) for k in range(lost, lost + won + 1)) / 2 ** (lost + won)
    return lost > won and tail < CHANCE


def draw(source: ImageSource, share: float) -> ImageSource:
    """The same share of every class, the same every time."""
    if share >= 1:
        return source
    index = subset_indices(source, 0, share, None)
    return source if index is None else Subset(source, index)


def parts_of(data: Data, features: FrozenFeatures, heads: Heads) -> list[Part]:
    """The training and validation images for a review: features, and logits of heads that have not seen the image."""
    assert data.validation is not None
    held = features.validation
    logits = heads.alone.scores(held.values).float().cpu().numpy()
    return [
        make_part("train", data.train, features.train, heads.chosen.logits),
        make_part("validation", data.validation, held, logits),
    ]
