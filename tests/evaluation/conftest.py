"""A small run, and verbs run in this process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import vitlab
from vitlab.cli import main

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`vitlab WORDS`: its exit code and what it prints."""

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["vitlab", *words])
        with pytest.raises(SystemExit) as stop:
            main()
        printed = capsys.readouterr()
        return int(str(stop.value.code)), printed.out, printed.err

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("small") / "run"
    vitlab.save(vitlab.create("Ti/4", image_size=8, depth=1, width=24, heads=2, mlp=48, classes=10), folder)
    return folder
