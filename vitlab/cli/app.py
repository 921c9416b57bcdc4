"""The trunk of the command line: the app, its console, and how mistakes are told. Verbs import what is heavy."""

import io
import os
import sys
from typing import Annotated

import typer

from vitlab.errors import Stopped, UserError
from vitlab.terminal import Terminal, printable

app = typer.Typer(
    name="vitlab",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="The Vision Transformer, whole: build, load, train, evaluate, look inside.",
    epilog="Start with: [bold]vitlab demo[/bold]",
)
console = Terminal()
NO_MEMORY = ("can't allocate memory", "out of memory", "std::bad_alloc")  # in torch's RuntimeErrors


def main() -> None:
    """Run a verb; what the user or the machine has to fix is one sentence and exit code 1, never a traceback."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that cannot show a letter gets its code
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except Stopped as stop:
        Terminal(stderr=True).print(printable(str(stop)), soft_wrap=True)
        sys.exit(stop.code)
    except Exception as error:
        line = sentence(error)
        if line is None:
            raise
        Terminal(stderr=True).remark("error", line, "bold red")
        sys.exit(1)


def sentence(error: Exception) -> str | None:
    """What to tell of an error that is no fault of the program; None of one that may be."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and any(w in str(error) for w in NO_MEMORY)):
        return "there is not enough memory for this; use a smaller batch, smaller images or fewer workers"
    if isinstance(error, OSError) and error.strerror:  # a full or read-only disk, a file that may not be read
        name = error.filename or "a file"
        return f"{os.fsdecode(name) if isinstance(name, bytes) else name} cannot be used: {error.strerror}"
    return None


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show:
        from vitlab import __version__

        console.print(f"vitlab {__version__}")
        raise typer.Exit
