"""The model in the box; by a small one in its place: loading, and every command that uses it where none is named."""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

import vitlab
from vitlab.analysis.class_map import class_map
from vitlab.data.folder import subfolders
from vitlab.data.transforms import eval_pixels
from vitlab.errors import UserError
from vitlab.plots.inside import overlay
from vitlab.training.first_weights import find_weights
from vitlab.weights import box
from vitlab.weights.lora_base import find_base, name_base

NAMES = ("acorn", "goose", "umbrella")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two photos in it and one in a folder."""
    (tmp_path / "here" / "photos").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    for seed, name in enumerate(("cat.jpg", "dog.png", "photos/cow.png")):
        coarse = np.random.default_rng(seed).integers(0, 256, (5, 6, 3), np.uint8)
        Image.fromarray(coarse).resize((90, 60), Image.Resampling.BICUBIC).save(tmp_path / "here" / name)
    return tmp_path / "here"


def plain_logits(folder: Path, images: Tensor) -> Tensor:
    """Those of the tensors in the file, without vitlab's reader."""
    model = vitlab.create("Ti/8", image_size=32, depth=2, width=32, heads=2, mlp=64, classes=3)
    model.load_state_dict({name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()})
    return model.eval()(images)


# ---- the package's own


def test_it_knows_what_is_on_the_photo() -> None:
    assert vitlab.predict(vitlab.load("box"), box.PHOTO).label == "espresso"


def test_its_card_is_about_its_file() -> None:
    file, card = box.PACKAGED / box.WEIGHTS, (box.PACKAGED / "README.md").read_text()
    assert hashlib.sha256(file.read_bytes()).hexdigest() in card
    assert vitlab.load("box").config.classes == card.split("## Classes")[1].count(",") + 1 == 200


# ---- loading


def test_it_has_the_logits_of_its_file(boxed: Path, caplog: pytest.LogCaptureFixture) -> None:
    images = torch.randn(2, 3, 32, 32)
    model = vitlab.load("box")
    assert torch.equal(model(images), plain_logits(boxed, images))
    assert model.labels == NAMES
    assert caplog.text == ""


def test_a_folder_of_that_name_is_another(boxed: Path, here: Path, caplog: pytest.LogCaptureFixture) -> None:
    vitlab.save(vitlab.create("Ti/8", image_size=8, depth=1, width=24, heads=2, mlp=48, classes=5), "box")
    assert vitlab.load("box").labels == NAMES
    assert "./box" in caplog.text
    for other in ("./box", Path("box")):
        assert vitlab.load(other).config.classes == 5


def test_a_copy_without_weights(no_box: None, here: Path, command: Command) -> None:
    with pytest.raises(UserError, match="no model in the box"):
        vitlab.load("box")
    for words in (["predict", "cat.jpg"], ["predict", "box", "cat.jpg"], ["serve", "--port", "0"], ["inspect", "box"]):
        code, out, err = command(*words)
        assert (code, out) == (1, ""), words
        assert err.startswith("error: this copy of vitlab has no model in the box"), words
        assert err.count("\n") == 1, words
    assert not (here / "looked").exists()


def test_low_rank_updates_name_it(boxed: Path, here: Path, tmp_path: Path) -> None:
    (here / "box").mkdir()
    adapter = name_base("box", rank=2)
    assert adapter.source == "box"
    assert find_base(adapter, tmp_path, "updates") == "box"
    with pytest.raises(UserError, match="sha256 differs"):
        find_base(dataclasses.replace(adapter, sha256="0" * 64), tmp_path, "updates")


# ---- predict


def test_a_photo_without_a_model(boxed: Path, here: Path, command: Command) -> None:
    code, out, err = command("predict", "cat.jpg", "--device", "cpu")
    assert code == 0
    note, look = err.splitlines()
    assert note.startswith("note: no model is named")
    assert note.endswith(str(boxed / "README.md"))
    assert look == "note: where it looked: looked/cat-looked.png"
    assert [entry.name for entry in subfolders(here)] == ["photos"]  # those pictures are no class of a data set
    best = int(plain_logits(boxed, vitlab.load(boxed).preprocess("cat.jpg")).argmax())
    assert out.splitlines()[1].split()[:2] == ["cat.jpg", NAMES[best]]


