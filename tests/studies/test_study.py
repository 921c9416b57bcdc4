"""Studies: what is asked, jobs that are run once, errors, tables; and every study of the catalog as data."""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from test_transfer import make_set

import vitlab
from vitlab.cli import main
from vitlab.data.folder import is_drawn
from vitlab.errors import Stopped, UserError
from vitlab.evaluation.features import FeatureSet
from vitlab.evaluation.fewshot import few_shot
from vitlab.files import read_json
from vitlab.plots.studies import Dots, Lines, Series, dots_figure, lines_figure
from vitlab.studies.catalog import STUDIES, count_runs, find_study
from vitlab.studies.optimizer import RATES, weight_decay
from vitlab.studies.place import Place
from vitlab.studies.request import Request, make_request, merge, slug
from vitlab.studies.run import all_rows, choose_rows, run_study
from vitlab.studies.study import FewShot, Measure, Number, Outcome, Row, Study, Train, follow_weights, in_order
from vitlab.studies.table import Table, cells, comma_separated, heading, make_table, markdown
from vitlab.training.lock import folder_lock
from vitlab.training.loop import train
from vitlab.training.optim import OptimizerName, make_optimizer, set_learning_rate
from vitlab.training.recipe import override
from vitlab.training.recipes import find

QUIET = Console(quiet=True)
TINY = ("steps=2", "batch=8", "depth=1", "device=cpu", "subset=0.05")
calls: list[str] = []


# ---- a small study of our own


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for rate in (0.0, 0.2):
        run = ask.pretrain(f"dropout-{rate:g}", seed, dropout=rate)
        count = Measure(f"{run.name}-count", (run,), count_files, ("ls",))
        numbers = ask.few_shots(run)
        numbers |= {"accuracy": Number(run, "accuracy"), "files": Number(count, "files", "")}
        yield Row(f"dropout-{rate:g}", {"dropout": f"{rate:g}"}, numbers, run, {"theirs": 0.5})


def count_files(runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
    calls.append(folder.name)
    (folder / "note.txt").write_text("kept")
    return {"files": float(len(list(runs[0].iterdir())))}


def draw(table: Table) -> Any:
    return dots_figure(
        [Dots("", "", [line.name for line in table.lines], [line.values["accuracy"] for line in table.lines])]
    )


SMALL = Study("dropout", "does dropout help?", "nowhere", rows, draw, seeds=2)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Request, Table]:
    out, request = tmp_path_factory.mktemp("study") / "out", make_request(SMALL, ("seeds=2", *TINY), quick=True)
    table, failed = run_study(SMALL, request, out, console=QUIET)
    assert not failed
    return out, request, table


def test_a_study_leaves_a_table_a_figure_and_a_page(finished: tuple[Path, Request, Table]) -> None:
    out, _, table = finished
    assert {"table.csv", "table.md", "figure.png", "figure.svg", "study.html", "study.json"} <= {
        p.name for p in out.iterdir()
    }
    assert is_drawn(str(out))  # so that a set with the folder in it has no such class
    assert [line.seeds for line in table.lines] == [2, 2]
    page = (out / "study.html").read_text()
    assert "proves nothing" in page
    assert "no claim is drawn from a difference smaller than it" in page
    assert "vitlab train study" in page
    assert "paper: theirs" in page
    assert not re.search(r"(src|href)=\"(?!data:)", page)  # nothing is loaded from elsewhere


def test_numbers_are_means_over_seeds(finished: tuple[Path, Request, Table]) -> None:
    out, _, _ = finished
    with (out / "table.csv").open() as file:
        lines = list(csv.DictReader(file))
    for line in lines:
        stored = [json.loads((out / f"jobs/{line['row']}-seed-{s}/result.json").read_text()) for s in (0, 1)]
        values = [each["numbers"]["accuracy"] for each in stored]
        assert float(line["accuracy mean"]) == pytest.approx(np.mean(values))
        assert float(line["accuracy std"]) == pytest.approx(abs(values[0] - values[1]) / 2**0.5)  # of two
        assert int(line["accuracy n"]) == 2
        assert (line["steps"], line["batch"], line["paper theirs"]) == ("2", "8", "0.5")
        assert int(line["images"]) == stored[0]["about"]["images"] > 0


