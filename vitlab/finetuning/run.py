"""Fine-tuning in stages, each of which leaves a usable model and a report.

RUN/model.safetensors, report.html            the best model so far
RUN/features                                  features of the images, computed once
RUN/start                                     the weights with a soft head, from which fine-tuning starts
RUN/recipe.json, log.jsonl, checkpoints/...   the fine-tuning, an ordinary run
RUN/stages.json                               the budget, and what each stage brought

The stages are compared on the validation images. The test images are used once, by the report of the last stage.
"""

import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from vitlab.data.review_file import NAME as REVIEW
from vitlab.data.review_file import write_review
from vitlab.data.source import Data
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import head_logits
from vitlab.evaluation.extract import extract
from vitlab.evaluation.review import Part, make_part, review
from vitlab.evaluation.temperature import fit_temperature
from vitlab.evaluation.unknown import fit_unknown
from vitlab.finetuning.budget import Budget
from vitlab.finetuning.head import FrozenFeatures, Heads, fit_heads, frozen_features, set_head
from vitlab.finetuning.plan import Plan
from vitlab.report import Report, write_report
from vitlab.text import duration
from vitlab.training.log import LOG
from vitlab.training.loop import train
from vitlab.training.parallel import Cluster, process_group
from vitlab.training.setup import RECIPE, prepare_run
from vitlab.training.stages import Stages, read_stages, write_stages
from vitlab.weights import load, save
from vitlab.weights.load import find_origin

START = "start"


@dataclass(frozen=True)
class Finetuned:
    """A finished run: its folder, its stages, and the report on the test images."""

    folder: Path
    stages: Stages
    report: Report | None  # None: it could not be written


def run_stages(
    plan: Plan, out: Path, *, resume: bool = False, accept: bool = False, console: Console | None = None
) -> Finetuned:
    """Run the stages of a plan in the folder `out`, or continue them with `resume`."""
    began, console = time.monotonic(), console or Console()
    with process_group(plan.recipe.device) as cluster:
        run = StagedRun(plan, out, cluster, console, began, accept)
        stages = cluster.agree(lambda: run.begin(resume))
        if stages.steps and stages.tuned is None:
            stages = run.tune(stages)
    return run.finish(stages)


