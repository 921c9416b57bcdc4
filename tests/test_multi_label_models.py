"""Multi-label models after training: evaluation, predictions, the server and exported metadata agree with torch."""

import csv
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Command, Randomize
from numpy.typing import NDArray
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score
from starlette.testclient import TestClient

import vitlab
from vitlab.data.label_sets import sets_of
from vitlab.data.open import open_data
from vitlab.data.source import ArraySource
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import evaluate, evaluate_sets
from vitlab.inference.onnx_file import metadata
from vitlab.models.config import Preprocess
from vitlab.prediction import Classifier
from vitlab.serving.app import create_app
from vitlab.serving.service import Service, ServiceSettings

NAMES = ("ant", "bee", "cat", "dog", "eel")
THRESHOLDS = (0.5, 0.4, 0.6, 0.99999, 0.3)


@pytest.fixture(scope="module")
def pixels() -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (40, 16, 16, 3), np.uint8)


@pytest.fixture
def run(tmp_path: Path, randomize: Randomize) -> Path:
    model = randomize(vitlab.create("Ti/8", image_size=16, depth=1, width=32, mlp=64, heads=2, classes=5))
    vitlab.save(model, tmp_path / "run", preprocess=Preprocess(crop=1.0), labels=NAMES, thresholds=THRESHOLDS)
    return tmp_path / "run"


def expected(run: Path, pixels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Sigmoids of the logits of images that have the model's size, of which nothing is cropped."""
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1
    values: NDArray[np.float32] = vitlab.load(run)(images).sigmoid().detach().numpy()
    return values


def found(values: NDArray[np.float32]) -> list[list[str]]:
    """The classes that reach their thresholds, the most probable first."""
    chosen = [[k for k in np.argsort(-row) if row[k] >= np.float32(THRESHOLDS[k])] for row in values]
    return [[NAMES[k] for k in row] for row in chosen]


def test_evaluation_is_scikit_learns(run: Path, pixels: NDArray[np.uint8], tmp_path: Path) -> None:
    rows = [[k for k in range(4) if (i * (k + 2)) % 3 == 0] for i in range(40)]  # the set does not know eels
    source = ArraySource("set", pixels, sets_of(rows), NAMES[:4])
    model, values = vitlab.load(run), expected(run, pixels)
    result = evaluate_sets(model, source, device="cpu", workers=0)
    truth, guesses = sets_of(rows).multi_hot(4), (values >= np.array(THRESHOLDS, np.float32))[:, :4]
    scores = result.overall()
    assert scores["map"] == pytest.approx(average_precision_score(truth, values[:, :4]), abs=1e-6)
    assert scores["f1_micro"] == pytest.approx(f1_score(truth, guesses, average="micro"), abs=1e-9)
    assert scores["f1_macro"] == pytest.approx(f1_score(truth, guesses, average="macro", zero_division=0), abs=1e-9)
    assert scores["exact"] == (truth == guesses).all(1).mean()
    result.write_results(tmp_path / "scores", {"model": "m"})
    table = {row["class"]: row for row in json.loads((tmp_path / "scores" / "scores.json").read_text())["per_class"]}
    assert table["eel"]["average_precision"] is None
    assert table["bee"]["average_precision"] == pytest.approx(average_precision_score(truth[:, 1], values[:, 1]))
    single = ArraySource("single", pixels, np.arange(40) % 4, NAMES[:4])
    one = average_precision_score(np.eye(4)[single.labels], values[:, :4])
    assert evaluate_sets(model, single, device="cpu", workers=0).mean_precision == pytest.approx(one, abs=1e-6)
    with pytest.raises(UserError, match="one label per image"):
        evaluate(model, single)


def test_a_model_of_one_class_is_not_tested_on_many(tmp_path: Path, pixels: NDArray[np.uint8]) -> None:
    source = ArraySource("set", pixels, sets_of([[0, 1]] * 40), NAMES)
    with pytest.raises(UserError, match="this model is not"):
        evaluate_sets(vitlab.create("Ti/8", image_size=16, depth=1, classes=5), source)


def test_predictions_in_every_form(run: Path, pixels: NDArray[np.uint8], tmp_path: Path, command: Command) -> None:
    folder = tmp_path / "pictures"
    folder.mkdir()
    for i in range(8):
        Image.fromarray(pixels[i]).save(folder / f"{i}.png")
    values = expected(run, pixels[:8])
    names = found(values)
    assert {len(row) for row in names} != {1}
    classifier = Classifier(run, "cpu")
    assert [list(classifier.predict(folder / f"{i}.png").labels) for i in range(8)] == names
    assert classifier.predict(folder / "0.png", top=2).labels == tuple(np.array(NAMES)[np.argsort(-values[0])[:2]])
    code, out, _ = command("predict", str(run), str(folder), "--json", "--device", "cpu")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [[one["name"] for one in line["classes"]] for line in lines] == names
    for line, row in zip(lines, values, strict=True):
        for one in line["classes"]:
            k = NAMES.index(one["name"])
            assert one["probability"] == pytest.approx(row[k], abs=1e-5)
            assert one["threshold"] == pytest.approx(THRESHOLDS[k], rel=1e-6)
    _, table, _ = command("predict", str(run), str(folder), "--device", "cpu")
    assert [line.split()[1] for line in table.splitlines()[1:]] == [row[0] if row else "(none)" for row in names]
    command("predict", str(run), str(folder), "--out", str(tmp_path / "found.csv"), "--device", "cpu")
    cells = list(csv.reader((tmp_path / "found.csv").open()))
    assert cells[0] == ["path", "labels", "probabilities"]
    assert [row[1].split(";") if row[1] else [] for row in cells[1:]] == names
    if any(len(row) > 1 for row in names):
        data = open_data(str(tmp_path / "found.csv"))  # predictions are labels for another model
        assert data.is_multi_label


@pytest.mark.slow
def test_the_server_answers_with_the_classes_found(run: Path, pixels: NDArray[np.uint8]) -> None:
    names, file = found(expected(run, pixels[:1]))[0], io.BytesIO()
    Image.fromarray(pixels[0]).save(file, "PNG")
    service = Service(Classifier(run, "cpu"), ServiceSettings(processes=1))
    with TestClient(create_app(service)) as http:
        assert http.get("/v1/model").json()["multi_label"] is True
        for route in ("/v1/predict", "/v1/explain"):
            answer = http.post(route, files={"image": ("0.png", file.getvalue())}).json()
            classes = (answer["images"][0] if route == "/v1/predict" else answer)["classes"]
            assert [one["name"] for one in classes] == names
            assert all(one["probability"] >= one["threshold"] for one in classes)
        many = http.post("/v1/predict?top_k=5", files={"image": ("0.png", file.getvalue())}).json()
        assert len(many["images"][0]["classes"]) == 5


def test_files_say_that_the_model_is_multi_label(run: Path, tmp_path: Path) -> None:
    known = metadata(vitlab.load(run), False)
    assert json.loads(known["multi_label"]) is True
    assert json.loads(known["thresholds"]) == list(THRESHOLDS)
    files = {"again": "vitlab", "m.safetensors": "timm", "folder": "timm", "m.npz": "google", "hub": "huggingface"}
    for target, to in files.items():  # what a format cannot hold is in a JSON beside it
        vitlab.convert(run, tmp_path / target, to, gelu="tanh" if to == "google" else "exact")
        assert vitlab.load(tmp_path / target).card.thresholds == THRESHOLDS
    with pytest.raises(UserError, match="2 thresholds"):
        vitlab.save(vitlab.load(run), tmp_path / "bad", thresholds=(0.5, 0.5))
