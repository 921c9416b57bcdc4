"""What reaches a terminal: names from outside are text there, never commands, markup or line breaks.

Rich reads strings as markup, so a class called `[/red]` would end the program, and a terminal obeys escape characters
in any file name. A `Terminal` prints strings literally; whoever wants a style asks for it, with `style=` or, for text
of our own, `markup=True`.
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
    """One line without what would break a line or steer a terminal: such characters as \\x1b or \\u202e, spelt out."""
    return text if text.isprintable() else "".join(map(_spelt, text))


def _spelt(c: str) -> str:
    # controls, format characters (writing direction among them), lone surrogates, separators of lines and paragraphs
    harmful = unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in JOINERS
    return c.encode("unicode_escape").decode() if harmful else c


class Terminal(Console):
    """A console that takes strings literally and keeps control characters from the terminal, line breaks aside."""

    def __init__(self, *, stderr: bool = False) -> None:
        super().__init__(stderr=stderr, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, **options: Any) -> Text:  # every string that is printed or put in a table
        return super().render_str("\n".join(map(printable, text.split("\n"))), **options)

    def remark(self, kind: str, line: str, style: str = "yellow") -> None:
        """`kind: line` with its first word colored."""
        self.print(Text.assemble((f"{kind}:", style), " ", printable(line)), soft_wrap=True)


def warn(line: str) -> None:
    Terminal(stderr=True).print(f"warning: {line}", soft_wrap=True)


@contextmanager
def progress(title: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, nothing elsewhere; call what it gives with the images that are done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task(title, total=total)
        yield lambda images: bar.advance(task, images)


def track(items: Iterable[Item], title: str, total: int | None = None) -> Iterator[Item]:
    """Yield the items, with a transient bar on the standard error where that is a terminal."""
    console = Console(stderr=True)
    yield from bars.track(items, title, total, console=console, transient=True, disable=not console.is_terminal)
