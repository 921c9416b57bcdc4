"""Muon against a plain float64 derivation, singular values by SVD, and runs that are killed, recorded or shared."""

import copy
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from small_runs import assert_same_run, records, train_small
from test_parallel import train
from test_resume import killed_at
from torch import Tensor, nn

import vitlab
from vitlab.models.config import ResNetConfig, StemConfig, ViTConfig
from vitlab.models.variants import build
from vitlab.training.lora import add_updates
from vitlab.training.muon import POLYNOMIALS, Muon, hidden_matrices, orthogonalize
from vitlab.training.optim import make_optimizer, set_learning_rate

LR, DECAY, BETAS = 0.01, 0.1, (0.9, 0.95)
SMALL = {"depth": 2, "width": 64, "mlp": 96, "heads": 4, "classes": 3, "image_size": 32}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: vitlab.create("Ti/16", **SMALL),
    "swiglu": lambda: vitlab.create("Ti/16", **SMALL, mlp_kind="swiglu"),
    "attention pool": lambda: vitlab.create("Ti/16", **SMALL, pool="attention"),
    "hybrid": lambda: build(ViTConfig((32, 32), 1, 2, 64, 96, 4, 3, stem=StemConfig((1, 1), 32))),
    "resnet": lambda: build(ResNetConfig((32, 32), (1, 1), 32, 3)),
    "axial resnet": lambda: build(ResNetConfig((32, 32), (1, 1), 32, 3, attention="axial")),
}


def muon(model: nn.Module, lr: float = LR, dtype: torch.dtype = torch.float64) -> Muon:
    optimizer = make_optimizer(model, "muon", weight_decay=DECAY, betas=BETAS, momentum=0.0, dtype=dtype)
    set_learning_rate(optimizer, lr)
    assert isinstance(optimizer, Muon)
    return optimizer


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if p.requires_grad:
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)


# ---- one step, derived again


def near_orthogonal(g: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each singular value, as a share of the Frobenius norm, through the five polynomials; by SVD."""
    u, s, v = np.linalg.svd(g, full_matrices=False)
    s = s / math.sqrt((s**2).sum())
    for a, b, c in POLYNOMIALS:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


def two_updates(gradients: list[NDArray[np.float64]]) -> list[NDArray[np.float64]]:
    """Muon's updates without scale for a matrix's gradients, step by step, with Nesterov's momentum in its sum form."""
    momentum, updates = np.zeros_like(gradients[0]), []
    for g in gradients:
        momentum = 0.95 * momentum + g
        updates.append(near_orthogonal(g + 0.95 * momentum))
    return updates


@pytest.mark.parametrize(
    ("layer", "parts"),
    [("attention.qkv", 3), ("attention.out", 1), ("mlp.up", 1), ("mlp.down", 1)],  # packed, square, tall, wide
)
def test_steps_equal_a_derivation_in_float64(layer: str, parts: int) -> None:
    model = vitlab.create("Ti/16", **SMALL).double()
    optimizer = muon(model)
    weight = model.get_parameter(f"blocks.1.{layer}.weight")
    expected, gradients = weight.detach().numpy().copy(), []
    for step in range(2):
        give_gradients(model, step)
        assert weight.grad is not None
        gradients.append(weight.grad.numpy().copy())
        optimizer.step()
    rows = expected.shape[0] // parts
    for part in range(parts):
        own = slice(part * rows, (part + 1) * rows)
        size = 0.2 * math.sqrt(max(rows, expected.shape[1]))
        for update in two_updates([g[own] for g in gradients]):
            expected[own] = expected[own] * (1 - LR * DECAY) - LR * size * update
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=0, atol=1e-6 * LR)


def test_the_gates_and_values_of_swiglu_are_apart_and_a_convolution_is_a_matrix() -> None:
    for kind, name, shape in (
        ("swiglu", "blocks.0.mlp.up.weight", (2, 96, 64)),
        ("hybrid", "stem.stages.1.0.conv2.weight", (1, 64, 64 * 9)),
    ):
        model = MODELS[kind]().double()
        weight = model.get_parameter(name)
        before = weight.detach().numpy().copy()
        give_gradients(model, 0)
        assert weight.grad is not None
        gradients = weight.grad.numpy().reshape(shape)
        optimizer = muon(model)
        optimizer.step()
        updates = np.stack([near_orthogonal(g) for g in gradients]) * 0.2 * math.sqrt(max(shape[1:]))
        expected = before * (1 - LR * DECAY) - LR * updates.reshape(before.shape)
        np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=0, atol=1e-6 * LR)