def test_finished_jobs_are_not_repeated(finished: tuple[Path, Request, Table]) -> None:
    out, request, table = finished
    before, done = {p: p.stat().st_mtime_ns for p in out.glob("jobs/*/result.json")}, len(calls)
    left = out / "jobs/dropout-0-seed-0/run/checkpoints"  # as of a process that was killed after its result
    left.mkdir()
    again, _ = run_study(SMALL, request, out, console=QUIET)
    assert not left.exists()
    assert {p: p.stat().st_mtime_ns for p in out.glob("jobs/*/result.json")} == before
    assert len(calls) == done
    assert comma_separated(again) == comma_separated(table)


def test_a_row_equals_the_single_commands(finished: tuple[Path, Request, Table], tmp_path: Path) -> None:
    """The command that is stored with a run, by the functions of the verbs."""
    out, _, _ = finished
    stored = json.loads((out / "jobs/dropout-0.2-seed-1/result.json").read_text())
    _, verb, recipe, *words = stored["command"].split()
    assert verb == "train"
    report = train(override(find(recipe).recipe, words[: words.index("--out")]), tmp_path / "run", console=QUIET).report
    assert report == stored["numbers"]
    features = FeatureSet(str(tmp_path / "run"), "digits", keep=tmp_path / "features", device="cpu")
    sets = [features.extract(source, "") for source in (features.data.train, features.data.test)]
    (found,) = few_shot(*sets, shots=(5,), seeds=3)
    few = json.loads((out / "jobs/dropout-0.2-seed-1-5-shot-digits/result.json").read_text())
    assert found.mean == few["numbers"]["accuracy"]


def test_other_settings_need_another_folder(finished: tuple[Path, Request, Table]) -> None:
    out, _, _ = finished
    other = make_request(SMALL, ("seeds=2", *TINY, "lr=0.1"), quick=True)
    with pytest.raises(UserError, match=r"was begun with settings .*another --out"):
        run_study(SMALL, other, out, console=QUIET)
    more = make_request(SMALL, ("seeds=2", *TINY, "log_every=1"), quick=True)  # the same numbers
    run_study(SMALL, more, out, console=QUIET)
    with pytest.raises(UserError, match="holds the study 'dropout'"):
        run_study(find_study("positions"), make_request(find_study("positions"), quick=True), out, console=QUIET)


def test_seeds_can_be_added(tmp_path: Path) -> None:
    place = Place(tmp_path / "new")
    for seeds in (1, 3, 3):
        place.open(SMALL, make_request(SMALL, [f"seeds={seeds}"]), {})
        assert json.loads((tmp_path / "new/study.json").read_text())["seeds"] == seeds
    with pytest.raises(UserError, match="was begun with seeds 3, not 2"):
        place.open(SMALL, make_request(SMALL, ["seeds=2"]), {})


