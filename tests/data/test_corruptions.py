"""Corruptions: their filters and draws against scipy, their effects against closed forms, and what they depend on."""

import colorsys

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage, stats

from vitlab.data.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from vitlab.data.fields import (
    Draws,
    convolve,
    disk_blur,
    fractal,
    gaussian_blur,
    mirrored,
    motion_blur,
    places,
    sample,
    smooth_noise,
)
from vitlab.data.rng import keys

RANDOM = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "glass_blur",
    "motion_blur",
    "snow",
    "frost",
    "fog",
    "elastic",
)


def photo(h: int = 48, w: int = 64, seed: int = 0) -> Image.Image:
    """A picture with edges and smooth parts."""
    field = ndimage.gaussian_filter(np.random.default_rng(seed).random((h, w, 3)), (2, 2, 0))
    pixels = (field - field.min()) / (field.max() - field.min()) * 200 + 20
    pixels[h // 4 : h // 2, w // 4 : w // 2] = (200, 40, 90)
    return Image.fromarray(pixels.astype(np.uint8))


def gray(value: int, side: int = 224) -> Image.Image:
    return Image.new("RGB", (side, side), (value,) * 3)


def draws(*parts: int) -> Draws:
    return Draws(keys(*parts))


def change(image: Image.Image, name: str, severity: int) -> float:
    """Root of the mean squared difference, from 0 to 1."""
    found = corrupt(image, name, severity, 3)
    return float(np.sqrt(np.mean((np.asarray(found) / 255 - np.asarray(image) / 255) ** 2)))


# ---- filters and draws


def test_normal_draws_are_normal() -> None:
    found = draws(1, 2).normal(100, 100)
    assert stats.kstest(found.ravel(), "norm").pvalue > 0.01
    assert abs(np.corrcoef(found[:, :-1].ravel(), found[:, 1:].ravel())[0, 1]) < 0.03


def test_convolution_is_scipys() -> None:
    rng = np.random.default_rng(0)
    image, kernel = rng.random((20, 31, 3)), rng.random((7, 5))
    expected = np.stack([ndimage.convolve(image[..., c], kernel / kernel.sum(), mode="reflect") for c in range(3)], -1)
    assert np.allclose(convolve(image, kernel), expected)
    assert np.allclose(convolve(image[..., 0], kernel), expected[..., 0])


def test_gaussian_blur_is_scipys() -> None:
    image = np.random.default_rng(0).random((40, 33, 3))
    for sigma in (0.4, 1.0, 2.7):
        expected = ndimage.gaussian_filter(image, (sigma, sigma, 0), mode="reflect", truncate=5)
        assert np.abs(gaussian_blur(image, sigma) - expected).max() < 2e-3


def test_sampling_is_scipys() -> None:
    rng = np.random.default_rng(0)
    image = rng.random((12, 17, 3))
    down, across = (place + rng.uniform(-4, 4, (12, 17)) for place in places(12, 17))
    expected = [ndimage.map_coordinates(image[..., c], [down, across], order=1, mode="nearest") for c in range(3)]
    assert np.allclose(sample(image, down, across), np.stack(expected, -1))


def test_places_beyond_an_edge_are_mirrored() -> None:
    image = np.random.default_rng(0).random((12, 17, 3))
    down, across = (place * 3 - side for place, side in zip(places(12, 17), (12, 17), strict=True))
    expected = [ndimage.map_coordinates(image[..., c], [down, across], order=1, mode="reflect") for c in range(3)]
    assert np.allclose(sample(image, mirrored(down, 12), mirrored(across, 17)), np.stack(expected, -1))


def test_smooth_noise_is_scipys() -> None:
    plain = draws(4).uniform(32, 48)
    expected = ndimage.gaussian_filter(2 * plain - 1, 2.0, mode="wrap", truncate=8)
    assert np.allclose(smooth_noise(draws(4), 32, 48, 2.0), expected, atol=1e-6)


def test_a_moving_point_leaves_a_line() -> None:
    point = np.zeros((41, 41))
    point[20, 20] = 1
    found = motion_blur(point, 10, 1e9, 0)  # a very wide Gaussian: all along the line weigh the same
    line = found[20, 20:31]
    assert np.allclose(found.sum(), 1)
    assert np.allclose(line.sum(), 1, atol=0.02)
    assert line[1:-1] == pytest.approx(np.full(9, line[1:-1].mean()), rel=0.05)
    fallen = motion_blur(point, 10, 1e9, 90)
    assert np.allclose(fallen[20:31, 20].sum(), 1, atol=0.02)


def test_a_point_out_of_focus_is_a_disk() -> None:
    point = np.zeros((61, 61))
    point[30, 30] = 1
    found = disk_blur(point, 9.0)
    down, across = (place - 30 for place in places(61, 61))
    assert (found[np.hypot(down, across) > 9.6] < 1e-12).all()
    assert found[30, 30] == pytest.approx(1 / (np.pi * 9**2), rel=0.05)


def test_clouds_have_ever_finer_scales() -> None:
    """The more a scale's weight decays, the smoother they are; all of them fill the range."""
    rough, smooth = (fractal(draws(9), 64, 96, decay) for decay in (1.3, 3.0))
    for cloud in (rough, smooth):
        assert (cloud.min(), cloud.max(), cloud.shape) == (0, 1, (64, 96))
    assert np.abs(np.diff(rough)).mean() > 2 * np.abs(np.diff(smooth)).mean()


DIAGONAL, STRAIGHT = ((-1, -1), (-1, 1), (1, -1), (1, 1)), ((-1, 0), (1, 0), (0, -1), (0, 1))


def published_cloud(decay: float, rng: np.random.Generator) -> np.ndarray:
    """The cloud of the benchmark's fog: midpoints in place, on a torus of 256 pixels, of which 224 are shown."""
    cloud, step, wibble = np.zeros((256, 256)), 256, 100.0
    while step > 1:
        half = step // 2
        for top, left, around in ((half, half, DIAGONAL), (0, half, STRAIGHT), (half, 0, STRAIGHT)):
            i, j = np.ogrid[top:256:step, left:256:step]
            near = [cloud[(i + half * down) % 256, (j + half * across) % 256] for down, across in around]
            cloud[i, j] = sum(near) / 4 + wibble * rng.uniform(-wibble, wibble, near[0].shape)
        step, wibble = half, wibble / decay
    cloud -= cloud.min()
    return cloud[:224, :224] / cloud.max()


def cloud_of_fog(severity: int, index: int, side: int = 224) -> np.ndarray:
    """What fog adds to white, from 0 to 1."""
    fog, white = CORRUPTIONS["fog"], np.ones((side, side, 3))
    strength = fog.levels[severity - 1][0]
    found = fog.apply(white, draws(7, severity, index), fog.levels[severity - 1], side / 224)
    return (found[..., 0] * (1 + strength) - 1) / strength


def octaves(cloud: np.ndarray) -> np.ndarray:
    """A cloud's energy by octave of frequency: from 1, 2, 4, ... 64 waves a side on."""
    fade = np.hanning(len(cloud))
    energy = np.abs(np.fft.fft2((cloud - cloud.mean()) * fade[:, None] * fade)) ** 2
    waves = np.fft.fftfreq(len(cloud), 1 / len(cloud))
    size = np.hypot(waves[:, None], waves)
    return np.array([energy[(size >= 2**n) & (size < 2 ** (n + 1))].sum() for n in range(7)])


@pytest.mark.parametrize(("severity", "decay"), [(1, 2), (3, 1.7), (5, 1.4)])
def test_fog_has_the_published_energy_in_every_octave(severity: int, decay: float) -> None:
    rng = np.random.default_rng(severity)
    published = [published_cloud(decay, rng) for _ in range(24)]
    found = [cloud_of_fog(severity, index) for index in range(24)]
    energy, expected = (np.mean([octaves(cloud) for cloud in clouds], 0) for clouds in (found, published))
    assert energy == pytest.approx(expected, rel=0.4)  # the last has a millionth of the first
    assert np.mean(found) == pytest.approx(np.mean(published), rel=0.12)
    assert np.std(found) == pytest.approx(np.std(published), rel=0.12)


def test_fog_is_the_same_cloud_at_every_size() -> None:
    large = cloud_of_fog(3, 0).reshape(112, 2, 112, 2).mean((1, 3))
    assert np.abs(cloud_of_fog(3, 0, 112) - large).max() < 0.01


# ---- effects


def test_gaussian_noise_has_its_deviation() -> None:
    found = np.asarray(corrupt(gray(128), "gaussian_noise", 1, 0)) / 255
    assert found.std() == pytest.approx(0.08, rel=0.02)
    assert found.mean() == pytest.approx(128 / 255, abs=0.001)


@pytest.mark.parametrize("value", [40, 128])
def test_shot_noise_is_poissons(value: int) -> None:
    photons = 25
    found = np.asarray(corrupt(gray(value), "shot_noise", 2, 0)) / 255 * photons
    counts = np.bincount(found.round().astype(int).ravel(), minlength=photons)[:photons]
    expected = stats.poisson(photons * value / 255).pmf(np.arange(photons)) * found.size
    few = expected > 20  # white hides larger counts
    assert (np.abs(counts - expected)[few] < 5 * np.sqrt(expected[few])).all()


def test_black_has_no_photons() -> None:
    assert not np.asarray(corrupt(gray(0), "shot_noise", 5, 0)).any()


def test_impulse_noise_hits_its_share() -> None:
    found = np.asarray(corrupt(gray(128), "impulse_noise", 3, 0))
    assert (found == 0).mean() == pytest.approx(0.045, rel=0.05)
    assert (found == 255).mean() == pytest.approx(0.045, rel=0.05)
    assert set(np.unique(found)) == {0, 128, 255}


def test_brightness_is_hsvs_value() -> None:
    image = photo(8, 8)
    found = np.asarray(corrupt(image, "brightness", 2, 0))
    for before, after in zip(np.asarray(image).reshape(-1, 3) / 255, found.reshape(-1, 3), strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*before)
        expected = colorsys.hsv_to_rgb(hue, saturation, min(1, value + 0.2))
        assert after / 255 == pytest.approx(expected, abs=0.5 / 255 + 1e-9)
    assert (np.asarray(corrupt(gray(0, 4), "brightness", 1, 0)) == round(0.1 * 255)).all()


def test_contrast_shrinks_deviations_about_the_mean() -> None:
    image = photo()
    before, after = np.asarray(image) / 255, np.asarray(corrupt(image, "contrast", 1, 0)) / 255
    assert after.mean((0, 1)) == pytest.approx(before.mean((0, 1)), abs=0.001)
    assert after.std((0, 1)) == pytest.approx(0.4 * before.std((0, 1)), abs=0.002)


def test_elastic_moves_three_points_by_shares_of_244() -> None:
    """Without the bend: what is at three places of the image is then at those that were drawn."""
    unit = 64 / 224
    colors = np.stack([*places(64, 64), np.zeros((64, 64))], -1)
    found = CORRUPTIONS["elastic"].apply(colors, draws(8), (0, 0.7, 0.1), unit)
    before = np.array([[1, 1], [1, -1], [-1, -1]]) * 64 / 3 + 31.5
    after = before + (2 * draws(8).uniform(3, 2) - 1) * 0.1 * 244 * unit
    seen = [ndimage.map_coordinates(found[..., axis], after.T, order=1) for axis in range(2)]
    assert np.allclose(np.stack(seen, -1), before)


def test_elastic_bends_by_two_pixels() -> None:
    """Severity 5 has 0.12 / 0.01 times the deviation of uniform noise after a blur."""
    colors = np.stack([*places(112, 112), np.zeros((112, 112))], -1)
    found = [CORRUPTIONS["elastic"].apply(colors, draws(8, i), (0.12, 0.01, 0), 112 / 224) for i in range(4)]
    moved = (np.stack(found) - colors)[:, 10:-10, 10:-10, :2]
    assert moved.std() == pytest.approx(112 / 224 * 0.12 / 0.01 / np.sqrt(12 * np.pi), rel=0.05)


def test_pixelate_makes_squares() -> None:
    found = np.asarray(corrupt(photo(40, 40), "pixelate", 5, 0))
    assert (found.reshape(10, 4, 10, 4, 3) == found[::4, None, ::4, None]).all()
    columns = np.arange(224)[None, :, None] * np.ones((224, 1, 3))
    found = np.asarray(corrupt(Image.fromarray(columns.astype(np.uint8)), "pixelate", 3, 0))
    assert len(np.unique(found)) == 89  # 0.4 of 224 is 89.6, which the benchmark rounds down


def test_jpeg_is_pillows() -> None:
    image = photo()
    sizes = []
    for quality, severity in zip((25, 18, 15, 10, 7), SEVERITIES, strict=True):
        found = corrupt(image, "jpeg", severity, 0)
        sizes.append(change(image, "jpeg", severity))
        assert CORRUPTIONS["jpeg"].levels[severity - 1] == quality
        assert found.size == image.size
    assert sizes == sorted(sizes)


@pytest.mark.parametrize(
    "name",
    ["gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "zoom_blur", "brightness", "contrast"],
)
def test_a_higher_severity_changes_more(name: str) -> None:
    found = [change(photo(64, 64), name, severity) for severity in SEVERITIES]
    assert found == sorted(found)
    assert found[0] > 0.005


def test_blur_scales_with_the_image() -> None:
    """A point's disk in an image twice as large has twice the radius."""
    spread = []
    for side in (112, 224):
        pixels = np.zeros((side, side, 3), np.uint8)
        dot = side // 28
        pixels[side // 2 - dot : side // 2 + dot, side // 2 - dot : side // 2 + dot] = 255
        found = np.asarray(corrupt(Image.fromarray(pixels), "defocus_blur", 4, 0))[..., 0].astype(float)
        down, across = (place - (side - 1) / 2 for place in places(side, side))
        spread.append(np.sqrt((found * (down**2 + across**2)).sum() / found.sum()))
    assert spread[1] / spread[0] == pytest.approx(2, rel=0.05)


# ---- what they depend on


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_depend_on_seed_index_and_severity_alone(name: str) -> None:
    image = photo(24, 32)
    found = corrupt(image, name, 3, 5, seed=1)
    assert (found.mode, found.size) == ("RGB", image.size)
    assert found.tobytes() != image.tobytes()
    assert corrupt(image, name, 3, 5, seed=1).tobytes() == found.tobytes()
    others = [corrupt(image, name, 3, 6, seed=1), corrupt(image, name, 3, 5, seed=2)]
    assert all((other.tobytes() != found.tobytes()) == (name in RANDOM) for other in others)


@pytest.mark.parametrize("size", [(8, 8), (1, 3), (40, 25)])
def test_all_take_any_size(size: tuple[int, int]) -> None:
    image = photo(24, 32).resize(size)
    for name in CORRUPTIONS:
        for severity in (1, 5):
            assert corrupt(image, name, severity, 0).size == size
