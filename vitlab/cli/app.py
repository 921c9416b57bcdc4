"""The Typer app, its console, and how errors are reported. Verbs import heavy packages when they run."""

import gc
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, TypeVar

import typer

from vitlab.cli.help import Verb, Verbs
from vitlab.errors import Stopped, UserError
from vitlab.terminal import Terminal, printable

app = typer.Typer(
    name="vitlab",
    cls=Verbs,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The Vision Transformer: build, load, train, evaluate, look inside, serve.",
    epilog="Start with `vitlab demo`, or with your photos, a folder for each class: `vitlab finetune photos/`.",
)
console = Terminal()
Command = TypeVar("Command", bound=Callable[..., Any])
NO_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "std::bad_alloc")  # in RuntimeErrors


def verb(*examples: str, name: str | None = None) -> Callable[[Command], Command]:
    """Register a function as a verb, with examples of its use at the end of its help.

    Its name is the function's; one of two words, as in `vitlab bench compare`, is given.
    """
    return app.command(name, cls=Verb, epilog="\n".join(examples))


def main() -> None:
    """Run a verb. An error that the user or the machine causes is one line and exit code 1, without a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a character that the terminal cannot show is escaped
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except Stopped as stop:
        Terminal(stderr=True).print(printable(str(stop)), soft_wrap=True)
        sys.exit(stop.code)
    except Exception as error:
        line = describe_error(error)
        if line is None:
            raise
        Terminal(stderr=True).remark("error", line, "bold red")
        sys.exit(1)
    finally:
        gc.freeze()  # all memory is given back at once: Python need not look through it for what can go


@contextmanager
def without_collection() -> Iterator[None]:
    """Without garbage collection, which finds nothing during imports and takes a tenth of their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def describe_error(error: Exception) -> str | None:
    """One line about an error that is no bug of this program; None if it may be one."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in NO_MEMORY)):
        return "there is not enough memory for this; use a smaller batch, smaller images or fewer workers"
    if isinstance(error, OSError) and error.strerror:  # a full or read-only disk, a file without read permission
        name = error.filename or "a file"
        return f"{os.fsdecode(name) if isinstance(name, bytes) else name} cannot be used: {error.strerror}"
    return None


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        from vitlab import __version__

        console.print(f"vitlab {__version__}")
        raise typer.Exit
