"""Guests against torchvision itself: logits to the bit, preprocessing, and what is refused."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from safetensors.torch import save_file

from vitlab.data.imagenet import short_names
from vitlab.data.source import ArraySource
from vitlab.data.transforms import eval_image, eval_pixels
from vitlab.errors import UserError
from vitlab.evaluation.extract import extract_values
from vitlab.weights import load
from vitlab.weights.guests import choose_weights, guest_names, open_guest, open_measured, to_preprocess

Command = Callable[..., tuple[int, str, str]]
CLASSES = 3


def theirs(name: str) -> torch.nn.Module:
    """torchvision's model with statistics that are not those of a fresh one, in eval mode."""
    torch.manual_seed(0)
    model: torch.nn.Module = torchvision.models.get_model(name, num_classes=CLASSES)
    for module in model.modules():
        if (
            isinstance(module, torch.nn.BatchNorm2d)
            and module.running_mean is not None
            and module.running_var is not None
        ):
            torch.nn.init.uniform_(module.running_mean, -0.1, 0.1)
            torch.nn.init.uniform_(module.running_var, 0.8, 1.2)
    return model.eval()


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    model, path = theirs("resnet18"), tmp_path_factory.mktemp("guests") / "resnet18.pth"
    torch.save(model.state_dict(), path)
    return model, path


def check_same(model: torch.nn.Module, spec: str, size: int = 64) -> None:
    guest, images = open_guest(spec), torch.rand(2, 3, size, size)
    with torch.no_grad():
        expected, found = model(images), guest(images)
        assert torch.equal(found, expected)
        assert torch.equal(guest.head(guest.features(images)), expected)
    assert guest.features(images).shape == (2, guest.config.features)


@pytest.mark.slow
def test_a_resnet_is_torchvisions_to_the_bit(resnet: tuple[torch.nn.Module, Path]) -> None:
    check_same(resnet[0], f"torchvision:resnet18:{resnet[1]}")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "efficientnet_b0", "efficientnet_v2_s", "swin_t", "swin_v2_t"])
