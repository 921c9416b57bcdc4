"""Images as Python programs have them: each kind of one picture gives the same input; what is unclear is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image

import vitlab
from vitlab.data.python_images import to_image
from vitlab.errors import UserError
from vitlab.models.card import Card
from vitlab.models.config import Preprocess
from vitlab.models.variants import Model

SIZE = (16, 24)
HOW = Preprocess((0.4, 0.5, 0.6), (0.2, 0.3, 0.25), "bilinear", "crop", 1.0)


@pytest.fixture(scope="module")
def model() -> Model:
    model = vitlab.create("Ti/8", image_size=SIZE, classes=3, depth=1, width=24, mlp=32, heads=2)
    model.card = Card(HOW)
    return model


@pytest.fixture
def pixels() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)


def expected(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """The input of a picture of exactly the model's size, by its definition, (3, h, w)."""
    return ((pixels / 255 - np.array(HOW.mean)) / np.array(HOW.std)).transpose(2, 0, 1)


def test_every_kind_of_one_picture_is_the_same_input(model: Any, pixels: NDArray[np.uint8], tmp_path: Path) -> None:
    Image.fromarray(pixels).save(tmp_path / "cat.png")
    tensor = torch.from_numpy(pixels).permute(2, 0, 1)
    kinds: list[object] = [
        str(tmp_path / "cat.png"),
        tmp_path / "cat.png",
        Image.open(tmp_path / "cat.png"),
        pixels,
        pixels / 255,
        (pixels / 255).astype(np.float32),
        pixels[:, ::-1][:, ::-1],  # views of other strides
        tensor,
        tensor / 255,
        (tensor / 255).double().requires_grad_(),
        (tensor / 255).permute(0, 2, 1).contiguous().permute(0, 2, 1),
    ]
    for kind in kinds:
        made = model.preprocess(kind)
        assert made.shape == (1, 3, *SIZE)
        assert made.dtype == torch.float32
        np.testing.assert_allclose(made[0].numpy(), expected(pixels), atol=1e-6)
    both = model.preprocess(kinds)
    np.testing.assert_array_equal(both.numpy(), np.repeat(model.preprocess(pixels).numpy(), len(kinds), 0))
    assert torch.equal(model.preprocess(np.stack([pixels, pixels])), both[:2])
    assert torch.equal(model.preprocess(torch.stack([tensor, tensor])), both[:2])
    assert model.double().preprocess(pixels).dtype == torch.float64
    model.float()


def test_every_byte_survives_as_a_float() -> None:
    ramp = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for kind in (np.float32, np.float64):
        np.testing.assert_array_equal(np.asarray(to_image((ramp / 255).astype(kind)))[..., 0], ramp)
    np.testing.assert_array_equal(np.asarray(to_image(torch.from_numpy(ramp) / 255))[..., 1], ramp)


def test_gray_and_transparent_pictures() -> None:
    gray = np.random.default_rng(1).integers(0, 256, (5, 7), np.uint8)
    for kind in (gray, gray[:, :, None], torch.from_numpy(gray), torch.from_numpy(gray)[None]):
        np.testing.assert_array_equal(np.asarray(to_image(kind)), np.repeat(gray[:, :, None], 3, 2))
    color, alpha = (np.random.default_rng(i).integers(0, 256, (6, 7, c), np.uint8) for i, c in ((2, 3), (3, 1)))
    over_white = color * (alpha / 255) + 255 * (1 - alpha / 255)
    clear = np.concatenate([color, alpha], 2)
    for image in (clear, torch.from_numpy(clear).permute(2, 0, 1), Image.fromarray(clear)):
        np.testing.assert_allclose(np.asarray(to_image(image)), over_white, atol=1)


def test_pil_images_are_turned_upright(pixels: NDArray[np.uint8]) -> None:
    turned = Image.fromarray(pixels).transpose(Image.Transpose.ROTATE_90)
    turned.getexif()[0x0112] = 6  # to be shown turned right
    np.testing.assert_array_equal(np.asarray(to_image(turned)), pixels)


def array(*shape: int, dtype: Any = np.uint8) -> NDArray[Any]:
    return np.ones(shape, dtype)


UNCLEAR: list[tuple[object, str]] = [
    (array(3, 8, 9), r"an array of shape \(3, 8, 9\).*transpose\(1, 2, 0\)"),
    (torch.ones(8, 9, 3), r"a tensor of shape \(8, 9, 3\).*permute\(2, 0, 1\)"),
    (array(3, 8, 3), "may be the first or the last axis"),
    (torch.ones(3, 8, 4), "may be the first or the last axis"),
    (array(8, 9, 5), "1, 3 or 4 channels"),
    (array(8), r"shape \(8,\)"),
    (np.array(3, np.uint8), r"shape \(\)"),
    (torch.tensor(3.0), r"shape \(\)"),
    (array(0, 9, 3), r"shape \(0, 9, 3\)"),
    (array(8, 9, 3, dtype=np.float32) * 200, "from 200 to 200, and floats are from 0 to 1; divide by 255"),
    (torch.full((3, 8, 9), -1.5), "from -1.5 to -1.5.*undo its normalization"),
    (array(8, 9, 3) * np.float32("nan"), "nan"),
    (array(8, 9, 3, dtype=np.int64), "type int64"),
    (torch.ones(3, 8, 9, dtype=torch.bool), "type bool"),
    (b"\x89PNG", "type bytes is not an image; give a path"),
    ({"image": 1}, "type dict is not an image"),
    (7, "type int is not an image"),
    (None, "type NoneType is not an image"),
    ([array(8, 9, 3), "nowhere.jpg"], "nowhere.jpg cannot be read: No such file"),
    ([array(8, 9, 3), 7], "image 1: an object of type int is not an image"),
    ([], "no image in the list"),
]


@pytest.mark.parametrize(("value", "message"), UNCLEAR)
def test_what_is_unclear_is_refused(model: Any, value: object, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        model.preprocess(value)
    assert "\n" not in str(caught.value)
