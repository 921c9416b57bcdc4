"""Fine-tuning in stages: a usable model after the first, the better of both at the end, whatever happens between."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

import vitlab
from vitlab.data.open import open_data
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import evaluate
from vitlab.evaluation.extract import extract
from vitlab.finetuning import run
from vitlab.finetuning.budget import ENOUGH, LEAST, Budget
from vitlab.finetuning.head import FrozenFeatures, fit_heads, set_head
from vitlab.finetuning.plan import Plan, make_plan
from vitlab.finetuning.run import run_stages
from vitlab.prediction import Classifier
from vitlab.training.stages import read_stages

QUIET = Console(quiet=True)
SMALL = ["device=cpu", "subset=0.3", "workers=0"]


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


def test_a_head_alone_where_time_is_short(tmp_path: Path, weights: str) -> None:
    done = run_stages(plan_for(weights, minutes=1e-6), tmp_path / "run", console=QUIET)
    assert done.stages.steps == 0
    assert done.stages.finished
    assert done.report is not None
    assert done.report.path.exists()
    assert accuracy(tmp_path / "run", open_data("digits").test) > 0.6
    assert not (tmp_path / "run" / "checkpoints").exists()


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


@pytest.mark.slow
def test_a_run_killed_after_the_first_stage_is_usable_and_continues(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Stands for SIGKILL."""

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(run, "train", killed)
        with pytest.raises(Killed):
            run_stages(plan_for(weights, "steps=4"), out, console=QUIET)
    assert "validation images right" in (out / "report.html").read_text()
    assert Classifier(str(out), "cpu").labels == plan_for(weights).data.classes
    with pytest.raises(UserError, match="continue it with --resume"):
        run_stages(plan_for(weights, "steps=4"), out, console=QUIET)
    before = read_stages(out)
    done = run_stages(plan_for(weights, "steps=4"), out, resume=True, console=QUIET)
    assert before is not None
    assert done.stages == dataclasses.replace(before, tuned=done.stages.tuned, spent=done.stages.spent, finished=True)
    assert "test images right" in (out / "report.html").read_text()
    again = run_stages(plan_for(weights, "steps=4"), tmp_path / "again", console=QUIET)
    assert again.stages.tuned == done.stages.tuned
    first, second = (vitlab.load(folder).state_dict() for folder in (out, tmp_path / "again"))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_head_is_the_fit(weights: str) -> None:
    plan = plan_for(weights)
    assert plan.data.validation is not None
    train, held = (extract(plan.model, source, device="cpu") for source in (plan.data.train, plan.data.validation))
    heads = fit_heads(FrozenFeatures(train, held, 0.01), 10)
    for linear in (heads.start, heads.final):
        set_head(plan.model, linear)
        logits = extract(plan.model, plan.data.validation, what="logits", device="cpu").values
        np.testing.assert_allclose(logits, linear.scores(held.values).numpy(), atol=1e-4)
    assert heads.start.l2 >= 0.1


def test_speed_changes_the_length_and_nothing_else(weights: str, tmp_path: Path) -> None:
    plan = plan_for(weights)
    idle, busy = Budget(600, 0.01), Budget(600, 0.03)
    steps = [budget.steps(plan.data, 20) for budget in (idle, busy)]
    assert steps[0] >= steps[1] > 0
    recipes = [plan.tuning(tmp_path, number, balanced=False) for number in steps]
    same = [dataclasses.replace(recipe, steps=1, warmup=0) for recipe in recipes]
    assert same[0] == same[1]


def test_a_budget_is_kept(weights: str) -> None:
    data = plan_for(weights).data
    for seconds in (60.0, 600.0):
        for image in (0.001, 0.02, 0.1):
            budget = Budget(seconds, image)
            steps = budget.steps(data, 30)
            seen = steps * 32
            assert seen == 0 or LEAST - 32 <= seen <= max(ENOUGH, 12 * len(data.train))
            if seen:
                assert 30 + seen * 3 * image + budget.closing(data) <= seconds
