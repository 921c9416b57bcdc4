"""The copy in bfloat16 that computes: its gradients, what stays in float32, and runs that use it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from small_runs import SMALL, assert_same_run, assert_same_tensors, records, train_small
from torch import Tensor, nn

import vitlab
from vitlab.errors import UserError
from vitlab.models.shown import show
from vitlab.models.vit import ViT
from vitlab.training.trainer import Trainer
from vitlab.training.working_copy import WorkingCopy

SETTINGS: list[dict[str, Any]] = [
    {},
    {"layer_scale": True, "registers": 2, "positions": "2d", "pool": "token_mean"},
    {"positions": "sincos2d", "pool": "attention", "qkv_bias": "qv"},
    {"rotary": "cells", "positions": "none", "pool": "mean", "mlp_kind": "swiglu"},
]


def small(**settings: Any) -> ViT:
    model = vitlab.create("Ti/8", image_size=32, depth=3, width=32, heads=2, mlp=64, classes=5, **settings)
    assert isinstance(model, ViT)
    for p in model.parameters():
        if p.ndim > 1:
            nn.init.normal_(p, std=0.2)
    return model


def gradient(module: nn.Module, masters: nn.Module, images: Tensor, working: WorkingCopy | None = None) -> Tensor:
    """Of all parameters, side by side, in mixed precision unless they are float64."""
    masters.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=images.dtype != torch.float64):
        loss = module(images).double().square().sum()
    loss.backward()
    if working is not None:
        working.move_gradients()
    return torch.cat([p.grad.double().flatten() for p in masters.parameters() if p.grad is not None])


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_gradient_is_as_near_to_float64s_as_that_of_mixed_precision(settings: dict[str, Any]) -> None:
    model = small(**settings)
    images = torch.randn(4, 3, 32, 32)
    plain = gradient(model, model, images)
    working = WorkingCopy(model)
    fast = gradient(working.module, model, images, working)
    exact = gradient(model.double(), model, images.double())
    errors = [float((found - exact).norm() / exact.norm()) for found in (plain, fast)]
    assert errors[0] < 0.1
    assert errors[1] < 2 * errors[0]  # the sums of tokens and branches are rounded too


def test_tokens_are_bfloat16_and_norms_are_the_models_own() -> None:
    model = small()
    working = WorkingCopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        seen: list[torch.dtype] = []
        assert isinstance(working.module, ViT)
        for block in working.module.blocks:
            block.register_forward_hook(lambda *args: seen.append(args[2].dtype))
        working.module(torch.randn(1, 3, 32, 32))
    assert seen == [torch.bfloat16] * 3
    pairs = list(zip(model.named_parameters(), working.module.named_parameters(), strict=True))
    for (name, own), (other, cast) in pairs:
        assert name == other
        assert (own is cast) == ("norm" in name)
        assert own.dtype == torch.float32
        torch.testing.assert_close(cast, own.to(cast.dtype), rtol=0, atol=0)


def test_gradients_of_micro_batches_add_up_in_float32() -> None:
    model = small()
    working = WorkingCopy(model)
    parts = [gradient(working.module, model, torch.randn(2, 3, 32, 32), working) for _ in range(2)]
    model.zero_grad()
    torch.manual_seed(0)
    for weight in (1.0, 0.001):  # in bfloat16 the second would be lost
        for own, cast in zip(working.own, working.cast, strict=True):
            cast.grad = torch.full_like(cast, weight)
            assert own.grad is None or weight != 1.0
        working.move_gradients()
    expected = torch.tensor(1.0) + torch.tensor(0.001).bfloat16().float()
    assert all(own.grad is not None and bool((own.grad == expected).all()) for own in working.own)
    assert all(cast.grad is None for cast in working.cast)
    assert all(part.isfinite().all() for part in parts)


def test_small_images_for_a_while() -> None:
    """The copy's positions are resampled for another size, and learn through that, as the model's."""
    model = small()
    working = WorkingCopy(model)
    images = torch.randn(2, 3, 16, 16)
    show(working.module, (16, 16))  # type: ignore[arg-type]
    fast = gradient(working.module, model, images, working)
    show(model, (16, 16))
    plain = gradient(model, model, images)
    assert float((fast - plain).norm() / plain.norm()) < 0.1


def test_frozen_weights_stay_frozen() -> None:
    model = small()
    for name, p in model.named_parameters():
        p.requires_grad_(name.startswith("head."))
    working = WorkingCopy(model)
    gradient(working.module, model, torch.randn(2, 3, 32, 32), working)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"head.weight", "head.bias"}
    assert len(working.own) == 2


@pytest.mark.parametrize("frozen", [False, True])
def test_a_refreshed_copy_has_all_of_the_model(frozen: bool) -> None:
    """Also what does not learn, and a fixed table, which need not be the formula's: it may have been resampled."""
    model = small(positions="sincos2d").requires_grad_(not frozen)
    working = WorkingCopy(model)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.normal_()
    working.refresh()
    copied = working.module.state_dict()
    assert len(copied) == len(model.state_dict()) > 30
    for name, tensor in model.state_dict().items():
        assert torch.equal(copied[name], tensor.to(copied[name].dtype)), name


# ---- runs

