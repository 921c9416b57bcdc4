"""Kernels on a CPU: a script in Triton's interpreter, in a process of its own, as the switch is read on import."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def run_interpreted(name: str) -> Any:
    """What a script beside this file prints, as JSON."""
    pytest.importorskip("triton")
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, str(Path(__file__).with_name(name))]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])
