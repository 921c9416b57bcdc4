"""VTAB: labels by hand, lists, and the real study on two small tasks made of colored shapes."""

import io
import json
import os
import shutil
import signal
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from rich.console import Console
from safetensors.torch import load_file

import vitlab
from vitlab.cli import main
from vitlab.errors import Stopped, UserError
from vitlab.studies import vtab_labels as labels
from vitlab.studies.vtab import Result, Study, means, run_vtab
from vitlab.studies.vtab_tasks import GROUPS, TASKS, choose, open_task, read_list, write_lists

QUIET = Console(quiet=True)
SMALL = ("image_size=16", "batch=8", "device=cpu", "log_every=1", "checkpoint_every=2", "workers=0")
TWO = choose("patch_camelyon,kitti")  # 2 and 4 classes
COLORS = ("red", "blue", "green", "yellow")


# ---- labels


def test_clevr_counts() -> None:
    assert [labels.clevr_count(n) for n in range(3, 11)] == list(range(8))
    for wrong in (2, 11):
        with pytest.raises(UserError, match="from 3 to 10"):
            labels.clevr_count(wrong)


@pytest.mark.parametrize(
    ("depth", "label"), [(0.1, 0), (7.99, 0), (8.0, 0), (8.01, 1), (8.7, 2), (9.2, 3), (9.5, 3), (9.9, 4), (12.0, 5)]
)
def test_clevr_distances(depth: float, label: int) -> None:
    assert labels.clevr_distance([depth]) == label
    assert labels.clevr_distance([depth + 3, depth, 50.0]) == label  # the closest decides


def test_clevr_distances_have_six_classes() -> None:
    found = {labels.clevr_distance([float(d)]) for d in np.linspace(0.1, 99, 500)}
    assert found == set(range(6))
    for wrong in ([], [0.0], [-1.0], [101.0], [float("nan")]):
        with pytest.raises(UserError):
            labels.clevr_distance(wrong)


@pytest.mark.parametrize(
    ("kinds", "depths", "label"),
    [
        (["Car"], [7.9], 0),
        (["Car", "Van"], [30.0, 12.0], 1),
        (["Truck"], [25.0], 2),
        ([], [], 3),
        (["Pedestrian", "Cyclist"], [4.0, 5.0], 3),  # no vehicle
        (["Pedestrian", "Car"], [4.0, 15.0], 1),
        (["DontCare"], [-1000.0], 3),
    ],
)
def test_kitti_distances(kinds: list[str], depths: list[float], label: int) -> None:
    assert labels.kitti_distance(kinds, depths) == label


def test_dsprites_bins_are_equal_parts() -> None:
    for derive, count in ((labels.dsprites_location, 32), (labels.dsprites_orientation, 40)):
        found = [derive(i) for i in range(count)]
        assert found == [int(Fraction(i, count) * 16) for i in range(count)]
        assert set(found) == set(range(16))
        with pytest.raises(UserError):
            derive(count)


def test_norb_views() -> None:
    assert [labels.norb_azimuth(a) for a in range(0, 36, 2)] == list(range(18))
    assert [labels.norb_elevation(e) for e in range(9)] == list(range(9))
    for wrong in (1, 36, -2):
        with pytest.raises(UserError):
            labels.norb_azimuth(wrong)
    with pytest.raises(UserError):
        labels.norb_elevation(9)


# ---- tasks and lists


def test_the_nineteen_tasks() -> None:
    assert len(TASKS) == len({task.name for task in TASKS}) == 19
    assert [sum(task.group == group for task in TASKS) for group in GROUPS] == [7, 4, 8]
    derived = {"clevr_count": 8, "clevr_dist": 6, "kitti": 4, "dsprites_loc": 16, "dsprites_ori": 16}
    derived |= {"smallnorb_azi": 18, "smallnorb_ele": 9, "dmlab": 6}
    assert {task.name: task.classes for task in TASKS if task.name in derived} == derived
    not_flipped = {"dsprites_loc", "dsprites_ori", "smallnorb_azi", "svhn"}  # a mirror image is of another class
    assert {task.name for task in TASKS if not task.flip} == not_flipped
    assert all(not task.crop for task in TASKS if task.group == "structured")


def test_tasks_are_chosen_by_name_and_group() -> None:
    assert choose("all") == TASKS
    assert [task.name for task in choose("kitti, dtd")] == ["dtd", "kitti"]
    assert len(choose("specialized,svhn,eurosat")) == 5
    with pytest.raises(UserError, match="did you mean 'kitti'"):
        choose("kiti")


