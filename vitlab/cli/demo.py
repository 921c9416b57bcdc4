"""`vitlab demo`: everything on built-in data."""

from pathlib import Path
from typing import Annotated

from typer import Option

from vitlab.cli.app import console, verb
from vitlab.cli.training import train_and_report
from vitlab.errors import Stopped
from vitlab.signals import stoppable


@verb("vitlab demo", "vitlab demo --out runs/digits")
def demo(out: Annotated[Path, Option(help="The run's folder.")] = Path("runs/demo")) -> None:
    """Train a small ViT on handwritten digits, test it and write its report: two minutes on a CPU, offline.

    The run stays in its folder, with digits as image files to try the other verbs on. What is finished is not done
    again.
    """
    with stoppable("stopped; the same command continues from there"):
        from vitlab import demo

        recipe, resume = demo.begin(console, out)
        try:
            train_and_report(recipe, out, resume)
        except Stopped as stop:
            raise Stopped(stop.code - 128, "stopped and saved; the same command continues from there") from None
        demo.show(console, out)