BF16: dict[str, Any] = {"precision": "bfloat16", "device": "cpu", "workers": 0, "steps": 6}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in bfloat16 that nothing interrupts."""
    out = tmp_path_factory.mktemp("complete") / "run"
    train_small(out, **BF16)
    return out


def losses(out: Path) -> list[float]:
    return [r["loss"] for r in records(out) if "loss" in r]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_is_that_of_mixed_precision_to_rounding(
    tmp_path: Path, complete: Path, optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With micro-batches, clipping, dropout, an average and a validation; the checkpoint has the same tensors."""
    runs = complete if optimizer == SMALL.optimizer else tmp_path / "copy", tmp_path / "plain"
    if runs[0] != complete:
        train_small(runs[0], optimizer=optimizer, **BF16)
    monkeypatch.setattr(Trainer, "uses_working_copy", property(lambda self: False))
    train_small(runs[1], optimizer=optimizer, **BF16)
    np.testing.assert_allclose(losses(runs[0]), losses(runs[1]), rtol=2e-3)
    states = [load_file(run / "checkpoints/last/state.safetensors") for run in runs]
    kinds = [{name: (t.shape, t.dtype) for name, t in state.items()} for state in states]
    assert kinds[0] == kinds[1]
    assert {dtype for name, (_, dtype) in kinds[0].items()} == {torch.float32}
    kernels = [name for name in states[0] if name.startswith("model/blocks") and name.endswith("weight")]
    for name in kernels:  # biases of keys have no gradient but rounding, and AdamW moves by its sign
        a, b = states[0][name], states[1][name]
        assert float((a - b).norm() / b.norm()) < 0.02


def test_a_resumed_run_is_the_run(tmp_path: Path, complete: Path) -> None:
    interrupt(tmp_path / "parts", **BF16)
    train_small(tmp_path / "parts", resume=True, **BF16)
    assert_same_run(complete, tmp_path / "parts")


def test_a_resumed_head_learns_on_the_frozen_body(tmp_path: Path) -> None:
    settings = BF16 | {"freeze": "body"}
    train_small(tmp_path / "complete", **settings)
    interrupt(tmp_path / "parts", **settings)
    train_small(tmp_path / "parts", resume=True, **settings)
    assert_same_run(tmp_path / "complete", tmp_path / "parts")


def interrupt(out: Path, **settings: Any) -> None:
    """A run that ends with the checkpoint at step 4."""
    before = Trainer.step

    def step(self: Trainer, number: int) -> Any:
        if number == 4:
            raise InterruptedError
        return before(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        with pytest.raises(InterruptedError):
            train_small(out, **settings)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("settings", [{}, {"compile": "no"}, {"cuda_graph": True}, {"optimizer": "muon"}])
def test_a_run_on_a_gpu_is_the_plain_one_to_rounding(
    tmp_path: Path, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy and the kernels together, against neither."""
    run = {"device": "cuda", "steps": 30, "micro": 32, "width": 64, "dropout": 0.0, **settings}
    train_small(tmp_path / "fast", **run)
    monkeypatch.setattr(Trainer, "uses_working_copy", property(lambda self: False))
    monkeypatch.setattr("vitlab.training.trainer.use_kernels", lambda module, compiled: None)
    monkeypatch.setattr("vitlab.training.trainer.use_class_token", lambda module: None)
    train_small(tmp_path / "plain", **run)
    np.testing.assert_allclose(losses(tmp_path / "fast"), losses(tmp_path / "plain"), rtol=2e-2)


def test_without_the_other_tokens_of_the_last_block_a_run_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {"precision": "float64", "steps": 6, "dropout": 0.0, "drop_path": 0.2}
    train_small(tmp_path / "fast", **settings)
    left_out: list[object] = []
    monkeypatch.setattr("vitlab.training.trainer.use_class_token", left_out.append)
    train_small(tmp_path / "plain", **settings)
    assert len(left_out) == 1
    np.testing.assert_allclose(losses(tmp_path / "fast"), losses(tmp_path / "plain"), rtol=1e-9)


# ---- in 8 bits


@pytest.mark.slow
def test_a_run_in_8_bits_learns_and_resumes_with_its_scales(tmp_path: Path, complete: Path) -> None:
    settings = BF16 | {"precision": "fp8"}
    train_small(tmp_path / "run", **settings)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(complete), rtol=5e-3)
    state = load_file(tmp_path / "run" / "checkpoints/last/state.safetensors")
    scales = {name: tensor for name, tensor in state.items() if name.startswith("fp8/")}
    assert set(scales) == {f"fp8/blocks.{i}.mlp.{part}" for i in range(2) for part in ("up", "down")}
    for name, maxima in scales.items():  # values are seen below the start of 16, and weights as they are
        weight = state[f"model/{name.removeprefix('fp8/')}.weight"]
        assert 0.9 * float(weight.abs().max()) < float(maxima[2]) < 1.3 * float(weight.abs().max())
    interrupt(tmp_path / "parts", **settings)
    train_small(tmp_path / "parts", resume=True, **settings)
    assert_same_tensors(tmp_path / "run", tmp_path / "parts", "checkpoints/last/state.safetensors")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"model": "R50x1", "image_size": (32, 32), "model_settings": {}}, "a transformer in one process"),
        ({"freeze": "body"}, "an MLP that learns"),
        ({"width": 24}, "16 divides"),
    ],
)
def test_where_nothing_is_in_8_bits_the_run_does_not_start(
    tmp_path: Path, settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=f"^precision=fp8 .*{words}.*; use precision=bfloat16$"):
        train_small(tmp_path, precision="fp8", device="cpu", **settings)