def test_lists_are_drawn_once_and_for_all(tmp_path: Path) -> None:
    paths = [f"images/a picture {i:04d}.png" for i in range(1300)]
    classes = [i % 4 for i in range(1300)]
    write_lists(tmp_path / "a", paths, classes, seed=3)
    write_lists(tmp_path / "b", paths[::-1], classes[::-1], seed=3)
    write_lists(tmp_path / "c", paths, classes, seed=4)
    found = {name: read_list(tmp_path / "a" / f"{name}.txt", 4) for name in LISTS}
    assert [len(found[name]) for name in LISTS] == [800, 200, 1000, 300]
    assert set(found["train800"]) | set(found["val200"]) == set(found["train800val200"])
    assert set(found["train800val200"]) | set(found["test"]) == set(zip(paths, classes, strict=True))
    for name in LISTS:
        assert (tmp_path / "a" / f"{name}.txt").read_text() == (tmp_path / "b" / f"{name}.txt").read_text()
    assert (tmp_path / "a" / "test.txt").read_text() != (tmp_path / "c" / "test.txt").read_text()
    share = np.mean([label == 0 for _, label in found["train800val200"]])
    assert 0.2 < share < 0.3


LISTS = ("train800", "val200", "train800val200", "test")


def test_a_test_split_of_its_own(tmp_path: Path) -> None:
    write_lists(tmp_path, [f"{i}.png" for i in range(1000)], [0] * 1000, test=(["t.png"], [1]))
    assert read_list(tmp_path / "test.txt", 2) == [("t.png", 1)]
    with pytest.raises(UserError, match="there are 999"):
        write_lists(tmp_path, [f"{i}.png" for i in range(999)], [0] * 999, test=(["t.png"], [1]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.png 0\nb.png\n", "line 2"),
        ("a.png 0\nb.png cat\n", "line 2"),
        ("a.png 4\n", "class 4; there are 0 to 3"),
        ("a.png -1\n", "line 1"),
        ("\n\n", "lists no images"),
    ],
)
def test_bad_lists_are_an_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "test.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_list(path, 4)
    assert str(path) in str(error.value)


# ---- the study


def shape(color: str, seed: int) -> Image.Image:
    rng = np.random.default_rng(seed)
    image = Image.new("RGB", (24, 16), "white")
    x, y, r = (int(v) for v in rng.integers((8, 6, 3), (16, 10, 6)))
    draw = ImageDraw.Draw(image)
    (draw.ellipse if seed % 2 else draw.rectangle)((x - r, y - r, x + r, y + r), fill=color)
    return image


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tasks, the class of an image being its shape's color; 30 images to train on and 13 to test."""
    place = tmp_path_factory.mktemp("vtab-1k")
    for task in TWO:
        lines = []
        (place / task.name / "images").mkdir(parents=True)
        for i in range(43):
            shape(COLORS[i % task.classes], i).save(place / task.name / "images" / f"{i}.png")
            lines.append(f"images/{i}.png {i % task.classes}\n")
        cuts = {"train800": lines[:20], "val200": lines[20:30], "train800val200": lines[:30], "test": lines[30:]}
        for name, some in cuts.items():
            (place / task.name / f"{name}.txt").write_text("".join(some))
    return place


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    model = vitlab.create("Ti/8", classes=3, image_size=24, depth=1, width=16, mlp=16, heads=2)
    folder = tmp_path_factory.mktemp("weights") / "small"
    vitlab.save(model, folder)
    return str(folder)


def study(weights: str, root: Path, out: Path, **more: Any) -> Study:
    options: dict[str, Any] = {"tasks": TWO, "steps": 5, "settings": SMALL, "console": QUIET}
    return run_vtab(weights, root, out, **(options | more))


