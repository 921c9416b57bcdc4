"""A multi-label set from files of every kind to every use of its model: digits drawn two to a picture."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from conftest import Command
from sklearn.metrics import average_precision_score, f1_score
from starlette.testclient import TestClient
from two_digits import NAMES, Pictures, draw, png, write_csv, write_parquet, write_shards

from vitlab.prediction import Classifier
from vitlab.serving.app import create_app
from vitlab.serving.service import Service, ServiceSettings

SETTINGS = (
    "model=Ti/4 image_size=8x16 depth=4 width=64 mlp=128 heads=4 epochs=14 batch=100 lr=0.002 warmup=30 clip=1 "
    "weight_decay=0.05 area=0.8,1 flip=false mixup=0 label_smoothing=0 device=cpu workers=0 evaluate_every=420"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "write", [write_csv, *(pytest.param(write, marks=pytest.mark.long) for write in (write_shards, write_parquet))]
)
def test_from_files_to_every_use(
    write: Callable[[Path, dict[str, Pictures]], str],
    tmp_path: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VITLAB_DATA", str(tmp_path / "cache"))
    parts = {"train": draw(3300, "train"), "test": draw(400, "test")}
    (tmp_path / "set").mkdir()
    data, run = write(tmp_path / "set", parts), str(tmp_path / "run")
    code, out, _ = command("finetune", data, "--weights", "none", "--out", run, *SETTINGS.split())
    assert code == 0
    assert "a sigmoid for each class" in out
    assert "average precision" in (tmp_path / "run" / "report.html").read_text()

    # the scores are scikit-learn's of the model's own probabilities
    command("evaluate", run, data, "--json", str(tmp_path / "scores.json"), "--device", "cpu", "--workers", "0")
    scores = json.loads((tmp_path / "scores.json").read_text())
    pixels, rows = parts["test"]
    truth = np.array([[k in row for k in range(10)] for row in rows])
    images = pixels.transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
    classifier = Classifier(run, "cpu")
    assert classifier.labels == NAMES
    assert classifier.thresholds is not None
    command("export", run, str(tmp_path / "model.onnx"))
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    known = session.get_modelmeta().custom_metadata_map
    odds = 1 / (1 + np.exp(-session.run(None, {"images": images})[0]))
    guesses = odds >= np.array(json.loads(known["thresholds"]))
    assert average_precision_score(truth, odds) >= 0.95
    assert scores["map"] == pytest.approx(average_precision_score(truth, odds), abs=1e-4)
    assert scores["f1_micro"] == pytest.approx(f1_score(truth, guesses, average="micro"), abs=2e-3)
    assert scores["f1_micro"] >= 0.85
    found = [{NAMES[k] for k in np.flatnonzero(row)} for row in guesses]

    # the same answers by the command line and by the server
    files = [tmp_path / f"{i:02d}.png" for i in range(20)]
    for file, picture in zip(files, pixels, strict=False):
        file.write_bytes(png(picture))
    code, out, _ = command("predict", run, *map(str, files), "--json", "--device", "cpu")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [{one["name"] for one in line["classes"]} for line in lines] == found[:20]
    with TestClient(create_app(Service(classifier, ServiceSettings(processes=1)))) as http:
        sent = [("image", (file.name, file.read_bytes())) for file in files[:8]]
        answers = http.post("/v1/predict", files=sent).json()["images"]
    assert [{one["name"] for one in answer["classes"]} for answer in answers] == found[:8]
