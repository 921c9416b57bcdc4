"""Runs the blocks of a page, in order, in one folder: commands by bash, Python in this process."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import preloaded
from docs_commands import ROOT, Block
from docs_standins import Page

BIN = Path(sys.executable).parent
LONGEST = 900  # seconds of one command: the demo's training, on a busy machine
NOWHERE = "http://127.0.0.1:9"
# No way to the network but to this machine; programs of a cluster that only print or start what they are given.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "https_proxy": NOWHERE,
    "http_proxy": NOWHERE,
    "no_proxy": "127.0.0.1,localhost",
    "SLURM_NNODES": "1",
    "SLURM_JOB_ID": "1",
    "SLURM_JOB_NODELIST": "localhost",
}
PROGRAMS = {"scontrol": "echo 127.0.0.1", "srun": 'exec "$@"'}
KEPT = re.compile(r"(.* && )?(\.|source|export|cd) ")  # commands whose effect the following ones need


class Runner:
    """One page's folder, its environment, and the server that runs in it."""

    def __init__(self, page: Page, folder: Path, environment: Mapping[str, str]) -> None:
        self.page, self.folder, self.environment = page, folder, environment
        self.names = page.names()
        self.before: list[str] = []
        self.server: subprocess.Popen[str] | None = None
        self.ports = {":8000": f":{free_port()}", ":29500": f":{free_port()}"}
        self.printed: dict[str, str] = {}  # by command, as the page has it

    def run(self, block: Block) -> None:
        if block.language == "python":
            with contextlib.chdir(self.folder):
                exec(compile(self.replaced(block.text), "a block of the page", "exec"), self.names)
            return
        for command in block.commands:
            if not command.startswith(tuple(self.page.parsed)):  # the others are parsed, by a quick test
                self.printed[command] = self.run_command(self.adapted(command))

    def replaced(self, text: str) -> str:
        for old, new in (*self.page.replace.items(), *self.ports.items()):
            text = text.replace(old, new)
        return text

    def adapted(self, command: str) -> str:
        """The command with its stand-ins."""
        command = self.replaced(command)
        more = [words for start, words in self.page.append.items() if command.startswith(start)]
        return " ".join([re.sub(r"\s+# .*", "", command), *more])

    def run_command(self, command: str) -> str:
        if KEPT.match(command):
            self.before.append(command)
        if "vitlab serve" in command:
            self.start_server(command)
            return ""
        script = "\n".join(["set -e", *self.before, command])
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=LONGEST,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start_server(self, command: str) -> None:
        self.stop_server()
        port = self.ports[":8000"].removeprefix(":")
        command = command.replace("vitlab serve", "exec vitlab serve") + f" --port {port}"
        self.server = subprocess.Popen(
            ["bash", "-c", "\n".join([*self.before, command])],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        wait_for(f"http://127.0.0.1:{port}/healthz", self.server)

    def stop_server(self) -> None:
        """As a system would: SIGTERM, after which it prints that it stopped."""
        if self.server is not None:
            server, self.server = self.server, None
            server.send_signal(signal.SIGTERM)
            printed, complaints = server.communicate(timeout=60)
            assert server.returncode == 0, complaints
            assert "stopped" in printed


@contextlib.contextmanager
def runner(page: Page, folder: Path, environment: Mapping[str, str] | None = None) -> Iterator[Runner]:
    """A runner in a folder with the page's stand-in files; its server is stopped at the end."""
    for name, make in page.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        make(folder / name)
    run = Runner(page, folder, environment or own_environment(folder))
    try:
        yield run
        run.stop_server()
    finally:
        if run.server is not None:
            run.server.kill()
            run.server.communicate()


def own_environment(folder: Path) -> dict[str, str]:
    """Commands by their names, and what they would keep at home kept in the folder."""
    programs = folder / ".programs"
    for name, text in PROGRAMS.items():
        write_program(programs / name, text)
    path = os.pathsep.join([str(preloaded.folder()), str(BIN), str(programs), os.environ["PATH"]])
    return {**os.environ, **ENVIRONMENT, "PATH": path, "VITLAB_DATA": str(folder)}


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(url: str, server: "subprocess.Popen[Any]") -> None:
    for _ in range(600):
        assert server.poll() is None, server.communicate()
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                assert answer.status == 200
                return
        except OSError:
            time.sleep(0.1)
    raise AssertionError("the server did not start")
