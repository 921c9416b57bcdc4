"""Crops, framing and mixing against torchvision, Pillow and closed forms."""

import numpy as np
import pytest
import torch
from pictures import picture
from PIL import Image, ImageEnhance, ImageOps
from scipy import integrate, stats
from torch import Tensor
from torchvision import transforms as T

from vitlab.data.mixing import Mix, draw_mix, mix_images, partners, smooth
from vitlab.data.randaugment import OPERATIONS, apply_operations, randaugment
from vitlab.data.rng import keys
from vitlab.data.source import ArraySource
from vitlab.data.transforms import Augment, crop_boxes, draw_flips, eval_image, normalize
from vitlab.data.workers import TrainReader
from vitlab.errors import UserError
from vitlab.models.config import Preprocess

PLAIN = Preprocess()
MANY = keys(1, 0, np.arange(40_000))

# ---- evaluation


@pytest.mark.parametrize("shape", [(50, 71), (71, 50), (64, 64), (20, 300), (31, 32)])
@pytest.mark.parametrize(("size", "crop"), [(32, 0.875), (30, 0.9), (48, 1.0)])
@pytest.mark.parametrize("kind", ["bilinear", "bicubic", "nearest", "lanczos"])
def test_framing_is_torchvisions(shape: tuple[int, int], size: int, crop: float, kind: str) -> None:
    image = picture(0, *shape)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.4)
    theirs = T.Compose(
        [
            T.Resize(int(size / crop), T.InterpolationMode(kind)),
            T.CenterCrop(size),
            T.ToTensor(),
            T.Normalize(mean, std),
        ]
    )
    ours = eval_image(image, (size, size), Preprocess(mean, std, kind, "crop", crop))  # type: ignore[arg-type]
    assert torch.allclose(ours, theirs(image), atol=1e-6)


def test_stretch_and_oblong_sizes() -> None:
    image = picture(0, 40, 60)
    ours = eval_image(image, (32, 16), Preprocess(fit="stretch"))
    theirs = T.ToTensor()(image.resize((16, 32), Image.Resampling.BILINEAR)) * 2 - 1
    assert torch.allclose(ours, theirs, atol=1e-6)
    wide = eval_image(image, (16, 48), Preprocess(crop=1.0))  # the width decides: 60 -> 48, 40 -> 32
    theirs = T.ToTensor()(image.resize((48, 32), Image.Resampling.BILINEAR).crop((0, 8, 48, 24))) * 2 - 1
    assert torch.allclose(wide, theirs, atol=1e-6)


# ---- the inception crop


@pytest.mark.parametrize("ratio", [1.0, 1.5, 0.6])
def test_inception_crops_follow_the_closed_form(ratio: float) -> None:
    """Aspect uniform in [3/4, 4/3]; height uniform up to what fits. Area's distribution by numerical integration."""
    found = crop_boxes(MANY, np.full(len(MANY), ratio), (32, 32), Augment(), PLAIN)
    width, height = found[:, 2] - found[:, 0], found[:, 3] - found[:, 1]
    assert (found >= 0).all()
    assert (found <= 1).all()
    aspect = width * ratio / height
    assert stats.kstest(aspect, stats.uniform(3 / 4, 4 / 3 - 3 / 4).cdf).pvalue > 1e-4
    area = width * height
    assert area.min() >= 0.05 - 1e-9

    def below(share: float) -> float:
        def given(a: float) -> float:  # P(area < share | aspect)
            r = a / ratio
            low, high = np.sqrt(0.05 / r), min(1 / np.sqrt(r), 1, 1 / r)
            return float(np.clip((np.sqrt(share / r) - low) / (high - low), 0, 1))

        return integrate.quad(given, 3 / 4, 4 / 3, limit=200)[0] / (4 / 3 - 3 / 4)

    for share in (0.1, 0.25, 0.5, 0.75):
        expected = below(share)
        assert abs((area < share).mean() - expected) < 5 * np.sqrt(expected * (1 - expected) / len(area)) + 1e-4


def test_crops_lie_anywhere() -> None:
    found = crop_boxes(MANY, np.ones(len(MANY)), (32, 32), Augment(), PLAIN)
    free_x, free_y = 1 - (found[:, 2] - found[:, 0]), 1 - (found[:, 3] - found[:, 1])
    for start, free in ((found[:, 0], free_x), (found[:, 1], free_y)):
        roomy = free > 1e-6
        assert stats.kstest(start[roomy] / free[roomy], "uniform").pvalue > 1e-4


def test_an_area_that_cannot_fit_uses_the_full_image() -> None:
    found = crop_boxes(MANY[:100], np.full(100, 30.0), (32, 32), Augment(area=(0.5, 1.0)), PLAIN)
    assert (found == [0, 0, 1, 1]).all()


