"""The report of a run, made again."""

from typing import Annotated

import typer

from vitlab.cli.app import app, console


@app.command(
    epilog="Examples: [bold]vitlab report runs/mine[/bold], [bold]vitlab report runs/mine photos/[/bold], if they moved"
)
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    data: Annotated[
        str | None, typer.Argument(metavar="DATA", help="What to test it on; by default the data of a run you started.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
) -> None:
    """Write a run's report.html again: how it was made, how good it is, its mistakes and where it looked.

    `vitlab finetune` and `vitlab train` do so themselves when they end. The page is one file.
    """
    from vitlab.signals import stoppable

    with stoppable("stopped; the folder is as it was"):
        from vitlab.report import write_report  # takes seconds, in which signals may come

        path = write_report(run, data, device=device)
    console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)
