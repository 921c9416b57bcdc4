"""patch_dropout: in training the blocks see some of the patches, as many of each image, as they are in the sequence."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import vitlab
from vitlab.cost import cost, forward_flops
from vitlab.errors import UserError
from vitlab.models.config import ViTConfig
from vitlab.models.names import configure
from vitlab.models.vit import Block, ViT
from vitlab.training.masked import MaskedPatches

Fill = Callable[..., Any]
RATE = 0.3
N, KEPT = 24, 17  # patches, and those that stay: 0.7 * 24 = 16.8
BASE: dict[str, Any] = {"image_size": (32, 48), "patch": 8, "depth": 2, "width": 24, "mlp": 40, "heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "class token": {},
    "mean": {"pool": "mean", "positions": "2d"},
    "registers": {"registers": 2, "prefix_positions": "none", "norm_before": True},
    "attention pool": {"pool": "attention", "positions": "sincos2d"},
    "rotary": {"rotary": "cells", "registers": 1, "positions": "none"},
    "rotary centers": {"rotary": "centers", "rotary_layout": "halves", "pool": "token_mean"},
}


def make(kind: str, randomize: Fill, **settings: Any) -> ViT:
    made: ViT = randomize(vitlab.build(ViTConfig(**(BASE | KINDS[kind] | {"classes": 5} | settings))))
    return made


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, 32, 48, generator=torch.Generator().manual_seed(7))


def kept_by(model: ViT, sequence: Tensor) -> Tensor:
    """The numbers of the patches that the model's next pass keeps, (B, n)."""
    with torch.random.fork_rng(devices=[]):
        _, kept = model.drop_patches(sequence)
    assert kept is not None
    return kept


@pytest.mark.parametrize("kind", KINDS)
def test_other_patches_have_no_part_in_it(kind: str, randomize: Fill) -> None:
    """Training gives what full attention gives where all tokens that are left out are masked, image by image."""
    model = make(kind, randomize, patch_dropout=RATE)
    full = make(kind, randomize).double().eval()
    model.double().train()
    x, prefix = images().double(), model.config.prefix
    torch.manual_seed(0)
    kept = kept_by(model, model.place(model.patches(x)))
    assert kept.shape == (3, KEPT)
    found = model(x)
    sequence = full.norm_before(full.place(full.patches(x)))  # all tokens
    for image, numbers in enumerate(kept):
        assert len(set(numbers.tolist())) == KEPT
        stays = torch.zeros(prefix + N, dtype=torch.bool)
        stays[:prefix] = stays[prefix + numbers] = True
        logits = masked_pass(full, sequence[image : image + 1], stays)
        torch.testing.assert_close(found[image], logits[0], rtol=1e-9, atol=1e-9)


def masked_pass(model: ViT, x: Tensor, stays: Tensor) -> Tensor:
    """The blocks on all tokens by softmax(q k^T / sqrt(K)) v, with -inf at the keys that do not stay; those are cut off
    before pooling."""
    hidden = torch.zeros(len(stays), dtype=x.dtype).masked_fill(~stays, -torch.inf)
    for block in model.blocks:
        assert isinstance(block, Block)
        q, k, v, _ = block.attention.project(block.norm1(x), model.rotary)
        weights = (q @ k.mT / q.shape[-1] ** 0.5 + hidden).softmax(-1)
        x = x + block.attention.mix(weights @ v, x)
        x = x + block.mlp(block.norm2(x))
    features = model.pool_tokens(model.norm(x)[:, stays])
    assert model.head is not None
    return model.head(features)


def test_tokens_are_gathered_as_they_are(randomize: Fill) -> None:
    """Before the blocks: the lead first, then the chosen rows of the full sequence, to the bit."""
    model = make("registers", randomize, patch_dropout=RATE)
    full = model.place(model.patches(images()))
    torch.manual_seed(1)
    some, kept = model.drop_patches(full)
    assert kept is not None
    for image in range(3):
        rows = [*range(3), *(3 + kept[image]).tolist()]
        assert torch.equal(some[image], full[image, rows])


