"""Programs that start from a process with everything imported end as the installed ones do."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from preloaded import program

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="elsewhere they are the installed ones"),
]
WAIT = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("vitlab", ["--version"]),
        ("vitlab", ["train", "no-such-recipe"]),
        ("python", ["-c", "import sys; print(input()); sys.exit('an error')"]),
        ("python", ["-c", "import os, sys; print(sys.argv, os.getcwd(), os.environ['NAME']); 1 / 0"]),
        ("python", ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"]),
    ],
)
def test_output_and_exit_code(name: str, words: list[str], tmp_path: Path) -> None:
    paths = Path(sys.executable).with_name(name), program(name)
    how = {"cwd": tmp_path, "env": {"NAME": "고양이", "PYTHONUTF8": "1"}, "input": "typed\n"}
    installed, ours = (subprocess.run([path, *words], capture_output=True, text=True, **how) for path in paths)  # type: ignore[call-overload]
    assert (ours.returncode, ours.stdout) == (installed.returncode, installed.stdout)
    assert ours.stderr.splitlines()[-1:] == installed.stderr.splitlines()[-1:]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_what_it_started(number: signal.Signals) -> None:
    with subprocess.Popen(
        [program("python"), "-c", WAIT], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        worker = psutil.Process(int(process.stdout.readline()))
        process.send_signal(number)
        assert process.wait(20) == -number
    until = time.monotonic() + 20
    while worker.is_running() and time.monotonic() < until:
        time.sleep(0.01)
    assert not worker.is_running()
