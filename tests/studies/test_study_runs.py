"""Studies by the command line: every one with --quick, killed, shared by processes, and a row repeated by hand."""

import contextlib
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from preloaded import program

from vitlab.studies.catalog import STUDIES
from vitlab.studies.request import make_request
from vitlab.studies.run import all_rows
from vitlab.training.lock import Held, folder_lock

FEW = ("--quick", "--only", "none,1d-stem", "seeds=2", "steps=6", "checkpoint_every=2", "device=cpu")
LIMIT = 300
LARGE = ("data", "axial", "bias")  # studies that train a ResNet here, too

pytestmark = pytest.mark.slow


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [str(program("vitlab")), "study", *words]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    text, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == code, text
    return text


def stamps(out: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in out.glob("jobs/*/result.json")}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study that nothing interrupted."""
    folder = tmp_path_factory.mktemp("complete")
    finish(start(folder, "positions", *FEW))
    return folder / "runs/study-positions-quick"


def test_killed_at_any_moment_it_ends_with_the_same_table(complete: Path, tmp_path: Path) -> None:
    out, draw = tmp_path / "runs/study-positions-quick", random.Random(0)
    for _ in range(6):
        before = stamps(out)
        process = start(tmp_path, "positions", *FEW)
        wanted = len(before) + 1  # at least one more job, so that it gets on
        until = time.monotonic() + LIMIT
        while process.poll() is None and len(stamps(out)) < wanted and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(draw.uniform(0, 1.0))
        process.kill()
        process.communicate()
        assert before.items() <= stamps(out).items()  # what was finished is not run again
    text = finish(start(tmp_path, "positions", *FEW))
    assert "proves nothing" in text
    assert (out / "table.csv").read_bytes() == (complete / "table.csv").read_bytes()
    numbers = [
        {path.parent.name: json.loads(path.read_text())["numbers"] for path in stamps(place)}
        for place in (out, complete)
    ]
    assert numbers[0] == numbers[1]


def test_runs_that_were_removed_run_again_where_they_are_needed(complete: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs/study-positions-quick"
    shutil.copytree(complete, out)
    for run in out.glob("jobs/*/run"):
        shutil.rmtree(run)
    (out / "jobs/1d-stem-seed-1-5-shot-digits/result.json").unlink()
    text = finish(start(tmp_path, "positions", *FEW))
    assert re.findall(r"^([\w.+-]+): (?:vitlab|python) ", text, re.MULTILINE) == [
        "1d-stem-seed-1",
        "1d-stem-seed-1-5-shot-digits",
    ]
    assert (out / "table.csv").read_bytes() == (complete / "table.csv").read_bytes()


def test_processes_share_a_folder(complete: Path, tmp_path: Path) -> None:
    both = [start(tmp_path, "positions", *FEW) for _ in range(2)]
    texts = [finish(process) for process in both]
    begun = [line for text in texts for line in re.findall(r"^([\w.+-]+): (?:vitlab|python) ", text, re.MULTILINE)]
    assert len(begun) == len(set(begun)) == len(stamps(complete))
    out = tmp_path / "runs/study-positions-quick"
    assert (out / "table.csv").read_bytes() == (complete / "table.csv").read_bytes()
    assert (out / "table.md").read_text() == (complete / "table.md").read_text()


def test_jobs_are_processes(complete: Path, tmp_path: Path) -> None:
    finish(start(tmp_path, "positions", *FEW, "--jobs", "2"))
    out = tmp_path / "runs/study-positions-quick"
    assert (out / "table.csv").read_bytes() == (complete / "table.csv").read_bytes()
    holders = {json.loads((path.parent / ".lock").read_text())["pid"] for path in stamps(out)}
    assert len(holders) == 2


TWO_JOBS = """
import os, time
from pathlib import Path

from vitlab.errors import Stopped
from vitlab.signals import catch_stop_signals
from vitlab.studies.request import make_request
from vitlab.studies.run import run_study
from vitlab.studies.study import Measure, Number, Row, Study

def wait(runs, folder):
    # work that saves what it has, as training does: in a second
    with catch_stop_signals() as signals:
        (folder / "begun").write_text(os.environ["OMP_NUM_THREADS"])
        while not signals.number:
            time.sleep(0.02)
        time.sleep(1)
        (folder / "saved").touch()
    raise Stopped(signals.number, "")

def rows(ask, seed):
    for name in "ab":
        yield Row(name, {}, {"x": Number(Measure(name, (), wait, ()), "x")})

