"""int8 files of trained models: agreement with float, size, and errors where they do not agree."""

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from conftest import Command
from PIL import Image
from rich.console import Console

import vitlab
from vitlab.data.open import open_data
from vitlab.data.transforms import eval_image
from vitlab.errors import UserError
from vitlab.export import export, int8_file
from vitlab.export.int8_file import find_int8
from vitlab.models.vit import ViT
from vitlab.prediction import Classifier
from vitlab.training.loop import train
from vitlab.training.recipe import override
from vitlab.training.recipes import find

SHARED = Path(__file__).parents[1] / ".." / "shared"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("runs") / "digits"
    recipe = override(find("digits").recipe, ["steps=250"])
    result = train(recipe, out, console=Console(quiet=True))
    assert result.report["accuracy"] > 0.9
    return str(out)


def test_digits_agree_on_all_but_one_in_a_hundred(digits: str, tmp_path: Path) -> None:
    result = export(digits, tmp_path / "x.onnx", precision="int8", calibrate="digits", least=0.99)
    int8 = result.int8
    assert int8 is not None
    assert int8.images >= 1000
    assert int8.separate
    assert int8.agreement >= 0.99
    assert result.bytes < 0.5 * int8.float_bytes
    assert len(int8.floats) < int8.layers / 4
    assert f"{int8.agreement:.2%} of {int8.images} images" in "\n".join(result.lines())

    model, data = vitlab.load(digits), open_data("digits")  # and once more, over all 1,797
    images = torch.stack(
        [
            eval_image(part.image(i), (8, 8), model.card.preprocess)
            for part in (data.train, data.test)
            for i in range(len(part))
        ]
    )
    with torch.no_grad():
        expected = model(images).argmax(1).numpy()
    (got,) = onnxruntime.InferenceSession(str(tmp_path / "x.onnx")).run(None, {"images": images.numpy()})
    assert len(got) == 1797
    assert (got.argmax(1) == expected).mean() >= 0.99

    options = onnxruntime.SessionOptions()  # the runtime recognizes the layers, and computes them as integers
    options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "as_run.onnx"), 3
    onnxruntime.InferenceSession(str(tmp_path / "x.onnx"), options)
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "as_run.onnx").graph.node)
    assert kinds["QGemm"] == int8.layers - len(int8.floats)
    assert kinds["DequantizeLinear"] == 0


def test_a_file_that_does_not_agree_is_refused_with_its_agreement(digits: str, tmp_path: Path) -> None:
    model = vitlab.load(digits)
    assert model.head is not None
    with torch.no_grad():  # pairs of classes with nearly the same logits
        model.head.weight[1::2] = model.head.weight[::2] + 1e-5 * torch.randn_like(model.head.weight[::2])
        model.head.bias[1::2] = model.head.bias[::2]
    vitlab.save(model, tmp_path / "run")
    with pytest.raises(
        UserError, match=r"nothing is written: int8 .* on \d\d\.\d\d% of 1024 images of digits, below 99.90%"
    ):
        export(tmp_path / "run", tmp_path / "x.onnx", precision="int8", calibrate="digits", least=0.999)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_is_calibrated_once_and_predicts_in_int8(digits: str, tmp_path: Path, command: Command) -> None:
    """The first command makes the file, the second uses it, and after further training it is refused."""
    run = tmp_path / "run"
    vitlab.save(vitlab.load(digits), run)
    words = ["evaluate", str(run), "digits", "--precision", "int8", "--device", "cpu", "--keep", str(tmp_path / "keep")]
    code, _, err = command(*words, "--calibrate", "digits")
    assert code == 0, err
    made = find_int8(str(run), vitlab.load(run), None, torch.device("cpu"))
    assert made.images >= 1000
    assert made.separate
    assert made.agreement >= 0.98
    model, test = vitlab.load(run), open_data("digits").test
    classifiers = [Classifier(model, "cpu", scales=scales) for scales in (None, made)]
    pixels = torch.stack([classifiers[0].pixels(test.image(i)) for i in range(len(test))])
    exact, rounded = (classifier.logits(pixels) for classifier in classifiers)
    assert (exact.argmax(1) == rounded.argmax(1)).double().mean() >= 0.98
    assert 1e-4 < (exact - rounded).abs().max() < 0.2 * exact.abs().max()  # not the same, and near

    before = (run / "int8.onnx").read_bytes()
    assert command(*words)[0] == 0
    assert (run / "int8.onnx").read_bytes() == before
    with torch.no_grad():
        model.head.bias.add_(0.1)  # type: ignore[union-attr]
    (run / "int8.onnx").rename(tmp_path / "int8.onnx")
    vitlab.save(model, tmp_path / "later")
    (tmp_path / "int8.onnx").rename(tmp_path / "later" / "int8.onnx")
    code, _, err = command("evaluate", str(tmp_path / "later"), *words[2:])
    assert (code, err.count("\n")) == (1, 1)
    assert "int8.onnx is of other weights; calibrate again with --calibrate IMAGES" in err