@pytest.mark.parametrize("kind", MODELS)
def test_everything_else_is_adamw_of_torch(kind: str) -> None:
    """Stem, embedding, head, positions, tokens, norms and biases, over three steps, bit for bit."""
    ours, theirs = MODELS[kind](), MODELS[kind]()
    theirs.load_state_dict(ours.state_dict())
    plain = make_optimizer(theirs, "adamw", weight_decay=DECAY, betas=BETAS, momentum=0.0)
    set_learning_rate(plain, LR)
    optimizer = muon(ours, dtype=torch.float32)
    for step in range(3):
        for model, own in ((ours, optimizer), (theirs, plain)):
            give_gradients(model, step)
            own.step()
    hidden = hidden_matrices(ours)
    outside = {"embed.weight", "head.weight"} if "resnet" not in kind else {"root.weight", "head.weight"}
    outside |= {"stem.root.weight"} if kind == "hybrid" else set()
    kernels = {f"{name}.weight" for name, m in ours.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert set(hidden) == kernels - outside
    for (name, p), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(p, other) == (name not in hidden), name


# ---- singular values


def spectrum(values: Tensor, rows: int, columns: int) -> Tensor:
    """A random matrix with these singular values."""
    u, _, v = torch.linalg.svd(torch.randn(rows, columns, dtype=torch.float64), full_matrices=False)
    return (u * values.double()) @ v


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_singular_values_are_near_one(dtype: torch.dtype) -> None:
    """For random gradients, one of rank one nearly, and spectra that fall over a range of 200, of any orientation."""
    torch.manual_seed(0)
    falling = torch.logspace(0, math.log10(1 / 200), 48)
    for rows, columns in ((48, 192), (192, 48), (48, 48)):
        cases = [spectrum(falling, rows, columns), spectrum(torch.arange(1, 49) ** -0.8, rows, columns)]
        cases += [torch.randn(rows, columns)] if rows != columns else []
        cases += [spectrum(torch.cat([torch.ones(1), torch.full((47,), 0.01)]), rows, columns)]
        stack = torch.stack([1e-6 * case.double() for case in cases])
        found = torch.linalg.svdvals(orthogonalize(stack.to(dtype)).double())
        assert found.min() > 0.6, (rows, columns)
        assert found.max() < 1.3, (rows, columns)


def test_tiny_singular_values_grow_and_nothing_explodes() -> None:
    """What is below 0.00065 of the norm is not orthogonal after five steps; it grows 977 times."""
    torch.manual_seed(0)
    values = torch.tensor([1.0, 1e-4, 1e-5, 0.0])
    found = torch.linalg.svdvals(orthogonalize(spectrum(values, 4, 6)[None]))[0]
    assert 0.8 < found[0] < 1.2
    torch.testing.assert_close(found[1:3], 977 * values[1:3].double(), rtol=2e-3, atol=0)
    assert found[3] < 1e-10
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.outer(torch.randn(64), torch.randn(96))[None].to(dtype)  # exactly at the end of the range
        assert torch.linalg.svdvals(orthogonalize(one).float()).max() < 1.3
        assert torch.equal(orthogonalize(torch.zeros(2, 4, 6, dtype=dtype)), torch.zeros(2, 4, 6, dtype=dtype))


# ---- settings of the step


def test_a_learning_rate_in_a_tensor_is_the_same_step() -> None:
    """As a recorded step has it, filled in place before every step."""
    ours, theirs = (vitlab.create("Ti/16", **SMALL) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    graph, plain = muon(ours, dtype=torch.float32), muon(theirs, dtype=torch.float32)
    rate = torch.zeros(())
    for group in graph.param_groups:
        group["lr"] = rate
    addresses = []
    for step in range(3):
        for model, optimizer in ((ours, graph), (theirs, plain)):
            set_learning_rate(optimizer, LR / (step + 1))
            give_gradients(model, step)
            optimizer.step()
        addresses.append([value.data_ptr() for state in graph.state.values() for value in state.values()])
    assert addresses[1] == addresses[2]  # state stays in place
    assert all(group["lr"] is rate for group in graph.param_groups)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_state_dict_continues() -> None:
    """Into an optimizer made anew, through torch's own state_dict."""
    models = [vitlab.create("Ti/16", **SMALL) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [muon(model, dtype=torch.float32) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        give_gradients(model, 0)
        optimizer.step()
    optimizers[1] = muon(models[1], dtype=torch.float32)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        give_gradients(model, 1)
        optimizer.step()
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def test_low_rank_updates_are_matrices_too() -> None:
    model = vitlab.create("Ti/16", **SMALL)
    add_updates(model, 4, 16.0, seed=0)
    shapes = hidden_matrices(model)
    assert shapes["blocks.0.attention.qkv.lora_b.weight"] == (64, 4)
    assert shapes["blocks.0.attention.qkv.lora_a.weight"] == (4, 64)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    give_gradients(model, 0)
    muon(model, dtype=torch.float32).step()
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == (not p.requires_grad), name


# ---- runs


def losses(out: Path, **changes: Any) -> list[float]:
    train_small(out, optimizer="muon", **changes)
    return [r["loss"] for r in records(out) if "loss" in r]


def test_killed_and_resumed_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings: dict[str, Any] = {"optimizer": "muon", "decay": "wsd", "steps": 9, "evaluate_every": 9}
    train_small(tmp_path / "plain", **settings)
    with killed_at(6, monkeypatch):  # between two checkpoints
        train_small(tmp_path / "cut", **settings)
    train_small(tmp_path / "cut", resume=True, **settings)
    assert_same_run(tmp_path / "plain", tmp_path / "cut")


def test_a_frozen_body_leaves_adamw(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"freeze": "body", "steps": 6, "evaluate_every": 6}
    assert losses(tmp_path / "muon", **settings)
    train_small(tmp_path / "adamw", **settings)
    assert_same_run(tmp_path / "muon", tmp_path / "adamw")


# ---- several processes


@pytest.mark.slow
def test_two_processes_give_the_losses_of_one(tmp_path: Path) -> None:
    """50 steps of the same batches: each process computes all updates, or owns a share of them."""
    settings = ("steps=50", "lr=0.003", "precision=float32", "optimizer=muon")
    train(tmp_path / "one", 1, *settings)
    alone = [r["loss"] for r in records(tmp_path / "one") if "loss" in r]
    assert len(alone) == 50
    assert sum(alone[-5:]) < 0.9 * sum(alone[:5])  # it learns, so a wrong update would show
    for parallel in ("ddp", "fsdp"):
        train(tmp_path / parallel, 2, *settings, f"parallel={parallel}")
        shared = [r["loss"] for r in records(tmp_path / parallel) if "loss" in r]
        np.testing.assert_allclose(shared, alone, rtol=1e-5, err_msg=parallel)


@pytest.mark.slow
def test_a_sharded_checkpoint_is_continued_by_one_process(tmp_path: Path) -> None:
    """Three processes, whose shards of 32 rows are uneven, stop after 10 of 20 steps; one continues to their losses."""
    settings = ("steps=20", "lr=0.001", "checkpoint_every=10", "precision=float64", "optimizer=muon")
    out = tmp_path / "run"
    train(out, 3, *settings, "parallel=fsdp")
    before = [r["loss"] for r in records(out) if "loss" in r]
    last, old = out / "checkpoints" / "last", out / "checkpoints" / "last.old"
    shutil.rmtree(last)
    old.rename(last)
    train(out, 1, *settings, resume=True)
    after = [r["loss"] for r in records(out) if "loss" in r]
    assert len(after) == 20
    np.testing.assert_allclose(after, before, rtol=1e-9)


# ---- recorded steps

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@GPU
def test_a_recorded_step_is_the_plain_one(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "device": "cuda",
        "precision": "float32",
        "compile": "no",
        "steps": 30,
        "micro": 32,
        "evaluate_every": 30,
    }
    plain = losses(tmp_path / "plain", **settings)
    found = losses(tmp_path / "graph", cuda_graph=True, **settings)
    assert len(found) == 30
    np.testing.assert_allclose(found, plain, rtol=1e-3)


@pytest.mark.gpu
@GPU
def test_a_recorded_step_is_resumed_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_gpu_resume import SETTINGS, killed_inside

    settings: dict[str, Any] = {**SETTINGS, "compile": "no", "cuda_graph": True, "optimizer": "muon"}
    train_small(tmp_path / "plain", **settings)
    with killed_inside(17, monkeypatch):
        train_small(tmp_path / "cut", **settings)
    train_small(tmp_path / "cut", resume=True, **settings)
    assert_same_run(tmp_path / "plain", tmp_path / "cut")
