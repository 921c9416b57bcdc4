"""Fine-tuning in stages: a usable model after the first, the better of both at the end, whatever happens between."""

import dataclasses
import json
import os
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from scipy.stats import binomtest

import vitlab
from vitlab.data.open import open_data
from vitlab.data.source import ImageSource, Subset
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import evaluate
from vitlab.evaluation.extract import ExtractOptions, extract
from vitlab.evaluation.result import Evaluation
from vitlab.finetuning import run
from vitlab.finetuning.budget import ENOUGH, LEAST, Budget
from vitlab.finetuning.head import FrozenFeatures, fit_heads, image_seconds, set_head, soft_head
from vitlab.finetuning.plan import Plan, make_plan
from vitlab.finetuning.run import Finetuned, run_stages
from vitlab.prediction import Classifier
from vitlab.training.stages import read_stages

QUIET = Console(quiet=True)
SMALL = ["device=cpu", "subset=0.2", "workers=0"]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with random weights: a head on its features is far better than chance."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "model"
    vitlab.save(vitlab.create("Ti/4", image_size=8, depth=2, width=32, mlp=64, heads=2, classes=5), folder)
    return str(folder)


def plan_for(weights: str, *pairs: str, minutes: float | None = None) -> Plan:
    plan = make_plan("digits", weights, [*SMALL, *pairs], minutes)
    assert plan is not None
    return plan


def accuracy(folder: Path, source: Any) -> float:
    return evaluate(vitlab.load(folder), source, device="cpu").top1.value


@pytest.mark.slow
def test_a_head_alone_where_time_is_short(tmp_path: Path, weights: str) -> None:
    done = run_stages(plan_for(weights, minutes=1e-6), tmp_path / "run", console=QUIET)
    assert done.stages.steps == 0
    assert done.stages.finished
    assert done.report is not None
    assert done.report.path.exists()
    assert accuracy(tmp_path / "run", open_data("digits").test) > 0.6
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_copies_of_test_images_join_the_review(tmp_path: Path, weights: str) -> None:
    from PIL import Image

    digits = open_data("digits").train
    for number in range(24):
        label = int(digits.labels[number])
        folder = tmp_path / "photos" / ("train" if number < 18 else "test") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        digits.image(number).resize((64, 64), Image.Resampling.BICUBIC).save(folder / f"{number}.png")
    copied = next((tmp_path / "photos" / "train").glob("*/3.png"))
    (tmp_path / "photos" / "test" / copied.parent.name).mkdir(exist_ok=True)
    Image.open(copied).resize((90, 90)).save(tmp_path / "photos" / "test" / copied.parent.name / "copy.png")
    plan = make_plan(str(tmp_path / "photos"), weights, ["device=cpu", "workers=0"], 1e-6)
    assert plan is not None
    run_stages(plan, tmp_path / "run", console=QUIET)
    lines = (tmp_path / "run" / "review.csv").read_text().splitlines()
    assert [line for line in lines if "two splits" in line and "copy.png" in line and "3.png" in line]


@pytest.mark.slow
def test_the_better_stage_is_kept(tmp_path: Path, weights: str) -> None:
    plan = plan_for(weights, "steps=3", "lr=10")  # a rate at which nothing is left of the weights
    bad = run_stages(plan, tmp_path / "bad", console=QUIET)
    assert bad.stages.tuned is not None
    assert bad.stages.tuned < bad.stages.head
    good = run_stages(plan_for(weights, "steps=3", "lr=0"), tmp_path / "good", console=QUIET)
    assert accuracy(tmp_path / "bad", plan.data.test) > 0.6
    assert good.stages.tuned == pytest.approx(accuracy(good.folder / "start", plan.data.validation))  # unchanged
    records = [json.loads(line) for line in (tmp_path / "good" / "log.jsonl").read_text().splitlines()]
    assert not any("test" in record for record in records)  # the test images are used by the report alone
    assert any("validation" in record for record in records)


class Killed(BaseException):
    """Stands for SIGKILL."""


def kill_at(monkeypatch: pytest.MonkeyPatch, name: str, plan: Plan, out: Path, place: Any = run) -> None:
    """Run the plan until it calls a function for the first time."""

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(place, name, killed)
        with pytest.raises(Killed):
            run_stages(plan, out, console=QUIET)


