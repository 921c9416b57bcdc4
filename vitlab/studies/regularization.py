"""`vitlab study regularization`: weight decay, dropout and label smoothing on small data."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vitlab.plots.studies import Dots, dots_figure
from vitlab.studies.request import Request
from vitlab.studies.study import Number, Row, Study
from vitlab.studies.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DECAYS, DROPOUTS, SMOOTHINGS = (0.0, 0.1, 0.3), (0.0, 0.1), (0.0, 0.1)
QUICK_DECAYS = (0.0, 0.3)
SUBSET = 0.1  # of the training images


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for decay in QUICK_DECAYS if ask.quick else DECAYS:
        for dropout in DROPOUTS:
            for smoothing in SMOOTHINGS:
                name = f"decay-{decay:g}-dropout-{dropout:g}-smoothing-{smoothing:g}"
                own: dict[str, Any] = {
                    "weight_decay": decay,
                    "dropout": dropout,
                    "label_smoothing": smoothing,
                    "subset": SUBSET,
                }
                run = ask.pretrain(name, seed, **own)
                numbers = {"accuracy": Number(run, "accuracy")} | ask.few_shots(run)
                about = {"weight decay": f"{decay:g}", "dropout": f"{dropout:g}", "smoothing": f"{smoothing:g}"}
                yield Row(name, about, numbers, run)


def figure(table: Table) -> "Figure":
    """Accuracy of every combination, on the set's own classes and few-shot on others."""
    names = [" ".join((f"decay {line.about['weight decay']}", *extras(line.about))) for line in table.lines]
    groups = [len(extras(line.about)) for line in table.lines]
    few = table.request.mean_heading("5-shot")
    panels = [Dots(key, "%", names, [line.values[key] for line in table.lines], groups) for key in ("accuracy", few)]
    return dots_figure(panels)


def extras(about: dict[str, str]) -> list[str]:
    words = {"dropout": "+ dropout", "smoothing": "+ smooth"}
    return [word for key, word in words.items() if about[key] != "0"]


STUDY = Study(
    "regularization",
    "What does regularization do for a ViT on small data?",
    "section 4.3 and table 3: searched for small data",
    rows,
    figure,
    paper="On ImageNet alone ViTs need strong weight decay (0.3), dropout (0.1) and label smoothing is searched too.",
    note="From scratch on a tenth of the training images.",
)
