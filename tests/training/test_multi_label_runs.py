"""Training on multi-label sets: targets, losses and tests against torch and scikit-learn, runs and their thresholds."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.metrics import average_precision_score, f1_score, log_loss, precision_recall_curve
from small_runs import SMALL, records
from torch import nn
from two_digits import few, source

from vitlab.data.loader import EvalLoader, TrainLoader
from vitlab.data.mixing import partners
from vitlab.data.source import ArraySource
from vitlab.data.transforms import Augment
from vitlab.errors import UserError
from vitlab.models.config import Preprocess
from vitlab.training.loop import TrainResult, train
from vitlab.training.objectives import MultiLabel, blank_batch, measure_sums
from vitlab.training.parallel import Cluster
from vitlab.training.recipe import change
from vitlab.training.setup import initial_model
from vitlab.weights import load

CPU = torch.device("cpu")
RECIPE = change(SMALL, data="two digits", objective="sigmoid", image_size=(8, 16), model="Ti/4", ema=0.0)


def run(out: Path, resume: bool = False, **changes: Any) -> TrainResult:
    return train(change(RECIPE, **changes), out, resume=resume, console=Console(quiet=True), data=few())


# ---- the loader


@pytest.mark.parametrize("resident", [False, True])
def test_mixed_targets_are_blends_of_multi_hot_labels(resident: bool) -> None:
    images = source(16, "train")
    augment = Augment(mixup=0.5, label_smoothing=0.1)
    loader = TrainLoader(images, (8, 16), augment, Preprocess(), batch=16, resident=resident)
    batch = next(loader.batches())
    assert images.label_sets is not None
    hot = torch.from_numpy(images.label_sets.multi_hot(10))[batch.index]
    assert (batch.labels == hot).all()
    plain = 0.9 * hot.double() + 0.01
    for i, partner in enumerate(partners(16)):
        only = hot[i] & ~hot[partner]
        if only.any():
            share = ((batch.targets[i][only] - 0.01) / 0.9).double()
            assert share.std(correction=0) < 1e-6
            assert (batch.targets[i] - (share[0] * plain[i] + (1 - share[0]) * plain[partner])).abs().max() < 1e-6


def test_one_label_each_gives_the_targets_of_a_single_label_set() -> None:
    from vitlab.data.label_sets import sets_of

    several = source(12, "train")
    first = np.array([row[0] for row in map(several.labels_of, range(12))], np.int64)
    plain = ArraySource("plain", several.pixels, first, several.classes)
    one = ArraySource("one", several.pixels, sets_of([[int(k)] for k in first]), several.classes)
    augment = Augment(mixup=0.3, cutmix=0.5, label_smoothing=0.1)
    batches = [next(TrainLoader(s, (8, 16), augment, Preprocess(), batch=12).batches()) for s in (plain, one)]
    assert torch.equal(batches[0].targets, batches[1].targets)
    assert torch.equal(batches[0].images, batches[1].images)


# ---- the objective


def test_test_report_is_scikit_learns() -> None:
    torch.manual_seed(0)
    images = source(61, "test")
    model = nn.Sequential(nn.Flatten(), nn.Linear(384, 10))
    batches = list(EvalLoader(images, (8, 16), Preprocess(), batch=16).batches())
    objective, spare = MultiLabel(), blank_batch((8, 16), CPU, 10)
    report = objective.report(measure_sums(objective, model, batches, spare, Cluster(CPU), passes=6))
    logits = torch.cat([model(batch.images) for batch in batches]).detach()
    assert images.label_sets is not None
    truth = images.label_sets.multi_hot(10)
    assert report["map"] == pytest.approx(average_precision_score(truth, (8 * logits).round() / 8), abs=1e-9)
    expected = sum(log_loss(truth[:, k], logits.sigmoid()[:, k].numpy(), labels=[0, 1]) for k in range(10))
    assert report["loss"] == pytest.approx(expected, rel=1e-5)


def test_the_head_starts_at_the_frequency_of_its_classes() -> None:
    data = few()
    model, _ = initial_model(RECIPE, data)
    assert model.head is not None
    assert isinstance(data.train, ArraySource)
    share = (data.train.class_counts() + 1) / (len(data.train) + 2)
    found = model.eval()(torch.randn(2, 3, 8, 16)).sigmoid().detach().numpy()
    assert np.abs(found - share).max() < 1e-6


# ---- runs


def test_softmax_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="set objective=sigmoid"):
        run(tmp_path / "run", objective="softmax")


def test_a_run_resumes_to_the_bit_and_keeps_thresholds_chosen_on_validation_images(tmp_path: Path) -> None:
    run(tmp_path / "all", steps=6, evaluate_every=6)
    calls = iter(range(100))

    class Interrupt(Exception):
        pass

    def stop(*_: object) -> None:
        if next(calls) == 4:
            raise Interrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitlab.training.recorder.Recorder.add_step", stop)
        with pytest.raises(Interrupt):
            run(tmp_path / "two", steps=6, evaluate_every=6)
    run(tmp_path / "two", steps=6, evaluate_every=6, resume=True)
    assert (tmp_path / "all" / "model.safetensors").read_bytes() == (
        tmp_path / "two" / "model.safetensors"
    ).read_bytes()
    assert (tmp_path / "all" / "config.json").read_bytes() == (tmp_path / "two" / "config.json").read_bytes()
    tests = [record["test"] for record in records(tmp_path / "all") if "test" in record]
    assert set(tests[-1]) == {"map", "loss"}
    model, data = load(tmp_path / "all"), few()
    assert model.card.labels == data.classes
    assert model.card.thresholds is not None
    assert data.validation is not None
    assert data.validation.label_sets is not None
    batch = next(EvalLoader(data.validation, (8, 16), model.card.preprocess, batch=64).batches())
    odds = torch.round(model(batch.images).double() * 8).detach() / 8
    cut = np.log(np.divide(model.card.thresholds, 1 - np.array(model.card.thresholds)))
    truth = data.validation.label_sets.multi_hot(10)
    for k in range(10):
        precision, recall, _ = precision_recall_curve(truth[:, k], odds[:, k])
        best = (2 * precision * recall / np.maximum(1e-12, precision + recall)).max()
        assert f1_score(truth[:, k], odds[:, k] >= cut[k]) == pytest.approx(best, abs=1e-9)


def test_thresholds_of_unknown_origin_are_checked(tmp_path: Path) -> None:
    run(tmp_path / "run", steps=1, warmup=0)
    config = tmp_path / "run" / "config.json"
    known = json.loads(config.read_text())
    for wrong, match in (([0.5], "1 thresholds"), ([2.0] * 10, "from 0 to 1"), (["x"] * 10, "thresholds"), (3, "thre")):
        config.write_text(json.dumps(known | {"thresholds": wrong}))
        with pytest.raises(UserError, match=match):
            load(tmp_path / "run")
    config.write_text(json.dumps(known))
    assert load(tmp_path / "run", classes=4).card.thresholds is None


@pytest.mark.slow
def test_the_report_has_average_precision_and_thresholds_by_class(tmp_path: Path) -> None:
    from vitlab.evaluation.evaluate import evaluate_sets
    from vitlab.report import write_report

    run(tmp_path / "run", steps=4, warmup=0, evaluate_every=2)
    page = write_report(tmp_path / "run", few(), device="cpu").path.read_text()
    scores = evaluate_sets(load(tmp_path / "run"), few().test, device="cpu")
    assert f"{100 * scores.mean_precision:.1f}" in page
    assert "confus" not in page.partition("<main>")[2]
    for row in scores.class_table():
        cells = f"<td>{row['class']}</td><td>{row['images']}</td><td>{row['average_precision']:.1%}</td>"
        assert cells in page
        assert f"<td>{row['threshold']:.1%}</td>" in page
