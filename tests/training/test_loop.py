"""The training step's arithmetic: accumulation, freezing, objectives, memory; and the records a run keeps."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from small_runs import SMALL, few_digits, plain_run, records, train_small
from test_resume import killed_at
from torch import Tensor

import vitlab
from vitlab.data.loader import TrainLoader
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.report.history import read_history
from vitlab.training.loop import Stage, train
from vitlab.training.objectives import Classification
from vitlab.training.optim import learning_rate
from vitlab.training.parallel import Cluster
from vitlab.training.recipe import Recipe, change
from vitlab.training.recorder import Recorder
from vitlab.training.saver import Saver
from vitlab.training.setup import divisors, fit_micro, initial_model, prepare_run
from vitlab.training.trainer import Trainer
from vitlab.weights import load

CPU = Cluster(torch.device("cpu"))


def make_trainer(out: Path, recipe: Recipe) -> Trainer:
    return Trainer(prepare_run(recipe, out, CPU, resume=False), CPU)


def gradient(out: Path, recipe: Recipe) -> tuple[float, dict[str, Tensor]]:
    trainer = make_trainer(out, recipe)
    for p in trainer.core.parameters():
        torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(p.numel()))
    loss = trainer.accumulate(step=3)
    return loss.item(), {name: p.grad for name, p in trainer.core.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("objective", ["softmax", "sigmoid", "masked"])
def test_eight_micro_batches_give_the_gradient_of_one(tmp_path: Path, objective: str) -> None:
    recipe = change(SMALL, objective=objective, dropout=0.0, drop_path=0.0, batch=64, micro=64)
    loss, once = gradient(tmp_path / "once", recipe)
    parts_loss, parts = gradient(tmp_path / "parts", change(recipe, micro=8))
    assert parts_loss == pytest.approx(loss, rel=1e-5)
    assert once.keys() == parts.keys()
    difference = sum(float((once[k] - parts[k]).double().pow(2).sum()) for k in once) ** 0.5
    size = sum(float(once[k].double().pow(2).sum()) for k in once) ** 0.5
    assert difference < 1e-5 * size


def test_the_first_loss_by_hand(tmp_path: Path) -> None:
    """A fresh head of zeros rates every class alike, whatever the images: the loss is log 10."""
    train_small(tmp_path, steps=4, warmup=0)
    assert records(tmp_path)[0]["loss"] == pytest.approx(torch.tensor(10.0).log().item(), rel=1e-6)


def test_the_first_sigmoid_loss_by_hand(tmp_path: Path) -> None:
    """Every logit is the head's bias: one class of ten is to be "yes", the others "no"."""
    train_small(tmp_path, steps=4, warmup=0, objective="sigmoid", head_bias=-6.9, label_smoothing=0.0, mixup=0.0)
    yes, no = torch.nn.functional.softplus(torch.tensor([6.9, -6.9], dtype=torch.float64)).tolist()
    assert records(tmp_path)[0]["loss"] == pytest.approx(yes + 9 * no, rel=1e-5)


def test_fresh_weights_by_the_authors_distributions(tmp_path: Path) -> None:
    recipe = change(SMALL, width=128, heads=4, prelogits=128)
    plain, lecun = (make_trainer(tmp_path / init, change(recipe, init=init)).core for init in ("xavier", "lecun"))
    changed = {name for name, p in plain.named_parameters() if not torch.equal(p, lecun.get_parameter(name))}
    assert changed == {"embed.weight", "prelogits.weight"}
    for name, inputs in (("embed.weight", 3 * 4 * 4), ("prelogits.weight", 128)):
        assert lecun.get_parameter(name).std().item() == pytest.approx(inputs**-0.5, rel=0.05)


