"""What masked patch prediction predicts: against derivations in numpy, patch by patch."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from small_runs import SMALL, assert_same_run, records, train_small
from test_resume import killed_at

from vitlab.errors import UserError
from vitlab.models.config import Preprocess, ViTConfig
from vitlab.models.names import configure
from vitlab.training.masked import PatchPrediction
from vitlab.training.patch_targets import COLORS, Colors, Pixels, Target, make_target
from vitlab.training.recipe import change, override
from vitlab.weights import load

OTHER = Preprocess(mean=(0.4, 0.5, 0.3), std=(0.2, 0.25, 0.3))
Pictures = NDArray[np.float64]


def pictures(height: int, width: int, seed: int = 0) -> Pictures:
    """Two images (2, 3, height, width) with values in [0, 1] whose means are never between two levels of color."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, (2, 3, height // 4 + 1, width // 4 + 1)).repeat(4, 2).repeat(4, 3)[..., :height, :width]
    noisy: Pictures = (np.clip(base + rng.integers(-20, 20, base.shape), 0, 254) + 0.1) / 255
    return noisy


def normalized(pixels: Pictures, preprocess: Preprocess) -> torch.Tensor:
    mean, std = (np.array(v)[:, None, None] for v in (preprocess.mean, preprocess.std))
    return torch.tensor((pixels - mean) / std, dtype=torch.float32)


def color_class(cell: Pictures) -> int:
    """The class of a cell (3, rows, columns): eight levels a channel, written in base 8."""
    levels = [min(7, math.floor(8 * cell[channel].mean())) for channel in range(3)]
    return int("".join(map(str, levels)), 8)


