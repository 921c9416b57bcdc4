"""`vitlab finetune`: a trained model learns other classes."""

import time
from pathlib import Path
from typing import Annotated

from typer import Option

from vitlab.cli.app import console, verb, without_collection
from vitlab.cli.options import AcceptDataChanges, Data, Out, RecipeSettings, Resume
from vitlab.cli.training import STOPPED_EARLY
from vitlab.signals import stoppable


@verb(
    "vitlab finetune photos/",
    "vitlab finetune photos/ --weights google/vit-base-patch16-224 --minutes 30",
    "vitlab finetune oxford-pets --weights weights.npz epochs=3 lr=0.003 --out runs/pets",
    "vitlab finetune photos/ --weights facebook/dinov2-base lora=8 --out runs/lora",
)
def finetune(
    data: Data,
    settings: RecipeSettings = None,
    weights: Annotated[
        str | None,
        Option(help="Weights to start from, by default from the hub, else box, the package's own; none: from scratch."),
    ] = None,
    minutes: Annotated[
        float | None, Option(help="Time for everything; with 1, a CPU fits a head alone.", show_default="10")
    ] = None,
    paper: Annotated[bool, Option("--paper", help="One stage by the paper's recipe, or what of it fits.")] = False,
    apply: Annotated[
        Path | None, Option(help="A review.csv with decisions: labels to change and images to leave out.")
    ] = None,
    out: Out = Path("run"),
    resume: Resume = False,
    accept: AcceptDataChanges = False,
) -> None:
    """Make a classifier of your classes: a head on frozen features first, then fine-tuning in the time that is left.

    The model and its report are there after the first stage. Fine-tuning is kept unless it is worse on held-out images.
    """
    began = time.monotonic()  # importing torch is part of the time
    with stoppable(STOPPED_EARLY):
        with without_collection():
            from vitlab.finetuning.finetune import Request, run_request

        pairs = (*(settings or []), *([f"review={apply}"] if apply else []))
        request = Request(data, out, weights, minutes, pairs, paper=paper, resume=resume, accept=accept, began=began)
        run_request(request, console)
