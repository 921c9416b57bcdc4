"""What `finetune` chooses by itself: by machine, by set, by the user's own settings."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab
from vitlab.training import auto
from vitlab.training.auto import finetune_recipe
from vitlab.weights import save

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


def test_the_recipe_names_the_model_of_the_weights(tmp_path: Path) -> None:
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


def test_a_start_without_weights_is_reported(tmp_path: Path) -> None:
    advice = finetune_recipe(photos(tmp_path / "p", {"a": 30, "b": 30}), "none", ["device=cpu"])
    assert advice.recipe.weights is None
    assert "from scratch" in " ".join(advice.warnings)


def test_without_a_hub_it_starts_from_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    advice = finetune_recipe(photos(tmp_path / "p", {"a": 30, "b": 30}), None, ["device=cpu"])
    assert advice.recipe.weights is None
    assert "--weights" in advice.warnings[0]


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
    large = vitlab.create("Ti/8", image_size=64, depth=6, width=192, mlp=768, heads=3, classes=5)
    device = torch.device("cpu")
    times = [auto.image_seconds(model, device, frozen=False) for model in (small, large)]
    assert 0 < times[0] < times[1]
    assert auto.image_seconds(large, device, frozen=True) < times[1]
