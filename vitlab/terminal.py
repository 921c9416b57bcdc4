"""Output to the terminal: untrusted names are printed as text, never as commands, markup or line breaks.

Rich parses strings as markup, so a class named `[/red]` would raise an error, and a terminal executes escape sequences
in file names. A `Terminal` prints strings literally; styles are given with `style=` or, for the package's own text,
with `markup=True`.
"""

import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich import progress as bars
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

Item = TypeVar("Item")
JOINERS = "\u200c\u200d"  # invisible, harmless, and part of words in Persian and of emoji


def printable(text: str) -> str:
    """The text on one line, with control characters such as \\x1b or \\u202e escaped."""
    return text if text.isprintable() else "".join(map(_escape, text))


def _escape(c: str) -> str:
    # controls, format characters (such as writing direction), lone surrogates, separators of lines and paragraphs
    harmful = unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in JOINERS
    return c.encode("unicode_escape").decode() if harmful else c


class Terminal(Console):
    """A console that prints strings literally and escapes control characters, except line breaks."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:  # every string that is printed or put in a table
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    def remark(self, kind: str, line: str, style: str = "yellow") -> None:
        """Print `kind: line` with its first word colored."""
        self.print(Text.assemble((f"{kind}:", style), " ", printable(line)), soft_wrap=True)


def warn(line: str) -> None:
    """Print a warning to stderr."""
    Terminal(stderr=True).print(f"warning: {line}", soft_wrap=True)


@contextmanager
def progress(title: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr if it is a terminal; yields a function to call with the number of images done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda images: bar.advance(task, images)


def track(items: Iterable[Item], title: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, with a transient bar on the standard error where that is a terminal."""
    console = Console(stderr=True)
    yield from bars.track(items, title, total, console=console, transient=True, disable=not console.is_terminal)
