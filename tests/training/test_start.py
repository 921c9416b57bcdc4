"""Fine-tuning: which head a run starts with, and what its model records of where it came from."""

import json
import math
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import fill
from small_runs import SMALL, records, train_small

import vitlab
from vitlab.data.source import ArraySource, Data
from vitlab.errors import UserError
from vitlab.models.variants import Model
from vitlab.models.vit import ViT
from vitlab.training.loop import train
from vitlab.training.recipe import Recipe, change
from vitlab.training.setup import initial_model
from vitlab.training.start import check_named_model
from vitlab.weights import load

OWN, OTHER = ("ant", "bee", "cat", "dog"), ("elk", "fox", "gnu", "hen")


def pictures(classes: tuple[str, ...], name: str = "pictures") -> Data:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (24, 8, 8, 3), dtype=np.uint8), np.arange(24) % len(classes)
    train, test = (ArraySource(name, pixels[part], labels[part], classes) for part in (slice(16), slice(16, 24)))
    return Data(name, train, test)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of four classes whose head and pre-logits are far from zero."""
    folder = tmp_path_factory.mktemp("weights") / "model"
    model = vitlab.create("Ti/4", image_size=8, depth=1, width=16, mlp=16, heads=2, classes=4, prelogits=12)
    vitlab.save(fill(model), folder, labels=OWN)
    return folder


def recipe(weights: Path, **changes: object) -> Recipe:
    return change(SMALL, weights=str(weights), model_settings={}, **changes)


def start(weights: Path, classes: tuple[str, ...], **changes: object) -> Model:
    return initial_model(recipe(weights, **changes), pictures(classes))[0]


def is_new(model: Model) -> bool:
    """Whether the head is one of zeros on the features themselves."""
    assert isinstance(model, ViT)
    assert model.head is not None
    fresh = not model.head.weight.any() and not model.head.bias.any()
    assert fresh == (model.config.prelogits == 0)
    return fresh


def test_other_names_start_with_a_new_head(weights: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert is_new(start(weights, OTHER))
    assert "replaced by zeros: the head of 4 classes and its pre-logits layer; its classes are others" in caplog.text
    assert is_new(start(weights, OWN[:3]))


def test_no_names_start_with_a_new_head(weights: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = load(weights)
    model.card = vitlab.create("Ti/4", image_size=8).card
    vitlab.save(model, tmp_path / "nameless")
    assert is_new(start(tmp_path / "nameless", OWN))
    assert "it has no class names" in caplog.text


def test_the_same_names_keep_the_head(weights: Path) -> None:
    images = torch.randn(2, 3, 8, 8)
    before = load(weights)(images)
    assert torch.equal(start(weights, OWN).eval()(images), before)
    assert is_new(start(weights, OWN, head="new"))


def test_the_same_names_in_another_order_keep_their_rows(weights: Path) -> None:
    images, order = torch.randn(2, 3, 8, 8), [2, 0, 3, 1]
    model = start(weights, tuple(OWN[i] for i in order)).eval()
    torch.testing.assert_close(model(images), load(weights)(images)[:, order])


def test_keeping_the_head_is_a_choice(weights: Path) -> None:
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(start(weights, OTHER, head="keep").eval()(images), load(weights)(images))
    with pytest.raises(UserError, match=r"head of 4 classes and the data has 3, .*head=new"):
        start(weights, OTHER[:3], head="keep")


def test_the_first_loss_is_that_of_chance(weights: Path, tmp_path: Path) -> None:
    train(recipe(weights, steps=2, batch=8, micro=8, warmup=0), tmp_path / "run", data=pictures(OTHER))
    assert next(r["loss"] for r in records(tmp_path / "run") if "loss" in r) == pytest.approx(math.log(4), abs=1e-6)


# ---- provenance


def test_a_trained_model_names_its_weights_and_its_data(weights: Path, tmp_path: Path) -> None:
    first = recipe(weights, steps=2, batch=8, micro=8, warmup=0, lr=0.25)
    train(first, tmp_path / "first", data=pictures(OTHER, "animals"))
    digest = sha256((weights / "model.safetensors").read_bytes()).hexdigest()
    training = "2 steps of 8 images, softmax, adamw, lr 0.25, seed 5"
    expected = {"source": str(weights), "format": "vitlab", "sha256": digest, "data": "animals", "training": training}
    assert load(tmp_path / "first").card.provenance == expected

    train(recipe(tmp_path / "first", steps=2, batch=8, micro=8, warmup=0), tmp_path / "second", data=pictures(OTHER))
    found = load(tmp_path / "second").card.provenance or {}
    digest = sha256((tmp_path / "first" / "model.safetensors").read_bytes()).hexdigest()
    assert (found["source"], found["sha256"]) == (str(tmp_path / "first"), digest)
    assert str(weights) in found["before"]
    assert training in found["before"]


def test_a_resumed_run_keeps_its_provenance(tmp_path: Path) -> None:
    train_small(tmp_path / "run", steps=4)
    config = tmp_path / "run" / "config.json"
    before = json.loads(config.read_text())
    assert before["provenance"]["source"] == "from scratch"
    config.unlink()
    (tmp_path / "run" / "model.safetensors").unlink()
    train_small(tmp_path / "run", steps=4, resume=True)
    assert json.loads(config.read_text()) == before


def test_a_named_model_must_be_that_of_the_weights(tmp_path: Path) -> None:
    """The weights decide what is trained, so another name would be passed over."""
    vitlab.save(vitlab.create("Ti/16", image_size=32, classes=3), tmp_path / "ti")
    vitlab.save(vitlab.create("R50x1", image_size=32, classes=3), tmp_path / "resnet")
    recipe = Recipe("Ti/16", "digits", steps=1, weights=str(tmp_path / "ti"))
    check_named_model(recipe)
    check_named_model(change(recipe, image_size=(48, 48)))
    for model, words in (
        ("B/16", r"ti is no B/16: it has width=192, not 768; leave model"),
        ("Ti/8", r"patch=16, not 8"),
        ("R50x1", "ti is no R50x1; leave model"),
        ("R26+Ti/16", "ti is no"),
    ):
        with pytest.raises(UserError, match=words):
            check_named_model(change(recipe, model=model))
    vitlab.save(vitlab.create("Ti/16", depth=2, image_size=32, classes=3), tmp_path / "two")
    shallow = change(recipe, depth=2, weights=str(tmp_path / "two"))
    check_named_model(shallow)
    for other, words in (
        (change(shallow, depth=3), "two is no Ti/16: it has depth=2, not 3"),
        (change(shallow, mlp=96), "mlp=768, not 96"),
    ):
        with pytest.raises(UserError, match=words):
            check_named_model(other)
    with pytest.raises(UserError, match="stages"):
        check_named_model(change(recipe, model="R101x1", weights=str(tmp_path / "resnet")))
