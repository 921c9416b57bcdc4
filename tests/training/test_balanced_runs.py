"""Runs on uneven classes: what balance= does to them, and that they resume to the bit."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from small_runs import SMALL, assert_same_run, few_digits, records
from test_resume import killed_at

from vitlab.data.balance import Balance
from vitlab.data.loader import EvalLoader
from vitlab.data.source import Data, Subset
from vitlab.errors import UserError
from vitlab.models.config import Preprocess
from vitlab.training.loop import train
from vitlab.training.recipe import change
from vitlab.weights import load


def uneven_digits() -> Data:
    """Few images of the digits from 5 on."""
    data = few_digits()
    labels = data.train.labels
    return dataclasses.replace(data, train=Subset(data.train, np.flatnonzero((labels < 5) | (np.arange(193) % 8 == 0))))


@pytest.mark.parametrize("balance", ["weights", "sampling"])
def test_a_balanced_run_resumes_to_the_bit(balance: Balance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, quiet = uneven_digits(), Console(quiet=True)
    recipe = change(SMALL, balance=balance, steps=8, checkpoint_every=3)
    train(recipe, tmp_path / "straight", data=data, console=quiet)
    with killed_at(4, monkeypatch):
        train(recipe, tmp_path / "resumed", data=data, console=quiet)
    train(recipe, tmp_path / "resumed", data=data, console=quiet, resume=True)
    assert_same_run(tmp_path / "straight", tmp_path / "resumed")


def test_both_ways_predict_small_classes_more_often(tmp_path: Path) -> None:
    """A model that knows little predicts classes by their frequency in training."""
    data, found = uneven_digits(), {}
    images = next(EvalLoader(data.test, (8, 8), Preprocess(), batch=59).batches()).images
    for balance in ("none", "weights", "sampling"):
        recipe = change(SMALL, balance=balance, steps=30, lr=1e-2, ema=0.0, mixup=0.0, label_smoothing=0.0, depth=1)
        recipe = change(recipe, evaluate_every=30, checkpoint_every=30, micro=32)
        train(recipe, tmp_path / balance, data=data, console=Console(quiet=True))
        with torch.no_grad():
            found[balance] = float(load(tmp_path / balance).eval()(images).softmax(1)[:, 5:].sum(1).mean())
    assert found["none"] < 0.25  # a tenth of the images
    assert found["weights"] > 0.35  # half of the weight
    assert found["sampling"] > 0.35
    losses = [record["loss"] for record in records(tmp_path / "weights") if "loss" in record]
    assert losses[0] == pytest.approx(np.log(10), rel=0.3)  # of a fresh head: the weights have a mean of one


def test_what_cannot_be_balanced() -> None:
    with pytest.raises(UserError, match="masked patch prediction uses no labels"):
        change(SMALL, balance="weights", objective="masked")
