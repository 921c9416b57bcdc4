"""Training killed again and again, at chosen points of the program and by the clock; what is left must be the same run.

Every chain is one run: killed one to four times, each time resumed, at the end compared to the bit.
"""

import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from chaos.faults import FUNCTIONS, POINTS, Fault, Kind
from chaos.processes import BOUND, ENVIRONMENT, VITLAB, spread
from chaos.rows import Row
from chaos.runs import difference, fresh, once, profile

KILLS, BY_CLOCK = 300, 36  # of the 300, so many are of fresh processes of the real command
BUDGET = 12 * 60  # seconds
COMMAND = ("depth=2", "width=16", "mlp=32", "heads=2", "batch=32", "dropout=0.1", "steps=60", "checkpoint_every=5")
SETTINGS = (
    *COMMAND,
    "validation=0.1",
    "evaluate_every=20",
    "log_every=1",
    "ema=0.9",
    "device=cpu",
    "threads=1",
    "workers=0",
)

ChainResult = dict[str, Any]  # how many kills, in which part of a run, what went wrong


def run(scale: float = 1.0, seed: int = 0) -> Row:
    began = time.monotonic()
    planned = max(8, round(KILLS * scale))
    by_clock = int(BY_CLOCK * scale)
    deadline = began + BUDGET * max(scale, 0.2)
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="chaos-kills-") as place:
        folder = Path(place)
        counts = profile(folder)
        found: list[ChainResult] = by_the_clock(folder, by_clock, draw, deadline) if by_clock else []
        jobs = chain_jobs(folder, counts, lambda: killed(found) < planned, draw)
        for chain_found in spread(jobs, deadline):
            found.append(chain_found)  # the jobs look at it  # noqa: PERF402
    return summarize(found, planned, time.monotonic() - began, counts)


def killed(found: list[ChainResult]) -> int:
    return sum(sum(chain["parts"].values()) for chain in found)


def summarize(found: list[ChainResult], planned: int, seconds: float, counts: Counter[str]) -> Row:
    parts: Counter[str] = Counter()
    for chain in found:
        parts.update(chain["parts"])
    kills = killed(found)
    failures = [failure for chain in found for failure in chain["failures"]]
    failures += [f"nothing ever reached {point}, so nothing was killed there" for point in POINTS if not counts[point]]
    if kills < planned:
        failures.append(f"only {kills} of {planned} kills happened within the time")
    notes = ", ".join(f"{count} in {part}" for part, count in parts.items())
    return Row("training killed", kills, "kills", seconds, failures, f"{notes}; {len(found)} runs, equal to the bit")


# ---- at points of the program


def chain_jobs(
    folder: Path, counts: Counter[str], more: Callable[[], bool], draw: random.Random
) -> Iterator[Callable[[], ChainResult]]:
    """Chains of one to four kills until enough are made; points in turn, so that every one has its share."""
    reached = [point for point in POINTS if counts[point]]
    turns: list[str] = []
    number = 0
    while more():
        faults = []
        for place in range(draw.randint(1, 4)):
            turns = turns or draw.sample(reached, len(reached))
            faults.append(draw_fault(turns.pop(), place, counts, draw))
        yield partial(chain, folder, f"chain{number}", faults)
        number += 1


def draw_fault(point: str, place: int, counts: Counter[str], draw: random.Random) -> Fault:
    # a resumed run has less before it: late calls of the first stretch would never come
    most = max(1, counts[point] // (place + 1))
    kinds: tuple[Kind, ...] = ("before", "after")
    if point in ("write", "save_file"):
        kinds = ("before", "within", "after")
    return Fault(point, draw.randint(1, most), draw.choice(kinds))


def chain(folder: Path, name: str, faults: list[Fault]) -> ChainResult:
    out = fresh(folder, name)
    parts: Counter[str] = Counter()
    failures = []
    for place, fault in enumerate(faults):
        ended = once(out, resume=place > 0, fault=fault)
        if ended.killed:
            parts[part_of(fault.point)] += 1
        elif ended.code:
            failures.append(f"{fault}: before it came, {ended}")
    ended = once(out, resume=True)
    story = "; then ".join(map(str, faults))
    if ended.code:
        failures.append(f"{story}: cannot be resumed, {ended}")
    elif wrong := difference(folder / "reference", out):
        failures.append(f"{story}: {wrong}")
    fresh(folder, name)
    return {"parts": parts, "failures": failures}


def part_of(point: str) -> str:
    return next(part for part, points in FUNCTIONS.items() if point in points)


# ---- by the clock, the real command


def by_the_clock(folder: Path, kills: int, draw: random.Random, deadline: float) -> list[ChainResult]:
    """Runs of fresh processes; the first, uninterrupted, measures how long one takes."""
    began = time.monotonic()
    code = command(folder / "clock", resume=False).wait(BOUND)
    took = time.monotonic() - began
    if code:
        return [{"parts": {}, "failures": [f"`vitlab train digits` ends with exit code {code}"]}]
    jobs = []
    for first in range(0, kills, 3):
        moments = [draw.uniform(0.3, 0.8 * took) for _ in range(min(3, kills - first))]
        jobs.append(partial(clock_chain, folder, f"clock{first}", moments))
    return list(spread(jobs, deadline))


def command(out: Path, resume: bool) -> subprocess.Popen[bytes]:
    words: list[str | Path] = [VITLAB, "train", "digits", "--out", out, *SETTINGS, *(["--resume"] if resume else [])]
    return subprocess.Popen(words, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def clock_chain(folder: Path, name: str, moments: list[float]) -> ChainResult:
    out = folder / name
    killed, failures = 0, []
    for moment in moments:
        process = command(out, resume=True)  # of a folder without a run, it begins one
        try:
            code = process.wait(moment)
            if code:
                failures.append(f"{name}: exit code {code} before the kill")
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            killed += 1
    code = command(out, resume=True).wait(BOUND)
    story = f"{name}, killed after {', '.join(f'{moment:.2f} s' for moment in moments)}"
    if code:
        failures.append(f"{story}: cannot be resumed, exit code {code}")
    elif wrong := difference(folder / "clock", out):
        failures.append(f"{story}: {wrong}")
    return {"parts": {"fresh processes by the clock": killed}, "failures": failures}
