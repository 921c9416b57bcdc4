"""Masked patch prediction: which patches are corrupted, how, and what is predicted."""

import math

import numpy as np
import pytest
import torch
from families import family
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import vitlab
from vitlab.data.loader import Batch
from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ViTConfig
from vitlab.models.names import configure
from vitlab.models.variants import build
from vitlab.models.vit import ViT
from vitlab.training.masked import Corruption, MaskedPatches, PatchPrediction, corrupt
from vitlab.training.patch_targets import COLORS, Colors, make_target
from vitlab.training.recipe import Recipe, override
from vitlab.training.recipes import IMAGES as IMAGES_OF
from vitlab.training.recipes import RECIPES, find, run_flops

PATCHES = 196
IMAGES = 600  # 117,600 patches
MEAN = Colors(Preprocess(), stride=4, side=1)


def share_is(found: int, of: int, expected: float) -> bool:
    """Within five deviations of a binomial: fails by chance once in a million."""
    return abs(found - of * expected) < 5 * math.sqrt(of * expected * (1 - expected))


def test_half_is_corrupted_and_shared_out_80_10_10() -> None:
    corruption = corrupt(seed=3, step=17, index=torch.arange(IMAGES), patches=PATCHES)
    total, chosen = IMAGES * PATCHES, int(corruption.chosen.sum())
    assert total >= 100_000
    assert share_is(chosen, total, 0.5)
    assert share_is(int(corruption.masked.sum()), chosen, 0.8)
    assert share_is(int(corruption.swapped.sum()), chosen, 0.1)
    assert not (corruption.masked & corruption.swapped).any()
    assert not ((corruption.masked | corruption.swapped) & ~corruption.chosen).any()


@pytest.mark.parametrize("share", [0.15, 0.75])
def test_any_share_is_corrupted_and_shared_out_80_10_10(share: float) -> None:
    corruption = corrupt(3, 17, torch.arange(IMAGES), PATCHES, "coin", share)
    chosen = int(corruption.chosen.sum())
    assert share_is(chosen, IMAGES * PATCHES, share)
    assert share_is(int(corruption.masked.sum()), chosen, 0.8)
    assert share_is(int(corruption.swapped.sum()), chosen, 0.1)


@pytest.mark.parametrize(
    ("patches", "share"), [(1, 0.5), (2, 0.5), (9, 0.5), (16, 0.5), (196, 0.5), (196, 0.15), (4, 0.1)]
)
def test_exactly_a_share_of_every_image(patches: int, share: float) -> None:
    corruption = corrupt(3, 17, torch.arange(400), patches, "exact", share)
    count = max(1, round(patches * share))
    assert (corruption.chosen.sum(1) == count).all()
    if patches > 2:
        assert all(share_is(int(n), 400, count / patches) for n in corruption.chosen.sum(0))
        chosen = int(corruption.chosen.sum())
        assert share_is(int(corruption.masked.sum()), chosen, 0.8)
        assert share_is(int(corruption.swapped.sum()), chosen, 0.1)
    part = corrupt(3, 17, torch.tensor([31, 4]), patches, "exact", share)  # whatever else is in the batch
    assert torch.equal(part.chosen, corruption.chosen[[31, 4]])


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_loss_of_exactly_a_share_is_the_mean_over_them(share: float) -> None:
    model, images, index = small(), torch.rand(4, 3, 16, 16) * 2 - 1, torch.arange(4)
    objective = PatchPrediction(MEAN, 2, (4, 4), "exact", share)
    corruption, targets = corrupt(2, 9, index, 16, "exact", share), MEAN.read(images)
    logs = model(images, corruption).log_softmax(-1)
    picked = [-logs[b, n, targets[b, n, 0]].item() for b, n in corruption.chosen.nonzero().tolist()]
    loss = objective.loss(model, Batch(images, index, torch.zeros(4, 1), index), step=9)
    assert loss.item() == pytest.approx(np.mean(picked), rel=1e-5)


def test_each_place_and_image_is_corrupted_as_often() -> None:
    corruption = corrupt(seed=0, step=0, index=torch.arange(2000), patches=64)
    by_place, by_image = corruption.chosen.sum(0), corruption.chosen.sum(1)
    assert all(share_is(int(n), 2000, 0.5) for n in by_place)
    assert by_image.float().var().item() == pytest.approx(64 * 0.25, rel=0.2)  # a binomial's


def test_swapped_patches_take_any_other_evenly() -> None:
    corruption = corrupt(seed=1, step=5, index=torch.arange(3000), patches=9)
    away = (corruption.other - torch.arange(9)) % 9
    assert (away != 0).all()
    counts = torch.bincount(away.flatten(), minlength=9)[1:]
    assert all(share_is(int(n), 27_000, 1 / 8) for n in counts)


def test_a_function_of_seed_step_and_image() -> None:
    all_images = corrupt(7, 3, torch.arange(50), 49)
    part = corrupt(7, 3, torch.tensor([31, 4]), 49)
    assert torch.equal(part.chosen, all_images.chosen[[31, 4]])
    assert torch.equal(part.other, all_images.other[[31, 4]])
    for other in (corrupt(8, 3, torch.arange(50), 49), corrupt(7, 4, torch.arange(50), 49)):
        agree = (other.chosen == all_images.chosen).float().mean().item()
        assert 0.4 < agree < 0.6  # unrelated, not merely shifted


