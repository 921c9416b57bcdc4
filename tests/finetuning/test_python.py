"""`vitlab.finetune`: a run from Python, by the code of the command line, for every kind of run."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Command
from PIL import Image

import vitlab
from vitlab.data.open import open_data
from vitlab.errors import UserError

HOW: dict[str, Any] = {"device": "cpu", "subset": 0.3, "workers": 0}
PAIRS = ("device=cpu", "subset=0.3", "workers=0")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights") / "model"
    vitlab.save(vitlab.create("Ti/4", image_size=8, depth=2, width=32, mlp=64, heads=2, classes=5), folder)
    return folder


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two colors, with so much noise that some are taken for the other."""
    folder, rng = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for label, color in (("red", (150, 110, 110)), ("blue", (110, 110, 150))):
        (folder / label).mkdir()
        for i in range(40):
            pixels = rng.normal(color, 45, (8, 8, 3)) + rng.normal(0, 30, 3)
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / label / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, photos: Path, weights: Path) -> vitlab.Run:
    out = tmp_path_factory.mktemp("runs") / "mine"
    return vitlab.finetune(photos, weights, 1e-6, out, device="cpu", workers=0, holdout=0.5)


def test_a_run_has_its_model_report_scores_and_predictions(run: vitlab.Run, photos: Path) -> None:
    test = open_data(str(photos), holdout=0.5).test
    images = [test.image(i) for i in range(len(test))]
    hits = [one.labels[0] == test.classes[label] for one, label in zip(run.predict(images), test.labels, strict=True)]
    assert run.accuracy == pytest.approx(np.mean(hits))
    assert run.accuracy is not None
    assert 0.6 < run.accuracy < 1
    assert run.scores["images"] == len(test)
    assert run.scores["split"] == "test"
    assert "<html" in Path(run.report).read_text()
    assert run.labels == test.classes
    logits = run.model(run.model.preprocess(images[:3]))
    assert [test.classes[i] for i in logits.argmax(1)] == [one.labels[0] for one in run.predict(images[:3])]
    again = vitlab.Run(run.folder, device="cpu")
    assert again.predict(images[0]) == run.predict(images[0])
    assert again.accuracy == run.accuracy


def test_mistakes_are_one_line(run: vitlab.Run, photos: Path, weights: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="holds a run already"):
        vitlab.finetune(photos, weights, out=run.folder, device="cpu")
    with pytest.raises(UserError, match="there is no setting 'learning_rate'"):
        vitlab.finetune(photos, weights, out=tmp_path / "run", learning_rate=0.1)
    with pytest.raises(UserError, match="lr must be a number, not 'fast'"):
        vitlab.finetune(photos, weights, out=tmp_path / "run", lr="fast")
    with pytest.raises(UserError, match=r"weights are a path or a hub id, not a ViT; vitlab\.save writes a model"):
        vitlab.finetune(photos, vitlab.load(weights), out=tmp_path / "run")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="there is no data set 'nowhere'"):
        vitlab.finetune("nowhere", weights, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_python_and_the_command_line_make_the_same_run(weights: Path, tmp_path: Path, command: Command) -> None:
    settings: dict[str, Any] = {**HOW, "steps": 4, "area": (0.5, 1), "flip": False, "image_size": 8}
    run = vitlab.finetune("digits", weights, out=tmp_path / "python", **settings)
    words = ("--weights", str(weights), "--out", str(tmp_path / "cli"))
    pairs = ("steps=4", "area=0.5,1", "flip=false", "image_size=8")
    code, _, complaint = command("finetune", "digits", *words, *PAIRS, *pairs)
    assert code == 0, complaint
    first, second = (vitlab.load(folder).state_dict() for folder in (run.folder, tmp_path / "cli"))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert vitlab.Run(tmp_path / "cli").accuracy == run.accuracy


@pytest.mark.slow
def test_runs_in_one_stage(tmp_path: Path, weights: Path) -> None:
    """Without weights, and by the paper's recipe; a run that has ended is resumed without training."""
    short: dict[str, Any] = {**HOW, "steps": 3, "warmup": 0, "batch": 16}
    scratch = vitlab.finetune("digits", "none", out=tmp_path / "scratch", **short)
    assert scratch.scores["images"] == len(open_data("digits").test)
    assert scratch.predict(np.zeros((8, 8), np.uint8)).labels
    before = scratch.model.state_dict()
    again = vitlab.finetune("digits", "none", out=tmp_path / "scratch", resume=True, **short)
    assert all(torch.equal(before[name], value) for name, value in again.model.state_dict().items())
    assert vitlab.finetune("digits", weights, out=tmp_path / "paper", paper=True, **short).accuracy is not None


@pytest.mark.slow
def test_several_labels(tmp_path: Path, weights: Path) -> None:
    rng = np.random.default_rng(0)
    lines = ["path,labels"]
    for i in range(60):
        labels = [name for name in ("dark", "red") if rng.random() < 0.5]
        pixels = np.full((8, 8, 3), 40 if "dark" in labels else 200, np.uint8)
        pixels[..., 0] += 50 * ("red" in labels)
        Image.fromarray(pixels).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{';'.join(labels)}")
    (tmp_path / "set.csv").write_text("\n".join(lines) + "\n")
    run = vitlab.finetune(
        tmp_path / "set.csv", weights, out=tmp_path / "run", steps=20, batch=8, device="cpu", workers=0, warmup=0
    )
    assert run.accuracy is None
    assert 0 <= run.scores["map"] <= 1
    assert run.model.card.thresholds is not None
    assert "mAP" in repr(run)
    found = run.predict(tmp_path / "0.png")
    assert set(found.labels) <= {"dark", "red"}
    shutil.rmtree(tmp_path / "run")
