"""Transfer on small sets of colored pictures: the sweep, seeds, failures, continuing, and a run repeated by hand."""

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from preloaded import program
from rich.console import Console

import vitlab
from vitlab.errors import UserError
from vitlab.studies.transfer import TARGETS, Target, Transfer, Transferred, choose_targets, run_transfer
from vitlab.training.lock import folder_lock
from vitlab.training.loop import train
from vitlab.training.recipe import change
from vitlab.training.recipes import FINETUNE, find

QUIET = Console(quiet=True)
SMALL = ("image_size=16", "batch=8", "steps=3", "lr=0.01,0.1", "seeds=2", "device=cpu", "workers=0", "compile=no")
Command = Callable[..., tuple[int, str, str]]


def save_run(folder: Path) -> Path:
    torch.manual_seed(0)
    model = vitlab.create("Ti/4", classes=3, image_size=16, depth=1, width=16, mlp=16, heads=2)
    vitlab.save(model, folder, labels=("a", "b", "c"))
    return folder


def make_set(folder: Path, classes: int = 3, each: int = 12) -> None:
    """Pictures of one color a class, with noise, in a train and a test folder."""
    rng = np.random.default_rng(0)
    for split, count in (("train", each), ("test", 4)):
        for i in range(classes):
            (folder / split / f"class {i}").mkdir(parents=True)
            for j in range(count):
                noise = rng.integers(0, 120, (16, 16, 3)) + 130 * (np.arange(3) == i % 3)
                Image.fromarray(noise.astype(np.uint8)).save(folder / split / f"class {i}" / f"{j}.png")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_run(tmp_path_factory.mktemp("weights") / "run")


def test_the_targets_are_the_papers_table() -> None:
    assert {target.recipe for target in TARGETS} == {f"{row[0]}-finetune" for row in FINETUNE}
    assert [target.name for target in choose_targets("flowers, pets")] == ["pets", "flowers"]
    assert choose_targets("all") == TARGETS
    with pytest.raises(UserError, match="there is no target 'pet'; did you mean 'pets'"):
        choose_targets("pet")


def test_a_plan_is_the_row_of_the_table(run: Path, tmp_path: Path) -> None:
    """Without settings: the paper's length, learning rates, warm-up and size, three seeds."""
    made = Transfer(str(run), vitlab.load(run), tmp_path, (), False, False, QUIET)
    for name, steps, rates, warmup in (
        ("imagenet", 20_000, (0.003, 0.01, 0.03, 0.06), 500),
        ("cifar100", 10_000, (0.001, 0.003, 0.01, 0.03), 500),
        ("pets", 500, (0.001, 0.003, 0.01, 0.03), 100),
        ("vtab", 2_500, (), 500),
    ):
        plan = made.plan(choose_targets(name)[0], "somewhere")
        r = plan.recipe
        assert (r.steps, plan.grid.get("lr", ()), r.warmup, plan.seeds) == (steps, rates, warmup, 3)
        assert (r.optimizer, r.batch, r.image_size, r.decay, r.clip, r.weight_decay) == (
            *("sgd", 512, (384, 384), "cosine", 1, 0),
        )
    assert made.plan(TARGETS[-1], "x").recipe.lr == 0.01


def test_data_is_found_by_name(tmp_path: Path) -> None:
    pets = choose_targets("pets")[0]
    assert pets.find(tmp_path) is None
    (tmp_path / "oxford-pets.parquet").touch()
    assert pets.find(tmp_path) == str(tmp_path / "oxford-pets.parquet")
    (tmp_path / "pets").mkdir()
    assert pets.find(tmp_path) == str(tmp_path / "pets")
    (tmp_path / "cifar-10-python.tar.gz").touch()
    assert choose_targets("cifar10")[0].find(tmp_path) == str(tmp_path / "cifar-10-python.tar.gz")
    assert choose_targets("cifar100")[0].find(tmp_path) is None


def test_what_cannot_start(run: Path, tmp_path: Path) -> None:
    for root, settings, message in (
        (None, (), "name the folder of data sets with --data FOLDER, or try --quick"),
        (tmp_path / "nowhere", (), "there is no folder"),
        (tmp_path, (), "none of the targets is in"),
        (tmp_path, ("epochs=3",), "'epochs' cannot be set here: steps= sets the length"),
        (tmp_path, ("weight_decay=0,0.1",), "only lr can have several values here, not weight_decay"),
        (tmp_path, ("data=digits",), "'data' cannot be set here: the paper's table and --data set it"),
    ):
        with pytest.raises(UserError, match=message):
            run_transfer(str(run), root, tmp_path / "out", settings=settings, console=QUIET)