def test_a_run_that_does_not_agree_is_refused(digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_file, "LEAST", 0.9999)
    model = vitlab.load(digits)
    assert isinstance(model, ViT)
    assert model.head is not None
    with torch.no_grad():  # pairs of classes with nearly the same logits
        model.head.weight[1::2] = model.head.weight[::2] + 1e-5 * torch.randn_like(model.head.weight[::2])
        model.head.bias[1::2] = model.head.bias[::2]
    with pytest.raises(UserError, match=r"int8 is refused: .* on \d\d\.\d\d% of 1024 images of digits, below 100%$"):
        find_int8(str(tmp_path), model, "digits", torch.device("cpu"))
    assert list(tmp_path.iterdir()) == []


def test_a_resnet_and_a_handful_of_images_are_refused(digits: str, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for i in range(3):
        Image.new("RGB", (8, 8), (80 * i, 0, 0)).save(photos / f"{i}.png")
    with pytest.raises(UserError, match="has 3 images; int8 is calibrated on at least 16"):
        export(digits, tmp_path / "x.onnx", precision="int8", calibrate=str(photos))
    vitlab.save(vitlab.create("R50x1", classes=3, image_size=32), tmp_path / "resnet")
    with pytest.raises(UserError, match="this model has none; use --fp16"):
        export(tmp_path / "resnet", tmp_path / "x.onnx", precision="int8", calibrate="digits")
    assert not (tmp_path / "x.onnx").exists()


@pytest.mark.skipif(not (SHARED / "weights").exists(), reason="the real weights and photos are outside the repository")
@pytest.mark.long
def test_the_real_ti16_agrees_on_photos_at_two_sizes(tmp_path: Path) -> None:
    weights, photos = SHARED / "weights" / "vit_tiny_patch16_224.safetensors", SHARED / "data" / "pets"
    result = export(weights, tmp_path / "x.onnx", dynamic_size=True, precision="int8", calibrate=str(photos))
    assert [(entry.size, entry.images) for entry in result.comparisons] == [((224, 224), 64), ((336, 240), 64)]
    assert max(entry.difference for entry in result.comparisons) <= 1e-4
    int8 = result.int8
    assert int8 is not None
    assert int8.images >= 1000
    assert int8.agreement >= 0.95
    assert "blocks.7.mlp.down" in int8.floats  # one of its channels is forty times as large as the others
    assert result.bytes < 0.6 * int8.float_bytes
    assert int8.seconds[1] < int8.seconds[0]


@pytest.mark.skipif(not (SHARED / "data").exists(), reason="the photos are outside the repository")
def test_the_box_agrees_on_photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitlab.export.int8.CALIBRATION", 32)  # a minute and a half in place of four
    monkeypatch.setattr("vitlab.export.int8.MEASURED", 256)
    photos = str(SHARED / "data" / "pets")
    result = export("box", tmp_path / "x.onnx", precision="int8", calibrate=photos, least=0.94)
    int8 = result.int8
    assert int8 is not None
    assert int8.images == 256
    assert int8.agreement >= 0.94
    assert len(int8.floats) <= int8.layers / 8
    assert int8.seconds[1] < int8.seconds[0]
