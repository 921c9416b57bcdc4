"""Training on a GPU, killed and resumed by real signals: does it end with the same weights, to the bit?

    python tests/chaos/gpu_kills.py [--device cuda] [--kills 4] [--steps 300] [--ways WAY ...] [--out FOLDER]

For each way of running (compiled or not, as a CUDA graph or not, bf16 or float32) an undisturbed run is made
twice, to see whether the machine's kernels are deterministic at all, and then once more with SIGKILL at random steps.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
VITLAB = [sys.executable, "-c", "from vitlab.cli import main; main()"]
WAYS: dict[str, list[str]] = {
    "compiled, bf16": ["compile=yes"],
    "compiled, CUDA graph, bf16": ["compile=yes", "cuda_graph=true"],
    "eager, bf16": ["compile=no"],
    "CUDA graph, bf16": ["compile=no", "cuda_graph=true"],
    "compiled, float32": ["compile=yes", "precision=float32"],
}


def start(out: Path, settings: list[str], *, resume: bool = False) -> "subprocess.Popen[bytes]":
    words = [*VITLAB, "train", "digits", "--out", str(out), *settings, *(["--resume"] if resume else [])]
    return subprocess.Popen(
        words, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def finish(process: "subprocess.Popen[bytes]") -> None:
    _, errors = process.communicate(timeout=400)
    if process.returncode:
        raise RuntimeError(errors.decode()[-2000:])


def steps_done(out: Path) -> int:
    log = out / "log.jsonl"
    return log.read_bytes().count(b'"lr"') if log.exists() else 0


def kill_at(out: Path, settings: list[str], step: int, *, resume: bool) -> int:
    """Start, kill at a step, and return the step it came to."""
    process = start(out, settings, resume=resume)
    while steps_done(out) < step and process.poll() is None:
        time.sleep(0.001)
    process.kill()
    _, errors = process.communicate()
    if process.returncode not in (-signal.SIGKILL, 0):
        raise RuntimeError(errors.decode()[-2000:])
    return steps_done(out)


def difference(a: Path, b: Path) -> float:
    """The largest difference between two runs' weights; 0 where they are the same to the bit."""
    ours, theirs = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def compare(folder: Path, settings: list[str], steps: int, kills: int) -> dict[str, Any]:
    for name in ("one", "two"):
        finish(start(folder / name, settings))
    moments = sorted(random.Random(steps).sample(range(5, steps - 5), kills))
    reached = [kill_at(folder / "cut", settings, step, resume=i > 0) for i, step in enumerate(moments)]
    finish(start(folder / "cut", settings, resume=True))
    return {
        "killed_at": reached,
        "run_to_run": difference(folder / "one", folder / "two"),
        "killed_to_undisturbed": difference(folder / "one", folder / "cut"),
        "same_losses": losses(folder / "one") == losses(folder / "cut"),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--ways", nargs="*", default=list(WAYS))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    common = [f"steps={given.steps}", f"batch={given.batch}", f"device={given.device}", "log_every=1", "warmup=10"]
    common += ["checkpoint_every=20", "seed=3", "dropout=0.1", "drop_path=0.1", "mixup=0.2", "evaluate_every=100"]
    found: dict[str, Any] = {}
    for way, settings in WAYS.items():
        if way not in given.ways:
            continue
        with tempfile.TemporaryDirectory() as spare:
            began = time.monotonic()
            found[way] = compare(Path(spare), [*common, *settings], given.steps, given.kills)
            found[way]["seconds"] = round(time.monotonic() - began, 1)
        print(way, json.dumps(found[way]), flush=True)
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "gpu_kills.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
