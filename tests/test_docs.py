"""Every command in the README and in docs/: parsed by the real command line here, and run by the slow tests.

What the commands need and this machine lacks is in docs_standins.py.
"""

import re
from pathlib import Path

import pytest
from docs_commands import FENCE, OTHERS, PAGES, ROOT, blocks, check_command, inline_commands


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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_words_are_plain(page: Path) -> None:
    private = r"(mend(ed|s)?|sa(id|ys?)|told|tells?|whole|aloud|vouch\w*|strangers?|sentence|speaks?)"
    assert not re.findall(rf"\b{private}\b", page.read_text("utf-8"), re.IGNORECASE)