def test_flip_rate() -> None:
    share = draw_flips(MANY, Augment()).mean()
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(len(MANY))
    assert not draw_flips(MANY, Augment(flip=False)).any()


def train_image(
    image: Image.Image, size: tuple[int, int], augment: Augment, preprocess: Preprocess, key: int
) -> Tensor:
    """What a worker makes of one picture, (3, h, w), normalized."""
    source = ArraySource("one", np.asarray(image)[None], np.zeros(1, np.int64), ("a", "b"))
    chunk = TrainReader(source, size, preprocess, augment).read_chunk([(0, key)])
    return normalize(chunk.pixels, preprocess)[0]


def test_workers_cut_as_pillow_does() -> None:
    image, size = picture(3, 90, 120), (32, 24)
    flipped = set()
    for key in keys(5, 0, np.arange(12)).tolist():
        each = np.array([key], np.uint64)
        box = crop_boxes(each, np.array([120 / 90]), size, Augment(), PLAIN)[0] * [120, 90, 120, 90]
        expected = image.resize((24, 32), Image.Resampling.BILINEAR, box=tuple(box))
        if draw_flips(each, Augment())[0]:
            expected = ImageOps.mirror(expected)
        flipped.add(bool(draw_flips(each, Augment())[0]))
        found = train_image(image, size, Augment(), PLAIN, key)
        assert found.shape == (3, 32, 24)
        assert (found - (T.ToTensor()(expected) * 2 - 1)).abs().mean() < 0.02  # shrinking in two steps is allowed
    assert flipped == {True, False}


@pytest.mark.parametrize("shape", [(60, 90), (90, 60)])
def test_resize_crop_keeps_the_evaluations_scale(shape: tuple[int, int]) -> None:
    ratio = np.full(len(MANY), shape[1] / shape[0])
    found = crop_boxes(MANY, ratio, (32, 32), Augment(crop="resize"), PLAIN)
    width, height = (found[:, 2] - found[:, 0]) * shape[1], (found[:, 3] - found[:, 1]) * shape[0]
    np.testing.assert_allclose(width, 0.875 * 60)
    np.testing.assert_allclose(height, 0.875 * 60)
    assert found[:, 0].std() > 0.01
    center = crop_boxes(MANY[:2], ratio[:2], (32, 32), Augment(crop="none"), PLAIN)
    np.testing.assert_allclose(center[:, :2], 1 - center[:, 2:])
    same = train_image(picture(1, *shape), (32, 32), Augment(crop="none", flip=False), PLAIN, 1)
    assert (same - eval_image(picture(1, *shape), (32, 32), PLAIN)).abs().mean() < 0.03


def test_invalid_augment_settings() -> None:
    for settings in (
        {"area": (0.0, 1.0)},
        {"mixup": 1.5},
        {"randaugment": (-1, 10.0)},
        {"crop": "zoom"},
        {"label_smoothing": 1.0},
    ):
        with pytest.raises(UserError):
            Augment(**settings)


# ---- RandAugment


def ours(name: str, image: Image.Image, level: float, sign: float = 1.0) -> np.ndarray:
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    chosen = np.array([OPERATIONS.index(name)])
    found = apply_operations(pixels, chosen, level, np.array([sign]), np.array([[0.5, 0.5]]))
    return found[0].permute(1, 2, 0).numpy().astype(int)


@pytest.mark.parametrize("level", [0.5, 1.0])
def test_color_operations_are_pillows(level: float) -> None:
    image = picture(7, 32, 32)
    factor = 1.8 * level + 0.1
    expected = {
        "autocontrast": ImageOps.autocontrast(image),
        "equalize": ImageOps.equalize(image),
        "invert": ImageOps.invert(image),
        "posterize": ImageOps.posterize(image, int(4 * level)),
        "solarize": ImageOps.solarize(image, int(256 * level)),
        "color": ImageEnhance.Color(image).enhance(factor),
        "contrast": ImageEnhance.Contrast(image).enhance(factor),
        "brightness": ImageEnhance.Brightness(image).enhance(factor),
        "sharpness": ImageEnhance.Sharpness(image).enhance(factor),
    }
    for name, picture_ in expected.items():
        assert np.abs(ours(name, image, level) - np.asarray(picture_)).max() <= 2, name


