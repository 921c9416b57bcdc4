"""Every command in the README and in docs/: parsed by the real command line here, and run by the slow tests.

What the commands need and this machine lacks is in docs_standins.py.
"""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
from docs_commands import FENCE, OTHERS, PAGES, ROOT, blocks, check_command, inline_commands
from docs_runner import BIN, ENVIRONMENT, runner, write_program
from docs_standins import PAGES as STANDINS
from docs_standins import SHORT_DEMO, Page

TUTORIAL = ROOT / "docs" / "tutorial.md"


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [*OTHERS, *PAGES], ids=name)
def test_commands_are_accepted_by_the_command_line(page: Path) -> None:
    commands = [command for block in blocks(page) if block.language == "bash" for command in block.commands]
    for command in [*commands, *inline_commands(page)]:
        check_command(command)


@pytest.mark.parametrize(
    "command",
    [
        "vitlab trian digits",
        "vitlab train digits --outt runs/x",
        "vitlab train digits opt=adamw",
        "vitlab bench digits --seconds many",
        "torchrun --nprocs-on-node 8 --no-python vitlab train digits",
        "srun bash -c 'exec vitlab train digits --outt runs/x'",
    ],
)
def test_a_misspelled_command_is_found(command: str) -> None:
    with pytest.raises((Exception, SystemExit)):
        check_command(command)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_blocks_name_their_language(page: Path) -> None:
    assert {language for language, _ in FENCE.findall(page.read_text("utf-8"))} <= {"bash", "python", "json", "text"}


@pytest.mark.parametrize("page", [*OTHERS, *PAGES], ids=name)
def test_files_of_the_project_that_a_page_names_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    for path in re.findall(r"`(?:python )?((?:vitlab|tests|docs|examples|benchmarks)/[\w/.-]+)", text):
        assert (ROOT / path).exists(), path


# ---- every block is run


def test_every_page_is_run() -> None:
    pages = {name(page) for page in [ROOT / "README.md", *PAGES]}
    assert pages <= set(STANDINS), "list the page in docs_standins.py"


@pytest.mark.parametrize("page", sorted(STANDINS))
def test_stand_ins_are_used(page: str) -> None:
    """What a stand-in replaces or leaves out is on the page."""
    path = ROOT / page
    text = path.read_text("utf-8") if path.exists() else ""
    for old in STANDINS[page].parsed:
        assert old in text or page in ("README.md", "docs/releasing.md"), old


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="pages use curl")
@pytest.mark.parametrize("page", [name(page) for page in PAGES if blocks(page) and page.stem != "tutorial"])
def test_blocks_run_in_order(page: str, tmp_path: Path) -> None:
    with runner(STANDINS[page], tmp_path) as run:
        for block in blocks(ROOT / page):
            run.run(block)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the tutorial uses curl")
@pytest.mark.parametrize(
    ("replace", "least"), [({"vitlab demo": SHORT_DEMO}, 90), pytest.param({}, 97, marks=pytest.mark.long)]
)
def test_the_tutorial_keeps_its_promises(tmp_path: Path, replace: dict[str, str], least: float) -> None:
    with runner(Page(replace=replace), tmp_path) as run:
        for block in blocks(TUTORIAL):
            run.run(block)
    rate = re.search(r"test: accuracy ([\d.]+)%", run.printed["vitlab demo"])
    assert rate is not None
    assert float(rate[1]) > least
    for file in ("report.html", "samples/3.png", "photos/9/20.png", "inside/3/steps.png"):
        assert (tmp_path / "runs" / "demo" / file).exists()
    for file in ("samples.png", "runs/mine/report.html", "scores/per_class.csv", "inside/3/steps.png", "digits.onnx"):
        assert (tmp_path / file).stat().st_size > 200
    assert (tmp_path / "mine-hf" / "config.json").exists()
    answers = list(csv.DictReader((tmp_path / "answers.csv").open()))
    assert [Path(answer["path"]).stem for answer in answers] == list("0123456789")
    assert sum(Path(answer["path"]).stem == answer["class"] for answer in answers) >= 8
    served = json.loads(next(text for line, text in run.printed.items() if line.startswith("curl")))
    best = served["images"][0]["classes"][0]
    assert best["name"] == answers[3]["class"]
    assert best["probability"] == pytest.approx(float(answers[3]["probability"]), abs=1e-4)


def test_the_tutorial_shows_all_its_images() -> None:
    images = re.findall(r"\((tutorial/[\w.-]+)\)|src=\"(tutorial/[\w.-]+)\"", TUTORIAL.read_text("utf-8"))
    files = [ROOT / "docs" / (a or b) for a, b in images]
    assert len(files) >= 4
    assert sum(path.stat().st_size for path in files) < 900_000
    assert {path.name for path in files} == {path.name for path in (ROOT / "docs" / "tutorial").iterdir()}


# ---- the README, from a shell in which nothing is installed

PIP = r"""
here=$(dirname "$0")
for word in "$@"; do case "$word" in
  .\[*\]) BIN/python -c "import sys, tomllib
extras = tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']
assert set(sys.argv[1].strip('.[]').split(',')) <= set(extras), sys.argv[1]" "$word" || exit 1;;
esac; done
for name in vitlab torchrun; do
  printf '#!/bin/sh\nexec BIN/%s "$@"\n' "$name" > "$here/$name"; chmod +x "$here/$name"
done
"""
PYTHON = r"""
if [ "$1" = -m ] && [ "$2" = venv ]; then
  mkdir -p "$3/bin"; cp "$(dirname "$0")"/* "$3/bin"
  printf 'export PATH="%s/bin:$PATH"\n' "$PWD/$3" > "$3/bin/activate"
else exec BIN/python "$@"; fi
"""


def fresh_shell(folder: Path) -> dict[str, str]:
    """An environment with a `python3` and a `pip` that install nothing but the names of vitlab's programs."""
    programs = folder.parent / "programs"
    for program, text in (("python3", PYTHON), ("python", PYTHON), ("pip", PIP)):
        write_program(programs / program, text.replace("BIN", str(BIN)))
    return {**ENVIRONMENT, "PATH": f"{programs}:/usr/bin:/bin", "HOME": str(folder), "VITLAB_DATA": str(folder)}


@pytest.mark.slow
def test_the_readme_runs_from_a_fresh_shell(tmp_path: Path) -> None:
    folder = tmp_path / "vitlab"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(".*", "site", "runs", "vitlab", "tests", "*.jpg"))
    with runner(STANDINS["README.md"], folder, fresh_shell(folder)) as run:
        for block in blocks(ROOT / "README.md"):
            for target in re.findall(r"^make ([\w-]+)", block.text, re.MULTILINE):
                run.run_command(f"make --dry-run {target} > make.log && make .venv/.ready")
            run.run(block)
