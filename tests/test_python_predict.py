"""`vitlab.predict`: one image or many, of every kind, by a model, a run, a classifier or a path."""

import functools
import http.server
import logging
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import fill
from PIL import Image

import vitlab
from vitlab.errors import UserError
from vitlab.prediction.classifier import Predictions

LABELS = ("cat", "dog, small", "고양이", "<b>emu</b>")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    model = fill(vitlab.create("Ti/8", image_size=16, classes=4, depth=1, width=32, mlp=64, heads=2))
    folder = tmp_path_factory.mktemp("runs") / "mine"
    vitlab.save(model, folder, labels=LABELS)
    return str(folder)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    for i in range(5):
        noise = np.random.default_rng(i).integers(0, 256, (3, 4, 3), np.uint8)
        Image.fromarray(noise).resize((24, 18), Image.Resampling.BICUBIC).save(root / f"{i}.png")
    return root


def probabilities(run: str, path: Path) -> np.ndarray:
    """By the model itself and a softmax in float64."""
    model = vitlab.load(run).double()
    with torch.no_grad():
        logits = model(model.preprocess(Image.open(path)))[0].numpy()
    e = np.exp(logits - logits.max())
    return e / e.sum()


def check(prediction: vitlab.Prediction, run: str, path: Path) -> None:
    expected = probabilities(run, path)
    order = np.argsort(-expected)
    assert prediction.labels == tuple(LABELS[i] for i in order)
    np.testing.assert_allclose(prediction.probabilities, expected[order], atol=1e-5)


def test_one_image_gives_one_prediction_and_a_list_gives_a_list(run: str, photos: Path) -> None:
    paths = sorted(photos.iterdir())
    arrays = [np.asarray(Image.open(path)) for path in paths]
    tensors = [torch.from_numpy(array.copy()).permute(2, 0, 1) / 255 for array in arrays]
    model = vitlab.load(run)
    for one in (paths[0], str(paths[0]), Image.open(paths[0]), arrays[0], tensors[0]):
        prediction = vitlab.predict(model, one)
        assert isinstance(prediction, vitlab.Prediction)
        check(prediction, run, paths[0])
    pattern = str(photos / "*.png")
    for many in (
        photos,
        str(photos),
        pattern,
        paths,
        tuple(arrays),
        iter(tensors),
        np.stack(arrays),
        torch.stack(tensors),
    ):
        predictions = vitlab.predict(model, many, batch=2)
        assert isinstance(predictions, Predictions)
        assert len(predictions) == 5
        for prediction, path in zip(predictions, paths, strict=True):
            check(prediction, run, path)
    mixed = vitlab.predict(model, [paths[3], arrays[1], str(photos), tensors[2]], top=1)
    assert [one.label for one in mixed] == [
        vitlab.predict(model, paths[i], top=1).label for i in (3, 1, 0, 1, 2, 3, 4, 2)
    ]
    assert [one.file for one in mixed[:2]] == [str(paths[3]), "image 1"]
    assert vitlab.predict(model, [paths[0]]) == [vitlab.predict(model, paths[0])]
    assert vitlab.predict(model, []) == []


def test_models_runs_classifiers_and_paths_agree(run: str, photos: Path) -> None:
    image = photos / "2.png"
    by_path = vitlab.predict(run, image, device="cpu")
    check(by_path, run, image)
    opened = vitlab.Run(run, device="cpu")
    for other in (Path(run), opened, vitlab.Classifier(run, "cpu"), vitlab.load(run)):
        assert vitlab.predict(other, image) == by_path
    assert opened.predict(str(image)) == by_path
    assert opened.predict([image], top=2)[0].labels == by_path.labels[:2]
    assert opened.labels == opened.model.labels == LABELS
    with pytest.raises(UserError, match="leave them out"):
        vitlab.predict(opened, image, device="cpu")
    with pytest.raises(UserError, match="type int is not a model"):
        vitlab.predict(7, image)  # type: ignore[call-overload]


def test_a_model_is_left_as_it_was(run: str, photos: Path) -> None:
    model = vitlab.load(run).train()
    block = model.get_submodule("blocks.0").eval()
    vitlab.predict(model, photos / "0.png")
    assert model.training
    assert not block.training
    half = vitlab.load(run).bfloat16()
    vitlab.predict(half, photos / "0.png")
    assert {x.dtype for x in half.parameters()} == {torch.bfloat16}


def test_what_cannot_be_read(run: str, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = vitlab.load(run)
    (tmp_path / "set").mkdir()
    Image.open(photos / "0.png").save(tmp_path / "set" / "good.png")
    bad = tmp_path / "set" / "bad.png"
    bad.write_text("a letter")
    (tmp_path / "empty").mkdir()
    cases: list[tuple[object, str]] = [
        (bad, "bad.png cannot be read: it is not an image of a known kind"),
        ([photos / "0.png", bad], "bad.png cannot be read"),
        ("nowhere.png", "there is no file or folder 'nowhere.png'"),
        (tmp_path / "empty", "holds no images"),
        ("https://example.org/cat.jpg", "allow_url=True"),
        ([[photos / "0.png"]], "image 0 of the list is a list itself"),
        (np.zeros((3, 9, 9), np.uint8), "transpose"),
        ([np.zeros((9, 9, 3), np.uint8), np.full((9, 9, 3), 2.0)], "image 1 has values from 2 to 2"),
    ]
    for images, message in cases:
        with pytest.raises(UserError, match=message):
            vitlab.predict(model, images)
    with pytest.raises(UserError, match="top must be at least 1, not 0"):
        vitlab.predict(model, photos, top=0)
    with caplog.at_level(logging.WARNING, "vitlab"):
        found = vitlab.predict(model, tmp_path / "set")
    assert [Path(one.file).name for one in found] == ["good.png"]
    assert "bad.png cannot be read and is left out" in caplog.text


def test_addresses_are_fetched_where_that_is_allowed(run: str, photos: Path) -> None:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(photos))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/1.png"
        found = vitlab.predict(vitlab.load(run), address, allow_url=True)
        server.shutdown()
    assert found.file == address
    check(found, run, photos / "1.png")


def test_files_are_decoded_by_other_processes_where_there_are_many(run: str, photos: Path) -> None:
    model = vitlab.load(run)
    assert vitlab.predict(model, photos, workers=1) == vitlab.predict(model, photos)
