"""Low-rank updates: only they and the head learn, any update can be expressed, and runs resume to the bit."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import fill
from safetensors.torch import load_file
from small_runs import SMALL, assert_same_run, records, train_small
from test_parallel import train as train_by
from test_resume import killed_at
from torch import Tensor, nn

import vitlab
from vitlab.errors import UserError
from vitlab.models.config import ResNetConfig
from vitlab.models.variants import build
from vitlab.models.vit import ViT
from vitlab.training.lora import add_updates, own_state
from vitlab.training.optim import is_decayed
from vitlab.training.recipe import change, override
from vitlab.training.setup import recipe_to_resume

DENSE = ("attention.qkv", "attention.out", "mlp.up", "mlp.down")


def tiny(**settings: Any) -> ViT:
    options = {"image_size": 8, "depth": 2, "width": 16, "mlp": 32, "heads": 2, "classes": 10} | settings
    model = vitlab.create("Ti/4", **options)
    assert isinstance(model, ViT)
    return fill(model)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of other classes than the digits'."""
    folder = tmp_path_factory.mktemp("base") / "model"
    vitlab.save(tiny(classes=3), folder)
    return folder


@pytest.fixture(scope="module")
def run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete run of rank 4; not to be changed."""
    out = tmp_path_factory.mktemp("lora") / "run"
    train_small(out, weights=str(base), lora=4)
    return out


# ---- what learns


def expected_names(depth: int = 2) -> set[str]:
    updates = {f"blocks.{i}.{layer}.lora_{x}.weight" for i in range(depth) for layer in DENSE for x in "ab"}
    return updates | {"head.weight", "head.bias"}


def test_only_updates_and_the_head_have_gradients() -> None:
    model = tiny()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    add_updates(model, rank=4, alpha=16, seed=0)
    model(torch.randn(3, 3, 8, 8)).square().sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == expected_names()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    after = dict(model.named_parameters())
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("head."))
    assert own_state(model).keys() == expected_names()
    assert is_decayed("blocks.0.mlp.up.lora_a.weight", after["blocks.0.mlp.up.lora_a.weight"])  # a kernel


def test_the_first_step_sees_the_model_as_it_was() -> None:
    images = torch.randn(2, 3, 8, 8)
    model = tiny().eval()
    before = model(images)
    add_updates(model, rank=4, alpha=16, seed=0)
    assert torch.equal(model(images), before)
    assert model.blocks[0].get_parameter("mlp.up.lora_a.weight").any()  # else nothing would ever learn


def test_the_scale_is_alpha_over_rank() -> None:
    model = tiny(depth=1).double()
    plain = model.blocks[0].get_submodule("mlp.up")
    assert isinstance(plain, nn.Linear)
    add_updates(model, rank=2, alpha=6, seed=0)
    layer, x = fill(model.blocks[0].get_submodule("mlp.up"), seed=3), torch.randn(5, 16, dtype=torch.float64)
    a, b = layer.get_parameter("lora_a.weight"), layer.get_parameter("lora_b.weight")
    weight, bias = layer.get_parameter("weight"), layer.get_parameter("bias")
    assert weight is plain.weight
    torch.testing.assert_close(layer(x), x @ (weight + 3 * b @ a).T + bias, rtol=1e-12, atol=1e-12)


# ---- with rank = width any update can be expressed


def test_full_rank_expresses_any_update() -> None:
    """W + B A = W' where A or B is the identity: A for layers of `width` inputs, B for the one of `width` outputs."""
    images = torch.randn(4, 3, 8, 8, dtype=torch.float64)
    model, target = tiny().double().eval(), tiny().double().eval()
    for i, block in enumerate(target.blocks):
        for layer in DENSE:
            nn.init.normal_(block.get_parameter(f"{layer}.weight"), std=0.2, generator=torch.Generator().manual_seed(i))
    assert (model(images) - target(images)).abs().max() > 0.1
    add_updates(model, rank=16, alpha=16, seed=0)
    with torch.no_grad():
        for own, other in zip(model.blocks, target.blocks, strict=True):
            for layer in DENSE:
                update = other.get_parameter(f"{layer}.weight") - own.get_parameter(f"{layer}.weight")
                a, b = own.get_parameter(f"{layer}.lora_a.weight"), own.get_parameter(f"{layer}.lora_b.weight")
                a.copy_(update if layer == "mlp.down" else torch.eye(16))
                b.copy_(torch.eye(16) if layer == "mlp.down" else update)
    torch.testing.assert_close(model(images), target(images), rtol=0, atol=1e-10)