@pytest.mark.slow
def test_a_run_killed_after_the_first_stage_is_usable_and_continues(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    kill_at(monkeypatch, "train", plan_for(weights, "steps=4"), out)
    assert "validation images right" in (out / "report.html").read_text()
    assert Classifier(str(out), "cpu").labels == plan_for(weights).data.classes
    with pytest.raises(UserError, match="continue it with --resume"):
        run_stages(plan_for(weights, "steps=4"), out, console=QUIET)
    before = read_stages(out)
    done = run_stages(plan_for(weights, "steps=4"), out, resume=True, console=QUIET)
    assert before is not None
    end = {name: getattr(done.stages, name) for name in ("tuned", "kept", "spent")}
    assert done.stages == dataclasses.replace(before, **end, finished=True)
    assert "test images right" in (out / "report.html").read_text()
    again = run_stages(plan_for(weights, "steps=4"), tmp_path / "again", console=QUIET)
    assert again.stages.tuned == done.stages.tuned
    first, second = (vitlab.load(folder).state_dict() for folder in (out, tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, weights: str) -> Finetuned:
    """A run of two steps that nothing interrupts."""
    return run_stages(plan_for(weights, "steps=2"), tmp_path_factory.mktemp("plain") / "run", console=QUIET)


MOMENTS = ["fit_heads", "write_report", "train", "review_test"]
OTHERS = ["frozen_features", "fit_unknown", "prepare_run", "review", "load", "head_logits"]


@pytest.mark.slow
@pytest.mark.parametrize("moment", [*MOMENTS, *(pytest.param(moment, marks=pytest.mark.long) for moment in OTHERS)])
def test_killed_at_any_moment_it_continues_to_the_same_end(
    tmp_path: Path, weights: str, plain: Finetuned, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Continued in another place and under another name, too."""
    kill_at(monkeypatch, moment, plan_for(weights, "steps=2"), tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    done = run_stages(plan_for(weights, "steps=2"), tmp_path / "moved", resume=True, console=QUIET)
    assert (done.stages.head, done.stages.tuned) == (plain.stages.head, plain.stages.tuned)
    first, second = (vitlab.load(folder) for folder in (tmp_path / "moved", plain.folder))
    assert all(torch.equal(value, second.state_dict()[name]) for name, value in first.state_dict().items())
    assert first.card.temperature == second.card.temperature
    assert (tmp_path / "moved" / "review.csv").read_text() == (plain.folder / "review.csv").read_text()
    assert "test images right" in (tmp_path / "moved" / "report.html").read_text()


@pytest.mark.slow
def test_the_first_report_is_about_images_that_its_model_has_not_seen(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_for(weights, "steps=2")
    kill_at(monkeypatch, "review", plan, tmp_path / "run")
    stages = read_stages(tmp_path / "run")
    assert stages is not None
    right = round(stages.head * len(plan.data.validation or ()))
    assert f"It gets {right} of" in " ".join((tmp_path / "run" / "report.html").read_text().split())


@pytest.mark.slow
def test_a_run_that_diverges_keeps_the_head(tmp_path: Path, weights: str) -> None:
    done = run_stages(plan_for(weights, "steps=30", "lr=1e18", "clip=0"), tmp_path / "run", console=QUIET)
    assert done.stages.tuned == 0
    assert done.report is not None
    assert accuracy(tmp_path / "run", open_data("digits").test) > 0.6


@pytest.mark.slow
def test_another_plan_does_not_continue_a_run(tmp_path: Path, weights: str) -> None:
    out = tmp_path / "run"
    run_stages(plan_for(weights, minutes=0.001), out, console=QUIET)
    other = tmp_path / "weights"
    vitlab.save(vitlab.load(weights), other)
    for plan, match in (
        (plan_for(weights, minutes=5), "has 0.001 minutes"),
        (plan_for(str(other)), "started from"),
        (plan_for(weights, "epochs=3"), "another length"),
        (plan_for(weights, "lr=5"), "another lr"),
        (plan_for(weights, "seed=1"), "has changed|seed"),
    ):
        with pytest.raises(UserError, match=match):
            run_stages(plan, out, resume=True, console=QUIET)
    assert run_stages(plan_for(weights), out, resume=True, console=QUIET).stages.finished
    (out / "stages.json").unlink()
    os.mkfifo(out / "stages.json")
    with pytest.raises(UserError, match="no regular file"):
        run_stages(plan_for(weights), out, resume=True, console=QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 3), (3, 3), (5, 2), (1, 4)])
def test_a_handful_of_photos(tmp_path: Path, weights: str, counts: tuple[int, int]) -> None:
    digits = open_data("digits").train
    for label, number in enumerate(counts):
        (tmp_path / "photos" / str(label)).mkdir(parents=True)
        for i in np.flatnonzero(digits.labels == label)[:number].tolist():
            digits.image(i).resize((40, 40)).save(tmp_path / "photos" / str(label) / f"{i}.png")
    plan = make_plan(str(tmp_path / "photos"), weights, ["device=cpu", "workers=0", "steps=2", "holdout=0.3"], None)
    if plan is None:  # none is left to choose on
        assert counts == (2, 3)
        return
    done = run_stages(plan, tmp_path / "run", console=QUIET)
    assert done.stages.finished
    assert Classifier(str(tmp_path / "run"), "cpu").labels == ("0", "1")


def test_small_losses_are_chance() -> None:
    """Against scipy's binomial test, on the images about which two models differ."""
    for lost, won in [(1, 0), (3, 0), (4, 0), (2, 1), (25, 15), (15, 25), (50, 39), (60, 40), (0, 0)]:
        old = np.array([True] * lost + [False] * won + [True] * 7)
        new = np.array([False] * lost + [True] * won + [True] * 7)
        chance = binomtest(lost, lost + won, alternative="greater").pvalue if lost + won else 1.0
        assert run.is_worse(new, old) == (chance < 0.1 and lost > won)


def test_a_large_set_gets_features_of_a_part() -> None:
    data = open_data("digits")  # 1,198 and 599 images
    assert Budget(600, 0.01).rows(data) > len(data.train)
    assert Budget(1e5, 10).rows(data) == int(0.7 * (1e4 - 599))


@pytest.mark.parametrize("image", [0.01, 0.06, 0.1, 0.2, 0.3, 0.45])
@pytest.mark.parametrize("minutes", [3, 10])
def test_the_first_stage_and_the_test_keep_the_budget(image: float, minutes: int) -> None:
    """A start takes as long as 50 images, and fits, review and report together a little longer."""
    start = 50 * image
    data, budget = open_data("digits"), Budget(60 * minutes, image, start, start + 36 * image)
    rows, tests = min(budget.rows(data), len(data.train)), min(budget.tests(data), len(data.test))
    assert rows >= 100
    assert tests >= 50
    assert budget.spent + (rows + tests) * image + 1.2 * start <= 1.1 * 60 * minutes + 1e-6


def test_a_budget_by_hand() -> None:
    """Three minutes, half a second an image, 20 s to start, 40 s until both are known; 1,198 and 599 images."""
    data, busy = open_data("digits"), Budget(180, 0.5, 20, 40)
    # 198 s may be used; 40 are, 18 go to fits and review and 6 to the page: 134 s for 268 images
    assert (busy.passes, busy.tests(data), busy.rows(data)) == (268, 134, 134)
    # 20 s of figures and 15 s of maps beside the 6 s of the page
    assert busy.draws(157)
    assert not busy.draws(157.1)
    called = Budget(180, 0.5, 0, 40)  # by a program that runs already: 30 images stand for a start
    assert called.passes == (198 - 40 - 1.2 * 15) / 0.5


def test_speed_is_measured_on_few_images_where_they_take_long(weights: str, tmp_path: Path) -> None:
    plan = plan_for(weights)
    options: ExtractOptions = {"device": "cpu", "workers": 0, "broken_limit": 0.1}
    for most, images in ((0.0, 12), (1e6, 36)):  # 4 to warm up, then 8 or 32
        source = CountedSource(plan.data.train)
        counted = dataclasses.replace(plan.data, train=source)
        assert image_seconds(plan.model, counted, tmp_path, options, most) > 0
        assert source.read == images


class CountedSource(Subset):
    """Counts the images that are read."""

    read = 0

    def __init__(self, source: ImageSource) -> None:
        super().__init__(source, np.arange(len(source)))

    def image(self, *arguments: Any) -> Any:
        self.read += 1
        return super().image(*arguments)


def test_a_start_counts_more_than_once(weights: str) -> None:
    """A start that takes longer, as on a busy machine, leaves less time for what comes after it too."""
    data = plan_for(weights).data
    quick, slow = Budget(600, 0.05, 3, 5), Budget(600, 0.05, 23, 5)
    # 20 s more: in fits and pages twice, 1.2 of a start each, and in drawings twice, a start each
    assert slow.closing(data, 500) - quick.closing(data, 500) == pytest.approx(2.2 * 20)
    seen = [budget.steps(data, 500, 5, 1) for budget in (quick, slow)]
    assert seen[0] - seen[1] == pytest.approx(2 * 2.2 * 20 / (3.2 * 0.05), abs=2)


@pytest.mark.slow
def test_a_slow_machine_learns_from_fewer_images(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a pace at which only a part fits: the result is a head, learned and tested on some images of every class."""
    monkeypatch.setattr(run, "image_seconds", lambda *_: 0.25)
    lines = StringIO()
    plan = make_plan("digits", weights, ["device=cpu", "workers=0"], 2)
    assert plan is not None
    done = run_stages(plan, tmp_path, console=Console(file=lines, width=200))
    assert done.stages.finished
    assert not done.stages.steps
    assert done.report is not None
    assert isinstance(done.report.scores, Evaluation)
    labels = done.report.scores.labels
    assert 200 < len(labels) <= 250  # half of 132 s, less 9 s for the rest, at 0.25 s each, less what was spent by then
    assert set(labels.tolist()) == set(range(10))
    assert f"to test {len(labels)} of 599" in lines.getvalue()


@pytest.mark.slow
def test_the_head_is_the_fit(weights: str) -> None:
    plan = plan_for(weights)
    assert plan.data.validation is not None
    train, held = (extract(plan.model, source, device="cpu") for source in (plan.data.train, plan.data.validation))
    heads = fit_heads(FrozenFeatures(train, held), 10)
    soft = [soft_head(train, heads, epochs) for epochs in (0.5, 4, 40)]
    for linear in (*soft, heads.alone, heads.final):
        set_head(plan.model, linear)
        logits = extract(plan.model, plan.data.validation, what="logits", device="cpu").values
        np.testing.assert_allclose(logits, linear.scores(held.values).numpy(), atol=1e-4)
    assert [head.l2 for head in soft] == [max(heads.chosen.l2, l2) for l2 in (0.1, 0.3, 1.0)]


def test_speed_changes_the_length_and_nothing_else(weights: str) -> None:
    plan = plan_for(weights)
    idle, busy = Budget(600, 0.01), Budget(600, 0.03)
    steps = [budget.steps(plan.data, 500, 20, 32) for budget in (idle, busy)]
    assert steps[0] >= steps[1] > 0
    recipes = [plan.tuning(number, balanced=False) for number in steps]
    same = [dataclasses.replace(recipe, steps=1, warmup=0) for recipe in recipes]
    assert same[0] == same[1]


def test_a_budget_is_kept(weights: str) -> None:
    data = plan_for(weights).data
    for seconds in (60.0, 600.0):
        for image in (0.001, 0.02, 0.1):
            budget = Budget(seconds, image)
            steps = budget.steps(data, 500, 30, 32)
            seen = steps * 32
            assert seen == 0 or LEAST - 32 <= seen <= max(ENOUGH, 12 * len(data.train))
            if seen:
                assert 30 + seen * 3 * image + budget.closing(data, 500) <= seconds


@pytest.mark.slow
def test_low_rank_updates_leave_the_weights_where_they_are(tmp_path: Path, weights: str) -> None:
    """Both stages write what they add to the weights; the result is the merged model, and continues when finished."""
    out, plan = tmp_path / "run", plan_for(weights, "steps=6", "lora=4")
    done = run_stages(plan, out, console=QUIET)
    assert done.stages.tuned is not None
    head = {"head.weight", "head.bias"}
    assert load_file(out / "start" / "model.safetensors").keys() == head
    names = {name for name in load_file(out / "model.safetensors") if not name.startswith("unknown.")}
    assert head < names
    assert all("lora_" in name for name in names - head)
    assert accuracy(out, plan.data.test) > 0.6
    body = vitlab.load(weights).state_dict()["embed.weight"]
    assert torch.equal(vitlab.load(out).state_dict()["embed.weight"], body)
    again = run_stages(plan_for(weights, "steps=6", "lora=4"), out, resume=True, console=QUIET)
    assert again.stages.tuned == done.stages.tuned
