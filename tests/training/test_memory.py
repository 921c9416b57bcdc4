"""Out of memory on the CPU: a smaller micro-batch where there is one, else an error. The limit is a real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
RUN = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import torch
from small_runs import train_small
from vitlab.errors import UserError
torch.set_num_threads(1)
size = dict(image_size=(32, 32), width=64, mlp=256, dropout=0.0, drop_path=0.0, warmup=0, workers=0, per_class=9)
train_small(Path(sys.argv[2]) / "warm", **size, steps=1, batch=4, micro=4)  # libraries are loaded by now
size |= {"width": int(sys.argv[4]), "depth": 4}
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[3]) << 20), resource.RLIM_INFINITY))
try:
    train_small(Path(sys.argv[2]) / "run", **size, steps=2, batch=1024, micro=1024)
    print("complete")
except UserError as error:
    print("error:", error)
"""


def train(tmp_path: Path, megabytes: int, width: int) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", RUN, str(HERE), str(tmp_path), str(megabytes), str(width)]
    return subprocess.run(words, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_the_micro_batch_shrinks(tmp_path: Path) -> None:
    """What a step needs differs by a factor of two between processors, whose libraries pack matrices differently."""
    for megabytes in (600, 350):
        done = train(tmp_path / f"{megabytes}", megabytes, 64)
        assert done.stdout.strip() == "complete", done.stderr[-2000:]
        assert (tmp_path / f"{megabytes}" / "run" / "model.safetensors").exists()
        if "out of memory" in done.stderr:
            break
    assert "out of memory with micro-batches of 1024 images; continuing with 512" in done.stderr.replace("\n", " ")


@pytest.mark.slow
def test_where_nothing_is_left_to_shrink_it_is_an_error(tmp_path: Path) -> None:
    """The model alone is too large."""
    done = train(tmp_path, 64, 2048)
    assert done.stdout.startswith("error: out of memory"), (done.stdout, done.stderr[-2000:])
    assert "Traceback" not in done.stderr