@pytest.mark.parametrize("preprocess", [Preprocess(), OTHER])
def test_the_mean_color_has_three_bits_a_channel(preprocess: Preprocess) -> None:
    pixels = pictures(12, 8)
    found = Colors(preprocess, stride=4, side=1).read(normalized(pixels, preprocess))
    assert found.shape == (2, 6, 1)
    for b, (row, column) in ((b, divmod(n, 2)) for b in range(2) for n in range(6)):
        patch = pixels[b, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
        assert found[b, 2 * row + column, 0] == color_class(patch)


@pytest.mark.parametrize("preprocess", [Preprocess(), OTHER])
def test_4x4_are_the_colors_of_the_downsized_patch(preprocess: Preprocess) -> None:
    """A patch of 8 x 8 pixels has cells of 2 x 2, in raster order."""
    pixels = pictures(24, 16)
    found = Colors(preprocess, stride=8, side=4).read(normalized(pixels, preprocess))
    assert found.shape == (2, 6, 16)
    for b in range(2):
        for n, (row, column) in enumerate(np.ndindex(3, 2)):
            patch = pixels[b, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8]
            cells = [color_class(patch[:, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2]) for y, x in np.ndindex(4, 4)]
            assert found[b, n].tolist() == cells
    assert len(found.unique()) > 20


def test_cells_stay_in_their_patch() -> None:
    """Patches of 14 pixels, which 4 does not divide: neighbors in other colors change nothing."""
    colors = np.random.default_rng(1).integers(0, 2, (2, 3, 2, 3)).astype(np.float64)
    found = Colors(Preprocess(), stride=14, side=4).read(normalized(colors.repeat(14, 2).repeat(14, 3), Preprocess()))
    for b in range(2):
        for n, (row, column) in enumerate(np.ndindex(2, 3)):
            assert set(found[b, n].tolist()) == {color_class(colors[b, :, row, column, None, None])}


def test_white_is_the_last_class_and_black_the_first() -> None:
    mean = Colors(Preprocess(), 4, 1)
    assert mean.read(torch.ones(1, 3, 4, 4)).item() == COLORS - 1
    assert mean.read(-torch.ones(1, 3, 4, 4)).item() == 0


def test_pixels_are_the_patch_that_the_model_sees() -> None:
    images = normalized(pictures(12, 8), OTHER)
    found = Pixels(4).read(images)
    assert found.shape == (2, 6, 48)
    for b in range(2):
        for n, (row, column) in enumerate(np.ndindex(3, 2)):
            patch = images[b, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            assert torch.equal(found[b, n], patch.flatten())


# ---- losses and what is reported


def test_the_loss_of_4x4_is_the_mean_of_16_predictions() -> None:
    target, images = Colors(Preprocess(), 8, 4), normalized(pictures(8, 16), Preprocess())
    predicted = torch.randn(2, 2, 16 * COLORS, generator=torch.Generator().manual_seed(0))
    wanted, losses = target.read(images), target.losses(predicted, target.read(images))
    for b, n in np.ndindex(2, 2):
        each = [
            F.cross_entropy(predicted[b, n, COLORS * cell : COLORS * (cell + 1)][None], wanted[b, n, cell][None])
            for cell in range(16)
        ]
        assert losses[b, n].item() == pytest.approx(torch.stack(each).mean().item(), rel=1e-5)


def fake_batches(target: Target, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Predictions, targets and a choice of the patches of two images."""
    generator = torch.Generator().manual_seed(seed)
    wanted = target.read(normalized(pictures(24, 24, seed), Preprocess()))
    predicted = torch.randn(*wanted.shape[:2], target.outputs, generator=generator)
    return predicted, wanted, torch.rand(wanted.shape[:2], generator=generator) < 0.6


@pytest.mark.parametrize("side", [1, 4])
def test_colors_report_accuracy_loss_and_the_best_fixed_guess(side: int) -> None:
    target = Colors(Preprocess(), 8, side)
    batches = [fake_batches(target, seed) for seed in range(3)]
    batches[0][0].unflatten(-1, (-1, COLORS)).scatter_(-1, batches[0][1][..., None], 9.0)  # one batch is right
    sums = sum(target.sums(*batch).double() for batch in batches)
    assert isinstance(sums, torch.Tensor)
    report = target.report(sums.tolist())
    logits, wanted = (torch.cat([batch[k][batch[2]] for batch in batches]) for k in (0, 1))  # (n, ...) chosen patches
    logits = logits.unflatten(-1, (-1, COLORS))
    assert report["accuracy"] == pytest.approx((logits.argmax(-1) == wanted).double().mean().item())
    assert report["loss"] == pytest.approx(F.cross_entropy(logits.flatten(0, 1), wanted.flatten()).item(), rel=1e-5)
    shares = [np.unique(column, return_counts=True)[1] / len(wanted) for column in wanted.numpy().T]
    assert report["prior"] == pytest.approx(np.mean([-(p * np.log(p)).sum() for p in shares]))
    assert 0.1 < report["accuracy"] < 0.9


def test_pixels_report_the_error_and_that_of_the_mean_patch() -> None:
    target = Pixels(8)
    batches = [fake_batches(target, seed) for seed in range(3)]
    sums = sum(target.sums(*batch).double() for batch in batches)
    assert isinstance(sums, torch.Tensor)
    report = target.report(sums.tolist())
    predicted, wanted = (torch.cat([batch[k][batch[2]] for batch in batches]).double().numpy() for k in (0, 1))
    assert report["loss"] == pytest.approx(np.mean((predicted - wanted) ** 2), rel=1e-5)
    assert report["prior"] == pytest.approx(np.mean((wanted - wanted.mean(0)) ** 2), rel=1e-4)
    assert set(report) == {"loss", "prior"}
    assert PatchPrediction(target, 0, (3, 3)).score(report) == -report["loss"]


@pytest.mark.parametrize(("name", "outputs"), [("mean", 512), ("4x4", 16 * 512), ("pixels", 3 * 16 * 16)])
def test_outputs_by_name(name: Any, outputs: int) -> None:
    config = configure("S/16", {"image_size": (32, 32)})
    assert isinstance(config, ViTConfig)
    assert make_target(name, Preprocess(), config).outputs == outputs


# ---- runs

MASKED = change(SMALL, objective="masked", mixup=0.0, label_smoothing=0.0)


@pytest.mark.parametrize("target", ["4x4", pytest.param("pixels", marks=pytest.mark.slow)])
def test_a_run_of_each_target_resumes_to_the_bit(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = change(MASKED, masked_target=target, corruption=0.25, steps=6)
    train_small(tmp_path / "plain", recipe=recipe)
    with killed_at(5, monkeypatch):
        train_small(tmp_path / "killed", recipe=recipe)
    train_small(tmp_path / "killed", recipe=recipe, resume=True)
    assert_same_run(tmp_path / "plain", tmp_path / "killed")
    assert load(tmp_path / "plain").config.classes == 0
    with pytest.raises(UserError, match="another corruption"):
        train_small(tmp_path / "plain", recipe=change(recipe, corruption=0.5), resume=True)


@pytest.mark.slow
def test_pixels_are_learned_better_than_the_mean_patch(tmp_path: Path) -> None:
    recipe = change(MASKED, masked_target="pixels", steps=300, warmup=30, lr=0.005, evaluate_every=300)
    train_small(tmp_path / "run", recipe=recipe)
    last = [record for record in records(tmp_path / "run") if "test" in record][-1]["test"]
    assert last["loss"] < 0.8 * last["prior"]


@pytest.mark.parametrize("pair", ["masked_target=patch", "corruption=0", "corruption=1.5", "masking=half"])
def test_other_values_are_refused(pair: str) -> None:
    with pytest.raises(UserError, match=pair.partition("=")[0]):
        override(MASKED, [pair])
