"""ImageNet's class names: those of torchvision and timm, for weights that are ImageNet's by format, tag or id alone."""

import collections
import csv
import importlib.resources
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision.models import ViT_B_16_Weights

import vitlab
from vitlab.data import imagenet
from vitlab.prediction import Classifier
from vitlab.weights import convert, load, save

SHARED = Path(os.environ.get("VITLAB_SHARED", Path(__file__).parents[3] / "shared"))
WEIGHTS = SHARED / "weights" / "vit_tiny_patch16_224.safetensors"
TORCHVISION = tuple(ViT_B_16_Weights.IMAGENET1K_V1.meta["categories"])


def test_short_names_are_torchvisions() -> None:
    assert imagenet.short_names() == TORCHVISION
    assert len(set(imagenet.short_names())) == 1000
    assert imagenet.short_names()[985] == "daisy"


def test_a_model_with_short_names_is_in_imagenets_order() -> None:
    numbers = imagenet.class_numbers(imagenet.short_names())
    assert numbers is not None
    assert numbers.tolist() == list(range(1000))


def test_names_of_21k_are_timms() -> None:
    """In the order of the authors' weights; a name of several classes is told apart by its synset."""
    info = importlib.resources.files("timm.data") / "_info"
    synsets = (info / "imagenet21k_goog_synsets.txt").read_text().split()
    lemmas = dict(csv.reader((info / "imagenet_synset_to_lemma.txt").read_text().splitlines(), delimiter="\t"))
    names = imagenet.names_21k()
    assert len(names) == len(synsets) == len(set(names)) == imagenet.CLASSES_21K
    plain = [lemmas[synset].split(",")[0] for synset in synsets]
    times = collections.Counter(plain)
    for name, first, synset in zip(names, plain, synsets, strict=True):
        assert name == (first if times[first] == 1 else f"{first} ({synset})")


# ---- the rule


def tiny(classes: int, gelu: str = "exact") -> Any:
    return vitlab.create("Ti/16", classes=classes, image_size=32, depth=1, width=8, mlp=8, heads=2, gelu=gelu)


