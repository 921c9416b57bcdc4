"""The commands in Markdown pages: fenced blocks in order, inline commands, and parsing them without running them."""

import dataclasses
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer.main
from torch.distributed.run import parse_args as parse_torchrun

from vitlab.cli import app
from vitlab.cli.help import join_name
from vitlab.data.transforms import Augment
from vitlab.models.config import ResNetConfig, StemConfig, ViTConfig
from vitlab.studies.request import StudySettings
from vitlab.training.recipe import Recipe
from vitlab.training.search import Repeats

ROOT = Path(__file__).parents[1]
PAGES = sorted(ROOT.glob("docs/**/*.md"))
OTHERS = [path for name in ("README.md", "README.ko.md", "CONTRIBUTING.md") if (path := ROOT / name).exists()]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INLINE = re.compile(r"(?<!`)`(vitlab [a-z][^`]*)`(?!`)")
KINDS: tuple[Any, ...] = (Recipe, Augment, ViTConfig, ResNetConfig, StemConfig)
VERBS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
SETTINGS = {field.name for kind in (*KINDS, Repeats, StudySettings) for field in dataclasses.fields(kind)}


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, as the fence names it, and its text."""

    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block; a line that ends in a backslash or inside a quote is continued."""
        commands: list[str] = []
        rest = ""
        for line in self.text.splitlines():
            rest += line + "\n"
            if line.endswith("\\") or is_open(rest):
                continue
            if words(rest):
                commands.append(rest.strip())
            rest = ""
        return commands


def is_open(text: str) -> bool:
    """Whether a quote in `text` is not closed."""
    try:
        words(text)
    except ValueError:
        return True
    return False


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "), comments=True)


def blocks(page: Path) -> list[Block]:
    """The shell and Python blocks of a page, in order; a block without a language is a shell block."""
    found = [Block(language.strip() or "bash", text) for language, text in FENCE.findall(page.read_text("utf-8"))]
    return [block for block in found if block.language in ("bash", "python")]


def inline_commands(page: Path) -> list[str]:
    """`vitlab ...` in running text; a command may go over the end of a line."""
    return [" ".join(text.split()) for text in INLINE.findall(FENCE.sub("", page.read_text("utf-8")))]


def check_command(command: str) -> None:
    """Raise for a command, or one inside a quoted script, that its program's own parser does not accept."""
    given = words(command)
    if given[:1] == ["vitlab"] and " ".join(given[1:]) in VERBS:  # a command's name alone
        return
    for word in given:
        if " vitlab " in word:  # bash -c '...'
            check_command(word)
    if "torchrun" in given[:-1]:
        parse_torchrun(given[given.index("torchrun") + 1 :])
    if "vitlab" in given[:-1]:
        check_vitlab(given[given.index("vitlab") + 1 :])


def check_vitlab(given: list[str]) -> None:
    """Raise for words that `vitlab` does not accept: a command, an option, a value's type, or the key of a setting."""
    ends = [i for i, word in enumerate(given) if word in ("<", ">", "|", "&&")]
    verb, *arguments = join_name(given[: min(ends, default=len(given))], VERBS)
    if verb in ("--help", "--version"):
        return
    if verb not in VERBS:
        raise ValueError(f"there is no command 'vitlab {verb}'")
    parameters = VERBS[verb].make_context(verb, list(arguments)).params
    for pair in parameters.get("settings") or []:
        if pair.partition("=")[0] not in SETTINGS:
            raise ValueError(f"there is no setting '{pair}'")
