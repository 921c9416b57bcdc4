"""The studies that measure more than a verb prints: speed, heads, axial attention, inductive bias; a few tiny rows."""

import ast
import csv
import dataclasses
import json
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import vitlab
from vitlab.cost import forward_flops
from vitlab.data.open import open_data
from vitlab.models.names import configure
from vitlab.models.vit import ViT
from vitlab.studies.axial import Timing
from vitlab.studies.catalog import STUDIES
from vitlab.studies.heads import Look
from vitlab.studies.request import make_request
from vitlab.studies.run import run_study
from vitlab.studies.study import Measure

QUIET = Console(quiet=True)
TINY = ("steps=2", "warmup=0", "batch=8", "device=cpu")


def run(name: str, out: Path, *rows: str) -> dict[str, dict[str, str]]:
    """The lines of a study's table.csv by row, after some of its rows were run with --quick."""
    words = TINY if name != "speed" else ("device=cpu",)
    _, failed = run_study(STUDIES[name], make_request(STUDIES[name], words, quick=True), out, only=rows, console=QUIET)
    assert not failed
    assert (out / "figure.png").stat().st_size > 5_000
    with (out / "table.csv").open() as file:
        return {line["row"]: line for line in csv.DictReader(file)}


def repeat(out: Path, job: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What the command gives that the page has for a measurement; files go to `out`."""
    words = shlex.split(json.loads((out / "jobs" / job / "result.json").read_text())["command"])
    assert words[:2] == ["python", "-c"]
    assert {type(part) for part in ast.parse(words[2]).body} == {ast.Import, ast.ImportFrom, ast.Expr}
    found: list[dict[str, float]] = []
    monkeypatch.setattr(sys, "argv", words[2:])
    monkeypatch.chdir(out)
    exec(words[2], {"print": found.append})
    return found[0]


@pytest.mark.slow
def test_bias_counts_predictions_that_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against images that the model's own `preprocess` reads and numpy moves."""
    line = run("bias", tmp_path, "ViT-1")["ViT-1"]
    folder = tmp_path / "jobs/ViT-1-seed-0/run"
    model, test = vitlab.load(folder).eval(), open_data("digits").test
    chosen = np.linspace(0, len(test) - 1, 40).astype(int)
    images = np.concatenate([model.preprocess(test.image(i)).numpy() for i in chosen.tolist()])

    def guesses(
        pictures: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    ) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        with torch.no_grad():
            return model(torch.from_numpy(pictures.copy())).argmax(1).numpy()

    plain = guesses(images)
    for pixels in (1, 4, 16):
        moved = [np.roll(images, step, axis) for step in (pixels, -pixels) for axis in (2, 3)]
        same = np.mean([guesses(pictures) == plain for pictures in moved])
        assert float(line[f"shift {pixels} px mean"]) == pytest.approx(same)
    assert all(0 <= float(line[f"{key} mean"]) <= 1 for key in ("tiles 8 px", "tiles 16 px", "no positions"))
    again = repeat(tmp_path, "ViT-1-seed-0-agreement", monkeypatch)
    assert again["shift 1 px"] == float(line["shift 1 px mean"])


def test_heads_that_attend_evenly_are_as_far_as_patches_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without queries and keys attention is spread evenly: the mean distance of a 4 x 4 grid of 16 pixels."""
    (cut := tmp_path / "jobs/hybrid-seed-0-distance/distance.npz").parent.mkdir(parents=True)
    cut.write_bytes(b"PK")  # of a job that was killed: no figure reads it
    line = run("heads", tmp_path, "ViT")["ViT"]
    stored = np.load(tmp_path / "jobs/ViT-seed-0-distance/distance.npz")
    assert stored["distance"].shape == (2, 2)
    assert float(line["first layer mean"]) == pytest.approx(stored["distance"][0].mean())
    folder = tmp_path / "jobs/ViT-seed-0/run"
    about = json.loads((folder / "recipe.json").read_text())
    about["recipe"]["data"] = f"pipe:touch {tmp_path}/ran"  # a stranger's folder: the request names the data
    (folder / "recipe.json").write_text(json.dumps(about))
    assert repeat(tmp_path, "ViT-seed-0-distance", monkeypatch)["first layer"] == float(line["first layer mean"])
    assert not (tmp_path / "ran").exists()
    model = vitlab.load(folder)
    assert isinstance(model, ViT)
    for name, weights in model.named_parameters():
        if "qkv" in name:
            torch.nn.init.zeros_(weights)
    vitlab.save(model, folder)
    found = Look(8, "cpu", ("data=digits",))((folder,), tmp_path)
    places = [(16 * y, 16 * x) for y in range(4) for x in range(4)]
    even = np.mean([np.hypot(a[0] - b[0], a[1] - b[1]) for a in places for b in places])
    assert float(stored["even"]) == pytest.approx(even)
    assert list(found.values()) == pytest.approx([even] * 4)


@pytest.mark.slow
def test_speed_is_measured_without_training(tmp_path: Path) -> None:
    lines = run("speed", tmp_path, "Ti16-32", "Ti16-64")
    done = [line for line in lines.values() if line["images/s mean"]]
    assert [line["row"] for line in done] == ["Ti16-32", "Ti16-64"]
    assert all(float(line[f"{key} mean"]) > 0 for line in done for key in ("images/s", "largest batch", "GFLOPs"))
    assert all(float(line["batch mean"]) in (1, 2, 4) for line in done)
    tokens, width, mlp = 5, 32, 64  # of two layers on 32 pixels, and a head of 1,000 classes
    layer = tokens * (4 * width * width + 2 * width * mlp) + 2 * tokens * tokens * width
    operations = 2 * (2 * layer + 4 * 16 * 16 * 3 * width + 1000 * width)
    assert float(lines["Ti16-32"]["GFLOPs mean"]) == pytest.approx(operations / 1e9)


def test_axial_models_differ_from_plain_ones_in_attention_alone() -> None:
    """A row each of both kinds of ViT and of the ResNet, as figure 13 has them."""
    request = make_request(STUDIES["axial"], ("device=cpu",))
    runs = {row.name: row.trained.settings() for row in STUDIES["axial"].rows(request, 0) if row.trained is not None}
    axial = {name for name in runs if name.startswith("axial-")}
    assert axial == {f"axial-{name}" for name in runs.keys() - axial} == {"axial-Ti16", "axial-Ti8", "axial-R50x1"}
    for name in axial:
        plain = runs[name.removeprefix("axial-")]
        settings = plain.model_settings | {"attention": "axial"}
        assert runs[name] == dataclasses.replace(plain, model_settings=settings)


@pytest.mark.parametrize("quick", [True, False])
def test_axial_models_are_timed_as_they_are_trained(quick: bool) -> None:
    """Without waiting for a run, and the same models: a training image costs three forward passes."""
    request = make_request(STUDIES["axial"], ("device=cpu",), quick=quick)
    for row in STUDIES["axial"].rows(request, 0):
        measure = next(job for job in row.jobs if isinstance(job, Measure))
        assert measure.needs == ()
        assert isinstance(measure.function, Timing)
        assert row.trained is not None
        cost = forward_flops(configure(measure.function.model, measure.function.settings))
        assert row.trained.flops == 3 * cost * row.trained.steps * row.trained.settings().batch


@pytest.mark.slow
def test_axial_attention_costs_what_two_blocks_cost(tmp_path: Path) -> None:
    lines = run("axial", tmp_path, "Ti8", "axial-Ti8")
    plain, axial = lines["Ti8"], lines["axial-Ti8"]
    assert 1.5 < float(axial["GFLOPs mean"]) / float(plain["GFLOPs mean"]) < 2  # a head and patches are one each
    assert all(float(line["ms an image mean"]) > 0 for line in (plain, axial))
    assert float(axial["flops"]) > float(plain["flops"])
