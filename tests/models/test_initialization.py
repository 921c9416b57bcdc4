"""Fresh weights are drawn as the authors draw theirs; tolerances follow from how many numbers there are to look at."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm, truncnorm, uniform
from torch import Tensor, nn

import vitlab
from vitlab.models.config import ResNetConfig, StemConfig, ViTConfig
from vitlab.models.vit import lecun_normal

UNLIKELY = 1e-6  # a fair draw fails a test less often than this


def is_normal(tensor: Tensor, std: float) -> None:
    values = tensor.detach().double().flatten().numpy()
    assert kstest(values, norm(0, std).cdf).pvalue > UNLIKELY
    assert abs(values.std() / std - 1) < 5 / (2 * values.size) ** 0.5  # five standard errors of a deviation


def is_xavier(weight: Tensor, fan_in: int, fan_out: int) -> None:
    bound = (6 / (fan_in + fan_out)) ** 0.5
    values = weight.detach().double().flatten().numpy()
    assert values.size == fan_in * fan_out
    assert np.abs(values).max() <= bound * (1 + 1e-6)
    assert np.abs(values).max() >= bound * UNLIKELY ** (1 / values.size)  # the largest of n uniform draws
    assert kstest(values, uniform(-bound, 2 * bound).cdf).pvalue > UNLIKELY


def is_zero(*tensors: Tensor) -> None:
    assert not any(tensor.any() for tensor in tensors)


def vit(**settings: Any) -> Any:
    base: dict[str, Any] = {"image_size": (32, 48), "patch": 8, "depth": 2, "width": 96, "mlp": 160, "heads": 3}
    return vitlab.build(ViTConfig(**(base | {"classes": 50} | settings)))


@pytest.mark.parametrize("attention", ["full", "axial"])
def test_encoder(attention: str) -> None:
    model = vit(attention=attention, pool="mean")
    parts = [m for m in model.modules() if hasattr(m, "qkv")]
    assert len(parts) == (2 if attention == "full" else 4)
    for part in parts:
        for matrix in part.qkv.weight.chunk(3):  # q, k and v each by itself: wider than one fused matrix would be
            is_xavier(matrix, 96, 96)
        is_xavier(part.out.weight, 96, 96)
        is_zero(part.qkv.bias, part.out.bias)


def test_mlp() -> None:
    model = vit(pool="attention")
    parts = [*(block.mlp for block in model.blocks), model.pool.mlp]
    for part in parts:
        is_xavier(part.up.weight, 96, 160)
        is_xavier(part.down.weight, 160, 96)
        is_normal(part.up.bias, 1e-6)
        is_normal(part.down.bias, 1e-6)


def test_patches_are_a_dense_layer() -> None:
    model = vit()
    is_xavier(model.embed.weight, 3 * 8 * 8, 96)
    is_zero(model.embed.bias)


@pytest.mark.parametrize("layer", [nn.Linear(96, 200), nn.Conv2d(3, 96, 8)])
def test_lecun_normal_is_flaxs(layer: nn.Linear | nn.Conv2d) -> None:
    """Cut off at two deviations, and widened so that the variance is 1 / inputs all the same."""
    lecun_normal(layer)
    fan_in = 96 if isinstance(layer, nn.Linear) else 3 * 8 * 8
    values = layer.weight.detach().double().flatten().numpy()
    std = fan_in**-0.5 / truncnorm(-2, 2).std()
    assert kstest(values, truncnorm(-2, 2, scale=std).cdf).pvalue > UNLIKELY
    assert values.std() == pytest.approx(fan_in**-0.5, rel=0.03)


@pytest.mark.parametrize("prelogits", [0, 40])
def test_class_token_and_head(prelogits: int) -> None:
    model = vit(prelogits=prelogits)
    is_zero(model.token, model.head.weight, model.head.bias)
    if prelogits:
        is_xavier(model.prelogits.weight, 96, 40)
        is_zero(model.prelogits.bias)
    assert model(torch.randn(2, 3, 32, 48)).abs().max() == 0


def test_norms() -> None:
    for module in vit(pool="attention").modules():
        if isinstance(module, nn.LayerNorm):
            assert (module.weight == 1).all()
            is_zero(module.bias)


@pytest.mark.parametrize(
    ("kind", "place"), [("1d", "stem"), ("1d", "every"), ("2d", "stem"), ("2d", "every"), ("relative", "stem")]
)
def test_positions(kind: str, place: str) -> None:
    model = vit(positions=kind, placement=place, image_size=(128, 96))
    tables = {n: p for n, p in model.named_parameters() if "positions." in n or "relative." in n}
    assert tables
    for table in tables.values():
        assert table.numel() > 0
        is_normal(table, 0.02)


def test_attention_pool() -> None:
    pool = vit(pool="attention").pool
    for part in (pool.q, pool.k, pool.v, pool.out):
        is_xavier(part.weight, 96, 96)
        is_zero(part.bias)
    assert pool.probe.any()


def test_stem() -> None:
    """Units start as their shortcuts: the last scale of each is zero, all others are one."""
    model = vit(stem=StemConfig((2, 1), width=32), patch=2, image_size=(32, 48))
    last = {f"stem.stages.{stage}.{unit}.norm3" for stage, unit in ((0, 0), (0, 1), (1, 0))}
    norms = {name: module for name, module in model.named_modules() if isinstance(module, nn.GroupNorm)}
    assert last < norms.keys()
    for name, module in norms.items():
        assert (module.weight == (0 if name in last else 1)).all(), name
        is_zero(module.bias)


@pytest.mark.parametrize("config", [ResNetConfig((32, 32), (1, 1), width=64), StemConfig((1, 1), width=64)])
def test_convolutions(config: Any) -> None:
    """Standardized before use, so only the shape of the draw matters; still of the scale 1/sqrt(fan in)."""
    model = vitlab.build(config) if isinstance(config, ResNetConfig) else vit(stem=config, patch=1).stem
    kernels = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(kernels) == 9
    for kernel in kernels:
        is_normal(kernel.weight, kernel.weight[0].numel() ** -0.5)


def test_resnet_head_and_norms() -> None:
    model = vitlab.build(ResNetConfig((32, 32), (1, 1), width=32, classes=7))
    assert model.head is not None
    is_zero(model.head.weight, model.head.bias)
    for module in model.modules():
        if isinstance(module, nn.GroupNorm):
            assert (module.weight == 1).all()
            is_zero(module.bias)


def test_the_seed_decides() -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(vit(positions="relative").state_dict())
    first, again, other = states
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["embed.weight"], other["embed.weight"])
    weights = [first[f"blocks.{i}.attention.qkv.weight"] for i in range(2)]
    assert not torch.equal(*weights)  # layers are drawn one by one, not copied
