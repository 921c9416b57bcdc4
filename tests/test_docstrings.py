"""Examples in the docstrings of public names are run; `help(...)` shows what goes in, comes out and can go wrong."""

import doctest
import importlib
import inspect
import pydoc
from pathlib import Path

import pytest
import torch
from docs_standins import GOOGLE, HUGGINGFACE, class_folders, converted, photo, run
from PIL import Image

import vitlab

FILES = {
    "google/vit-base-patch16-224": HUGGINGFACE,
    "ViT-B_16.npz": GOOGLE,
    "R26_S_32.npz": converted("google", name="R26+S/32", size=64, gelu="tanh"),
    "runs/mine": run(),
    "runs/pets": run(),
    "cat.jpg": photo,
    "photos": class_folders,
}
NAMES = sorted({*vitlab.__all__} - {"UserError"})
DESCRIBED = {
    "create": ("Args:", "Returns:", "Raises:", "Settings:"),
    "load": ("Args:", "Returns:", "Raises:", "Settings:"),
    "convert": ("Args:", "Raises:", "Settings:"),
    "save": ("Args:", "Raises:"),
    "attention": ("Args:", "Returns:", "Raises:"),
    "build": ("Args:", "Returns:"),
    "finetune": ("Args:", "Returns:", "Raises:"),
    "predict": ("Args:", "Returns:", "Raises:"),
    "embed": ("Args:", "Returns:", "Raises:"),
    "search": ("Args:", "Returns:", "Raises:"),
    "Run": ("Args:", "Raises:"),
}


class Lenient(doctest.OutputChecker):
    """Compares what an example prints with what is written below it, if anything is."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        return not want or super().check_output(want, got, optionflags)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that the examples name."""
    folder = tmp_path_factory.mktemp("examples")
    for name, make in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        make(folder / name)
    return folder


def public(name: str) -> object:
    room, _, last = name.rpartition(".")
    return getattr(importlib.import_module(f"vitlab.{room}") if room else vitlab, last)


@pytest.mark.parametrize("name", NAMES)
def test_examples_run(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    thing = public(name)
    names = {**vars(inspect.getmodule(thing)), "vitlab": vitlab, "torch": torch, "image": Image.open("cat.jpg")}
    runner = doctest.DocTestRunner(Lenient(), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    tests = doctest.DocTestFinder(recurse=False).find(thing, name, globs=names)
    assert sum(len(test.examples) for test in tests) >= 1, f"{name} has no example"
    for test in tests:
        assert runner.run(test).failed == 0


@pytest.mark.parametrize("name", sorted(DESCRIBED))
def test_help_describes_arguments_results_and_errors(name: str) -> None:
    text = inspect.getdoc(public(name)) or ""
    for section in DESCRIBED[name]:
        assert section in text


def test_the_api_page_names_what_exists() -> None:
    """The site's build reports the same, minutes later."""
    page = Path(vitlab.__file__).parents[1] / "docs" / "api.md"
    names = [line.removeprefix("::: ") for line in page.read_text("utf-8").splitlines() if line.startswith("::: ")]
    assert len(names) > 10
    for name in names:
        assert pydoc.locate(name) is not None, name