@pytest.mark.slow
def test_a_moved_study_resumes_its_fine_tuning(
    finished: tuple[Path, Request, Table], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, request, _ = finished
    tuned = request.finetune(request.pretrain("dropout-0", 0, dropout=0.0), "digits", 0)
    shutil.copytree(out, tmp_path / "first")
    report = tuned.run(tmp_path / "first", QUIET)  # with its checkpoint, as its job is not finished
    (tmp_path / "first").rename(tmp_path / "second")
    monkeypatch.chdir(tmp_path)
    assert tuned.run(Path("second"), QUIET) == report
    other = tuned.folder(Path("second"))
    follow_weights(other, Path("elsewhere/jobs/another/run"))  # another run's weights are no move
    with pytest.raises(UserError, match="has another weights"):
        train(override(find("study-finetune").recipe, [*tuned.pairs, "weights=digits"]), other, resume=True)


# ---- jobs that fail, and jobs of others


def test_a_failure_is_noted_and_the_rest_runs(tmp_path: Path) -> None:
    broken = {"now": True}

    def fails(runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
        if broken["now"]:
            raise RuntimeError("the disk is on fire")
        return {"x": 1.0}

    def sees(runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
        return {"x": 2.0 if "the disk is on fire" in (tmp_path / "out/table.md").read_text() else 3.0}

    def both(ask: Request, seed: int) -> Iterator[Row]:
        yield Row("bad", {}, {"x": Number(Measure("bad", (), fails, ()), "x", "")})
        good = Measure("good", (), sees, ())
        yield Row("good", {}, {"x": Number(good, "x", "")})

    study = Study("two", "?", "", both, lambda table: dots_figure([Dots("", "", ["a"], [[1.0]])]), seeds=1)
    request = make_request(study)
    table, failed = run_study(study, request, tmp_path / "out", console=QUIET)
    assert failed == {"bad": "the disk is on fire"}
    assert [line.mean("x") for line in table.lines] == [None, 2.0]
    assert "RuntimeError: the disk is on fire" in (tmp_path / "out/table.md").read_text()
    assert "Traceback" in json.loads((tmp_path / "out/jobs/bad/error.json").read_text())["traceback"]
    broken["now"] = False
    table, failed = run_study(study, request, tmp_path / "out", console=QUIET)
    assert not failed
    assert [line.mean("x") for line in table.lines] == [1.0, 2.0]
    assert not (tmp_path / "out/jobs/bad/error.json").exists()


def test_what_needs_a_failed_run_fails_with_it(tmp_path: Path) -> None:
    def one(ask: Request, seed: int) -> Iterator[Row]:
        run = ask.pretrain("run", seed)
        yield Row("row", {}, {"files": Number(Measure("count", (run,), count_files, ()), "files", "")}, run)

    study = Study("one", "?", "", one, draw, seeds=1)
    (blocked := tmp_path / "failed/jobs/run-seed-0/run").parent.mkdir(parents=True)
    blocked.touch()  # not a folder
    _, failed = run_study(study, make_request(study, TINY, quick=True), tmp_path / "failed", console=QUIET)
    assert failed["count"] == "it needs run-seed-0, which failed"
    # divergence is a result, which is not tried again
    words = (*TINY, "weight_decay=1e30", "lr=1e30", "warmup=0", "log_every=1")
    out = tmp_path / "diverged"
    for _ in range(2):
        table, failed = run_study(study, make_request(study, words, quick=True), out, console=QUIET)
        assert not failed
        assert "| row | diverged |" in markdown(table)
        assert (table.lines[0].seeds, table.lines[0].over, table.lines[0].mean("files")) == (0, 1, None)
        stored = json.loads((out / "jobs/run-seed-0/result.json").read_text())
        assert "the run diverged" in stored["diverged"]
        assert json.loads((out / "jobs/count/result.json").read_text())["diverged"] == "run-seed-0 diverged"
        assert not (out / "jobs/run-seed-0/run/checkpoints").exists()
        (out / "jobs/run-seed-0/run/log.jsonl").unlink(missing_ok=True)
    assert not (out / "jobs/run-seed-0/run/log.jsonl").exists()
    assert "not finished yet" not in (out / "study.html").read_text()


def test_a_diverged_run_that_was_removed_runs_again_with_what_needs_it(
    finished: tuple[Path, Request, Table], tmp_path: Path
) -> None:
    done, request, table = finished
    shutil.copytree(done, out := tmp_path / "out")
    run, lost = "dropout-0-seed-0", "dropout-0-seed-0-count"
    for name, why in ((run, "the run diverged"), (lost, f"{run} diverged")):
        path = out / "jobs" / name / "result.json"
        path.write_text(json.dumps(read_json(path) | {"numbers": {}, "diverged": why}))
    again, _ = run_study(SMALL, request, out, console=QUIET)
    assert "1 diverged" in markdown(again)
    (out / f"jobs/{run}/result.json").unlink()
    again, failed = run_study(SMALL, request, out, console=QUIET)
    assert not failed
    assert "diverged" not in markdown(again)
    assert comma_separated(again) == comma_separated(table)


def test_a_run_without_its_model_runs_again_where_it_is_needed(
    finished: tuple[Path, Request, Table], tmp_path: Path
) -> None:
    done, request, table = finished
    shutil.copytree(done, out := tmp_path / "out")
    for path in out.glob("jobs/*/run/model.safetensors"):
        path.unlink()
    (out / "jobs/dropout-0-seed-0-count/result.json").unlink()
    again, failed = run_study(SMALL, request, out, console=QUIET)
    assert not failed
    assert [path.parts[-3] for path in out.glob("jobs/*/run/model.safetensors")] == ["dropout-0-seed-0"]
    assert again.lines[0].values["accuracy"] == table.lines[0].values["accuracy"]


OTHER_PROCESS = """
import sys
from pathlib import Path
from vitlab.studies.place import Place

for how in sys.stdin:
    with Place(Path(sys.argv[1])).machine(alone=how == "alone\\n") as free:
        print(free, flush=True)
        sys.stdin.readline()
    print("through", flush=True)
"""


@contextlib.contextmanager
def other_process(folder: Path) -> Iterator[Callable[[str], str]]:
    """Another process that works in a folder: told how, it begins, and the next word ends it."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other:

        def tell(word: str) -> str:
            assert other.stdin is not None
            assert other.stdout is not None
            other.stdin.write(f"{word}\n")
            return other.stdout.readline().strip()

        yield tell


def test_what_is_timed_has_the_machine_for_itself(tmp_path: Path) -> None:
    with other_process(tmp_path) as tell:
        for theirs, mine, expected in (
            ("beside", False, True),
            ("beside", True, False),
            ("alone", False, False),
            ("alone", True, False),
        ):
            assert tell(theirs) == "True"
            with Place(tmp_path).machine(alone=mine) as free:
                assert free == expected, (theirs, mine)
            assert tell("enough") == "through"
            with Place(tmp_path).machine(alone=mine) as free:
                assert free


def test_timed_jobs_wait_while_others_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The job that takes times runs once the other process is through."""
    monkeypatch.setattr("vitlab.studies.run.POLL", 0.05)
    order: list[str] = []

    def both(ask: Request, seed: int) -> Iterator[Row]:
        yield Row("first", {}, {"x": Number(Measure("first", (), timed, (), timed=True), "x", "")})
        yield Row("second", {}, {"x": Number(Measure("second", (), plain, ()), "x", "")})

    def timed(runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
        order.append("timed")
        return {"x": 2.0}

    study = Study("two", "?", "", both, lambda table: dots_figure([Dots("", "", ["a"], [[1.0]])]), seeds=1)
    with other_process(tmp_path) as tell:
        assert tell("beside") == "True"

        def plain(runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
            order.append("plain")
            assert tell("enough") == "through"
            return {"x": 1.0}

        _, failed = run_study(study, make_request(study), tmp_path, console=QUIET)
    assert not failed
    assert order == ["plain", "timed"]


def test_what_has_no_accuracy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="objective=masked has none"):
        make_request(SMALL, ["objective=masked"])
    (tmp_path / "images").mkdir()
    lines = []
    for number in range(8):
        Image.new("RGB", (16, 16), (30 * number, 0, 0)).save(tmp_path / f"images/{number}.png")
        lines.append(f"images/{number}.png,{'red;round' if number % 2 else 'round'}")
    (tmp_path / "labels.csv").write_text("image,labels\n" + "\n".join(lines) + "\n")
    request = make_request(SMALL, [f"data={tmp_path / 'labels.csv'}", *TINY[:-1]], quick=True)
    with pytest.raises(UserError, match="several labels, and studies measure accuracy"):
        run_study(SMALL, request, tmp_path / "out", console=QUIET)
    assert not (tmp_path / "out").exists()


def test_options_of_a_study_need_its_name(command: Callable[..., tuple[int, str, str]]) -> None:
    for words in (["--only", "none"], ["--jobs", "2"], ["--out", "x"]):
        code, _, err = command("study", *words)
        assert (code, f"{words[0]} needs the name of a study" in err) == (1, True)


def one_number(x: float = 1.0, figure: Any = None) -> Study:
    """A study of one measurement."""
    job = Measure("a b", (), lambda runs, folder: {"x": x}, ("echo", "it's"))
    drawn = figure or (lambda table: dots_figure([Dots("", "", ["a"], [[1.0]])]))
    return Study("number", "?", "", lambda ask, seed: [Row("row", {}, {"x": Number(job, "x", "")})], drawn, seeds=1)


def test_a_figure_that_fails_does_not_end_a_study(tmp_path: Path) -> None:
    shown = Console(file=io.StringIO())
    study = one_number(figure=lambda table: 1 / 0)
    table, failed = run_study(study, make_request(study), tmp_path, console=shown)
    assert (table.lines[0].mean("x"), failed) == (1.0, {})
    assert "there is no figure: ZeroDivisionError" in shown.file.getvalue()  # type: ignore[attr-defined]
    assert "echo &#39;it&#39;&#34;&#39;&#34;&#39;s&#39;" in (tmp_path / "study.html").read_text()  # quoted for a shell


def test_numbers_are_plain_and_finite(tmp_path: Path) -> None:
    study = one_number(np.float32(0.25))  # type: ignore[arg-type]
    table, failed = run_study(study, make_request(study), tmp_path / "a", console=QUIET)
    assert (table.lines[0].mean("x"), failed) == (0.25, {})
    for _ in range(2):  # also after the first has left its folder
        study = one_number(float("nan"))
        _, failed = run_study(study, make_request(study), tmp_path / "b", console=QUIET)
        assert failed == {"a b": "x is nan, which is no number"}


def test_what_another_process_finished_has_not_failed(tmp_path: Path) -> None:
    def fails(runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
        Place(tmp_path).write_result(job, Outcome({"x": 1.0}), 1.0)  # as another process would
        raise RuntimeError("out of memory")

    job = Measure("job", (), fails, ())
    study = Study("s", "?", "", lambda ask, seed: [Row("row", {}, {"x": Number(job, "x", "")})], draw, seeds=1)
    table, failed = run_study(study, make_request(study), tmp_path, console=QUIET)
    assert (table.lines[0].mean("x"), failed) == (1.0, {})


def test_a_spread_is_shown_with_the_digits_that_mean_something(tmp_path: Path) -> None:
    """Two digits of it, and as many places of the mean; none of what all seeds have but for rounding."""
    measured = {"ms": (0.0062, 0.0081, 0.0058), "pixels": (58.01, 58.6, 59.4), "flops": (0.72, 0.72 + 2e-16, 0.72)}
    measured |= {
        "fine": (5.0, 5.00012, 5.00024),
        "images/s": (8101.0, 8478.0, 8350.0),
        "share": (0.1234, 0.1234, 0.1234),
        "wide": (0.001, -12.0, 12.0),
    }
    wanted = {"ms": "0.0067 ± 0.0012", "pixels": "58.67 ± 0.70", "flops": "0.72", "images/s": "8,310 ± 192"}
    wanted |= {"fine": "5.00012 ± 0.00012", "share": "12.34 ± 0.00", "wide": "0 ± 12"}

    def rows(ask: Request, seed: int) -> Iterator[Row]:
        job = Measure(f"job-{seed}", (), lambda runs, folder: {key: found[seed] for key, found in measured.items()}, ())
        yield Row("row", {}, {key: Number(job, key, "%" if key == "share" else "") for key in measured})

    study = Study("s", "?", "", rows, draw, seeds=3)
    table, failed = run_study(study, make_request(study), tmp_path, console=QUIET)
    assert not failed
    heads, (shown,) = cells(table)
    assert {key: shown[heads.index(heading(key, "%" if key == "share" else ""))] for key in measured} == wanted


def test_results_on_other_images_do_not_come_together(tmp_path: Path) -> None:
    """Unless there are none yet; and what is refused leaves the study as it was."""
    photos, out = tmp_path / "photos", tmp_path / "out"

    def go_on(data: Path, seeds: int, *only: str) -> Table:
        request = make_request(SMALL, [*TINY, f"data={data}", f"targets={data}", f"seeds={seeds}"], quick=True)
        return run_study(SMALL, request, out, only=only, console=QUIET)[0]

    make_set(photos)
    go_on(photos, 1, "dropout-0")
    Image.new("RGB", (9, 9)).save(photos / "train" / "class 0" / "new.png")
    with pytest.raises(UserError, match=r"the images of .*photos have changed since the study in .* began; put"):
        go_on(photos, 2)
    (photos / "train" / "class 0" / "new.png").rename(tmp_path / "new.png")
    assert go_on(photos, 1).done
    (tmp_path / "new.png").rename(photos / "train" / "class 0" / "new.png")
    shutil.rmtree(out / "jobs")
    assert go_on(photos, 1, "dropout-0").done


def test_costs_are_in_a_unit_that_is_short_to_read(finished: tuple[Path, Request, Table]) -> None:
    """Of the dearest row; a table of no runs has neither costs nor images and steps."""
    out, _, table = finished
    with (out / "table.csv").open() as file:
        flops = [float(line["flops"]) for line in csv.DictReader(file)]
    heads, rows = cells(table)
    assert heads[-5:] == ["images", "steps", "batch", "seeds", "gigaFLOPs"]
    assert [float(row[-1]) for row in rows] == [pytest.approx(f / 1e9, rel=0.005) for f in flops]
    (first, *others), names = (
        table.lines,
        {3e18: "exaFLOPs", 2e18 / 3: "petaFLOPs", 1e15: "petaFLOPs", 4e14: "teraFLOPs"},
    )
    for cost, name in names.items():
        heads, rows = cells(replace(table, lines=[replace(first, flops=cost), *others]))
        assert heads[-1] == name
        assert 1 <= float(rows[0][-1]) < 1000
    none = [replace(line, flops=None, steps=None, batch=None, images=None) for line in table.lines]
    heads, rows = cells(replace(table, lines=none))
    assert heads[-1] == "seeds"
    assert {len(row) for row in rows} == {len(heads)}


def test_what_is_timed_is_done_alone(tmp_path: Path) -> None:
    """Of several processes that share the rest, by the one that waits for the others."""
    for name in ("speed", "axial"):
        study = find_study(name)
        jobs = in_order(j for row in study.rows(make_request(study, quick=True), 0) for j in row.jobs)
        timed = [job for job in jobs if isinstance(job, Measure)]
        assert timed
        assert all(job.timed for job in timed)
    study = Study("s", "?", "", timed_rows, draw, seeds=1)
    _, failed = run_study(study, make_request(study), tmp_path, jobs=2, console=QUIET)
    assert not failed
    timed, *others = (read_json(tmp_path / f"jobs/{name}/result.json")["numbers"] for name in ("timed", "a", "b"))
    assert timed["pid"] == os.getpid()
    assert os.getpid() not in {other["pid"] for other in others}
    assert timed["begin"] > max(other["end"] for other in others)


def timed_rows(ask: Request, seed: int) -> Iterator[Row]:
    for name in ("timed", "a", "b"):
        job = Measure(name, (), note_process, (), timed=name == "timed")
        yield Row(name, {}, {"pid": Number(job, "pid", "")})


def note_process(runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
    begin = time.time()
    time.sleep(0.2)
    return {"pid": os.getpid(), "begin": begin, "end": time.time()}


def test_rows_are_named_as_models_or_as_folders_are() -> None:
    for name in ("compute", "axial"):
        study = find_study(name)
        rows = all_rows(study, make_request(study, quick=True))
        found = [choose_rows(study, rows, [model])[0] for model in ("Ti/16", "Ti16")]
        assert found[0] == found[1]
        assert len(found[0]) == 1


def test_processes_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 32)
    ask = make_request(SMALL, ["device=cpu"]).shared(4)  # 8 of 32 cores read images
    run = ask.pretrain("a", 0)
    found = (run.settings().workers, ask.finetune(run, "b", 0).settings().workers, ask.few_shot(run, "b").workers)
    assert found == (2, 2, 2)
    assert make_request(SMALL, ["device=cpu"]).shared(1).pretrain("a", 0).settings().workers is None
    assert make_request(SMALL, ["workers=7"]).shared(4).pretrain("a", 0).settings().workers == 7
    assert make_request(SMALL, ["workers=none"], quick=True).workers is None


def test_a_log_axis_has_no_zero() -> None:
    """A batch that does not fit is 0."""
    series = Series("a", [0, 1, 2, 3], [[4.0], [0.0], [8.0], [2.0]])
    axes = lines_figure([Lines("", "", "", [series], share=False, log_y=True)]).axes[0]
    assert np.asarray(axes.lines[0].get_xydata()).tolist() == [[2, 8], [3, 2]]
    empty = Series("a", [1], [[0.0]])
    assert not lines_figure([Lines("", "", "", [empty], share=False, log_y=True)]).axes[0].lines


def test_a_frontier_joins_what_is_better_than_all_before_it() -> None:
    series = Series("ViT", [1, 2, 3, 4], [[0.1], [0.3], [0.2], [0.4]])
    axes = lines_figure([Lines("", "", "", [series], frontier=True)]).axes[0]
    joined = [(found.get_linestyle(), np.asarray(found.get_xydata())) for found in axes.lines]
    (points, every), (line, best) = ((style, xy) for style, xy in joined if len(xy) > 2)
    assert (points, line) == ("None", "-")
    assert every[:, 0].tolist() == [1, 2, 3, 4]
    np.testing.assert_allclose(best, [[1, 10], [2, 30], [4, 40]])


def test_labels_cover_neither_points_nor_each_other() -> None:
    """Three models of nearly one cost and accuracy, whose labels would be on top of each other on one side."""
    x, names = [0.84, 0.98, 1.06, 100], ["R26+S/16", "R101x1", "R50+S/16", "far away"]
    figure = lines_figure([Lines("", "", "", [Series("", x, [[0.209], [0.205], [0.208], [0.3]], names)])])
    figure.draw_without_rendering()
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert [text.get_text() for text in axes.texts] == names
    assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[:i])
    points = axes.transData.transform(np.column_stack([x, [20.9, 20.5, 20.8, 30]]))
    assert not any(box.contains(*point) for box in boxes for point in points)


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.4), (0.4, 0.1)])
def test_labels_leave_lines_free_where_they_can(first: float, second: float) -> None:
    """The first label would be on a line that rises, on the other side of its point on one that falls."""
    panel = Lines("", "", "", [Series("ViT", [1, 4], [[first], [second]], ["Ti/16", "S/16"])], log=False)
    figure = lines_figure([panel])
    figure.draw_without_rendering()
    axes = figure.axes[0]
    (x0, y0), (x1, y1) = axes.transData.transform([(1, 100 * first), (4, 100 * second)])
    for box in (text.get_window_extent() for text in axes.texts):
        x = np.linspace(x0, x1, 1000)  # of the line, pixel for pixel
        y = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        assert not ((x > box.x0) & (x < box.x1) & (y > box.y0) & (y < box.y1)).any()


def test_a_job_is_claimed_once(tmp_path: Path) -> None:
    place, job = Place(tmp_path), Measure("job", (), count_files, ())
    with folder_lock(tmp_path / "jobs" / "job"), place.claim(job) as mine:
        assert not mine
    with place.claim(job) as mine:
        assert mine
    (tmp_path / "jobs/job/result.json").write_text('{"numbers": {"x": 1}, "about": {}, "command": "c"}')
    with place.claim(job) as mine:
        assert not mine
    (tmp_path / "jobs/job/result.json").write_text("{")
    with pytest.raises(UserError, match=r"result\.json cannot be read"):
        place.result(job)


def test_two_jobs_of_one_name_are_refused() -> None:
    with pytest.raises(UserError, match="two different jobs called 'a'"):
        in_order([Train("a", "study", ("seed=0",)), Train("a", "study", ("seed=1",))])


# ---- what is asked


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("stepps=3", "did you mean 'steps'"),
        ("steps=many", "steps must be an integer"),
        ("seed=3", "seeds=3 runs three seeds"),
        ("epochs=3", "steps= sets the length"),
        ("model=B/16", "the study sets it"),
        ("seeds=0", "seeds must be"),
        ("targets=a,,b", "targets must be data sets"),
        ("targets=x/pets,y/pets", "the same name"),
    ],
)
def test_wrong_settings_are_errors(pair: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        make_request(SMALL, [pair])


def test_a_setting_that_the_study_varies_is_refused() -> None:
    with pytest.raises(UserError, match="'per_class' is what the study 'data' varies"):  # by subset=
        all_rows(STUDIES["data"], make_request(STUDIES["data"], ["per_class=3"], quick=True))
    with pytest.raises(UserError, match="'dropout' is what the study 'dropout' varies"):
        list(rows(make_request(SMALL, ["dropout=0.1"]), 0))


def test_settings_reach_the_right_runs() -> None:
    ask = make_request(
        SMALL, ["data=d", "targets=a/x,b", "steps=100", "device=cpu", "lr=0.5", "tune_steps=40", "image_size=32"]
    )
    run = ask.pretrain("R26+Ti/16", 2, "R26+Ti/16")
    recipe = run.settings()
    assert (recipe.model, recipe.data, recipe.steps, recipe.warmup) == ("R26+Ti/16", "d", 100, 10)
    assert (recipe.lr, recipe.device, recipe.seed) == (0.5, "cpu", 2)
    tuned = ask.finetune(run, "a/x", 2)
    recipe = tuned.settings()
    assert (recipe.model, recipe.data, recipe.steps, recipe.warmup) == ("R26+Ti/16", "a/x", 40, 4)
    assert (recipe.lr, recipe.device, recipe.image_size, recipe.seed) == (0.03, "cpu", (32, 32), 2)
    assert tuned.words(Path("o"))[-1] == "weights=o/jobs/R26+Ti16-seed-2/run"
    assert tuned.name == "R26+Ti16-to-x-seed-2"
    assert list(ask.few_shots(run)) == ["5-shot x", "5-shot b", "5-shot mean"]


def test_a_model_from_scratch_has_the_shape_of_the_others() -> None:
    """The user's; without dropout, as in all fine-tuning."""
    ask = make_request(SMALL, ["depth=6", "pool=mean", "dropout=0.1", "lr=0.5", "image_size=32"])
    scratch, run = ask.finetune(None, "x", 0).settings(), ask.pretrain("a", 0).settings()
    assert (scratch.model, scratch.image_size) == (run.model, run.image_size)
    assert scratch.model_settings == {"depth": 6, "pool": "mean"}
    assert scratch.lr == find("study-finetune").recipe.lr


@pytest.mark.parametrize("kind", RATES)
def test_optimizers_shrink_weights_equally_fast(kind: OptimizerName) -> None:
    """Steps without a gradient, after SGD's momentum has settled."""
    model = vitlab.create("Ti/16", classes=2, image_size=16, depth=1, width=16, mlp=16, heads=2)
    weights = next(p for name, p in model.named_parameters() if "qkv" in name and p.ndim > 1)
    for rate in RATES[kind]:
        decay = weight_decay(kind, rate, 0.9)
        optimizer = make_optimizer(model, kind, weight_decay=decay, betas=(0.9, 0.999), momentum=0.9)
        set_learning_rate(optimizer, rate)
        norms = []
        for _ in range(101):
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
            norms.append(float(weights.detach().double().norm()))
        assert 1 - (norms[100] / norms[60]) ** (1 / 40) == pytest.approx(1e-4, rel=0.02)


def test_merge_keeps_the_last_of_each_key() -> None:
    assert merge(["a=1", "b=1"], ["a=2"], ["c=3"]) == ("b=1", "a=2", "c=3")
    assert slug("R50+B/16 on [pets]") == "R50+B16-on-pets-"


def test_text_is_safe_in_markdown(tmp_path: Path) -> None:
    nothing = Study("n", "?", "", lambda ask, seed: [Row("a|b", {}, {})], draw)
    ask = make_request(nothing, ["seeds=1"])
    assert "| a\\|b |" in markdown(make_table(nothing, ask, Place(tmp_path), all_rows(nothing, ask)))


# ---- the catalog


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize("quick", [pytest.param(False, marks=pytest.mark.slow), True])
def test_every_study_is_sound_data(name: str, quick: bool) -> None:
    study = STUDIES[name]
    ask = make_request(study, ["seeds=2"], quick=quick)
    first, second = all_rows(study, ask)
    assert [row.name for row in first] == [row.name for row in second]
    assert len({row.name for row in first}) == len(first) > 1
    assert all(row.numbers and list(row.numbers) == list(first[0].numbers) for row in first)
    jobs = in_order(job for rows in (first, second) for row in rows for job in row.jobs)
    assert len({job.name for job in jobs}) == len(jobs)
    assert all(re.fullmatch(r"[\w.+-]+", job.name) for job in jobs)
    for job in jobs:
        assert job.command(Path("out")).split()[0] in ("vitlab", "python")
        if isinstance(job, Train):
            assert job.flops > 0
            assert job.settings().warmup < job.steps
        if isinstance(job, FewShot):
            assert job.of in jobs
    assert all(0 < value <= 1 for row in first for value in row.paper.values())


def test_shared_runs_are_counted_once() -> None:
    runs, flops = count_runs(STUDIES["positions"], make_request(STUDIES["positions"], ["seeds=1"]))
    assert runs == 8
    assert flops == pytest.approx(8 * find_flops("Ti/8"), rel=0.02)  # positions cost little


def find_flops(model: str) -> float:
    return Train("a", "study", (f"model={model}",)).flops


# ---- the command


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["vitlab", "study", *words])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_list_shows_every_study(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(monkeypatch, "lr=0.001", "device=cpu", "--quick") == 0
    shown = capsys.readouterr().out
    assert "'lr' is what the study 'head' varies" in " ".join(shown.split())
    assert all(re.search(rf"^{name} ", shown, re.MULTILINE) for name in STUDIES)
    assert "FLOPs" in shown
    assert "about" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["postions"], "there is no study 'postions'; did you mean 'positions'?"),
        (["positions", "--quick", "lrr=1"], "there is no setting 'lrr'; did you mean 'lr'?"),
        (["positions", "--quick", "data=no-such-folder"], "there is no data set 'no-such-folder'"),
        (["positions", "--quick", "--only", "3d"], "the study 'positions' has no row '3d'; its rows are none, 1d-stem"),
        (["positions", "--quick", "image_size=30"], "30"),
        (["data", "--quick", "--only", "ViT-Ti-1", "mlp=96"], "R50x1 is a ResNet and has no setting 'mlp'"),
    ],
)
def test_errors_are_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(monkeypatch, *words) == 1
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())  # nothing was begun


class Finalized:
    """An object whose finalizer is interrupted: Python prints that, and goes on."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):  # in one of which Python calls the handler
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_finalizer_stops_it_before_the_next_job(tmp_path: Path) -> None:
    def interrupted(runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
        one = Finalized()
        del one
        return {"x": 1.0}

    jobs = [Measure(name, (), interrupted, ()) for name in "ab"]
    rows = [Row(job.name, {}, {"x": Number(job, "x", "")}) for job in jobs]
    study = Study("s", "?", "", lambda ask, seed: rows, draw, seeds=1)
    with pytest.raises(Stopped, match="the same command goes on from here"):
        run_study(study, make_request(study), tmp_path, console=QUIET)
    assert [Place(tmp_path).result(job) is not None for job in jobs] == [True, False]
