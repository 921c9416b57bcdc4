"""A short version of the chaos run, and that it would notice; `make chaos` is the long one."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from chaos import ranks
from chaos.rows import Row
from chaos.table import END, START, write_page
from chaos.targets import TARGETS

TESTS = Path(__file__).parents[1]
INPUTS = 75  # of every reader, on a machine that is not busy


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def python(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: copies are made of it, which one with threads would not survive."""
    command = [sys.executable, "-m", *words]
    return subprocess.run(
        command, env=environment(), cwd=TESTS, capture_output=True, text=True, timeout=300, check=False
    )


# ---- hostile files


@pytest.fixture(scope="module")
def shaken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("shaken")
    done = python("chaos.shake", str(folder), str(INPUTS))
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
def test_readers_refuse_or_accept(name: str, shaken: tuple[Path, str]) -> None:
    folder, printed = shaken
    start = f"{name}: "
    tried = next(int(line.removeprefix(start).split()[0]) for line in printed.splitlines() if line.startswith(start))
    assert tried >= (2 if name == "parquet" else INPUTS / 3)  # that one starts a process for every file
    found = folder / name / "failures.jsonl"
    assert not found.exists(), found.read_text()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs Atheris: pip install 'vitlab[chaos]'")
def test_guided_by_coverage(tmp_path: Path) -> None:
    from chaos.fuzz import fuzz

    row = Row(**fuzz("npz", tmp_path / "npz", 5, seed=0))
    assert row.failures == []
    assert row.count > 100
    assert int(row.notes.split()[0]) > 50  # branches of the package, so it is watched


# ---- runs


@pytest.mark.slow
def test_killed_and_starved(tmp_path: Path) -> None:
    """Eight kills, five full disks and two small file systems, by the command."""
    done = python("chaos", "--scale", "0.02", "--only", "kills,disk", "--out", str(tmp_path), "--no-page")
    report = json.loads((tmp_path / "chaos.json").read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert [row["failures"] for row in rows.values()] == [[], [], []], done.stdout
    assert rows["training killed"]["count"] >= 8
    assert rows["disk full at every write"]["count"] >= 4
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_what_was_measured(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "chaos",
        "--only",
        "disk,kills",
        "--scale",
        "0.02",
        "--no-page",
        "--out",
        str(tmp_path),
    ]
    with subprocess.Popen(words, cwd=TESTS, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("kills"))  # the disk is done
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
    names = [row["name"] for row in json.loads((tmp_path / "chaos.json").read_text())["rows"]]
    assert names[:2] == ["disk full at every write", "small file systems"]
    assert names[-1] == "the rest"


@pytest.mark.long
def test_a_lost_process() -> None:
    row = ranks.run(0.05)
    assert (row.count, row.failures) == (1, [])


# ---- it would notice


@pytest.mark.slow
def test_a_broken_package_is_found(tmp_path: Path) -> None:
    done = python("chaos.broken", str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, list[str]] = json.loads(done.stdout)
    assert "cannot be resumed" in found["damaged_checkpoint"][0]
    assert "not the uninterrupted run" in found["wrong_step"][0]
    assert "no clean end" in found["raw_disk_errors"][0]
    kinds = [kind.partition(" at ")[0].partition(":")[0] for kind in found["bad_reader"]]
    assert kinds == ["writes outside its folder", "runs a program or calls out", "large", "KeyError in the test"]


def test_the_page_shows_failures(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{START}\nold\n{END}\nafter\n")
    rows = [
        Row("kills", 300, "kills", 1.0),
        Row("disk", 2, "faults", 2.0, ["a | b in /home/me/vitlab/x.py went wrong", *["c"] * 6], "small"),
    ]
    facts: dict[str, Any] = dict.fromkeys(("command", "commit", "machine", "seed", "date"), "x")
    write_page(facts, rows, page)
    write_page(facts, rows, page)
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert text.count("| kills | 300 kills | 0 | 1 |  |") == 1
    assert "| disk | 2 faults | 7 | 2 | small |" in text
    assert "- a | b in x.py went wrong" in text


def test_a_part_that_does_not_exist(tmp_path: Path) -> None:
    done = python("chaos", "--only", "kill", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "there is no part kill" in done.stderr