def write(folder: Path, name: str, classes: int = 1000, config: dict[str, Any] | None = None) -> Path:
    """Weights as others publish them: without the JSON of vitlab's, and with a config.json if one is given."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    kinds = {".npz": "google", ".pth": "torchvision"}
    save(tiny(classes, "tanh" if path.suffix == ".npz" else "exact"), folder / "run")
    convert(folder / "run", path, to=kinds.get(path.suffix, "timm"))
    path.with_name(f"{path.name}.vitlab.json").unlink()
    if config is not None:
        (path.parent / "config.json").write_text(json.dumps(config))
    return path


def labels(path: Path) -> Any:
    return load(path, heads=2).card.labels


ARCH = {"architecture": "vit_tiny_patch16_224", "num_classes": 1000}
NAMED: dict[str, tuple[str, dict[str, Any] | None]] = {
    "an author's file": ("B_16.npz", None),
    "timm's tag": ("model.safetensors", {**ARCH, "pretrained_cfg": {"tag": "augreg_in21k_ft_in1k"}}),
    "timm's tag at the top": ("model.safetensors", {**ARCH, "tag": "fb_in1k"}),
    "timm's old config": ("model.safetensors", {"arch": "vit_tiny_patch16_224", "num_classes": 1000}),
    "timm's file name": ("vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors", None),
    "DeiT III's file name": ("deit_3_small_224_1k.safetensors", None),
    "words with a hyphen": ("vit-tiny-imagenet-1k.safetensors", None),
    "torchvision's file": ("vit_b_16-c867db91.pth", None),
}
UNNAMED: dict[str, tuple[str, dict[str, Any] | None]] = {
    "a bare file": ("model.safetensors", None),
    "a file of one's own": ("vit_tiny_patch16_224.safetensors", None),
    "another tag": ("model.safetensors", {**ARCH, "pretrained_cfg": {"tag": "augreg_in21k_ft_inat"}}),
    "no tag": ("model.safetensors", {**ARCH, "pretrained_cfg": {"num_classes": 1000}}),
    "a strange tag": ("model.safetensors", {**ARCH, "pretrained_cfg": {"tag": ["in1k"]}}),
    "a word within a word": ("skin1k5.safetensors", None),
    "a thousand birds": ("birds-1k.safetensors", None),
    "a number of anything": ("flowers_1k.safetensors", None),
    "a run of torchvision": ("vit_b_16_photos.pth", None),
    "only the folder's folder": ("in1k/mine/model.safetensors", None),
}


@pytest.mark.parametrize("name", NAMED)
def test_imagenets_weights_have_imagenets_names(name: str, tmp_path: Path) -> None:
    assert labels(write(tmp_path, *configured(NAMED[name]))) == TORCHVISION


@pytest.mark.parametrize("name", UNNAMED)
def test_other_weights_keep_numbers(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, *configured(UNNAMED[name]))
    assert labels(path) is None
    assert load(path, heads=2).labels[985] == "class 985"


def configured(case: tuple[str, dict[str, Any] | None]) -> tuple[str, int, dict[str, Any] | None]:
    return case[0], 1000, case[1]


@pytest.mark.parametrize("classes", [0, 10, 999, 1001])
def test_other_numbers_of_classes_keep_theirs(classes: int, tmp_path: Path) -> None:
    assert labels(write(tmp_path, "vit.fb_in1k.safetensors", classes)) is None


def test_21k(tmp_path: Path) -> None:
    assert labels(write(tmp_path, "vit.augreg_in21k.safetensors", 21843)) == imagenet.names_21k()


def test_labels_of_their_own_stay(tmp_path: Path) -> None:
    """Those in the config, and those that vitlab wrote beside a file of 1,000 classes."""
    own = [f"bird {i}" for i in range(1000)]
    config = {**ARCH, "label_names": own, "pretrained_cfg": {"tag": "fb_in1k"}}
    assert labels(write(tmp_path, "model.safetensors", 1000, config)) == tuple(own)
    save(tiny(1000, "tanh"), tmp_path / "named", labels=own)
    convert(tmp_path / "named", tmp_path / "birds_in1k.npz", to="google")
    assert labels(tmp_path / "birds_in1k.npz") == tuple(own)
    save(tiny(1000, "tanh"), tmp_path / "fresh")
    convert(tmp_path / "fresh", tmp_path / "fresh_in1k.npz", to="google")  # and beside it: no names
    assert labels(tmp_path / "fresh_in1k.npz") is None


def test_a_folder_there_and_back_gains_no_names(tmp_path: Path) -> None:
    save(tiny(1000), tmp_path / "run")
    convert(tmp_path / "run", tmp_path / "timm", to="timm")
    assert load(tmp_path / "timm").card.labels is None
    assert load(tmp_path / "run").card.labels is None


def test_a_new_head_has_no_names(tmp_path: Path) -> None:
    path = write(tmp_path, "vit.fb_in1k.safetensors")
    assert load(path, heads=2, classes=5).card.labels is None


def test_a_photo_has_a_name(tmp_path: Path) -> None:
    if not WEIGHTS.exists():
        pytest.skip(f"there is no {WEIGHTS}; set VITLAB_SHARED to the folder that has weights/")
    Image.fromarray(load_sample_images().images[1]).save(tmp_path / "dahlia.png")
    classifier = Classifier(WEIGHTS, "cpu")
    assert classifier.labels == TORCHVISION
    with torch.no_grad():
        logits = classifier.model(classifier.model.preprocess(tmp_path / "dahlia.png"))
    assert "daisy" in {classifier.labels[i] for i in logits[0].topk(2).indices.tolist()}  # there is no dahlia
