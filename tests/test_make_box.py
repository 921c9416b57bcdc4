"""benchmarks/make_box.py: a finished run becomes the folder of the box."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1]))

import vitlab
from benchmarks.make_box import last_part, make_box, short_labels
from vitlab.errors import UserError
from vitlab.files import sha256
from vitlab.training.loop import train
from vitlab.training.recipes import find


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("box") / "run"
    recipe = dataclasses.replace(find("digits").recipe, steps=2, warmup=0, batch=16, workers=0)
    train(recipe, folder, console=Console(quiet=True))
    return folder


def test_a_run_becomes_the_box(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "box"
    out.mkdir()
    (out / "NOTICE").write_text("terms")
    make_box(run, "digits", out)
    first = sha256(out / "model.safetensors")
    scores = {"data": "/home/me/digits", "split": "test", "images": 599}
    scores["top1"] = {"value": 0.625, "low": 0.58, "high": 0.66}
    make_box(run, "digits", out, scores, [("pets", "75.2 %")])
    assert sha256(out / "model.safetensors") == first
    assert (out / "NOTICE").read_text() == "terms"
    before, after = load_file(run / "model.safetensors"), load_file(out / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor.half()), name
    assert vitlab.load(out).card.preprocess == vitlab.load(run).card.preprocess
    card = (out / "README.md").read_text()
    parameters = sum(tensor.numel() for tensor in before.values())
    for part in (
        f"{parameters:,} parameters",
        first,
        "62.50% of 599",
        "58.0% to 66.0%",
        "| pets | 75.2 % |",
        "steps=2",
    ):
        assert part in card, part
    for text in (card, (out / "config.json").read_text()):
        assert "/home" not in text
        assert str(tmp_path) not in text
    assert vitlab.load(out).card.temperature != 1
    assert json.loads((out / "config.json").read_text())["labels"] == list("0123456789")


def test_what_is_refused(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.make_box.MOST_BYTES", 1000)
    with pytest.raises(UserError, match="bytes in fp16, more than 1,000"):
        make_box(run, "digits", tmp_path / "box")
    with pytest.raises(UserError, match="not the folder of a run"):
        make_box(saved(tmp_path / "model"), "digits", tmp_path / "box")
    assert not (tmp_path / "box").exists()


def saved(folder: Path) -> Path:
    vitlab.save(vitlab.create("Ti/2", image_size=8, depth=1, width=24, heads=2, mlp=48, classes=2), folder)
    return folder


def test_names() -> None:
    long = ("goldfish, Carassius auratus", "African elephant, Loxodonta africana", "crane")
    assert short_labels(long) == ("goldfish", "African elephant", "crane")
    assert short_labels(("my cat", "my dog")) == ("my cat", "my dog")
    paths = {
        "/a/b.parquet": "b.parquet",
        "../x/": "x",
        "~/y/z": "z",
        "imagenet:/data/in": "in",
        r"C:\me\w.npz": "w.npz",
    }
    texts = {
        "google/vit": "google/vit",
        "from scratch": "from scratch",
        "source: /a/b; format: x": "source: b; format: x",
    }
    for text, short in {**paths, **texts}.items():
        assert last_part(text) == short
