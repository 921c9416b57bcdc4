"""Photos framed by other libraries from the folders that we write: transformers' processors and timm's transform.

transformers rounds the corner of a center crop down where torchvision, timm and we round to even, so that its crop of a
side with 4k + 3 pixels too many begins one pixel earlier: nothing in its settings changes that.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from peers import randomize
from photos import WEIGHTS, pets, photos
from PIL import Image
from transformers import AutoImageProcessor, ViTForImageClassification, pipeline
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

import vitlab
from vitlab.data.transforms import eval_image
from vitlab.models.config import Preprocess, ViTConfig
from vitlab.models.variants import build
from vitlab.weights import convert, load, save
from vitlab.weights.formats.base import RawCheckpoint
from vitlab.weights.formats.huggingface_processor import describe_preprocess, read_preprocess
from vitlab.weights.tensors import TensorFile

VIT = ViTConfig((64, 64), patch=16, depth=1, width=64, mlp=80, heads=1, classes=5)
CUBIC = Preprocess((0.1, 0.25, 0.4), (0.3, 0.2, 0.6), "bicubic", "crop", 0.84)  # 76 pixels, 12 more than are kept
SIZES = [*range(32, 513, 16), *range(42, 513, 14)]


def read_back(processor: Any) -> Preprocess | None:
    return read_preprocess(RawCheckpoint("x", TensorFile(Path("x"), {}, lambda name: torch.ones(1)), {}, processor))


@pytest.mark.slow
def test_the_scaled_side_survives() -> None:
    """Every usual size with every crop: photos are scaled to an integer, the same here and there."""
    for side in SIZES:
        for crop in (0.875, *(share / 100 for share in range(70, 101))):
            p = Preprocess(interpolation="bicubic", crop=crop)
            written = describe_preprocess(ViTConfig((side, side), 1, 1, 1, 1, 1), p)
            assert written["size"]["shortest_edge"] == int(side / crop)  # timm's, and what evaluation scales to
            assert read_back(written) == p
            del written["crop_pct"]  # a folder of others
            back = read_back(written)
            assert back is not None
            assert int(side / back.crop) == int(side / crop)


@pytest.mark.parametrize(
    ("side", "edge", "crop"), [(224, 256, 0.875), (224, 248, 0.9), (224, 224, 1.0), (384, 426, 0.9)]
)
def test_the_usual_shares_are_found(side: int, edge: int, crop: float) -> None:
    back = read_back({"size": {"shortest_edge": edge}, "crop_size": {"height": side, "width": side}})
    assert back is not None
    assert back.crop == crop


def half_pixel(image: Image.Image, side: int, edge: int) -> bool:
    """Whether the centers of the two conventions differ."""
    short, long = sorted(image.size)
    return 3 in ((edge - side) % 4, (int(edge * long / short) - side) % 4)


@pytest.fixture
def hub(tmp_path: Path) -> Path:
    save(randomize(build(VIT)), tmp_path / "ours", preprocess=CUBIC, labels=list("abcde"))
    convert(tmp_path / "ours", tmp_path / "hub", "huggingface")
    return tmp_path / "hub"


def test_transformers_pipeline_agrees_with_ours(hub: Path) -> None:
    ours = vitlab.Classifier(hub.parent / "ours", device="cpu")
    processor = BitImageProcessorPil.from_pretrained(hub)
    model = ViTForImageClassification.from_pretrained(hub)
    theirs: Any = pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    images = [image for image in photos(30) if not half_pixel(image, 64, 76)]
    assert len(images) > 15
    for image in images:
        answers = {answer["label"]: answer["score"] for answer in theirs(image)}
        found = ours.predict(image)
        assert max(answers, key=lambda label: answers[label]) == found.label
        assert max(abs(answers[label] - value) for label, value in found.top) <= 1e-5


@pytest.mark.slow
def test_real_weights_on_real_photos(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The numbers in docs/weights.md: largest differences of probability, where the corners are the same and not."""
    images = pets(40)
    convert(WEIGHTS, tmp_path / "hub", "huggingface")
    convert(WEIGHTS, tmp_path / "timm", "timm")
    ours = vitlab.Classifier(WEIGHTS, device="cpu")
    expected = ours.probabilities(torch.stack([ours.pixels(image) for image in images]))
    shifted = torch.tensor([half_pixel(image, 224, 248) for image in images])
    auto: Any = AutoImageProcessor
    makers: dict[str, Any] = {
        "Pillow": BitImageProcessorPil.from_pretrained(tmp_path / "hub"),
        "torch": auto.from_pretrained(tmp_path / "hub"),
    }
    pixels = {
        name: torch.cat([make(image, return_tensors="pt")["pixel_values"] for image in images])
        for name, make in makers.items()
    }
    pixels["timm"] = torch.stack([timm_transform(tmp_path / "timm")(image) for image in images])
    for name, limit in (("Pillow", 1e-5), ("torch", 0.01), ("timm", 1e-5)):
        with torch.inference_mode():
            found = torch.cat([ours.model(x).softmax(-1) for x in pixels[name].split(10)])
        difference = (found - expected).abs().amax(1)
        same = torch.ones_like(shifted) if name == "timm" else ~shifted
        with capsys.disabled():
            print(f"\n{name}: {difference[same].max():.2g} on {int(same.sum())}, {difference.max():.2g} on all")
        assert difference[same].max() <= limit, name
        assert torch.equal(found.argmax(1)[same], expected.argmax(1)[same]), name


