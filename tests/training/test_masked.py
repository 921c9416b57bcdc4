"""Masked patch prediction: which patches are corrupted, how, and what is predicted."""

import math

import numpy as np
import pytest
import torch
from families import family
from torch import Tensor

import vitlab
from vitlab.data.loader import Batch
from vitlab.errors import UserError
from vitlab.models.config import Preprocess
from vitlab.models.variants import build
from vitlab.models.vit import ViT
from vitlab.training.masked import COLORS, MaskedPatches, PatchPrediction, color_classes, corrupt

PATCHES = 196
IMAGES = 600  # 117,600 patches


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


@pytest.mark.parametrize("patches", [1, 2, 9, 16, 196])
def test_exactly_half_of_every_image(patches: int) -> None:
    corruption = corrupt(3, 17, torch.arange(400), patches, "half")
    assert (corruption.chosen.sum(1) == round(patches / 2)).all()
    if patches > 2:
        assert all(share_is(int(n), 400, round(patches / 2) / patches) for n in corruption.chosen.sum(0))
        chosen = int(corruption.chosen.sum())
        assert share_is(int(corruption.masked.sum()), chosen, 0.8)
        assert share_is(int(corruption.swapped.sum()), chosen, 0.1)
    part = corrupt(3, 17, torch.tensor([31, 4]), patches, "half")  # whatever else is in the batch
    assert torch.equal(part.chosen, corruption.chosen[[31, 4]])


def test_loss_of_exactly_half_is_the_mean_over_them() -> None:
    model, images, index = small(), torch.rand(4, 3, 16, 16) * 2 - 1, torch.arange(4)
    objective = PatchPrediction(Preprocess(), 2, (4, 4), 4, "half")
    corruption, targets = corrupt(2, 9, index, 16, "half"), color_classes(images, Preprocess(), 4)
    logs = model(images, corruption).log_softmax(-1)
    picked = [-logs[b, n, targets[b, n]].item() for b, n in corruption.chosen.nonzero().tolist()]
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


@pytest.mark.parametrize("preprocess", [Preprocess(), Preprocess(mean=(0.4, 0.5, 0.3), std=(0.2, 0.25, 0.3))])
def test_targets_are_the_three_bit_mean_color(preprocess: Preprocess) -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 256, (2, 3, 3, 2))  # a color per patch, (B, C, h, w)
    pixels = np.clip(base.repeat(4, 2).repeat(4, 3) + rng.integers(-20, 20, (2, 3, 12, 8)), 0, 255)
    mean, std = (np.array(v)[:, None, None] for v in (preprocess.mean, preprocess.std))
    images = torch.tensor((pixels / 255 - mean) / std, dtype=torch.float32)
    found = color_classes(images, preprocess, stride=4)
    for b in range(2):
        for row in range(3):
            for column in range(2):
                patch = pixels[b, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4] / 255
                r, g, b_ = (min(7, int(patch[c].mean() * 8)) for c in range(3))
                assert found[b, 2 * row + column] == 64 * r + 8 * g + b_


def test_white_is_the_last_class_and_black_the_first() -> None:
    assert color_classes(torch.ones(1, 3, 4, 4), Preprocess(), 4).item() == COLORS - 1
    assert color_classes(-torch.ones(1, 3, 4, 4), Preprocess(), 4).item() == 0


def small() -> MaskedPatches:
    torch.manual_seed(0)
    vit = vitlab.create("Ti/4", image_size=16, depth=2, width=32, mlp=64, heads=2, classes=0)
    assert isinstance(vit, ViT)
    model = MaskedPatches(vit)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


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


def test_loss_counts_corrupted_patches_only() -> None:
    model = small()
    images = torch.rand(4, 3, 16, 16) * 2 - 1
    index = torch.arange(4)
    objective = PatchPrediction(Preprocess(), seed=2, grid=(4, 4), stride=4)
    batch = Batch(images, index, torch.zeros(4, 1), index)
    corruption, targets = corrupt(2, 9, index, 16), color_classes(images, Preprocess(), 4)
    logs = model(images, corruption).log_softmax(-1)
    total = sum(-logs[b, n, targets[b, n]].item() for b in range(4) for n in range(16) if corruption.chosen[b, n])
    assert objective.loss(model, batch, step=9).item() == pytest.approx(total / (0.5 * 64), rel=1e-5)


def test_prior_is_the_entropy_of_the_colors() -> None:
    objective = PatchPrediction(Preprocess(), seed=0, grid=(1, 1), stride=4)
    counts = [0.0] * COLORS
    counts[3], counts[9] = 30.0, 10.0
    report = objective.report([40.0, 20.0, 60.0, *counts])
    assert report["prior"] == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert report["accuracy"] == 0.5
    assert report["loss"] == 1.5


@pytest.mark.parametrize("name", ["DINOv2 with registers", "DINOv3", "DINOv3, SwiGLU", "DeiT III", "CLIP"])
def test_families_predict_patches_alone(name: str) -> None:
    """Neither registers nor the class token have a prediction, and all but them is learned through the patches."""
    vit = build(family(name, classes=0))
    assert isinstance(vit, ViT)
    model, images = MaskedPatches(vit), torch.rand(4, 3, 32, 48) * 2 - 1
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
        MaskedPatches(vit)


def test_attention_pooling_is_refused() -> None:
    model = vitlab.create("Ti/4", image_size=16, depth=1, width=32, mlp=64, heads=2, classes=0, pool="attention")
    assert isinstance(model, ViT)
    with pytest.raises(UserError, match="pool"):
        MaskedPatches(model)