STUDY = Study("two", "?", "", rows, None, seeds=1)
if __name__ == "__main__":
    run_study(STUDY, make_request(STUDY, ["device=cpu"]), Path("out"), jobs=2)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_of_one_command_save_and_end_with_it(number: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM to all, as of a job's end, counts once; after SIGKILL of the first, the others stop."""
    (tmp_path / "two.py").write_text(TWO_JOBS)
    env = {name: value for name, value in os.environ.items() if "NUM_THREADS" not in name}
    command = [sys.executable, "two.py"]
    first = subprocess.Popen(command, cwd=tmp_path, env=env, start_new_session=True, stderr=subprocess.PIPE)
    jobs, until = tmp_path / "out/jobs", time.monotonic() + LIMIT
    while len([begun for begun in jobs.glob("*/begun") if begun.read_text()]) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    holders = {json.loads((jobs / place / ".lock").read_text())["pid"] for place in "ab"}
    assert len(holders - {first.pid}) == 2
    share = str(max(1, (os.cpu_count() or 1) // 2))  # of the cores: numpy's threads in each process
    assert [(jobs / place / "begun").read_text() for place in "ab"] == [share, share]
    if number == signal.SIGTERM:
        os.killpg(first.pid, number)
    else:
        first.kill()
    first.wait(LIMIT)
    for place in "ab":
        while not (jobs / place / "saved").exists() and time.monotonic() < until:
            time.sleep(0.05)
        while time.monotonic() < until:
            with contextlib.suppress(Held), folder_lock(jobs / place):  # dropped with its process
                break
            time.sleep(0.05)
    assert time.monotonic() < until


def test_work_of_killed_processes_is_done_by_the_first(complete: Path, tmp_path: Path) -> None:
    process = start(tmp_path, "positions", *FEW, "--jobs", "2")
    out, until = tmp_path / "runs/study-positions-quick", time.monotonic() + LIMIT
    while len(locks := list(out.glob("jobs/*/.lock"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    for pid in {json.loads(path.read_text())["pid"] for path in locks} - {process.pid}:
        os.kill(pid, signal.SIGKILL)
    finish(process)
    assert (out / "table.csv").read_bytes() == (complete / "table.csv").read_bytes()


def test_ctrl_c_stops_processes_that_are_about_to_start(tmp_path: Path) -> None:
    """They import for seconds, in which Python has its own handler."""
    for place, wait in enumerate((0.1, 1.5)):
        command = [str(program("vitlab")), "study", "positions", *FEW, "--jobs", "2", "--out", f"{tmp_path}/{place}"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1, start_new_session=True
        )
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        before = next(line for line in lines if " jobs, " in line)
        time.sleep(wait)
        os.killpg(process.pid, signal.SIGINT)
        text = before + "".join(lines)
        assert process.wait(LIMIT) == 128 + signal.SIGINT, text
        assert "Traceback" not in text
        assert "the same command goes on from here" in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_it_and_the_same_command_goes_on(number: int, complete: Path, tmp_path: Path) -> None:
    out = tmp_path / "runs/study-positions-quick"
    process = start(tmp_path, "positions", *FEW)
    while process.poll() is None and not stamps(out):
        time.sleep(0.02)
    os.kill(process.pid, number)
    text = finish(process, 128 + number)
    assert "the same command goes on from here" in text
    assert "Traceback" not in text
    finish(start(tmp_path, "positions", *FEW))
    assert (out / "table.csv").read_bytes() == (complete / "table.csv").read_bytes()


def test_a_row_repeated_by_hand_is_the_same_to_the_bit(complete: Path, tmp_path: Path) -> None:
    run = json.loads((complete / "jobs/1d-stem-seed-1/result.json").read_text())
    shots = json.loads((complete / "jobs/1d-stem-seed-1-5-shot-digits/result.json").read_text())
    words = shlex.split(run["command"])
    assert words[:3] == ["vitlab", "train", "study"]
    words[words.index("--out") + 1] = "mine"
    subprocess.run([program("vitlab"), *words[1:]], cwd=tmp_path, check=True, capture_output=True, timeout=LIMIT)
    log = [json.loads(line) for line in (tmp_path / "mine/log.jsonl").read_text().splitlines()]
    assert next(record["test"] for record in reversed(log) if "test" in record) == run["numbers"]
    words = shlex.split(shots["command"])
    assert words[:2] == ["vitlab", "fewshot"]
    words = ["fewshot", "mine", *words[3:], "--json", "few.json", "--keep", "kept"]
    subprocess.run([program("vitlab"), *words], cwd=tmp_path, check=True, capture_output=True, timeout=LIMIT)
    (found,) = json.loads((tmp_path / "few.json").read_text())["results"]
    assert found["accuracy"] == shots["numbers"]["accuracy"]


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs_offline_on_built_in_data(name: str, tmp_path: Path) -> None:
    rows = [row.name for row in all_rows(STUDIES[name], make_request(STUDIES[name], ["seeds=1"], quick=True))[0]]
    if name not in LARGE:  # ResNets have no small size: half a minute each
        rows = [row for row in rows if not re.match(r"R\d|ResNet", row)]
    chosen = (rows[0], rows[-1])
    text = finish(start(tmp_path, name, "--quick", "--only", ",".join(chosen)))
    out = tmp_path / f"runs/study-{name}-quick"
    table = (out / "table.md").read_text()
    for row in chosen:
        cells = next(line for line in table.splitlines() if line.startswith(f"| {row} |"))
        assert re.search(r"\d", cells.removeprefix(f"| {row} |")), cells
    assert "proves nothing" in text
    assert (out / "figure.png").stat().st_size > 5_000
    assert "<svg" in (out / "figure.svg").read_text()
    assert "proves nothing" in (out / "study.html").read_text()
