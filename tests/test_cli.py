"""The command line as a user meets it: a process, its exit code, what it prints."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from timing import measure_until, seconds

from vitlab.cli import app, main

VITLAB = Path(sys.executable).with_name("vitlab")


def vitlab(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([VITLAB, *words], capture_output=True, text=True, timeout=120)


def test_help_answers_at_once() -> None:
    """Within 0.7 s or, on a slow machine, four times what Python takes for the libraries that print it."""
    assert vitlab("--help").returncode == 0  # and compiles the bytecode
    libraries = [sys.executable, "-c", "import typer, rich.console, rich.table"]

    def measure() -> tuple[float, float]:
        return seconds(lambda: vitlab("--help")), seconds(lambda: subprocess.run(libraries, check=True))

    measure_until(lambda took: took[0] < max(0.7, 4 * took[1]), measure)


def test_the_list_of_recipes_fits_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = vitlab("recipes").stdout
    assert "0.0006" in said
    assert "…" not in said


def test_help_does_not_import_torch() -> None:
    code = """
import sys
from vitlab.cli import app, main
sys.argv = ["vitlab", "--help"]
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False"


VERBS = [command.name or command.callback.__name__ for command in app.registered_commands if command.callback]


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_shows_an_example(verb: str) -> None:
    done = vitlab(verb, "--help")
    assert done.returncode == 0
    assert "Example" in done.stdout
    assert f"vitlab {verb}" in done.stdout


@cache
def help_of(verb: str) -> str:
    return vitlab(verb, "--help").stdout


ROOT = Path(__file__).parents[1]
PAGES = [str(page.relative_to(ROOT)) for page in sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")])]


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_verbs_and_options_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        for line in block.splitlines():
            if match := re.search(r"\bvitlab (\w+)(.*?)(?: {3,}|#|$)", line):
                assert match[1] in VERBS, line
                known = help_of(match[1])
                assert all(option in known for option in re.findall(r"--[a-z-]+", match[2])), line


def test_cost() -> None:
    done = vitlab("cost", "B/16", "--images", "303M", "--epochs", "7", "--tflops", "100")
    assert done.returncode == 0, done.stderr
    assert "86,567,656" in done.stdout
    assert "223.5 exaFLOPs" in done.stdout  # the paper prints 224
    assert "25.87 days" in done.stdout  # 223.5e18 / 100e12 / 86400


def test_cost_takes_settings_of_the_model() -> None:
    done = vitlab("cost", "Ti/16", "image_size=32x48", "positions=none", "pool=mean")
    assert done.returncode == 0, done.stderr
    assert [line.split()[-2] for line in done.stdout.splitlines() if "tokens" in line] == ["6"]


def test_models_lists_what_is_asked() -> None:
    done = vitlab("models", "Ti/16", "R50x1")
    assert done.returncode == 0, done.stderr
    assert "5,717,416" in done.stdout
    assert "25,549,352" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cost", "Q/16"], "the sizes are Ti, S, B, L, H or g"),
        (["cost", "B/16", "image_size=225"], "use 224 or 240"),
        (["cost", "B/16", "heads=5"], "5 heads do not divide the width 768"),
        (["cost", "B/16", "dropout=-1"], "dropout must be at least 0"),
        (["cost", "B/16", "dropot=1"], "did you mean 'dropout'?"),
        (["cost", "B/16", "dropout"], "write key=value"),
        (["cost", "B/16", "--images", "many"], "--images must be a positive number"),
        (["cost", "B/16", "--epochs", "0"], "--epochs must be positive"),
        (["cost", "B/16", "--tflops", "-1"], "the speed must be positive"),
        (["models", "B/16", "--image-size", "100"], "use 96 or 112"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_1(
    words: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["vitlab", *words])
    with pytest.raises(SystemExit) as stop:
        main()
    printed = capsys.readouterr()
    assert stop.value.code == 1
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert said in printed.err
    assert printed.out == ""


def test_a_mistake_ends_the_process_with_code_1() -> None:
    done = vitlab("cost", "Q/16")
    assert done.returncode == 1
    assert done.stderr == "error: there is no size 'Q' (in 'Q/16'); the sizes are Ti, S, B, L, H or g\n"
