"""What `finetune` chooses by itself: by machine, by set, by the user's own settings."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.report.runs import score_text
from vitlab.text import counted
from vitlab.training import auto
from vitlab.training.auto import finetune_recipe
from vitlab.weights import save

Command = Callable[..., tuple[int, str, str]]
RNG = np.random.default_rng(0)


def photos(folder: Path, counts: dict[str, int], side: int = 40) -> str:
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(RNG.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(folder / name / f"{i}.png")
    return str(folder)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("weights") / "model"
    save(vitlab.create("Ti/16", image_size=64, depth=1, width=32, mlp=32, heads=2, classes=5), folder)
    return str(folder)


def test_a_cpu_is_not_given_the_papers_batch(tmp_path: Path, weights: str) -> None:
    advice = finetune_recipe(photos(tmp_path / "p", {"a": 30, "b": 30}), weights, ["device=cpu"])
    r = advice.recipe
    assert (r.image_size, r.batch, r.freeze, r.optimizer) == ((64, 64), 32, "none", "sgd")
    assert r.weights == weights
    assert r.warmup * 10 <= (r.epochs or 0) * 60 / 32 + 10
    assert any("about" in line and "CPU" in line for line in advice.lines)
    assert 0 < advice.seconds < 60


def test_the_recipe_names_the_model_of_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "image_seconds", lambda model, device, frozen: 0.01)  # not measured: it has no part here
    save(vitlab.create("Ti/32", image_size=64, classes=5), tmp_path / "model")
    plan = finetune_recipe(photos(tmp_path / "p", {"a": 3, "b": 3}), str(tmp_path / "model"), ["device=cpu"])
    assert plan.recipe.model == "Ti/32"


def test_where_time_is_short_only_the_head_learns(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "image_seconds", lambda model, device, frozen: 5.0 if frozen else 15.0)
    advice = finetune_recipe(photos(tmp_path / "p", {"a": 30, "b": 30}), weights, ["device=cpu"])
    assert advice.recipe.freeze == "body"
    seen = round((advice.recipe.epochs or 0) * 44 / 32) * 32  # 12 of 60 are test images, 4 of 48 validation images
    assert 5.0 * seen <= auto.TIME_LIMIT
    assert advice.seconds == 5.0 * (seen + 12 + 10 * 4)  # the test images once, the others ten times


def test_the_users_settings_take_precedence(tmp_path: Path, weights: str) -> None:
    pairs = ["device=cpu", "epochs=2", "batch=8", "lr=0.5", "image_size=32", "freeze=body"]
    r = finetune_recipe(photos(tmp_path / "p", {"a": 30, "b": 30}), weights, pairs).recipe
    assert (r.epochs, r.batch, r.lr, r.image_size, r.freeze) == (2.0, 8, 0.5, (32, 32), "body")
    assert r.warmup <= 1


def test_the_papers_recipe_where_the_machine_can_run_it(
    tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "can_run_paper", lambda *_: True)
    r = finetune_recipe(photos(tmp_path / "p", {"a": 30, "b": 30}), weights, ["device=cpu"]).recipe
    assert (r.batch, r.image_size, r.steps, r.optimizer, r.clip) == (512, (384, 384), 500, "sgd", 1.0)


@pytest.mark.parametrize("large", [True, False])
def test_low_rank_updates_have_a_recipe_of_their_own(
    large: bool, tmp_path: Path, weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """AdamW, and never a frozen body beside them, which nobody asked for: also where time is short."""
    monkeypatch.setattr(auto, "can_run_paper", lambda *_: large)
    monkeypatch.setattr(auto, "image_seconds", lambda model, device, frozen: 5.0 if frozen else 15.0)
    data = photos(tmp_path / "p", {"a": 30, "b": 30})
    advice = finetune_recipe(data, weights, ["device=cpu", "lora=4"])
    r = advice.recipe
    assert (r.lora, r.freeze, r.optimizer, r.lr, r.batch) == (4, "none", "adamw", 0.001, 512 if large else 32)
    assert any("AdamW" in line and "lr 0.001" in line for line in advice.lines)
    own = finetune_recipe(data, weights, ["device=cpu", "lora=4", "optimizer=sgd", "lr=0.1"]).recipe
    assert (own.optimizer, own.lr) == ("sgd", 0.1)


def test_a_start_without_weights_is_reported(tmp_path: Path) -> None:
    advice = finetune_recipe(photos(tmp_path / "p", {"a": 30, "b": 30}), "none", ["device=cpu"])
    assert advice.recipe.weights is None
    assert "from scratch" in " ".join(advice.warnings)


@pytest.mark.parametrize("words", [(), ("--paper",)])
def test_without_weights_and_a_hub_nothing_is_trained(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command, no_box: None
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    data = photos(tmp_path / "p", {"a": 30, "b": 30})
    code, _, err = command("finetune", data, "--out", str(tmp_path / "run"), *words, "device=cpu")
    assert code == 1
    assert err.startswith("error: there are no weights to start from")
    assert err.count("\n") == 1
    for part in ("--weights FILE", "hf download WinKawaks/vit-tiny-patch16-224", "--weights none", "cannot be reached"):
        assert part in err
    assert not (tmp_path / "run").exists()


# ---- --out


def test_out_is_checked_before_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """DATA does not exist, and the error is about --out all the same."""
    (tmp_path / "file").write_text("")
    for name in ("run", "stages"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "recipe.json").write_text("{}")
    (tmp_path / "stages" / "stages.json").write_text("{}")
    cases = {
        tmp_path / "file": "is a file; name a folder",
        tmp_path / "file" / "below": "is a file; name a folder",
        tmp_path / "run": "holds a run already; continue it with --resume, or choose another --out",
        tmp_path / "stages": "holds a run already; continue it with --resume, or choose another --out",
        Path("/proc/run"): "nothing can be written in /proc",  # for root too
    }
    for out, message in cases.items():
        code, _, err = command("finetune", str(tmp_path / "missing"), "--out", str(out))
        assert (code, message in err) == (1, True), err
    code, _, err = command("finetune", str(tmp_path / "missing"), "--out", str(tmp_path / "new" / "run"))
    assert (code, "missing" in err) == (1, True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "verb", [["train", "digits"], ["evaluate", "RUN", "DATA"], ["inspect", "RUN"], ["vtab", "RUN"]]
)
def test_other_verbs_check_out_first(verb: list[str], tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = command(*verb, "--out", str(tmp_path / "file"))
    assert code == 1
    assert "file" in err
    assert err.count("\n") == 1


# ---- numbers in print


@pytest.mark.parametrize(
    ("number", "text"), [(1, "1 epoch"), (1.0, "1 epoch"), (0, "0 epochs"), (2.5, "2.5 epochs"), (1234, "1,234 epochs")]
)
def test_counted(number: float, text: str) -> None:
    assert counted(number, "epoch") == text


def test_the_length_of_one_epoch(tmp_path: Path, weights: str) -> None:
    lines = finetune_recipe(photos(tmp_path / "p", {"a": 8, "b": 8}), weights, ["device=cpu", "epochs=1"]).lines
    assert lines[-1].startswith("length   1 epoch, ")


def test_scores_in_print() -> None:
    report = {"accuracy": 0.5, "accuracy5": 1.0, "loss": 0.25}
    assert score_text(report, 10) == "accuracy 50.00%, top-5 100.00%, loss 0.2500"
    assert score_text(report, 2) == "accuracy 50.00%, loss 0.2500"
    assert score_text({"map": 0.5, "loss": 1.0}, 2) == "mAP 50.00%, loss 1.0000"


def test_problems_of_the_set_are_reported(tmp_path: Path, weights: str) -> None:
    folder = photos(tmp_path / "p" / "train", {"many": 60, "few": 3, "ok": 30})
    photos(tmp_path / "p" / "test", {"many": 4, "few": 4, "ok": 4})
    twin = (tmp_path / "p" / "train" / "ok" / "0.png").read_bytes()
    (tmp_path / "p" / "test" / "ok" / "0.png").write_bytes(twin)
    warnings = " ".join(finetune_recipe(str(Path(folder).parent), weights, ["device=cpu"]).warnings)
    assert "uneven" in warnings
    assert "fewer than" in warnings
    assert "also in train" in warnings


def test_time_is_measured_on_the_model() -> None:
    small = vitlab.create("Ti/16", image_size=64, depth=1, width=32, mlp=32, heads=2, classes=5)
    large = vitlab.create("Ti/8", image_size=64, depth=3, width=128, mlp=512, heads=2, classes=5)
    device = torch.device("cpu")
    times = [auto.image_seconds(model, device, frozen=False) for model in (small, large)]
    assert 0 < times[0] < times[1]
    assert auto.image_seconds(large, device, frozen=True) < times[1]
