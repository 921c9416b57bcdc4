"""The trunk of the command line: the app, its console, and how mistakes are told. Verbs import what is heavy."""

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from vitlab.config import Stopped, UserError

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
console = Console()


def main() -> None:
    """Run a verb; what the user can mend is one sentence and exit code 1, never a traceback."""
    try:
        app()
    except UserError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except Stopped as stop:
        Console(stderr=True).print(str(stop), highlight=False, markup=False, soft_wrap=True)
        sys.exit(stop.code)


@app.callback(invoke_without_command=True)
def version(show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if show:
        from vitlab import __version__

        console.print(f"vitlab {__version__}", highlight=False)
        raise typer.Exit