def test_geometric_operations_are_pillows() -> None:
    image, grey = picture(7, 32, 32), (128, 128, 128)
    reach = round(100 / 224 * 32)
    affine = {
        ("shear x", 1.0): (1, 0.3, 0, 0, 1, 0),
        ("shear y", -1.0): (1, 0, 0, -0.3, 1, 0),
        ("translate x", 1.0): (1, 0, -reach, 0, 1, 0),
        ("translate y", -1.0): (1, 0, 0, 0, 1, reach),
    }
    for (name, sign), matrix in affine.items():
        theirs = [
            np.asarray(image.transform(image.size, Image.Transform.AFFINE, m, fillcolor=grey)).astype(int)
            for m in (matrix, (*(matrix[0], -matrix[1], matrix[2], -matrix[3]), *matrix[4:]))
        ]
        found = ours(name, image, 1.0, sign)
        share = max((np.abs(found - other).max(-1) <= 1).mean() for other in theirs)  # a mirrored sense is as good
        assert share > 0.9, name
    turned = np.asarray(image.rotate(30, fillcolor=grey)).astype(int)
    assert (np.abs(ours("rotate", image, 1.0, -1.0) - turned).max(-1) <= 1).mean() > 0.9


def test_cutout_and_solarize_add() -> None:
    image = picture(8, 56, 56)
    found, before = ours("cutout", image, 1.0), np.asarray(image)
    changed = (found != before).any(-1)
    assert (found[changed] == 128).all()
    rows, columns = np.flatnonzero(changed.any(1)), np.flatnonzero(changed.any(0))
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (18, 37, 18, 37)  # 20 pixels: twice 40/224 of the side
    expected = np.where(before < 128, np.minimum(before.astype(int) + 110, 255), before)
    assert (ours("solarize add", image, 1.0) == expected).all()


def test_randaugment_of_a_batch_is_that_of_its_images() -> None:
    pixels = torch.stack([torch.from_numpy(np.array(picture(i, 24, 24))).permute(2, 0, 1) for i in range(40)])
    key, augment = keys(2, 0, np.arange(40)), Augment(randaugment=(2, 9))
    together = randaugment(pixels, key, augment)
    for i in range(40):
        assert torch.equal(together[i], randaugment(pixels[i : i + 1], key[i : i + 1], augment)[0])
    assert sum(not torch.equal(a, b) for a, b in zip(together, pixels, strict=True)) > 35


# ---- mixing


@pytest.mark.parametrize("batch", [1, 2, 7, 8])
def test_partners_are_others(batch: int) -> None:
    found = partners(batch)
    assert ((found >= 0) & (found < batch)).all()
    if batch > 1:
        assert (found != np.arange(batch)).all()


def test_mixup_weights_pixels_and_targets_alike() -> None:
    images, labels = torch.rand(6, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1, 2])
    mix = draw_mix(keys(0, np.arange(6)), Augment(mixup=0.8))
    assert mix is not None
    partner = torch.from_numpy(partners(6))
    mixed, own = mix_images(images, mix, partner)
    for i in range(6):
        expected = mix.own[i] * images[i] + (1 - mix.own[i]) * images[i ^ 1]
        assert torch.allclose(mixed[i], expected.float(), atol=1e-6)
    assert torch.allclose(own.double(), torch.from_numpy(mix.own), atol=1e-6)
    assert (mix.own >= 0.5).all()
    goal = smooth(torch.nn.functional.one_hot(labels, 3), 0.1)
    assert torch.allclose(goal.sum(1), torch.ones(6))
    assert torch.allclose(goal[0], torch.tensor([0.9 + 0.1 / 3, 0.1 / 3, 0.1 / 3]))


def test_cutmix_pastes_a_box_and_counts_it() -> None:
    images = torch.arange(2.0).reshape(2, 1, 1, 1).expand(2, 3, 10, 20)
    box = np.array([[0.25, 0.2, 0.5, 0.7], [0.25, 0.2, 0.5, 0.7]])
    mixed, own = mix_images(images, Mix(np.ones(2), box), torch.tensor([1, 0]))
    expected = torch.zeros(10, 20)
    expected[2:7, 5:10] = 1
    assert torch.equal(mixed[0, 0], expected)
    assert torch.equal(mixed[1, 2], 1 - expected)
    assert torch.allclose(own, torch.full((2,), 1 - 25 / 200))


def test_cutmix_areas_and_the_choice_between_the_two() -> None:
    both = draw_mix(MANY, Augment(mixup=0.5, cutmix=1.0))
    assert both is not None
    cut = both.own == 1
    assert abs(cut.mean() - 0.5) < 0.02
    assert (both.box[~cut] == 0).all()
    sides = both.box[cut][:, 2:] - both.box[cut][:, :2]
    inner = (both.box[cut][:, :2] > 0).all(1) & (both.box[cut][:, 2:] < 1).all(1)  # not clipped at an edge: square
    np.testing.assert_allclose(sides[inner, 0], sides[inner, 1])
    assert draw_mix(MANY, Augment()) is None