def test_every_patch_is_as_likely(randomize: Fill) -> None:
    """And each image has draws of its own."""
    model = make("class token", randomize, patch_dropout=RATE)
    torch.manual_seed(0)
    kept = kept_by(model, torch.zeros(4000, 1 + N, 24))
    counts = torch.bincount(kept.flatten(), minlength=N) / 4000
    share = KEPT / N
    assert (counts - share).abs().max() < 5 * (share * (1 - share) / 4000) ** 0.5
    assert len({tuple(sorted(row)) for row in kept[:100].tolist()}) > 95


@pytest.mark.parametrize("kind", KINDS)
def test_without_training_or_rate_nothing_changes(kind: str, randomize: Fill) -> None:
    """To the bit, and no random number is drawn."""
    plain, zero, rated = (make(kind, randomize, patch_dropout=rate) for rate in (0.0, 0.0, 0.9))
    state = torch.get_rng_state()
    assert torch.equal(zero.train()(images()), plain.eval()(images()))
    assert torch.equal(rated.eval()(images()), plain(images()))
    assert torch.equal(torch.get_rng_state(), state)
    rated.train()
    assert not torch.equal(rated(images()), rated(images()))


def test_a_patch_always_stays() -> None:
    assert ViTConfig(**BASE, patch_dropout=0.99).training_length == 1 + 1
    assert ViTConfig(**BASE).training_length == 1 + N
    assert ViTConfig(**BASE, patch_dropout=RATE, registers=2).training_length == 3 + KEPT


def test_a_hybrid_drops_patches_of_its_map() -> None:
    config = configure("R+Ti/16", {"image_size": 96, "classes": 5, "depth": 1, "patch_dropout": 0.5})
    model = vitlab.build(config)
    seen: list[torch.Size] = []
    assert isinstance(model, ViT)
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape))
    assert model(torch.zeros(2, 3, 96, 96)).shape == (2, 5)
    patches = model.config.grid[0] * model.config.grid[1]
    assert seen == [torch.Size([2, 1 + round(patches / 2), 192])]


@pytest.mark.slow
def test_one_graph(randomize: Fill) -> None:
    """Compiled without a break, forwards and backwards; shapes do not depend on chance, so it is compiled once."""
    torch._dynamo.reset()
    model = make("rotary", randomize, patch_dropout=RATE, depth=1)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        torch.manual_seed(2)
        ours = compiled(images())
        torch.manual_seed(3)
        assert not torch.equal(compiled(images()), ours)
    torch.manual_seed(2)
    torch.testing.assert_close(ours, model(images()), rtol=1e-4, atol=1e-5)
    ours.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "axial": ({"attention": "axial", "pool": "mean"}, "axial attention"),
    "relative": ({"positions": "relative"}, "positions='relative'"),
    "every layer": ({"placement": "every"}, "placement='every'"),
    "shared": ({"placement": "shared"}, "placement='shared'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_the_grid_is_refused(name: str) -> None:
    settings, part = REFUSED[name]
    with pytest.raises(UserError, match=f"^{part} needs .* set patch_dropout=0$"):
        ViTConfig(**(BASE | settings), patch_dropout=RATE)
    ViTConfig(**(BASE | settings))


def test_masked_patches_are_refused() -> None:
    with pytest.raises(UserError, match=r"^masked patch prediction .* set patch_dropout=0$"):
        MaskedPatches(ViT(ViTConfig(**BASE, patch_dropout=RATE)), 512)


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_is_a_share(rate: float) -> None:
    with pytest.raises(UserError, match="patch_dropout"):
        ViTConfig(**BASE, patch_dropout=rate)


def test_cost_counts_what_training_computes() -> None:
    """The blocks of a width of 24 on 1 + 17 tokens, the embedding on all 24 patches; in closed form too."""
    config = ViTConfig(**BASE, patch_dropout=RATE, classes=5)
    tokens, d, mlp = 1 + KEPT, 24, 40
    block = 2 * tokens * (4 * d * d + 2 * d * mlp) + 4 * tokens * tokens * d
    expected = 2 * N * (3 * 64) * d + 2 * block + 2 * d * 5
    assert cost(lambda: vitlab.build(config)).forward_flops == forward_flops(config) == expected