@dataclass(frozen=True)
class StagedRun:
    """The stages of one run, in its folder."""

    plan: Plan
    out: Path
    cluster: Cluster
    console: Console
    began: float
    accept: bool

    @property
    def device(self) -> str:
        return self.plan.recipe.device

    def begin(self, resume: bool) -> Stages:
        """The first stage, or what is known of it where it is done; only the first process comes here."""
        stages = read_stages(self.out)
        if stages is not None and not resume:
            raise UserError(f"{self.out} holds a run already; continue it with --resume, or choose another --out")
        if stages is not None:
            self.print(f"the head is there already: {stages.head:.1%} of the validation images")
            return stages
        if (self.out / RECIPE).exists():
            raise UserError(f"{self.out} holds a run of another kind; choose another --out")
        return self.first_stage()

    def first_stage(self) -> Stages:
        """Features, heads, the model and its report."""
        plan, data, model = self.plan, self.plan.data, self.plan.model
        self.out.mkdir(parents=True, exist_ok=True)
        features = frozen_features(model, data, self.out / "features", self.device)
        heads = fit_heads(features, len(data.classes))
        images = len(data.train) + len(data.validation or ())
        about = f"logistic head on frozen features of {images} images, l2 {heads.chosen.l2:g}"
        provenance = {**find_origin(plan.weights), "data": data.name, "training": about}
        card = dataclasses.replace(model.card, labels=data.classes, provenance=provenance)
        set_head(model, heads.start)
        model.card = card
        save(model, self.out / START)
        set_head(model, heads.final)
        temperature = fit_temperature(heads.chosen.logits, features.train.labels).value
        # frozen features: every image is new to them, so each can be held out in turn
        model.card = dataclasses.replace(card, temperature=temperature, unknown=fit_unknown(features.all))
        save(model, self.out)
        spent = time.monotonic() - self.began
        budget = Budget(plan.seconds, features.seconds)
        steps = plan.steps if plan.steps is not None else budget.steps(data, spent)
        chosen = heads.chosen
        stages = Stages(
            weights=plan.weights,
            seconds=plan.seconds,
            image=features.seconds,
            spent=spent,
            l2=chosen.l2,
            cross_validation=chosen.accuracy,
            head=heads.accuracy,
            balanced=heads.balanced,
            steps=steps,
        )
        recipe = self.plan.tuning(self.out / START, max(1, steps), heads.balanced)
        prepare_run(recipe, self.out, Cluster(self.cluster.device), resume=False, data=data)
        (self.out / LOG).touch()
        write_stages(self.out, stages)
        self.print(
            f"head: {heads.accuracy:.1%} of {len(data.validation or ())} validation images, "
            f"{chosen.accuracy:.1%} by cross-validation; {duration(spent)}"
            + ("; every class weighs the same, which helps the rare ones" if heads.balanced else "")
        )
        if steps:
            self.report(dataclasses.replace(data, test=data.validation or data.test), "validation")
        else:
            self.print(f"{duration(plan.seconds)} are too short to fine-tune as well: the head is the result")
        findings = review(parts_of(data, features, heads), data.classes)  # after the report: it reads images again
        write_review(self.out / REVIEW, findings)
        if findings:
            self.print(f"worth a look: {len(findings)} images in {self.out / REVIEW}; use it with --apply")
        return stages

    def tune(self, stages: Stages) -> Stages:
        """Fine-tune all weights in the time that is left; keep the result if it is no worse on validation images."""
        data, started = self.plan.data, time.monotonic()
        recipe = self.plan.tuning(self.out / START, stages.steps, stages.balanced)
        deadline = None
        if self.plan.steps is None:
            deadline = started + Budget(stages.seconds, stages.image).deadline(data, stages.spent)
        self.print(f"fine-tuning: up to {stages.steps} steps of {recipe.batch} images")
        train(
            recipe,
            self.out,
            resume=True,
            accept_data_changes=self.accept,
            console=self.console,
            data=data,
            only_best=True,
            deadline=deadline,
        )
        return self.cluster.agree(lambda: self.judge(stages, started))

    def judge(self, stages: Stages, started: float) -> Stages:
        """Compare the best checkpoint with the head on the validation images."""
        data = self.plan.data
        assert data.validation is not None
        best = load(self.out / "checkpoints" / "best")
        held = extract(best, data.validation, device=self.device, title="validation features")
        logits = head_logits(best, held.values)
        accuracy = float((logits.argmax(1) == held.labels).mean())
        spent = stages.spent + time.monotonic() - started
        stages = dataclasses.replace(stages, tuned=accuracy, spent=spent)
        if stages.improved:
            seen = extract(best, data.train, device=self.device, title="training features")
            temperature, unknown = fit_temperature(logits, held.labels).value, fit_unknown(seen, held)
            best.card = dataclasses.replace(best.card, temperature=temperature, unknown=unknown)
            save(best, self.out)
        write_stages(self.out, stages)
        verdict = "kept" if stages.improved else "dropped: the head is better"
        self.print(f"fine-tuning: {accuracy:.1%} of the validation images, the head had {stages.head:.1%}; {verdict}")
        return stages

    def finish(self, stages: Stages) -> Finetuned:
        """The report on the test images, by the first process, after the group of processes has ended."""
        stages, report = dataclasses.replace(stages, finished=True), None
        if self.cluster.first:
            report = self.report(self.plan.data, "test")
            write_stages(self.out, stages)
        return Finetuned(self.out, stages, report)

    def report(self, data: Data, split: str) -> Report | None:
        """Write the report. The model is saved by now, so an error here is a note."""
        try:
            return write_report(self.out, data, split=split, device=self.device)
        except (UserError, OSError) as error:
            later = f"`vitlab report {self.out}` writes it later"
            self.print(f"the model is saved, but there is no report: {error}; {later}")
            return None

    def print(self, line: str) -> None:
        if self.cluster.first:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def parts_of(data: Data, features: FrozenFeatures, heads: Heads) -> list[Part]:
    """The training and validation images for a review: features, and logits of heads that have not seen the image."""
    assert data.validation is not None
    held = features.validation
    logits = heads.alone.scores(held.values).float().numpy()
    return [
        make_part("train", data.train, features.train, heads.chosen.logits.astype(np.float32)),
        make_part("validation", data.validation, held, logits),
    ]