def test_every_family_is_torchvisions_to_the_bit(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    tensors = {key: x.contiguous() for key, x in model.state_dict().items() if x.is_floating_point()}
    save_file(tensors, tmp_path / "weights.safetensors")
    check_same(model, f"torchvision:{name}:{tmp_path / 'weights.safetensors'}")
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    check_same(model, f"torchvision:{name}:{tmp_path / 'weights.pth'}")


def every_preset() -> list[Any]:
    return [weights for name in guest_names() for weights in torchvision.models.get_model_weights(name)]


@pytest.mark.parametrize("size", [(500, 375), (301, 640), (64, 64)])
def test_preprocessing_is_torchvisions(size: tuple[int, int]) -> None:
    """For each kind of framing there is: the same pixels, and the same normalized values up to rounding."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8))
    presets = {str(weights.transforms()): weights.transforms() for weights in every_preset()}
    assert len(presets) > 10
    for frame in [frame for frame in presets.values() if frame.crop_size[0] <= 256]:
        ours = to_preprocess(frame)
        side = frame.crop_size[0]
        scaled = torchvision.transforms.functional.resize(image, frame.resize_size, frame.interpolation)
        pixels = torchvision.transforms.functional.pil_to_tensor(
            torchvision.transforms.functional.center_crop(scaled, frame.crop_size)
        )
        assert torch.equal(eval_pixels(image, (side, side), ours), pixels), frame
        assert torch.allclose(eval_image(image, (side, side), ours), frame(image), atol=1e-6, rtol=0), frame


def test_every_preset_scales_to_torchvisions_size() -> None:
    """Also of the large ones, whose pictures would take long."""
    for weights in every_preset():
        frame = weights.transforms()
        ours = to_preprocess(frame)
        assert int(frame.crop_size[0] / ours.crop) == frame.resize_size[0], weights
        assert (ours.mean, ours.std) == (tuple(frame.mean), tuple(frame.std))


def test_files_are_known_by_digest_and_name() -> None:
    old, new = torchvision.models.ResNet50_Weights
    assert choose_weights("resnet50", "", "w.pth", "0676ba61" + 56 * "0") == (old, True)
    assert choose_weights("resnet50", "", "resnet50-0676ba61.safetensors", 64 * "0") == (old, True)
    assert choose_weights("resnet50", "", "w.pth", 64 * "0") == (new, False)
    assert choose_weights("resnet50", "IMAGENET1K_V1", "w.pth", 64 * "0") == (old, True)
    with pytest.raises(UserError, match="no weights 'V3' of resnet50; it has IMAGENET1K_V1 or IMAGENET1K_V2"):
        choose_weights("resnet50", "V3", "w.pth", 64 * "0")


@pytest.mark.slow
def test_classes_have_names_where_the_file_is_known(tmp_path: Path) -> None:
    state = torchvision.models.resnet18().state_dict()
    torch.save(state, tmp_path / "mine.pth")
    assert open_guest(f"torchvision:resnet18:{tmp_path / 'mine.pth'}").card.labels is None
    guest = open_guest(f"torchvision:resnet18.IMAGENET1K_V1:{tmp_path / 'mine.pth'}")
    assert guest.card.labels == short_names()
    categories = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"]
    same = [ours == theirs for ours, theirs in zip(short_names(), categories, strict=True)]
    assert sum(same) >= 995  # a few have other names for the same class


@pytest.mark.slow
def test_drawing_elsewhere_is_not_changed(resnet: tuple[torch.nn.Module, Path]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    open_guest(f"torchvision:resnet18:{resnet[1]}")
    assert torch.equal(torch.rand(3), expected)


# ---- refused


def test_what_is_no_guest(resnet: tuple[torch.nn.Module, Path]) -> None:
    path = resnet[1]
    for spec, message in {
        "torchvision:resnet18": "names no weights; write torchvision:resnet18:FILE",
        "torchvision:resnet18:nowhere.pth": "there is no file nowhere.pth; write torchvision:resnet18:FILE",
        f"torchvision:vgg11:{path}": "there is no guest 'vgg11'",
        f"torchvision:swin_t:{path}": "has no matrix 'head.weight', so it is not torchvision's swin_t",
    }.items():
        with pytest.raises(UserError, match=message.replace("(", "\\(")):
            open_measured(spec)


@pytest.mark.slow
def test_files_of_other_models(resnet: tuple[torch.nn.Module, Path], tmp_path: Path) -> None:
    state = dict(resnet[0].state_dict())
    torch.save(state | {"more.weight": torch.zeros(1)}, tmp_path / "more.pth")
    with pytest.raises(UserError, match=r"is not torchvision's resnet18, which has no 'more.weight'"):
        open_guest(f"torchvision:resnet18:{tmp_path / 'more.pth'}")
    torch.save({k: x for k, x in state.items() if k != "fc.bias"}, tmp_path / "less.pth")
    with pytest.raises(UserError, match=r"is not torchvision's resnet18: it lacks 'fc.bias'"):
        open_guest(f"torchvision:resnet18:{tmp_path / 'less.pth'}")
    torch.save(state | {"conv1.weight": torch.zeros(64, 3, 3, 3)}, tmp_path / "other.pth")
    with pytest.raises(UserError, match=r"'conv1.weight' in .* has the shape \(64, 3, 3, 3\)"):
        open_guest(f"torchvision:resnet18:{tmp_path / 'other.pth'}")


class Runs:
    """Would write a file when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    (tmp_path / "bad.pth").write_bytes(pickle.dumps({"fc.weight": Runs(tmp_path / "ran")}))
    with pytest.raises(UserError):
        open_guest(f"torchvision:resnet18:{tmp_path / 'bad.pth'}")
    assert not (tmp_path / "ran").exists()


def test_guests_are_not_loaded_as_models(resnet: tuple[torch.nn.Module, Path]) -> None:
    with pytest.raises(UserError, match="is a guest, and this needs a model of vitlab's own; evaluate"):
        load(f"torchvision:resnet18:{resnet[1]}")


@pytest.mark.slow
def test_verbs_that_need_a_model_of_ours_refuse(
    resnet: tuple[torch.nn.Module, Path], tmp_path: Path, command: Command
) -> None:
    spec = f"torchvision:resnet18:{resnet[1]}"
    Image.new("RGB", (32, 32)).save(tmp_path / "photo.jpg")
    for words in (
        ["train", "digits", f"weights={spec}", "--out", str(tmp_path / "run")],
        ["export", spec, str(tmp_path / "x.onnx")],
        ["inspect", spec, str(tmp_path / "photo.jpg")],
        ["predict", spec, str(tmp_path / "photo.jpg")],
        ["convert", spec, str(tmp_path / "x.npz"), "--to", "google"],
        ["transfer", spec, "--quick", "--out", str(tmp_path / "transfer")],
    ):
        code, _, err = command(*words)
        assert (code, err.count("\n")) == (1, 1), words
        assert "is a guest, and this needs a model of vitlab's own" in err, words


# ---- measured


def test_extraction_is_torchvisions_own(resnet: tuple[torch.nn.Module, Path]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 40, 30, 3), np.uint8)
    source = ArraySource("image", pixels, np.zeros(3, np.int64), ("a",))
    guest = open_guest(f"torchvision:resnet18:{resnet[1]}")
    found = extract_values(guest, source, what="logits", device="cpu", workers=0).values
    frame = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.transforms()
    with torch.no_grad():
        expected = resnet[0](torch.stack([frame(Image.fromarray(each)) for each in pixels])).numpy()
    assert np.allclose(found, expected, atol=1e-4)


@pytest.mark.slow
def test_the_verbs_label_guests(resnet: tuple[torch.nn.Module, Path], tmp_path: Path, command: Command) -> None:
    spec, photos = f"torchvision:resnet18:{resnet[1]}", tmp_path / "photos"
    for i, name in enumerate("abc"):
        (photos / name).mkdir(parents=True)
        for j in range(6):
            pixels = np.random.default_rng(10 * i + j).integers(0, 80 + 80 * i, (40, 30, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(photos / name / f"{j}.png")
    (tmp_path / "names.txt").write_text("a\nb\nc\n")
    for words in (
        ["evaluate", spec, str(photos), "--split", "all", "--labels", str(tmp_path / "names.txt")],
        ["fewshot", spec, str(photos), "--shots", "1", "--json", str(tmp_path / "fewshot.json")],
        ["probe", spec, str(photos), "--k", "3"],
        ["embed", spec, str(photos), str(tmp_path / "features.parquet")],
    ):
        code, out, err = command(*words, "--device", "cpu", "--workers", "0")
        assert code == 0, err
        assert "guest: torchvision's resnet18, not a model of vitlab" in out, words
    assert "not a model of vitlab" in (tmp_path / "fewshot.json").read_text()
    words = ["search", spec, str(photos / "a" / "0.png"), "--in", str(tmp_path / "features.parquet")]
    assert command(*words, "--out", str(tmp_path / "similar.csv"))[0] == 0
    assert str(photos / "a" / "0.png") in (tmp_path / "similar.csv").read_text().splitlines()[1]  # itself first