def test_a_step_is_torchs(tmp_path: Path) -> None:
    """Four steps of the loop against the same four written out."""
    recipe = change(SMALL, dropout=0.0, drop_path=0.0, micro=32, steps=4, warmup=1, clip=0.5)
    trainer = make_trainer(tmp_path / "a", recipe)
    other = make_trainer(tmp_path / "b", recipe)
    model = other.core
    kernels = [p for n, p in model.named_parameters() if n.endswith("weight") and p.ndim > 1]
    rest = [p for n, p in model.named_parameters() if not (n.endswith("weight") and p.ndim > 1)]
    adam = torch.optim.AdamW([{"params": kernels, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])
    data = other.setup.data.train
    loader = TrainLoader(data, (8, 8), recipe.augment, other.setup.preprocess, batch=32, seed=recipe.seed)
    batches = loader.batches()
    for step in range(4):
        found, _ = trainer.step(step)
        batch = next(batches)
        loss = torch.nn.functional.cross_entropy(model(batch.images), batch.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, base=recipe.lr, steps=4, warmup=1, decay="cosine")
        adam.step()
        adam.zero_grad()
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    for (name, ours), theirs in zip(trainer.core.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6, msg=name)


def test_rates_in_the_log_are_the_schedules(tmp_path: Path) -> None:
    train_small(tmp_path, evaluate_every=20)
    steps = [r for r in records(tmp_path) if "lr" in r]
    assert [r["step"] for r in steps] == list(range(1, 21))
    for r in steps:
        t = r["step"] - 1
        expected = learning_rate(t, base=SMALL.lr, steps=20, warmup=3, decay="cosine")
        assert r["lr"] == expected


def test_frozen_body_stays_and_head_learns(tmp_path: Path) -> None:
    recipe = change(SMALL, freeze="body", weight_decay=0.3)
    trainer = make_trainer(tmp_path, recipe)
    before = {name: p.detach().clone() for name, p in trainer.core.named_parameters()}
    for step in range(3):
        trainer.step(step + 3)
    for name, p in trainer.core.named_parameters():
        assert torch.equal(p, before[name]) != name.startswith("head."), name


def test_a_run_from_a_run(tmp_path: Path) -> None:
    """Fine-tuning starts where the weights are: with frozen body and no rate, the features are those of the weights."""
    train_small(tmp_path / "second", weights=str(plain_run()), freeze="body", lr=0.0, seed=9, steps=4)
    first, second = load(plain_run()), load(tmp_path / "second")
    images = torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(first(images), second(images))


def test_weights_decide_what_the_model_is(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="depth=2, not 3; set depth=2"):
        train_small(tmp_path / "second", weights=str(plain_run()), depth=3)
    other = change(SMALL, depth=3, dropout=0.1)  # a recipe's own depth is not the user's: its weights have another one
    train_small(tmp_path / "third", recipe=other, weights=str(plain_run()), steps=4)
    config = load(tmp_path / "third").config
    assert isinstance(config, ViTConfig)
    assert (config.depth, config.dropout) == (2, 0.1)


def test_masked_run_leaves_a_model_without_a_head(tmp_path: Path) -> None:
    result = train_small(tmp_path, objective="masked", steps=8)
    assert load(tmp_path).config.classes == 0
    assert result.report["prior"] > 0
    assert result.report["loss"] > 0


def test_recomputed_activations_change_nothing(tmp_path: Path) -> None:
    plain = gradient(tmp_path / "a", change(SMALL, micro=32))
    again = gradient(tmp_path / "b", change(SMALL, micro=32, recompute=True))
    assert plain[0] == again[0]
    assert all(torch.equal(plain[1][k], again[1][k]) for k in plain[1])


def test_out_of_memory_shrinks_the_micro_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model that cannot take more than ten images at a time is given eight."""
    recipe = change(SMALL, micro=32, dropout=0.0, drop_path=0.0)
    trainer = make_trainer(tmp_path / "small", recipe)
    plain_loss = trainer.objective.loss

    class Tight:
        def __getattr__(self, name: str) -> object:
            return getattr(objective, name)

        def loss(self, module: torch.nn.Module, batch: object, step: int) -> Tensor:
            if len(batch.images) > 10:  # type: ignore[attr-defined]
                raise torch.OutOfMemoryError("no room")
            return plain_loss(module, batch, step)  # type: ignore[arg-type]

    objective, trainer.objective = trainer.objective, Tight()  # type: ignore[assignment]
    loss, _ = trainer.step(0)
    assert trainer.micro == 8
    assert "continuing with 8" in capsys.readouterr().err
    plain = make_trainer(tmp_path / "plain", recipe)
    assert loss.item() == pytest.approx(plain.step(0)[0].item(), rel=1e-5)


def test_micro_batches_fit_and_divide() -> None:
    assert fit_micro(4096, image_bytes=10, state_bytes=0, free=10_000) == 512  # 800 fit; 512 divides
    assert fit_micro(4096, image_bytes=10, state_bytes=7000, free=10_000) == 64
    assert fit_micro(96, image_bytes=1, state_bytes=0, free=100) == 48
    assert fit_micro(96, image_bytes=1, state_bytes=0, free=1) == 1
    assert divisors(12) == [12, 6, 4, 3, 2, 1]


def test_every_test_image_is_counted_once(tmp_path: Path) -> None:
    """59 images in batches of 32: the last one partial."""
    result = train_small(tmp_path, steps=4)
    hits = result.report["accuracy"] * 59
    assert hits == pytest.approx(round(hits), abs=1e-9)


def test_recipe_beside_the_checkpoint_is_resolved(tmp_path: Path) -> None:
    train_small(tmp_path, steps=None, epochs=1.0, warmup=1)
    about = json.loads((tmp_path / "recipe.json").read_text())
    assert about["recipe"]["steps"] == round(193 / 32)
    assert about["labels"] == [str(n) for n in range(10)]
    assert about["model"]["kind"] == "vit"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"warmup": 20}, "warm-up"),
        ({"micro": 7}, "divide"),
        ({"objective": "masked", "pool": "attention"}, "pool"),
        ({"data": "nowhere"}, "nowhere"),
        ({"device": "tpux"}, "tpux"),
    ],
)
def test_settings_that_cannot_work(tmp_path: Path, change: dict[str, Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        train_small(tmp_path / "run", **change)


def test_tensorboard(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train_small(tmp_path, tensorboard=True, steps=8)
    board = events.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    losses = [r["loss"] for r in records(tmp_path) if "loss" in r]
    assert [e.value for e in board.Scalars("loss")] == pytest.approx(losses, rel=1e-6)
    assert board.Scalars("ema/accuracy")


def test_tensorboard_of_a_resumed_run_has_every_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those after the checkpoint are done again; the one at the checkpoint is not, nor is its evaluation."""
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    settings: dict[str, Any] = {"tensorboard": True, "steps": 8, "checkpoint_every": 4, "evaluate_every": 4}
    with killed_at(6, monkeypatch):
        train_small(tmp_path, log_every=1, **settings)
    train_small(tmp_path, resume=True, log_every=1, **settings)
    board = events.EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [e.step for e in board.Scalars("loss")] == list(range(1, 9))
    assert [e.step for e in board.Scalars("validation/accuracy")] == [4, 8]


def test_the_time_of_a_slow_run_is_in_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large model on one core takes a minute for an image."""
    plain, steps, seconds = Recorder.write_speed, [0], []

    def slowly(self: Recorder, step: int, loss: float, speed: float) -> None:
        seconds.append(SMALL.batch * (step - steps[-1]) / (1e-5 * speed))
        steps.append(step)
        plain(self, step, loss, 1e-5 * speed)

    monkeypatch.setattr(Recorder, "write_speed", slowly)
    train_small(tmp_path, steps=8, log_every=2)
    assert len(seconds) > 2
    assert read_history(tmp_path).seconds == pytest.approx(sum(seconds), rel=1e-3)


# ---- ends before the last step


def validations(out: Path) -> list[int]:
    return [record["step"] for record in records(out) if "validation" in record]


def test_patience_ends_a_run_that_no_longer_improves(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"lr": 0.0, "warmup": 0, "ema": 0.0, "steps": 20, "evaluate_every": 2, "patience": 3}
    train_small(tmp_path / "run", **settings)
    assert validations(tmp_path / "run") == [2, 4, 6, 8]  # the first is the best of all
    assert [record["step"] for record in records(tmp_path / "run") if "test" in record] == [8]
    again = train_small(tmp_path / "run", resume=True, **settings)
    assert validations(tmp_path / "run") == [2, 4, 6, 8]
    assert again.report["accuracy"] == records(tmp_path / "run")[-1]["test"]["accuracy"]


def saved_start(folder: Path) -> Path:
    """The model of the recipe, saved."""
    data = few_digits()
    vitlab.save(initial_model(SMALL, data)[0], folder / "start")
    return folder / "start"


def test_a_stage_leaves_its_best_and_no_model(tmp_path: Path) -> None:
    start = saved_start(tmp_path)
    result = train(SMALL, tmp_path / "run", console=Console(quiet=True), data=few_digits(), stage=Stage(start))
    assert (tmp_path / "run" / "checkpoints" / "best").exists()
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert not any("test" in record for record in records(tmp_path / "run"))
    last = [record for record in records(tmp_path / "run") if "validation" in record][-1]
    assert result.report == last["ema"]


@pytest.mark.parametrize("is_stage", [True, False])
def test_the_end_of_a_stage_counts_and_the_best_of_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stage: bool
) -> None:
    scores = iter(range(9, 0, -1))  # worse every time
    monkeypatch.setattr(Classification, "score", lambda *_: next(scores))
    saved: list[int] = []
    monkeypatch.setattr(Saver, "save_best", lambda *_: saved.append(1))
    recipe = change(SMALL, steps=4, warmup=0, evaluate_every=1)
    stage = Stage(saved_start(tmp_path)) if is_stage else None
    train(recipe, tmp_path / "run", console=Console(quiet=True), data=few_digits(), stage=stage)
    assert len(saved) == (2 if is_stage else 1)


def test_a_deadline_ends_a_run_with_a_validation(tmp_path: Path) -> None:
    stage = Stage(saved_start(tmp_path), time.monotonic())
    train(SMALL, tmp_path / "run", console=Console(quiet=True), data=few_digits(), stage=stage)
    assert validations(tmp_path / "run") == [1]
    assert (tmp_path / "run" / "checkpoints" / "best").exists()
