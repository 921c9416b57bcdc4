"""`vitlab report`: the report of a finished run."""

from typing import Annotated

from typer import Argument

from vitlab.cli.app import console, verb
from vitlab.cli.options import Device
from vitlab.signals import stoppable


@verb("vitlab report runs/mine", "vitlab report runs/mine photos/  # if they moved")
def report(
    run: Annotated[str, Argument(metavar="RUN", help="The folder of a finished run.")],
    data: Annotated[
        str | None, Argument(metavar="DATA", help="Data to test on; by default that of a run you started.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Write a run's report.html again: its settings, its scores, its mistakes and where it looked.

    `vitlab finetune` and `vitlab train` write it themselves when they end. The page is one file.
    """
    with stoppable("stopped; the folder is as it was"):
        from vitlab.report import write_report  # takes seconds, during which signals may arrive

        path = write_report(run, data, device=device).path
    console.print(f"report: {path}", soft_wrap=True)