def test_one_process_at_a_time_writes_the_results(run: Path, tmp_path: Path) -> None:
    with folder_lock(tmp_path / "out"), pytest.raises(UserError, match="choose another --out"):
        run_transfer(str(run), None, tmp_path / "out", quick=True, console=QUIET)


def test_any_error_ends_its_target_alone(run: Path, tmp_path: Path) -> None:
    class Broken(Transfer):
        def run_target(self, target: Target, data: str) -> Transferred:
            raise RuntimeError("an odd file")

    made = Broken(str(run), vitlab.load(run), tmp_path, (), False, False, QUIET)
    made.run(choose_targets("pets")[0], "somewhere", "[1/1]")
    assert made.failed["pets"].startswith("RuntimeError: an odd file")
    assert "Traceback" in (tmp_path / "pets/error.txt").read_text()


@pytest.mark.slow
def test_targets_that_are_there_run_and_one_that_fails_stops_no_other(
    run: Path, tmp_path: Path, command: Command
) -> None:
    root, out = tmp_path / "sets", tmp_path / "out"
    make_set(root / "pets")
    make_set(root / "flowers")
    for file in sorted((root / "pets").rglob("*.png")):
        file.write_bytes(b"no image")
    words = ["transfer", str(run), "--data", str(root), "--out", str(out), *SMALL]
    code, text, err = command(*words)
    assert code == 1
    assert "some targets did not finish (pets)" in err
    assert "CIFAR-10 is left out: there is no cifar-10" in text
    stored = json.loads((out / "results.json").read_text())["targets"]
    assert list(stored) == ["flowers"]
    assert len(stored["flowers"]["accuracies"]) == 2
    # once the images are back, the same command does what is left
    logs = {path: path.stat().st_mtime_ns for path in (out / "flowers").rglob("log.jsonl")}
    for folder in ("train", "test"):
        for file in sorted((root / "flowers" / folder).rglob("*.png")):
            target = root / "pets" / file.relative_to(root / "flowers")
            target.write_bytes(file.read_bytes())
    code, text, err = command(*words)
    assert code == 0, err
    assert {path: path.stat().st_mtime_ns for path in logs} == logs  # nothing was trained again
    stored = json.loads((out / "results.json").read_text())["targets"]
    assert stored["pets"]["accuracies"] == stored["flowers"]["accuracies"]  # the same images
    mean = np.mean(stored["pets"]["accuracies"])
    assert stored["pets"]["std"] == pytest.approx(np.std(stored["pets"]["accuracies"], ddof=1))
    assert f"| Oxford-IIIT Pets | 12 | {stored['pets']['lr']:g} | 2 | {mean:.2%} ±" in (out / "table.md").read_text()
    assert not list(out.rglob("model.safetensors"))
    code, _, err = command(*words, "momentum=0.8")
    assert (code, "were made with other settings" in err) == (1, True)
    # another order, other workers and more seeds are the same work, and some more
    more = [pair for pair in reversed(SMALL) if not pair.startswith(("seeds=", "workers="))] + ["workers=1", "seeds=3"]
    code, _, err = command(*words[: -len(SMALL)], *more)
    assert code == 0, err
    assert {path: path.stat().st_mtime_ns for path in logs} == logs
    first, stored = stored, json.loads((out / "results.json").read_text())["targets"]
    for name in ("pets", "flowers"):
        assert len(stored[name]["accuracies"]) == 3
        assert stored[name]["accuracies"][:2] == first[name]["accuracies"]
    code, _, err = command(*words)
    assert (code, "were made with 3 seeds, not 2" in err) == (1, True)


@pytest.mark.slow
def test_a_row_is_what_train_gives_by_hand(run: Path, tmp_path: Path) -> None:
    make_set(tmp_path / "sets" / "pets")
    done = run_transfer(str(run), tmp_path / "sets", tmp_path / "out", settings=SMALL, keep=True, console=QUIET)
    row = done.results["pets"]
    settings = {"image_size": (16, 16), "batch": 8, "steps": 3, "warmup": 0, "device": "cpu", "workers": 0}
    settings |= {"compile": "no", "evaluate_every": 3, "validation": 0.0, "head": "new", "weights": str(run)}
    recipe = change(find("pets-finetune").recipe, data=str(tmp_path / "sets" / "pets"), lr=row.lr, **settings)
    for seed, accuracy in enumerate(row.accuracies):
        report = train(change(recipe, seed=seed), tmp_path / f"hand-{seed}", console=QUIET).report
        assert report["accuracy"] == accuracy
        theirs, ours = (vitlab.load(f) for f in (tmp_path / "out" / "pets" / f"seed-{seed}", tmp_path / f"hand-{seed}"))
        assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))


