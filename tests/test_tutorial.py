"""Every command of docs/tutorial.md, in order, as real processes in an empty folder, offline.

A block that starts a server runs beside the next one, which asks it, and is then stopped as a system would: SIGTERM.
The only thing changed is the port, as 8000 may be taken.
"""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "tutorial.md").read_text()
BIN = Path(sys.executable).parent
LONGEST = 240  # seconds of one command: the demo's training, on a busy machine


def blocks() -> list[list[str]]:
    """The tutorial's blocks of commands."""
    found = [block.strip().splitlines() for block in re.findall(r"^```\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)]
    return [block for block in found if block[0].startswith(("vitlab ", "curl "))]


def environment() -> dict[str, str]:
    """Commands by their names, and no way to the network but to this machine."""
    nowhere = "http://127.0.0.1:9"
    return os.environ | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "https_proxy": nowhere,
        "http_proxy": nowhere,
        "no_proxy": "127.0.0.1",
    }


def test_the_tutorial_has_its_commands_and_pictures() -> None:
    verbs = [shlex.split(line)[1] for block in blocks() for line in block if line.startswith("vitlab ")]
    assert verbs == [
        *("demo", "data", "finetune", "report", "evaluate", "predict", "predict"),
        *("inspect", "serve", "export", "convert"),
    ]
    pictures = re.findall(r"\((tutorial/[\w.-]+)\)|src=\"(tutorial/[\w.-]+)\"", TEXT)
    files = [ROOT / "docs" / (a or b) for a, b in pictures]
    assert len(files) >= 6
    assert sum(path.stat().st_size for path in files) < 900_000
    assert {path.name for path in files} == {path.name for path in (ROOT / "docs" / "tutorial").iterdir()}


def run(line: str, folder: Path) -> str:
    done = subprocess.run(
        shlex.split(line), cwd=folder, env=environment(), capture_output=True, text=True, timeout=LONGEST
    )
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(port: int, server: "subprocess.Popen[str]") -> None:
    for _ in range(300):
        assert server.poll() is None, server.communicate()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=2) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.2)
    raise AssertionError("the server did not start")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorial asks the server with curl")
def test_every_command_runs_in_order(tmp_path: Path) -> None:
    said: dict[str, str] = {}
    server: subprocess.Popen[str] | None = None
    port = free_port()
    try:
        for line in (line for block in blocks() for line in block):
            if line.startswith("vitlab serve"):
                words = [*shlex.split(line), "--port", str(port)]
                server = subprocess.Popen(
                    words, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
                wait_for(port, server)
                continue
            said[line] = run(line.replace(":8000", f":{port}"), tmp_path)
            if server is not None:
                server.send_signal(signal.SIGTERM)
                printed, complaints = server.communicate(timeout=60)
                assert server.returncode == 0, complaints
                assert "stopped" in printed
                server = None
    finally:
        if server is not None:
            server.kill()
            server.communicate()
    check(said, tmp_path)


def check(said: dict[str, str], folder: Path) -> None:
    """What the tutorial promises is there."""
    rate = re.search(r"test: accuracy ([\d.]+)%", said["vitlab demo"])
    assert rate is not None
    assert float(rate[1]) > 97
    for name in ("report.html", "samples/3.png", "photos/9/20.png", "inside/3/steps.png"):
        assert (folder / "runs" / "demo" / name).exists()
    for name in ("samples.png", "runs/mine/report.html", "scores/per_class.csv", "inside/3/steps.png", "digits.onnx"):
        assert (folder / name).stat().st_size > 200
    assert (folder / "mine-hf" / "config.json").exists()
    answers = list(csv.DictReader((folder / "answers.csv").open()))
    assert [Path(answer["path"]).stem for answer in answers] == list("0123456789")
    assert sum(Path(answer["path"]).stem == answer["class"] for answer in answers) >= 8
    asked = json.loads(next(text for line, text in said.items() if line.startswith("curl")))
    best = asked["images"][0]["classes"][0]
    assert best["name"] == answers[3]["class"]
    assert best["probability"] == pytest.approx(float(answers[3]["probability"]), abs=1e-4)