def test_the_picture_is_the_photo_and_the_map_of_its_class(boxed: Path, here: Path, command: Command) -> None:
    """As `vitlab inspect` draws it with matplotlib, up to the colors between those that are tabled."""
    assert command("predict", "cat.jpg", "--device", "cpu")[0] == 0
    picture = np.asarray(Image.open("looked/cat-looked.png").convert("RGB"))
    model = vitlab.load("box")
    image = model.preprocess("cat.jpg")
    best, other, _ = plain_logits(boxed, image)[0].argsort(descending=True).tolist()
    seen = eval_pixels(Image.open("cat.jpg").convert("RGB"), (256, 256), model.card.preprocess)
    pixels = seen.permute(1, 2, 0).numpy()
    assert np.array_equal(picture[:, :256], pixels)
    drawn = [255 * overlay(pixels / 255, class_map(model, image, label)[0].numpy()) for label in (best, other)]
    difference, another = (np.abs(picture[:, 256:] - one) for one in drawn)
    assert difference.max() < 14  # between two colors of the table
    assert difference.mean() < 2
    assert another.max() > 50


@pytest.mark.parametrize(
    ("words", "files", "pictures"),
    [
        ("cat.jpg dog.png", ["cat.jpg", "dog.png"], ["looked/cat-looked.png", "looked/dog-looked.png"]),
        ("photos", ["photos/cow.png"], []),
        ("*.png", ["dog.png"], []),
        ("box cat.jpg", ["cat.jpg"], []),
        ("box cat.jpg --look seen", ["cat.jpg"], ["seen/cat-looked.png"]),
        ("photos --look seen", ["photos/cow.png"], ["seen/cow-looked.png"]),
    ],
)
def test_which_word_is_the_model(
    boxed: Path, here: Path, command: Command, words: str, files: list[str], pictures: list[str]
) -> None:
    code, out, err = command("predict", *words.split(), "--device", "cpu", "--workers", "0")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == files
    assert ("no model is named" in err) == (not words.startswith("box"))
    assert sorted(map(str, Path().glob("*/*-looked.png"))) == pictures


def test_json_is_as_with_the_folder_named(boxed: Path, here: Path, command: Command) -> None:
    with_box = command("predict", "cat.jpg", "dog.png", "--json", "--device", "cpu")
    named = command("predict", str(boxed), "cat.jpg", "dog.png", "--json", "--device", "cpu")
    assert with_box[:2] == named[:2]
    assert [json.loads(line)["path"] for line in with_box[1].splitlines()] == ["cat.jpg", "dog.png"]
    assert not (here / "looked").exists()


@pytest.mark.parametrize("model", ["box", "RUN", "weights.npz"])
def test_a_model_without_images(boxed: Path, here: Path, command: Command, model: str) -> None:
    word = str(boxed) if model == "RUN" else model
    code, out, err = command("predict", word)
    assert (code, out) == (1, "")
    assert err == f"error: {word} is a model; name images after it: vitlab predict {word} photo.jpg\n"


# ---- fine-tuning


def test_fine_tuning_starts_from_it_without_a_network(
    boxed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    found = find_weights(None, torch.device("cpu"))
    assert found.name == "box"
    assert found.line.startswith("box: the small model of the package")
    (warning,) = found.warnings
    assert "cannot be reached" in warning
    assert "\n" not in warning
    assert found.model is not None
    own, file = found.model.state_dict(), load_file(boxed / "model.safetensors")
    assert all(torch.equal(own[name], file[name].float()) for name in file)
    assert find_weights("none", torch.device("cpu")).name is None


@pytest.mark.slow
def test_finetune_uses_it(boxed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "empty"))
    words = ["--minutes", "0.001", "--out", str(tmp_path / "run"), "device=cpu", "subset=0.1", "workers=0"]
    code, out, _ = command("finetune", "digits", *words)
    assert code == 0
    assert "weights  box: the small model of the package" in out
    run = vitlab.load(tmp_path / "run")
    assert run.card.provenance is not None
    assert run.card.provenance["source"] == "box"
    body = load_file(boxed / "model.safetensors")["embed.weight"].float()
    assert torch.equal(run.state_dict()["embed.weight"], body)
