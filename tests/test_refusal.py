"""Models that can answer "none of these": the same answer from Python, the command line, the server and the report."""

import csv
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command, fill
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient

import vitlab
from vitlab.data.source import ArraySource
from vitlab.errors import UserError
from vitlab.evaluation.evaluate import evaluate
from vitlab.evaluation.extract import extract
from vitlab.evaluation.unknown import fit_unknown
from vitlab.export import export
from vitlab.files import sha256
from vitlab.models.config import Preprocess
from vitlab.prediction import Classifier
from vitlab.report.page import templates
from vitlab.serving.app import create_app
from vitlab.serving.service import Service, ServiceSettings

NAMES = ("red", "green", "blue")
HOW = Preprocess(crop=1.0)


def pictures(count: int, seed: int) -> ArraySource:
    """Noisy pictures, each of one color."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    pixels = rng.integers(0, 40, (count, 16, 16, 3))
    pixels[np.arange(count), :, :, labels] += rng.integers(140, 200, (count, 1, 1))
    return ArraySource("colors", pixels.astype(np.uint8), labels, NAMES)


def strange(count: int = 6) -> NDArray[np.uint8]:
    """Checkerboards of white and gray."""
    board = np.indices((16, 16)).sum(0) % 2 * 255
    return np.stack([np.maximum(board, 20 * i)[:, :, None].repeat(3, 2) for i in range(count)]).astype(np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = fill(vitlab.create("Ti/8", image_size=16, depth=1, width=32, mlp=64, heads=2, classes=3))
    model.card = replace(model.card, preprocess=HOW, labels=NAMES)
    train, held_out = (extract(model, pictures(90, seed), device="cpu", workers=0) for seed in (0, 1))
    model.card = replace(model.card, unknown=fit_unknown(train, held_out), temperature=1.5)
    folder = tmp_path_factory.mktemp("runs") / "colors"
    vitlab.save(model, folder)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """a0.png … a5.png are red, green and blue; b0.png … b5.png are checkerboards."""
    folder = tmp_path_factory.mktemp("photos")
    for letter, pixels in (("a", pictures(6, 2).pixels), ("b", strange())):
        for i, one in enumerate(pixels):
            Image.fromarray(one).save(folder / f"{letter}{i}.png")
    return folder


def expected(run: Path, photos: Path) -> NDArray[np.float64]:
    """The distances by the features of the saved model and its stored arrays, in numpy."""
    model = vitlab.load(run)
    pixels = np.stack([np.asarray(Image.open(photos / f"{letter}{i}.png")) for letter in "ab" for i in range(6)])
    with torch.no_grad():
        features = model.features(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 127.5 - 1)
    assert model.card.unknown is not None
    return model.card.unknown.distances(features).numpy()


def test_python_refuses_what_it_was_not_trained_on(run: Path, photos: Path) -> None:
    classifier = Classifier(run, "cpu")
    found = [classifier.predict(photos / f"{letter}{i}.png") for letter in "ab" for i in range(6)]
    np.testing.assert_allclose([one.distance or 0.0 for one in found], expected(run, photos), rtol=1e-4, atol=1e-3)
    assert [one.refused for one in found[6:]] == [True] * 6
    assert sum(one.refused for one in found[:6]) <= 1
    refused, accepted = found[6], next(one for one in found if not one.refused)
    assert (refused.label, refused.probability) == ("none of these", 0)
    assert set(refused.labels) == set(NAMES)
    assert sum(refused.probabilities) == pytest.approx(1, abs=1e-6)
    assert "none of these" in repr(refused)
    assert "none of these" in refused._repr_html_()
    assert accepted.label in NAMES
    assert "none of these" not in repr(accepted) + accepted._repr_html_()


def test_the_share_of_false_refusals_can_be_chosen(run: Path, photos: Path) -> None:
    off = Classifier(run, "cpu", refuse=0)
    assert off.unknown is None
    prediction = off.predict(photos / "b0.png")
    assert (prediction.distance, prediction.refused) == (None, False)
    assert prediction.label in NAMES
    images = torch.from_numpy(pictures(300, 7).pixels).permute(0, 3, 1, 2)
    shares = []
    for rate in (0.02, 0.1, 0.5):
        distances = Classifier(run, "cpu", refuse=rate).scores(images).distances
        assert distances is not None
        shares.append(float((distances > 1).double().mean()))
    assert np.abs(np.array(shares) - (0.02, 0.1, 0.5)).max() < 0.12  # the limits are from 90 images
    assert shares == sorted(shares)
    for wrong in (1.0, -0.1, float("nan")):
        with pytest.raises(UserError, match="false refusals"):
            Classifier(run, "cpu", refuse=wrong)


def test_every_format_of_the_command_line(run: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    distances = expected(run, photos)
    refused = distances > 1
    files = [str(photos / f"{letter}{i}.png") for letter in "ab" for i in range(6)]
    _, out, _ = command("predict", str(run), str(photos), "--json", "--device", "cpu")
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["refused"] for line in lines] == refused.tolist()
    np.testing.assert_allclose([line["distance"] for line in lines], distances, rtol=1e-4, atol=1e-3)
    assert all(len(line["classes"]) == 3 for line in lines)
    nearest = [line["classes"][0]["name"] for line in lines]
    _, table, _ = command("predict", str(run), str(photos), "--device", "cpu")
    for line, strange_one, name in zip(table.splitlines()[1:], refused, nearest, strict=True):
        assert ("none of these" in line) == strange_one
        assert (f"nearest {name} " in line) == strange_one
    for top in (1, 2):
        out_file = tmp_path / f"{top}.csv"
        command("predict", str(run), str(photos), "--out", str(out_file), "--top-k", str(top), "--device", "cpu")
        rows = list(csv.DictReader(out_file.open()))
        assert [row["path"] for row in rows] == files
        assert [row["nearest"] for row in rows] == nearest
        assert [row["class"] == "none of these" for row in rows] == refused.tolist()
        assert all((row["probability"] == "") == bad for row, bad in zip(rows, refused, strict=True))
        assert all(None not in row and None not in row.values() for row in rows)  # as many cells as the header has
    _, plain, _ = command("predict", str(run), str(photos), "--json", "--refuse", "0", "--device", "cpu")
    assert all(set(json.loads(line)) == {"path", "classes"} for line in plain.splitlines())
    code, _, err = command("predict", str(run), str(photos), "--refuse", "1.5")
    assert code != 0
    assert "--refuse" in err


def test_a_model_that_cannot_refuse_is_as_before(run: Path, photos: Path, tmp_path: Path, command: Command) -> None:
    model = vitlab.load(run)
    model.card = replace(model.card, unknown=None)
    vitlab.save(model, tmp_path / "plain")
    assert Classifier(tmp_path / "plain", "cpu").predict(photos / "b0.png").distance is None
    _, out, _ = command("predict", str(tmp_path / "plain"), str(photos), "--csv", "--device", "cpu")
    assert out.splitlines()[0] == "path,class,probability"
    code, _, err = command("predict", str(tmp_path / "plain"), str(photos), "--refuse", "0.1", "--device", "cpu")
    assert code == 1
    assert "cannot refuse" in err


@pytest.mark.slow
def test_the_server(run: Path, photos: Path) -> None:
    distances = expected(run, photos)
    files = [("image", (f"{name}.png", (photos / f"{name}.png").read_bytes())) for name in ("a0", "b0")]
    with TestClient(create_app(Service(Classifier(run, "cpu"), ServiceSettings(processes=1)))) as http:
        assert http.get("/v1/model").json()["refuse"] == 0.05
        images = http.post("/v1/predict", files=files).json()["images"]
        explained = [http.post("/v1/explain", files=[file]).json() for file in files]
        assert "refused" in http.get("/openapi.json").json()["components"]["schemas"]["Prediction"]["properties"]
    for answers in (images, explained):
        for one, distance in zip(answers, distances[[0, 6]], strict=True):
            assert one["refused"] == (distance > 1)
            assert one["distance"] == pytest.approx(distance, rel=1e-4, abs=1e-3)
            assert len(one["classes"]) == 3
    with TestClient(create_app(Service(Classifier(run, "cpu", refuse=0), ServiceSettings(processes=1)))) as http:
        assert http.get("/v1/model").json()["refuse"] is None
        assert set(http.post("/v1/predict", files=files).json()["images"][0]) == {"name", "classes"}


def test_evaluation_and_report_count_the_refused(run: Path) -> None:
    model, source = vitlab.load(run), pictures(60, 3)
    found = evaluate(model, source, device="cpu", workers=0)
    with torch.no_grad():
        images = torch.from_numpy(source.pixels).permute(0, 3, 1, 2) / 127.5 - 1
        logits, features = model(images), model.features(images)
    np.testing.assert_allclose(found.confidence, (logits / 1.5).softmax(1).amax(1).numpy(), atol=1e-5)
    assert model.card.unknown is not None
    bad = (model.card.unknown.distances(features) > 1).numpy()
    right = logits.argmax(1).numpy() == source.labels
    summary = found.refusals()
    assert summary is not None
    assert (summary["promised"], summary["images"]) == (0.05, int(bad.sum()))
    assert summary["mistakes"] == int((bad & ~right).sum())
    assert summary["accuracy_of_others"]["value"] == pytest.approx(right[~bad].mean())
    assert found.to_json()["refused"] == summary
    sections: Any = templates().get_template("sections.html").module
    assert f"it refuses {bad.sum()}," in " ".join(str(sections.refusals(found, "test")).split())
    assert str(sections.refusals(replace(found, distances=None, refuse=None), "test")).strip() == ""


@pytest.mark.slow
def test_the_files_of_an_evaluation(run: Path, tmp_path: Path) -> None:
    found = evaluate(vitlab.load(run), pictures(60, 3), device="cpu", workers=0)
    found.write_results(tmp_path, {})
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert [float(row["distance"]) > 1 for row in rows] == found.refused.tolist()
    assert json.loads((tmp_path / "scores.json").read_text())["refused"]["images"] == found.refused.sum()


# ---- files


def test_it_travels_in_vitlab_folders_and_files(
    run: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    distances = expected(run, photos)
    vitlab.save(vitlab.load(run), tmp_path / "again")
    vitlab.convert(run, tmp_path / "converted", "vitlab")
    shutil.copy(run / "model.safetensors", tmp_path / "alone.safetensors")  # loses the preprocessing, not this
    for name in ("again", "converted"):
        np.testing.assert_array_equal(expected(tmp_path / name, photos), distances)
    np.testing.assert_array_equal(expected(tmp_path / "alone.safetensors", photos), distances)
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (run / "model.safetensors").read_bytes()
    with caplog.at_level(logging.INFO, "vitlab"):
        vitlab.convert(run, tmp_path / "timm", "timm")
        export(run, tmp_path / "colors.pt2")
    for name in ("timm", "colors.pt2"):  # and it is said where it does not
        assert f'{name} cannot hold what answers "none of these"' in caplog.text
    assert vitlab.load(tmp_path / "timm").card.unknown is None
    assert vitlab.load(run, classes=4).card.unknown is None  # other classes
    assert vitlab.load(run, image_size=32).card.unknown is None  # other features


def hostile(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    key, change = name.split(": ")
    old = tensors[f"unknown.{key}"]
    new = {
        "no rows": lambda: old[:0],
        "too narrow": lambda: old[..., :-1],
        "one axis more": lambda: old[None],
        "nan": lambda: old * torch.nan,
        "infinite": lambda: old * torch.inf,
        "negative": lambda: -old - 1,
        "integers": lambda: old.long(),
        "huge": lambda: old * 0 + 3e38,
        "unsorted": lambda: old.flip(0),
    }
    rest = {name: tensor for name, tensor in tensors.items() if name != f"unknown.{key}"}
    if change == "another name":
        return {**rest, "unknown.code": old}
    return rest if change == "missing" else {**rest, f"unknown.{key}": new[change]().contiguous()}


CHANGES = ["means: missing", "means: too narrow", "means: no rows", "means: one axis more", "means: nan"]
CHANGES += ["means: integers", "means: another name", "held_out: unsorted", "held_out: nan", "spread: negative"]
CHANGES += [
    "held_out: one axis more",
    "rate: one axis more",
    "counts: negative",
    "rate: negative",
    "rate: huge",
    "rate: infinite",
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_does_not_fit_is_one_error(run: Path, tmp_path: Path, change: str) -> None:
    shutil.copytree(run, tmp_path / "run")
    file, config = tmp_path / "run" / "model.safetensors", tmp_path / "run" / "config.json"
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    save_file(hostile(change, load_file(file)), file, metadata)
    config.write_text(json.dumps(json.loads(config.read_text()) | {"sha256": sha256(file)}))
    with pytest.raises(UserError) as caught:
        vitlab.load(tmp_path / "run")
    message = str(caught.value)
    assert str(tmp_path / "run") in message
    assert "unknown" in message or "weights are floating-point" in message
    assert "\n" not in message
    assert len(message) < 400


def test_distances_are_numbers_for_any_features(run: Path) -> None:
    unknown = vitlab.load(run).card.unknown
    assert unknown is not None
    features = torch.tensor([[torch.nan], [torch.inf], [1e38], [0.0]]).expand(4, 32)
    distances = unknown.distances(features)
    assert distances.isfinite().all()
    assert (distances[:3] > 1).all()
    assert json.dumps(distances.tolist(), allow_nan=False)
    few = replace(unknown, held_out=unknown.held_out[:18])  # too few for a limit at 5 %
    assert (few.distances(features) <= 1).all()
    assert (replace(unknown, held_out=unknown.held_out[:19]).distances(features[:3]) > 1).all()
