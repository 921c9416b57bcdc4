"""Settings chosen on held-out images, and the best of them repeated: what is run, on which images, and what is kept."""

import dataclasses
import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from rich.console import Console
from small_runs import SMALL, few_digits, skip_report
from test_received import photos as make_photos

import vitlab
from vitlab.errors import UserError
from vitlab.training import search
from vitlab.training.loop import train
from vitlab.training.recipe import change
from vitlab.training.recorder import Diverged
from vitlab.training.search import Plan, Search, best_of, result_rows, run_search, split_pairs, trial_data, try_each
from vitlab.training.trainer import Trainer

Command = Callable[..., tuple[int, str, str]]
QUIET = Console(quiet=True)
TINY = change(SMALL, steps=6, warmup=1, micro=32, checkpoint_every=2, threads=1)


def test_numbers_with_several_values_are_a_grid() -> None:
    words = [
        "lr=0.003,0.01,0.003",
        "area=0.5,1",
        "randaugment=2,10",
        "image_size=8,8",
        "depth=1,2",
        "seeds=3",
    ]
    plain, grid, seeds = split_pairs(words)
    assert plain == ["area=0.5,1", "randaugment=2,10", "image_size=8,8"]
    assert (grid, seeds) == ({"lr": (0.003, 0.01), "depth": (1, 2)}, 3)
    trials = Plan(TINY, grid, 1).trials
    assert list(trials) == ["lr=0.003 depth=1", "lr=0.003 depth=2", "lr=0.01 depth=1", "lr=0.01 depth=2"]
    assert trials["lr=0.01 depth=2"] == change(TINY, lr=0.01, depth=2)
    assert split_pairs(["lr=0.1"]) == (["lr=0.1"], {}, None)
    assert split_pairs(["lr=0.1,0.2", "seeds=3", "lr=0.1", "seeds=2"]) == (["lr=0.1"], {}, 2)  # the last of each
    assert split_pairs(["lr=0.3", "lr=0.1,0.2"]) == ([], {"lr": (0.1, 0.2)}, None)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("seed=0,1,2", "seeds=3 runs three"),
        ("validation=0.1,0.2", "give validation one value"),
        ("lr=0.1,", "lr must be a number, not ''"),
        ("lr=0.1,-1", "lr must be at least 0"),
        ("seeds=0", "seeds must be at least 1"),
        ("seeds=many", "seeds must be an integer"),
    ],
)
def test_wrong_values_are_named(pair: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        split_pairs([pair])


def test_trials_never_see_the_test_split() -> None:
    own = few_digits()
    assert own.validation is not None
    assert trial_data(own, 0.1).test is own.validation
    assert trial_data(own, 0.1).train is own.train
    held = trial_data(dataclasses.replace(own, validation=None), 0.25)
    names = [{source.name(i) for i in range(len(source))} for source in (held.train, held.test, own.train, own.test)]
    assert names[0] | names[1] == names[2]
    assert not names[0] & names[1]
    assert not (names[0] | names[1]) & names[3]
    assert held.validation is None


def test_the_best_of_those_that_did_not_diverge(tmp_path: Path) -> None:
    made: list[str] = []

    def run(name: str, folder: Path) -> float:
        folder.mkdir()
        made.append(name)
        if name == "c":
            raise Diverged("no number")
        return {"b": 0.5, "d": 0.5}[name]

    scores: search.Scores = {"a": 0.25}
    stored: list[search.Scores] = []
    try_each({name: tmp_path / name for name in "abcd"}, scores, run, lambda: stored.append(dict(scores)))
    assert made == ["b", "c", "d"]  # the first is known
    assert scores == {"a": 0.25, "b": 0.5, "c": None, "d": 0.5}
    assert [len(each) for each in stored] == [2, 3, 4]
    assert not list(tmp_path.iterdir())
    assert best_of(scores) == "b"
    with pytest.raises(UserError, match="every run diverged"):
        best_of({"c": None})


class Killed(BaseException):
    """Stands for SIGKILL inside one process."""


@pytest.mark.slow
def test_a_search_that_is_killed_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = dataclasses.replace(few_digits(), validation=None)
    for place in ("search", "setup"):
        monkeypatch.setattr(f"vitlab.training.{place}.open_recipe_data", lambda recipe: data)
    plan, out, plain = Plan(TINY, {"lr": (1e-7, 0.02)}, 2), tmp_path / "search", Trainer.accumulate
    steps: list[tuple[str, int]] = []

    def accumulate(self: Trainer, step: int) -> torch.Tensor:
        steps.append((self.setup.out.name, step))
        if len(steps) == 10:  # in the second trial, after its first checkpoint
            raise Killed
        return plain(self, step)

    monkeypatch.setattr(Trainer, "accumulate", accumulate)
    with pytest.raises(Killed):
        run_search(plan, out, console=QUIET)
    found = run_search(plan, out, resume=True, console=QUIET)
    by_run = {run: [step for name, step in steps if name == run] for run, _ in steps}
    once, again = list(range(6)), [0, 1, 2, 3, 2, 3, 4, 5]  # the second continued from its checkpoint
    assert by_run == {"lr=1e-07": once, "lr=0.02": again, "seed-5": once, "seed-6": once}
    about = json.loads((out / "search.json").read_text())
    assert about["best"] == found.best == f"lr={max((1e-7, 0.02), key=lambda lr: found.scores[f'lr={lr}'] or 0)}"
    chosen = float(found.best.partition("=")[2])
    alone = train(change(TINY, lr=chosen, seed=6, validation=0.0), tmp_path / "alone", console=QUIET, data=data)
    assert found.runs[6] == alone.report  # all training images, and a plain run's result
    accuracy = [found.runs[seed]["accuracy"] for seed in (5, 6)]
    assert about["summary"]["accuracy"]["mean"] == pytest.approx(statistics.mean(accuracy))
    assert about["summary"]["accuracy"]["std"] == pytest.approx(statistics.stdev(accuracy))
    assert [row[0] for row in result_rows(found)] == ["seed 5", "seed 6", "mean"]
    with pytest.raises(UserError, match="holds a search already"):
        run_search(plan, out, console=QUIET)
    with pytest.raises(UserError, match="another values to choose from"):
        run_search(Plan(TINY, {"lr": (0.1,)}, 2), out, resume=True, console=QUIET)
    with pytest.raises(UserError, match="another weight_decay"):
        run_search(Plan(change(TINY, weight_decay=0.5), plan.grid, 2), out, resume=True, console=QUIET)


def test_results_of_other_images_or_weights_do_not_come_together(tmp_path: Path) -> None:
    """Where nothing is finished yet, others may take their place; and images that are gone on with on purpose."""
    photos, weights, out = tmp_path / "photos", tmp_path / "weights", tmp_path / "search"

    def go_on(seeds: int, accept: bool = False) -> Search:
        recipe = change(TINY, data=str(photos), weights=str(weights), model_settings={}, batch=4, micro=4, steps=2)
        plan = Plan(change(recipe, head="new", warmup=0), {}, seeds)
        return run_search(plan, out, resume=True, accept=accept, console=QUIET)

    vitlab.save(vitlab.create("Ti/2", classes=3, image_size=8, depth=1, width=16, mlp=16, heads=2), weights)
    make_photos(photos)
    go_on(1)
    Image.new("RGB", (9, 9)).save(photos / "class1" / "new.png")
    with pytest.raises(UserError, match=r"the data of .* has changed: .* is new; .* --accept-data-changes"):
        go_on(2)
    assert sorted(go_on(2, accept=True).runs) == [5, 6]
    assert sorted(go_on(2).runs) == [5, 6]
    vitlab.save(vitlab.create("Ti/2", classes=3, image_size=8, depth=1, width=16, mlp=16, heads=2), weights)
    with pytest.raises(UserError, match=r"the weights .* are not those that .* was begun with"):
        go_on(3)
    (out / "search.json").write_text(json.dumps(json.loads((out / "search.json").read_text()) | {"runs": {}}))
    shutil.rmtree(out / "seed-5")
    assert sorted(go_on(1).runs) == [5]
    (photos / "class1" / "new.png").rename(tmp_path / "new.png")
    with pytest.raises(UserError, match="has changed"):  # a finished search as well, which others show beside the data
        go_on(1)
    (tmp_path / "new.png").rename(photos / "class1" / "new.png")
    assert sorted(go_on(1).runs) == [5]
    for gone in (photos, weights):  # a finished one is shown all the same
        shutil.rmtree(gone)
    assert sorted(go_on(1).runs) == [5]


def test_trials_on_from_a_run_are_not_tested_on_what_it_should_not_know(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A part of its training images is held out to choose on, so that is no reason for a warning."""
    make_photos(tmp_path / "photos")
    recipe = change(TINY, data=str(tmp_path / "photos"), batch=4, micro=4, steps=2, warmup=0)
    train(recipe, tmp_path / "run", console=QUIET)
    on = change(recipe, weights=str(tmp_path / "run"), model_settings={})
    run_search(Plan(on, {"lr": (0.01, 0.1)}, 1), tmp_path / "search", console=QUIET)
    assert "has learned from" not in capsys.readouterr().err


def test_the_command_refuses_what_it_cannot_search(tmp_path: Path, command: Command) -> None:
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search.json").write_text("{}")
    for words, message in (
        (["lr=0.1,0.2"], "name the recipe to search with"),
        (["digits", "--out", str(tmp_path / "search")], "repeat its command with --resume"),
        (["digits", "seeds=2", "--out", str(tmp_path / "search"), "--resume"], "cannot be read"),
        (["B/16-jft", "lr=0.1,0.2"], "needs data=SOURCE"),
    ):
        code, _, printed = command("train", *words)
        assert (code, len(printed.strip().splitlines())) == (1, 1), printed
        assert message in printed


@pytest.mark.slow
def test_one_command(tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_report(monkeypatch)
    size = ["depth=1", "width=16", "mlp=32", "heads=2", "batch=64", "steps=60", "warmup=5", "ema=0"]
    words = ["train", "digits", *size, "lr=1e-6,0.01", "seeds=2", "--out", str(tmp_path / "run")]
    code, printed, _ = command(*words)
    assert code == 0
    assert "lr=0.01, chosen on held-out images" in printed
    assert "±" in printed
    runs = json.loads((tmp_path / "run" / "search.json").read_text())["runs"]
    assert sorted(runs) == ["0", "1"]
    again, printed, _ = command(*words, "--resume")
    assert again == 0
    assert "finished already: 2 trials, 2 runs" in printed


def test_a_search_shows_its_scores() -> None:
    plan = Plan(TINY, {"lr": (0.1,)}, 1)
    shown = Search(plan, Path(), None, QUIET)  # type: ignore[arg-type]
    assert shown.show(0.5) == "50.00% on the held-out images"
    assert shown.show(None) == "diverged"
    masked = Search(Plan(change(TINY, objective="masked"), {}, 1), Path(), None, QUIET)  # type: ignore[arg-type]
    assert masked.show(-2.5) == "a loss of 2.5000 on the held-out images"