def small() -> MaskedPatches:
    torch.manual_seed(0)
    vit = vitlab.create("Ti/4", image_size=16, depth=2, width=32, mlp=64, heads=2, classes=0)
    assert isinstance(vit, ViT)
    model = MaskedPatches(vit, COLORS)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


def counted_flops(recipe: Recipe) -> float:
    """What torch counts in a forward pass of a recipe's masked model, for one image."""
    config = configure(recipe.model, recipe.model_settings | {"image_size": recipe.image_size, "classes": 0})
    assert isinstance(config, ViTConfig)
    with torch.device("meta"):
        vit, images = ViT(config), torch.empty(2, 3, *config.image_size)
        masked = MaskedPatches(vit, make_target(recipe.masked_target, Preprocess(), config).outputs)
    patches = config.grid[0] * config.grid[1]
    chosen, other = (torch.empty(2, patches, dtype=kind, device="meta") for kind in (torch.bool, torch.long))
    with FlopCounterMode(display=False) as counter:
        masked(images, Corruption(chosen, chosen, chosen, other))
    return counter.get_total_flops() / 2


@pytest.mark.parametrize("target", ["mean", "4x4", "pixels"])
@pytest.mark.parametrize("model", ["Ti/8", "R26+Ti/16"])
def test_a_run_costs_what_torch_counts(model: str, target: str) -> None:
    settings = f"objective=masked masked_target={target} model={model} image_size=32 batch=8 steps=10"
    recipe = override(find("study").recipe, settings.split())
    assert run_flops(recipe) == 3 * counted_flops(recipe) * 8 * 10


@pytest.mark.parametrize("name", [name for name, entry in RECIPES.items() if entry.recipe.objective == "masked"])
def test_recipes_cost_what_torch_counts(name: str) -> None:
    recipe = find(name).recipe
    images = recipe.steps * recipe.batch if recipe.steps else (recipe.epochs or 0) * IMAGES_OF[recipe.data]
    assert run_flops(recipe) == 3 * counted_flops(recipe) * images


def test_embeddings_are_replaced_as_chosen() -> None:
    model = small()
    images = torch.randn(3, 3, 16, 16)
    corruption = corrupt(0, 0, torch.arange(3), 16)
    seen: list[Tensor] = []
    model.vit.encode = lambda x: seen.append(x) or torch.zeros(3, 17, 32)  # type: ignore[method-assign, func-returns-value]
    model(images, corruption)
    plain = model.vit.patches(images)
    for b in range(3):
        for n in range(16):
            if corruption.masked[b, n]:
                expected: Tensor = model.mask
            elif corruption.swapped[b, n]:
                expected = plain[b, corruption.other[b, n]]
            else:
                expected = plain[b, n]
            assert torch.equal(seen[0][b, n], expected)


@pytest.mark.parametrize("share", [0.5, 0.15])
def test_loss_counts_corrupted_patches_only(share: float) -> None:
    model = small()
    images = torch.rand(4, 3, 16, 16) * 2 - 1
    index = torch.arange(4)
    objective = PatchPrediction(MEAN, seed=2, grid=(4, 4), share=share)
    batch = Batch(images, index, torch.zeros(4, 1), index)
    corruption, targets = corrupt(2, 9, index, 16, share=share), MEAN.read(images)
    logs = model(images, corruption).log_softmax(-1)
    total = sum(-logs[b, n, targets[b, n, 0]].item() for b in range(4) for n in range(16) if corruption.chosen[b, n])
    assert objective.loss(model, batch, step=9).item() == pytest.approx(total / (share * 64), rel=1e-5)


@pytest.mark.parametrize("name", ["DINOv2 with registers", "DINOv3", "DINOv3, SwiGLU", "DeiT III", "CLIP"])
def test_families_predict_patches_alone(name: str) -> None:
    """Neither registers nor the class token have a prediction, and all but them is learned through the patches."""
    vit = build(family(name, classes=0))
    assert isinstance(vit, ViT)
    model, images = MaskedPatches(vit, COLORS), torch.rand(4, 3, 32, 48) * 2 - 1
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    corruption = corrupt(0, 0, torch.arange(4), 6)
    logits = model(images, corruption)
    assert logits.shape == (4, 6, COLORS)
    x = torch.where(corruption.swapped[..., None], swap(vit.patches(images), corruption.other), vit.patches(images))
    x = torch.where(corruption.masked[..., None], model.mask, x)
    torch.testing.assert_close(logits, model.head(vit.encode(x)[:, -6:]))
    logits.square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def swap(x: Tensor, other: Tensor) -> Tensor:
    return torch.stack([image[order] for image, order in zip(x, other, strict=True)])


@pytest.mark.parametrize("name", ["EVA-02", "MAE"])
def test_a_norm_after_pooling_is_refused(name: str) -> None:
    vit = build(family(name, classes=0))
    assert isinstance(vit, ViT)
    with pytest.raises(UserError, match="final_norm=tokens"):
        MaskedPatches(vit, COLORS)


def test_attention_pooling_is_refused() -> None:
    model = vitlab.create("Ti/4", image_size=16, depth=1, width=32, mlp=64, heads=2, classes=0, pool="attention")
    assert isinstance(model, ViT)
    with pytest.raises(UserError, match="pool"):
        MaskedPatches(model, COLORS)
