"""The Dockerfile, without Docker: its files exist, its commands are valid; test_front.py has its health check."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from vitlab.cli import app

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()


def instructions() -> list[tuple[str, str]]:
    """(name, arguments) of each instruction; a line that ends in a backslash is continued."""
    lines = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line.strip()]


def arguments(name: str) -> list[str]:
    return [rest for word, rest in instructions() if word == name]


def copied() -> list[str]:
    """What is copied from the repository."""
    return [word for rest in arguments("COPY") if "--from" not in rest for word in rest.split()[:-1]]


def test_instructions_are_dockers() -> None:
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "EXPOSE", "HEALTHCHECK", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} <= known
    for rest in arguments("RUN"):
        assert subprocess.run(["sh", "-n", "-c", rest]).returncode == 0


def test_copied_files_exist_and_are_sent_to_the_builder() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert set(copied()) == set(allowed)
    for name in copied():
        assert (ROOT / name).exists(), name


def test_the_copied_files_are_a_package(tmp_path: Path) -> None:
    """Its metadata can be built from them alone: everything that pyproject.toml names is there."""
    for name in copied():
        target = tmp_path / name
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, target)
    pytest.importorskip("setuptools")
    code = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("vitlab-")


def test_extras_and_pins() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [asked] = re.findall(r'"\.\[([\w,]+)\]"', TEXT)
    assert set(asked.split(",")) <= set(extras)
    pins = (ROOT / "constraints.txt").read_text()
    assert all(re.search(rf"^{name}==", pins, re.MULTILINE) for name in ("torch", "torchvision"))
    assert all("--constraint constraints.txt" in rest for rest in arguments("RUN") if "pip install" in rest)


def test_it_does_not_run_as_root() -> None:
    [user] = arguments("USER")
    assert int(user) > 0
    last = [name for name, _ in instructions()]
    assert last.index("USER") > max(i for i, name in enumerate(last) if name == "RUN")


def test_the_command_is_accepted() -> None:
    words = json.loads(arguments("ENTRYPOINT")[0]) + json.loads(arguments("CMD")[0])
    assert words[:2] == ["vitlab", "serve"]
    parameters = typer.main.get_group(app).commands["serve"].make_context("serve", words[2:]).params
    assert (parameters["run"], parameters["host"]) == ("/model", "0.0.0.0")
    assert arguments("EXPOSE") == [str(parameters["port"])]
