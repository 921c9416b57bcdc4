"""`vitlab study resolution`: fine-tuning above the pre-training size, the paper's section 3.2."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitlab.plots.studies import Lines, Series, lines_figure
from vitlab.studies.request import Request
from vitlab.studies.study import Row, Study
from vitlab.studies.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES, QUICK_SIZES = (48, 64, 80, 96), (16, 32)  # pixels; the first is that of pre-training
WAYS = {False: "resampled", True: "learned anew"}


def rows(ask: Request, seed: int) -> Iterator[Row]:
    sizes = QUICK_SIZES if ask.quick else SIZES
    run = ask.pretrain("pretrained", seed, image_size=(sizes[0], sizes[0]))
    for anew, words in WAYS.items():
        for size in sizes:
            name = f"{size}-{words.split()[-1]}"
            own = {"new_positions": True} if anew else {}
            numbers = ask.transfers(run, seed, name, image_size=(size, size), **own)
            yield Row(name, {"positions": words, "pixels": f"{size}"}, numbers, run)


def figure(table: Table) -> "Figure":
    """Accuracy by size."""
    panels = []
    for key in table.headings:
        series = []
        for words in WAYS.values():
            lines = [line for line in table.done if line.about["positions"] == words]
            sizes = [float(line.about["pixels"]) for line in lines]
            series.append(Series(words, sizes, [line.values[key] for line in lines]))
        panels.append(Lines(key, "image size, pixels", "accuracy, %", series, log=False))
    return lines_figure(panels)


STUDY = Study(
    "resolution",
    "Does fine-tuning at a higher resolution help, and do positions have to be resampled?",
    "section 3.2",
    rows,
    figure,
    paper="Fine-tuning above the pre-training size helps; positions are resampled on their grid.",
    note="One pre-training a seed at the smallest size. Positions learned anew begin as those of a fresh model.",
)
