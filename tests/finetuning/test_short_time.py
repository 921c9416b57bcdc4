"""What `vitlab finetune` imports, and what it does where there is no time at all: a program of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import vitlab

# Seconds each, for what a head on frozen features has no use for: compilation, sharding, figures, data frames.
HEAVY = {
    *("torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.checkpoint", "sympy"),
    *("matplotlib", "scipy", "sklearn", "pandas", "pyarrow", "torchvision", "transformers", "timm", "onnx"),
}
PROGRAM = """
import sys
from vitlab.cli import main
try:
    main()
finally:
    print("\\n" + " ".join(sys.modules))
"""


@pytest.mark.slow
def test_without_time_it_imports_and_draws_nothing_that_can_wait(tmp_path: Path) -> None:
    torch.manual_seed(0)
    small = vitlab.create("Ti/4", image_size=8, depth=2, width=32, mlp=64, heads=2, classes=5)
    vitlab.save(small, tmp_path / "weights")
    for number, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (24, 12, 12, 3), dtype=np.uint8)):
        folder = tmp_path / "photos" / ("train" if number < 16 else "test") / f"class {number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    run = tmp_path / "run"
    words = ["finetune", str(tmp_path / "photos"), "--weights", str(tmp_path / "weights"), "--out", str(run)]
    command = [sys.executable, "-c", PROGRAM, *words, "--minutes", "1e-6", "device=cpu", "workers=0"]
    env = {**os.environ, "PYTHONPATH": str(Path(vitlab.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    *printed, modules = done.stdout.strip().splitlines()
    assert not HEAVY & set(modules.split())
    assert any(f"`vitlab report {run}` draws them" in line for line in printed)
    page = (run / "report.html").read_text()
    assert f"<code>vitlab report {run}</code> draws them" in page
    assert "<picture>" not in page
    assert 'class="photo"' in page  # thumbnails of answers
    stages = json.loads((run / "stages.json").read_text())["stages"]
    assert stages["start"] > 0.5  # torch was imported
    assert stages["measured"] > stages["start"]