def fit(model: nn.Module, images: Tensor, labels: Tensor, steps: int) -> float:
    """The loss after some steps on one batch."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.02, weight_decay=0)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    return float(F.cross_entropy(model(images), labels).detach())


@pytest.mark.slow
def test_full_rank_reaches_the_loss_of_full_fine_tuning() -> None:
    images, labels = torch.randn(48, 3, 8, 8), torch.randint(10, (48,))  # noise: a head alone cannot fit it
    full, head, updated = tiny(), tiny(), tiny()
    add_updates(updated, rank=16, alpha=16, seed=0)
    head.requires_grad_(False)
    assert head.head is not None
    head.head.requires_grad_(True)
    reached = fit(full, images, labels, steps=30)
    assert fit(updated, images, labels, steps=60) < reached
    assert fit(head, images, labels, steps=60) > 10 * reached


# ---- runs


def test_a_run_keeps_what_it_learned_apart_from_the_base(run: Path, base: Path) -> None:
    for name in ("", "checkpoints/best"):
        assert load_file(run / name / "model.safetensors").keys() == expected_names()
        config = json.loads((run / name / "config.json").read_text())
        assert config["base"]["source"] == str(base)
    state = load_file(run / "checkpoints" / "last" / "state.safetensors")
    assert {key.removeprefix("model/") for key in state if key.startswith("model/")} == expected_names()
    assert {key.removeprefix("ema/") for key in state if key.startswith("ema/")} == expected_names()
    losses = [r["loss"] for r in records(run) if "loss" in r]
    assert len(losses) == 20


def test_the_loaded_run_is_the_model_that_was_tested(run: Path, base: Path) -> None:
    """W + 16 / 4 B A from the two files, by hand in float64; the rest is the base's, the head the run's."""
    model, theirs, own = vitlab.load(run), vitlab.load(base), load_file(run / "model.safetensors")
    state, plain = model.state_dict(), theirs.state_dict()
    for name, tensor in state.items():
        layer = name.removesuffix(".weight")
        expected = own.get(name, plain[name]).double()
        if f"{layer}.lora_a.weight" in own:
            update = own[f"{layer}.lora_b.weight"].double() @ own[f"{layer}.lora_a.weight"].double()
            assert update.any()
            expected = expected + 4 * update
        torch.testing.assert_close(tensor.double(), expected, rtol=1e-6, atol=1e-6)
    from small_runs import few_digits

    from vitlab.evaluation.evaluate import evaluate

    tested = next(r for r in reversed(records(run)) if "test" in r)
    measured = evaluate(model, few_digits().test, device="cpu").top1.value
    assert measured == pytest.approx(tested["ema"]["accuracy"])


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_bit(
    run: Path, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i, step in enumerate((2, 9)):  # before the first checkpoint, and between two
        with killed_at(step, monkeypatch):
            train_small(tmp_path / "run", resume=i > 0, weights=str(base), lora=4)
    train_small(tmp_path / "run", resume=True, weights=str(base), lora=4)
    assert_same_run(run, tmp_path / "run")


def test_resuming_needs_the_same_base(run: Path, base: Path, tmp_path: Path) -> None:
    place = tmp_path / "base"
    shutil.copytree(base, place)
    out = tmp_path / "run"
    train_small(out, weights=str(place), lora=4, steps=4)
    vitlab.save(fill(tiny(classes=3), seed=9), place)
    with pytest.raises(UserError, match="sha256 differs"):
        train_small(out, resume=True, weights=str(place), lora=4, steps=4)


@pytest.mark.parametrize("other", [{"lora": 2}, {"lora": 0}, {"lora_alpha": 8.0}])
def test_resuming_needs_the_same_rank_and_scale(other: dict[str, Any], run: Path, base: Path) -> None:
    with pytest.raises(UserError, match=rf"has another {next(iter(other))} \(the run has") as error:
        train_small(run, resume=True, **{"weights": str(base), "lora": 4, **other})
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_micro_batches_give_the_gradients_of_one(base: Path, tmp_path: Path) -> None:
    """With everything off that is drawn for each micro-batch; the gradients are clipped."""
    settings: dict[str, Any] = {"steps": 4, "warmup": 0, "log_every": 1, "clip": 1e-3, "precision": "float64"}
    settings |= {"dropout": 0.0, "drop_path": 0.0, "mixup": 0.0}
    found = []
    for micro in (8, 32):
        train_small(tmp_path / f"{micro}", weights=str(base), lora=4, micro=micro, **settings)
        found.append([(r["loss"], r["grad_norm"]) for r in records(tmp_path / f"{micro}") if "loss" in r])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-9)
    assert np.shape(found) == (2, 4, 2)
    assert np.min(np.array(found)[:, :, 1]) > 1e-3  # so that clipping has something to do


@pytest.mark.slow
def test_a_run_moves_with_its_base(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    shutil.copytree(base, old / "base")
    monkeypatch.chdir(old)
    with killed_at(9, monkeypatch):
        train_small(Path("runs/a"), weights="base", lora=4)
    os.chdir(tmp_path)
    old.rename(new)
    os.chdir(new)
    train_small(Path("runs/a"), resume=True, weights="base", lora=4)
    shutil.move(new, tmp_path / "again")
    assert vitlab.load(tmp_path / "again" / "runs" / "a").config.classes == 10  # the final model names the new place


def test_a_received_run_opens_no_weights_unasked(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    recipe = tmp_path / "run" / "recipe.json"
    recipe.write_text(recipe.read_text() + " ")  # not started here
    with pytest.raises(UserError, match=r"weights .* are not opened unasked"):
        recipe_to_resume(tmp_path / "run", ["data=digits"])


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"lora": 4}, "name them with weights="),
        ({"lora": 17, "weights": "BASE"}, "more than the width 16"),
        ({"lora": 4, "weights": "RESNET", "model_settings": {}}, "ResNet"),
        ({"lora": 4, "weights": "BASE", "freeze": "body"}, "freezes the body already"),
        ({"lora": 4, "weights": "BASE", "objective": "masked"}, "leave lora=4"),
        ({"lora": -1, "weights": "BASE"}, "lora must be"),
        ({"lora": 4, "lora_alpha": 0.0, "weights": "BASE"}, "lora_alpha must be positive"),
    ],
)
def test_meaningless_settings_are_refused(settings: dict[str, Any], words: str, base: Path, tmp_path: Path) -> None:
    vitlab.save(build(ResNetConfig((8, 8), stages=(1,), width=32, classes=3)), tmp_path / "resnet")
    places = {"BASE": str(base), "RESNET": str(tmp_path / "resnet")}
    settings = {key: places.get(value, value) if key == "weights" else value for key, value in settings.items()}
    with pytest.raises(UserError, match=words) as error:
        train_small(tmp_path / "run", **settings)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run" / "recipe.json").exists()  # the folder is free for the next attempt


def test_the_command_line_sets_the_rank() -> None:
    recipe = override(SMALL, ["lora=8", "lora_alpha=32"])
    assert (recipe.lora, recipe.lora_alpha) == (8, 32.0)
    assert (SMALL.lora, SMALL.lora_alpha) == (0, 16.0)


# ---- compilation and several processes


@pytest.mark.slow
def test_it_compiles_without_a_graph_break() -> None:
    model = tiny()
    add_updates(model, rank=4, alpha=16, seed=0)
    fill(model)
    images = torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_two_processes_give_the_loss_curve_of_one(base: Path, tmp_path: Path) -> None:
    """In their losses and in the files of updates, which a sharded run gathers."""
    settings = ["steps=25", "lr=0.03", "mixup=0", "precision=float64", "ema=0.9", "image_size=8", "width=16"]
    settings += ["checkpoint_every=10", "lora=4", f"weights={base}"]
    runs = {"one": (1, "ddp"), "ddp": (2, "ddp"), "fsdp": (2, "fsdp")}
    for name, (processes, parallel) in runs.items():
        train_by(tmp_path / name, processes, *settings, f"parallel={parallel}")
    losses = {name: [r["loss"] for r in records(tmp_path / name) if "loss" in r] for name in runs}
    alone = losses["one"]
    assert len(alone) == 25
    assert sum(alone[-3:]) < 0.9 * sum(alone[:3])  # it learns, so a wrong gradient would show
    one = load_file(tmp_path / "one" / "model.safetensors")
    assert one.keys() == expected_names()
    for name in ("ddp", "fsdp"):
        np.testing.assert_allclose(losses[name], alone, rtol=1e-9, err_msg=name)
        other = load_file(tmp_path / name / "model.safetensors")
        assert other.keys() == one.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(other[key], tensor, rtol=1e-6, atol=1e-7)


def test_the_report_names_what_was_trained() -> None:
    from vitlab.report.describe import describe_recipe

    words = describe_recipe(change(SMALL, lora=8, weights="w"), images=100, steps=20)
    assert "Low-rank updates (LoRA, rank 8) and the head were trained" in words


@pytest.mark.slow
def test_the_report_names_what_the_file_holds(run: Path, base: Path, tmp_path: Path) -> None:
    from small_runs import few_digits

    from vitlab.report.make import write_report

    shutil.copytree(run, tmp_path / "run")
    page = write_report(tmp_path / "run", few_digits(), device="cpu").path.read_text()
    size = (run / "model.safetensors").stat().st_size
    assert f"a file of {size / 1e6:.1f} MB: what it adds to {base}" in page