def test_the_accuracy_is_that_of_the_model_it_leaves(weights: str, root: Path, tmp_path: Path) -> None:
    settings = (*SMALL, "lr=0.1")
    found = study(weights, root, tmp_path / "out", steps=60, settings=settings, keep=True)
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    for task in TWO:
        model = vitlab.load(tmp_path / "out" / task.name)
        right = []
        for path, label in read_list(root / task.name / "test.txt", task.classes):
            image = Image.open(root / task.name / path).resize((16, 16), Image.Resampling.BILINEAR)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1
            with torch.no_grad():
                right.append(model(pixels).argmax().item() == label)
        assert found.results[task.name].accuracy == pytest.approx(np.mean(right))
        assert results["tasks"][task.name]["images"] == 13
    assert found.results["patch_camelyon"].accuracy > 0.9  # red or blue
    both = [result.accuracy for result in found.results.values()]
    assert results["means"]["all"] == {"mean": pytest.approx(np.mean(both)), "done": 2, "of": 19}
    assert results["means"]["structured"] == {"mean": found.results["kitti"].accuracy, "done": 1, "of": 8}
    assert "natural" not in results["means"]


def test_the_recipe_is_the_papers(weights: str, root: Path, tmp_path: Path) -> None:
    study(weights, root, tmp_path / "out", steps=5)
    recipe = json.loads((tmp_path / "out" / "kitti" / "recipe.json").read_text())["recipe"]
    assert (recipe["optimizer"], recipe["momentum"], recipe["lr"], recipe["decay"]) == ("sgd", 0.9, 0.01, "cosine")
    assert (recipe["weight_decay"], recipe["clip"], recipe["warmup"]) == (0.0, 1.0, 1)
    assert (recipe["augment"]["crop"], recipe["augment"]["flip"]) == ("none", True)  # a crop may lose the vehicle
    assert (recipe["preprocess"]["fit"], recipe["head"]) == ("stretch", "new")
    other = json.loads((tmp_path / "out" / "patch_camelyon" / "recipe.json").read_text())["recipe"]
    assert other["augment"]["crop"] == "resize"
    assert not (tmp_path / "out" / "kitti" / "model.safetensors").exists()  # without keep


def test_the_defaults_are_the_papers(weights: str) -> None:
    from vitlab.studies.vtab import base_recipe

    recipe = base_recipe(weights, vitlab.load(weights), 2500, ())
    assert (recipe.batch, recipe.steps, recipe.warmup, recipe.image_size) == (512, 2500, 500, (384, 384))
    with pytest.raises(UserError, match="'steps' cannot be set here: --steps sets it"):
        base_recipe(weights, vitlab.load(weights), 2500, ("steps=3",))


def test_finished_tasks_are_not_run_again(weights: str, root: Path, tmp_path: Path) -> None:
    place = shutil.copytree(root, tmp_path / "data")
    first = study(weights, place, tmp_path / "out", tasks=choose("kitti"))
    shutil.rmtree(place / "kitti")
    again = study(weights, place, tmp_path / "out")
    assert again.results["kitti"] == first.results["kitti"]
    assert set(again.results) == {"kitti", "patch_camelyon"}


class Interrupting(Console):
    """Ctrl-C at the first progress line of the second task."""

    def print(self, *objects: Any, **options: Any) -> None:
        line = str(objects[0])
        self.second = getattr(self, "second", False) or line.startswith("[2/2]")
        if self.second and line.startswith("step "):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.slow
