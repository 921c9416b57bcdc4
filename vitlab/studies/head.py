"""`vitlab study head`: the paper's figure 9."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitlab.plots.studies import Lines, Series, lines_figure
from vitlab.studies.request import Request
from vitlab.studies.study import Number, Row, Study
from vitlab.studies.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

POOLS = {"token": "class token", "mean": "mean of patches", "attention": "attention pooling"}
RATES, QUICK_RATES = (1e-4, 3e-4, 8e-4, 3e-3), (3e-4, 3e-3)  # 3e-4 and 8e-4 are the paper's


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for pool, words in POOLS.items():
        for rate in QUICK_RATES if ask.quick else RATES:
            name = f"{pool}-{rate:g}"
            run = ask.pretrain(name, seed, pool=pool, lr=rate)
            numbers = ask.few_shots(run) | {"accuracy": Number(run, "accuracy")}
            yield Row(name, {"head": words, "learning rate": f"{rate:g}"}, numbers, run)


def figure(table: Table) -> "Figure":
    """5-shot accuracy and accuracy by learning rate."""
    panels = []
    for key in (table.request.mean_heading("5-shot"), "accuracy"):
        series = []
        for words in POOLS.values():
            lines = [line for line in table.done if line.about["head"] == words]
            rates = [float(line.about["learning rate"]) for line in lines]
            series.append(Series(words, rates, [line.values[key] for line in lines]))
        panels.append(Lines(key, "learning rate", "accuracy, %", series))
    return lines_figure(panels)


STUDY = Study(
    "head",
    "Does a ViT need its class token?",
    "figure 9",
    rows,
    figure,
    paper="No: the mean of the patches does as well, but needs another learning rate (3e-4, the token 8e-4).",
    note="The paper draws 5-shot accuracy by epoch at one or two rates; here it is that of the end, by rate.",
)