def test_a_half_pixel_is_the_only_difference_in_framing(hub: Path) -> None:
    processor = BitImageProcessorPil.from_pretrained(hub)
    differs = 0
    for image in photos(30):
        found = processor(image, return_tensors="pt")["pixel_values"][0]
        expected = eval_image(image, (64, 64), CUBIC)
        agrees = bool((found - expected).abs().max() < 1e-5)
        assert agrees != half_pixel(image, 64, 76)
        differs += not agrees
    assert 0 < differs < 15


def test_stretched_photos_agree_on_any_shape(tmp_path: Path) -> None:
    stretch = Preprocess(interpolation="bicubic", fit="stretch")
    wide = ViTConfig((32, 64), patch=16, depth=1, width=64, mlp=80, heads=1, classes=5)
    save(build(wide), tmp_path / "ours", preprocess=stretch)
    convert(tmp_path / "ours", tmp_path / "hub", "huggingface")
    convert(tmp_path / "ours", tmp_path / "timm", "timm")
    processor = ViTImageProcessorPil.from_pretrained(tmp_path / "hub")
    transform = timm_transform(tmp_path / "timm")
    for image in photos():
        expected = eval_image(image, (32, 64), stretch)
        assert (processor(image, return_tensors="pt")["pixel_values"][0] - expected).abs().max() < 1e-5
        assert (transform(image) - expected).abs().max() < 1e-5


def test_a_crop_that_is_not_square_is_not_padded(tmp_path: Path) -> None:
    """No processor of transformers frames it, so none is written; ours is beside the weights."""
    wide = ViTConfig((32, 64), patch=16, depth=1, width=64, mlp=80, heads=1, classes=5)
    save(randomize(build(wide)), tmp_path / "ours", preprocess=CUBIC, labels=list("abcde"))
    convert(tmp_path / "ours", tmp_path / "hub", "huggingface")
    theirs: Any = ViTForImageClassification.from_pretrained(tmp_path / "hub")
    assert theirs.config.id2label[0] == "a"
    auto: Any = AutoImageProcessor
    with pytest.raises(OSError, match="preprocessor"):
        auto.from_pretrained(tmp_path / "hub")
    card = load(tmp_path / "hub").card
    assert (card.preprocess, card.labels) == (CUBIC, tuple("abcde"))


def timm_transform(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    config["input_size"] = tuple(config["input_size"])
    data: Any = timm.data
    return data.create_transform(**data.resolve_data_config({}, pretrained_cfg=config))


def test_timms_transform_agrees_with_ours(tmp_path: Path) -> None:
    save(randomize(build(VIT)), tmp_path / "ours", preprocess=CUBIC, labels=list("abcde"))
    convert(tmp_path / "ours", tmp_path / "timm", "timm")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    transform, ours = timm_transform(tmp_path / "timm"), vitlab.Classifier(tmp_path / "ours", device="cpu")
    with torch.no_grad():
        found = theirs(torch.stack([transform(image) for image in photos(30)])).softmax(-1)
    expected = ours.probabilities(torch.stack([ours.pixels(image) for image in photos(30)]))
    assert torch.equal(found.argmax(1), expected.argmax(1))
    assert (found - expected).abs().max() <= 1e-5


def test_where_timm_frames_otherwise_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """For an input that is not square timm scales with another filter and rounds the longer side."""
    wide = ViTConfig((32, 64), patch=16, depth=1, width=64, mlp=80, heads=1, classes=5)
    save(build(wide), tmp_path / "ours", preprocess=CUBIC)
    with caplog.at_level("INFO", "vitlab"):
        convert(tmp_path / "ours", tmp_path / "timm", "timm")
    assert "timm's own transform" in caplog.text
    transform = timm_transform(tmp_path / "timm")
    assert any((transform(image) - eval_image(image, (32, 64), CUBIC)).abs().max() > 0.01 for image in photos())