def test_a_result_is_not_shown_for_other_images(weights: str, root: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    shutil.copytree(root, other)
    done = run_vtab(weights, root, out, TWO[:1], steps=1, settings=SMALL, console=QUIET)
    assert run_vtab(weights, other, out, TWO[:1], steps=1, settings=SMALL, console=QUIET).results == done.results
    lists = other / TWO[0].name / "test.txt"
    first, *rest = lists.read_text().splitlines()
    path, label = first.rsplit(" ", 1)
    lists.write_text("\n".join([f"{path} {1 - int(label)}", *rest]) + "\n")
    with pytest.raises(UserError, match=f"the data of {TWO[0].name} has changed since its result"):
        run_vtab(weights, other, out, TWO[:1], steps=1, settings=SMALL, console=QUIET)
    options: dict[str, Any] = {"steps": 1, "settings": SMALL, "console": QUIET}
    run_vtab(weights, other, out, TWO[:1], accept=True, **options)
    kept = run_vtab(weights, other, out, TWO[:1], **options).results[TWO[0].name]  # as accepted
    assert replace(kept, data="") == replace(done.results[TWO[0].name], data="")
    text = lists.read_text()
    lists.write_text("wrong")  # it cannot be compared, and stops no other task
    assert run_vtab(weights, other, out, TWO[:1], **options).results[TWO[0].name] == kept
    lists.write_text(text)
    shutil.rmtree(other / TWO[0].name / "images")  # the lists alone are left
    assert run_vtab(weights, other, out, TWO[:1], **options).results[TWO[0].name] == kept


@pytest.mark.slow
def test_a_stopped_study_resumes(weights: str, root: Path, tmp_path: Path) -> None:
    study(weights, root, tmp_path / "once", steps=12, keep=True)
    with pytest.raises(Stopped, match=r"kitti: stopped at step \d+ of 12.*the same command resumes"):
        study(weights, root, tmp_path / "cut", steps=12, keep=True, console=Interrupting(file=sys.stderr))
    assert set(json.loads((tmp_path / "cut" / "results.json").read_text())["tasks"]) == {"patch_camelyon"}
    study(weights, root, tmp_path / "cut", steps=12, keep=True)
    one, two = (load_file(tmp_path / name / "kitti" / "model.safetensors") for name in ("once", "cut"))
    assert all(torch.equal(one[key], two[key]) for key in one)


def test_another_recipe_or_model_needs_another_folder(weights: str, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    study(weights, root, out, tasks=choose("kitti"), steps=2)
    with pytest.raises(UserError, match="steps"):
        study(weights, root, out, tasks=choose("kitti"), steps=3)
    with pytest.raises(UserError, match="other learning rates"):
        study(weights, root, out, tasks=choose("kitti"), steps=2, rates=(0.1,))
    model = vitlab.load(weights)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    changed = tmp_path / "small"
    vitlab.save(model, changed)
    shutil.copytree(out, tmp_path / "copy")
    results = json.loads((tmp_path / "copy" / "results.json").read_text())
    results["recipe"]["weights"] = str(changed)
    (tmp_path / "copy" / "results.json").write_text(json.dumps(results))
    with pytest.raises(UserError, match="other weights"):
        study(str(changed), root, tmp_path / "copy", tasks=choose("kitti"), steps=2)
    (out / "results.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        study(weights, root, out, tasks=choose("kitti"), steps=2)


@pytest.mark.slow
def test_tuning_takes_the_best_on_the_images_set_aside(weights: str, root: Path, tmp_path: Path) -> None:
    found = study(weights, root, tmp_path / "out", tasks=choose("patch_camelyon"), steps=40, rates=(1e-6, 0.1))
    result = found.results["patch_camelyon"]
    assert set(result.trials) == {"1e-06", "0.1"}
    assert (result.trials["0.1"] or 0) > (result.trials["1e-06"] or 0)
    assert result.lr == 0.1
    assert json.loads((tmp_path / "out" / "patch_camelyon" / "recipe.json").read_text())["recipe"]["lr"] == 0.1
    assert not list((tmp_path / "out" / "patch_camelyon").glob("lr-*"))


@pytest.mark.slow
def test_learning_rates_are_not_compared_across_changed_images(weights: str, root: Path, tmp_path: Path) -> None:
    other, out, output = tmp_path / "other", tmp_path / "out", io.StringIO()
    shutil.copytree(root, other)
    options: dict[str, Any] = {"steps": 2, "settings": SMALL, "rates": (0.01, 0.1)}
    run_vtab(weights, other, out, TWO[:1], console=QUIET, **options)
    (out / "results.json").unlink()  # as if it had been stopped before
    scores = json.loads((out / TWO[0].name / "tuning.json").read_text())["trials"]
    assert set(scores) == {"0.01", "0.1"}
    run_vtab(weights, other, out, TWO[:1], console=Console(file=output, width=200), **options)
    assert "tried again" not in output.getvalue()
    lists = other / TWO[0].name / "val200.txt"
    first, *rest = lists.read_text().splitlines()
    path, label = first.rsplit(" ", 1)
    lists.write_text("\n".join([f"{path} {1 - int(label)}", *rest]) + "\n")
    (out / "results.json").unlink()
    run_vtab(weights, other, out, TWO[:1], console=Console(file=output, width=200), accept=True, **options)
    assert f"{TWO[0].name}: its images have changed, so all learning rates are tried again" in output.getvalue()
    assert output.getvalue().count("images set aside") == 2


def test_results_do_not_go_among_the_data(weights: str, root: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(root, tmp_path / "vtab"))
    with pytest.raises(UserError, match="the results would be written among the data"):
        run_vtab(weights, place, tmp_path / "runs" / ".." / "vtab", TWO[:1], rates=(0.1,), console=QUIET)
    assert sorted(p.name for p in place.rglob("*")) == sorted(p.name for p in root.rglob("*"))


@pytest.mark.slow
def test_tuning_removes_nothing_of_others(weights: str, root: Path, tmp_path: Path) -> None:
    """Neither files nor a run that lies in the folder of a task, whatever has become of the images."""
    folder = tmp_path / "out" / TWO[0].name
    study(weights, root, tmp_path / "first", tasks=TWO[1:], steps=2, keep=True)
    shutil.copytree(tmp_path / "first" / TWO[1].name, folder)
    (folder / "notes.txt").write_text("mine")
    (folder / "tuning.json").write_text(json.dumps({"data": "others", "trials": {}}))
    written = ("tuning.json", ".lock")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name not in written}
    found = study(weights, root, tmp_path / "out", tasks=TWO[:1], steps=2, rates=(0.01, 0.1))
    assert "2" in found.failed[TWO[0].name]  # the run there has other classes
    assert {path: path.read_bytes() for path in before} == before


def test_tuning_trains_on_the_eight_hundred(root: Path) -> None:
    tuning, final = open_task(root, TWO[0], tuning=True), open_task(root, TWO[0])
    assert [len(tuning.train), len(tuning.test), len(final.train), len(final.test)] == [20, 10, 30, 13]
    names = [{source.name(i) for i in range(len(source))} for source in (tuning.train, tuning.test, final.train)]
    assert names[0] | names[1] == names[2]
    assert not names[0] & names[1]


def test_means_are_over_what_ran() -> None:
    results = {
        name: Result(accuracy, 10, 0.01, 1.0) for name, accuracy in (("dtd", 0.5), ("svhn", 0.7), ("kitti", 0.3))
    }
    found = means(results)
    assert found["natural"] == {"mean": pytest.approx(0.6), "done": 2, "of": 7}
    assert found["all"] == {"mean": pytest.approx(0.5), "done": 3, "of": 19}
    assert means({}) == {}


# ---- the command


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "argv", ["vitlab", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0)


def test_missing_tasks_are_listed_and_the_rest_runs(
    weights: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--tasks", "structured", "--data", str(root), "--out", str(tmp_path / "out"), "--steps", "5"]
    assert run_command(monkeypatch, "vtab", weights, *SMALL, *words) == 0
    printed = capsys.readouterr().out
    for task in choose("structured"):
        named = f"{task.name} is left out" in printed and task.origin in printed
        assert named == (task.name != "kitti")
    assert "structured, 1 of 8" in printed
    assert "mean of 1 of the 19" in printed
    assert "is not comparable to published numbers" in printed  # 30 images are not 1,000


def test_no_tasks_are_an_error(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run_command(monkeypatch, "vtab", weights, "--data", str(tmp_path / "none"), "--out", str(tmp_path / "out")) == 1
    )
    printed = capsys.readouterr()
    assert "none of these tasks is in" in printed.err
    assert printed.out.count("is left out") == 19
    assert not (tmp_path / "out").exists()


def test_a_broken_task_does_not_stop_the_others(
    weights: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place = shutil.copytree(root, tmp_path / "data")
    bad = place / "patch_camelyon" / "images" / "35.png"
    bad.write_bytes(b"no image")
    words = ["--tasks", "patch_camelyon,kitti", "--data", str(place), "--out", str(tmp_path / "out"), "--steps", "4"]
    assert run_command(monkeypatch, "vtab", weights, *SMALL, *words) == 1
    printed = capsys.readouterr()
    assert str(bad) in printed.out
    assert "1 task did not finish (patch_camelyon)" in printed.err
    assert set(json.loads((tmp_path / "out" / "results.json").read_text())["tasks"]) == {"kitti"}
    bad.unlink()
    assert run_command(monkeypatch, "vtab", weights, *SMALL, *words) == 1
    assert "1 of the 13 images" in capsys.readouterr().out
    shape(COLORS[35 % 2], 35).save(bad)
    assert run_command(monkeypatch, "vtab", weights, *SMALL, *words) == 0


@pytest.mark.parametrize("words", [["--tune", "fast"], ["--tune", "0.1,-1"], ["--steps", "0"], ["--tasks", "kiti"]])
def test_bad_options_are_one_line(
    weights: str, root: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(monkeypatch, "vtab", weights, "--data", str(root), *words) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
