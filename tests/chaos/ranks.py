"""One of two processes of a run is lost, at chosen points: the others must end soon, and resuming loses nothing."""

import dataclasses
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from training.small_runs import records

from chaos.faults import Fault
from chaos.processes import ENVIRONMENT, TESTS, Ended, cause, end_tree
from chaos.rows import Row

LOST = 20
BUDGET = 9 * 60  # seconds
BOUND = 60.0  # seconds until all processes must have ended, start-up included
COMMAND = ("train", "digits", "depth=2", "width=32", "mlp=32", "heads=2", "warmup=1", "batch=48", "log_every=1")
SETTINGS = (
    *COMMAND,
    "validation=0.1",
    "evaluate_every=10",
    "checkpoint_every=5",
    "steps=20",
    "ema=0.9",
    "device=cpu",
    "threads=1",
    "precision=float64",
)
POINTS = (  # that all processes reach, and how often
    ("vitlab.training.setup:prepare_run", 1),
    ("vitlab.training.trainer:Trainer.restore", 1),
    ("vitlab.training.trainer:Trainer.accumulate", 20),
    ("vitlab.training.trainer:Trainer.optimizer_step", 20),
    ("vitlab.training.loop:Run.evaluate", 2),
    ("vitlab.training.trainer:Trainer.measure", 6),
    ("vitlab.training.saver:Saver.save", 4),
    ("vitlab.training.saver:Saver.save_best", 1),
    ("vitlab.training.saver:Saver.save_final", 1),
)


def run(scale: float = 1.0, seed: int = 0) -> Row:
    began = time.monotonic()
    planned, deadline = max(1, round(LOST * scale)), began + BUDGET * max(scale, 0.3)
    draw = random.Random(seed)
    failures: list[str] = []
    tried, slowest, resumed = 0, 0.0, {1: 0, 2: 0}
    with tempfile.TemporaryDirectory(prefix="chaos-ranks-") as place:
        reference = Path(place) / "reference"
        ended = start(reference, 2, None)
        if ended.code:
            return Row("lost processes", 0, "losses", time.monotonic() - began, [f"no run of two at all: {ended}"])
        while tried < planned and time.monotonic() < deadline:
            point, calls = POINTS[tried % len(POINTS)]
            fault = Fault(point, draw.randint(1, calls), "after" if draw.random() < 0.5 else "before")
            parallel, rank = ("ddp", "fsdp")[tried % 2], draw.randrange(2)
            again = 1 + (tried // 2) % 2
            story = f"rank {rank} of a {parallel} run lost {fault}, continued by {again}"
            took, wrong = lose(Path(place) / f"lost{tried}", reference, rank, fault, parallel, again)
            failures += [f"{story}: {wrong}"] if wrong else []
            slowest, tried = max(slowest, took), tried + 1
            resumed[again] += 1
    if tried < planned:
        failures.append(f"only {tried} of {planned} were tried within the time")
    notes = f"all ended within {slowest:.0f} s, start-up included; {resumed[1]} continued by one, {resumed[2]} by two"
    return Row("lost processes", tried, "losses", time.monotonic() - began, failures, notes)


def lose(out: Path, reference: Path, rank: int, fault: Fault, parallel: str, again: int) -> tuple[float, str | None]:
    """How long the end took, and what went wrong."""
    began = time.monotonic()
    ended = start(out, 2, {"rank": rank, **dataclasses.asdict(fault)}, f"parallel={parallel}")
    took = time.monotonic() - began
    if ended.code == 0:
        return took, "the process was not lost"
    if took > BOUND:
        return took, f"the others had not ended after {BOUND:.0f} s"
    if f"failed (exitcode: -9) local_rank: {rank} " not in ended.printed:
        return took, f"the lost process is not reported: {ended}"
    ended = start(out, again, None, f"parallel={parallel}", "--resume")
    if ended.code:
        return took, f"cannot be resumed, {ended}"
    return took, difference(reference, out)


def start(out: Path, processes: int, fault: dict[str, object] | None, *options: str) -> Ended:
    """`vitlab train` by so many processes; ended by force some time after the bound."""
    launch = [sys.executable, "-m", "chaos.launch", json.dumps(fault or {"rank": None}), str(out)]
    run_command = [*launch, *SETTINGS, "--out", str(out), *options]
    if processes > 1:
        own = ["--standalone", f"--nproc-per-node={processes}", "--no-python"]
        run_command = [sys.executable, "-m", "torch.distributed.run", *own, *run_command]
    path = os.pathsep.join([str(TESTS), *filter(None, [ENVIRONMENT.get("PYTHONPATH")])])
    environment = ENVIRONMENT | {"PYTHONPATH": path}
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen(run_command, env=environment, stdout=file, stderr=file)
        try:
            code = process.wait(BOUND + 30)
        except subprocess.TimeoutExpired:
            end_tree(process.pid)
            code = process.wait()
        file.seek(0)
        return Ended(code, file.read())


def difference(reference: Path, out: Path) -> str | None:
    """Another number of processes adds up in another order: in double precision that hardly shows."""
    ours, theirs = ([r for r in records(folder) if "loss" in r] for folder in (out, reference))
    if [r["step"] for r in ours] != [r["step"] for r in theirs]:
        return "other steps in the log than the uninterrupted run's"
    try:
        np.testing.assert_allclose([r["loss"] for r in ours], [r["loss"] for r in theirs], rtol=1e-9)
        left, right = (load_file(folder / "model.safetensors") for folder in (out, reference))
        for key in right:
            torch.testing.assert_close(left[key], right[key], rtol=1e-6, atol=1e-9)
    except AssertionError as error:
        return f"not the uninterrupted run: {cause(str(error))}"
    return None