def make_vtab(root: Path) -> None:
    for task in ("cifar", "kitti"):
        folder = root / "vtab-1k" / task
        folder.mkdir(parents=True)
        for i in range(8):
            pixels = np.random.default_rng(i).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
        for name in ("train800", "val200", "train800val200", "test"):
            (folder / f"{name}.txt").write_text("".join(f"{i}.png {i % 4}\n" for i in range(8)))


@pytest.mark.slow
def test_vtab_is_run_once_for_each_seed(run: Path, tmp_path: Path) -> None:
    make_vtab(tmp_path / "sets")
    settings = tuple(pair for pair in SMALL if not pair.startswith("lr="))
    done = run_transfer(str(run), tmp_path / "sets", tmp_path / "out", settings=settings, console=QUIET)
    row = done.results["vtab"]
    assert (row.images, len(row.accuracies), row.lr) == (2, 2, 0.01)
    stored = [json.loads((tmp_path / "out/vtab" / f"seed-{s}/results.json").read_text()) for s in (0, 1)]
    assert row.accuracies == tuple(each["means"]["all"]["mean"] for each in stored)


@pytest.mark.slow
def test_vtab_has_the_settings_and_a_learning_rate_for_each_task(run: Path, tmp_path: Path) -> None:
    make_vtab(tmp_path / "sets")
    done = run_transfer(
        str(run), tmp_path / "sets", tmp_path / "out", settings=(*SMALL, "warmup=2", "seeds=1"), console=QUIET
    )
    assert done.results["vtab"].lr is None
    assert "| VTAB (19 tasks) | 2 of 19 tasks | by task | 1 |" in (tmp_path / "out/table.md").read_text()
    for task in ("cifar", "kitti"):
        recipe = json.loads((tmp_path / f"out/vtab/seed-0/{task}/recipe.json").read_text())["recipe"]
        assert recipe["warmup"] == 2
        assert recipe["lr"] in (0.01, 0.1)


@pytest.mark.slow
def test_killed_at_any_moment_it_ends_with_the_same_table(run: Path, tmp_path: Path) -> None:
    words = [str(program("vitlab")), "transfer", str(run), "--quick"]
    words += ["steps=40", "checkpoint_every=2", "device=cpu", "workers=0", "--out"]
    began = time.monotonic()
    subprocess.run([*words, str(tmp_path / "plain")], check=True, capture_output=True)
    took, ends = time.monotonic() - began, []
    for share in (0.15, 0.3, 0.45):
        with subprocess.Popen([*words, str(tmp_path / "killed")], stdout=subprocess.PIPE) as process:
            time.sleep(share * took)
            process.kill()
            process.communicate()  # until its work has ended, too
        ends.append(process.returncode)
    assert ends[:2] == [-signal.SIGKILL] * 2  # on a machine that becomes faster the last one may be too late
    subprocess.run([*words, str(tmp_path / "killed")], check=True, capture_output=True)
    tables = [(tmp_path / name / "table.md").read_text() for name in ("plain", "killed")]
    assert tables[0] == tables[1]


@pytest.mark.slow
def test_results_on_other_images_do_not_come_together(run: Path, tmp_path: Path) -> None:
    for root, each in (("sets", 6), ("others", 8)):
        make_set(tmp_path / root / "pets", each=each)
    short = ("image_size=16", "batch=8", "steps=1", "lr=0.01", "device=cpu", "workers=0", "compile=no")
    out = tmp_path / "out"

    def go_on(root: str, seeds: int, accept: bool = False) -> Transfer:
        settings = (*short, f"seeds={seeds}")
        return run_transfer(str(run), tmp_path / root, out, settings=settings, accept=accept, console=QUIET)

    first = go_on("sets", 1).results["pets"]
    other = go_on("others", 2)
    assert "has changed" in other.failed["pets"]
    assert other.results["pets"] == first
    (tmp_path / "sets").rename(tmp_path / "moved")  # the same images
    assert not go_on("moved", 2).failed
    assert len(go_on("others", 3, accept=True).results["pets"].accuracies) == 3


def test_places_are_distinct() -> None:
    """No folder could be two targets'."""
    places = [place for target in TARGETS for place in target.places]
    assert len(places) == len(set(places))
    assert all(isinstance(target, Target) and target.places for target in TARGETS)
