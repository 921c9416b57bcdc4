"""Hostile files, guided by code coverage: every reader of files under Atheris, each in a process with limits."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from chaos.processes import ENVIRONMENT, TESTS, end_tree, spread
from chaos.rows import Row
from chaos.targets import TARGETS

SECONDS = {"pictures": 150}
USUAL = 75  # seconds for the other readers
STARTS = 5  # of the process, which a crash ends
SPARE = 120  # seconds that starting, training a small run and a last slow input may take


def run(scale: float = 1.0, out: Path | None = None, seed: int = 0) -> list[Row]:
    """A row for every reader; inputs that broke one stay in `out`."""
    if importlib.util.find_spec("atheris") is None:
        return [Row("hostile files", 0, "inputs", 0.0, ["Atheris is not installed: pip install 'vitlab[chaos]'"])]
    folder = out or Path(tempfile.mkdtemp(prefix="chaos-fuzz-"))
    jobs = [
        partial(fuzz, name, folder / name.replace(".", "-"), max(2, round(SECONDS.get(name, USUAL) * scale)), seed)
        for name in TARGETS
    ]
    rows = {fields["name"]: Row(**fields) for fields in spread(jobs, float("inf"))}
    return [rows[title(name)] for name in TARGETS]


def title(name: str) -> str:
    return f"hostile files: {name}"


def fuzz(name: str, folder: Path, seconds: int, seed: int) -> dict[str, Any]:
    """Fuzz one reader for so many seconds, restarted after a crash; returns the fields of its row."""
    began = time.monotonic()
    shutil.rmtree(folder, ignore_errors=True)
    failures: list[str] = []
    tried = reached = refused = 0
    left, starts = float(seconds), 0
    while left >= 1 and starts < STARTS:
        start_folder = folder / f"start{starts}"
        start_folder.mkdir(parents=True)
        printed, code = process(name, start_folder, round(left), seed + starts)
        counts = (start_folder / "tried").read_text().split() if (start_folder / "tried").exists() else ["0", "0"]
        tried += int(counts[0])
        refused += int(counts[0]) - int(counts[1])
        reached = max([reached, *map(int, re.findall(r"cov: (\d+)", printed))])
        failures += read_failures(name, start_folder, code, printed)
        left -= max(1.0, spent(printed))
        starts += 1
        tidy(start_folder)
    if not tried:
        failures.append("no input was tried")
    notes = f"{reached} branches of code reached, {refused:,} refused"
    row = Row(title(name), tried, "inputs", time.monotonic() - began, failures, notes)
    return vars(row)


def process(name: str, start_folder: Path, seconds: int, seed: int) -> tuple[str, int]:
    words = [sys.executable, "-m", "chaos.fuzz_one", name, str(start_folder), str(seconds), str(seed)]
    path = os.pathsep.join([str(TESTS), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    own = ENVIRONMENT | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    with (start_folder / "printed.txt").open("w+") as file:
        run = subprocess.Popen(words, env=own, stdout=file, stderr=file, cwd=start_folder)
        try:
            code = run.wait(seconds + SPARE)
        except subprocess.TimeoutExpired:
            end_tree(run.pid)
            code = run.wait()
        file.seek(0)
        return file.read(), code


def read_failures(name: str, start_folder: Path, code: int, printed: str) -> list[str]:
    """The readers' failures, each with the input that caused it."""
    kept = start_folder / "failures.jsonl"
    records = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    failures = [f"{r['kind']} ({' '.join(r['detail'].split())[:120]}): {start_folder / r['input']}" for r in records]
    artifacts = [path for kind in ("crash", "timeout", "oom") for path in start_folder.glob(f"{kind}-*")]
    failures += [f"{path.name.partition('-')[0]} of the process: {path}" for path in artifacts]
    if code and not artifacts:
        failures.append(f"the process ended with exit code {code}: {printed.strip()[-200:]}")
    return failures


def spent(printed: str) -> float:
    done = re.search(r"Done \d+ runs in (\d+) second", printed)
    return float(done[1]) if done else USUAL / STARTS


def tidy(start_folder: Path) -> None:
    """Remove everything but the inputs that caused failures."""
    for name in ("corpus", "made", "place", "home"):
        shutil.rmtree(start_folder / name, ignore_errors=True)
