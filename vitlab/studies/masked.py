"""`vitlab study masked`: masked patch prediction, the paper's appendix B.1.2."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vitlab.plots.studies import Dots, dots_figure
from vitlab.studies.request import Request
from vitlab.studies.study import Row, Study
from vitlab.studies.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TARGETS = {"mean": "3-bit mean color", "4x4": "4x4 of 3-bit colors", "pixels": "full patch, L2"}
RATES = (0.5, 0.15)  # of corrupted patches
PAPER = "ImageNet, B/16"
# The last two follow from "2 % better than from scratch, 4 % worse than supervised pre-training".
PUBLISHED = {"mean-50": 0.799, "scratch": 0.779, "supervised": 0.839}


def rows(ask: Request, seed: int) -> Iterator[Row]:
    """Every row is fine-tuned; a masked model's pre-training uses no labels."""
    supervised = ask.pretrain("supervised", seed)
    about = {"pre-training": "supervised", "corrupted": ""}
    yield Row("supervised", about, ask.transfers(supervised, seed), supervised, published("supervised"))
    for target, words in TARGETS.items():
        for rate in RATES:
            name = f"{target}-{100 * rate:g}"
            own: dict[str, Any] = {
                "objective": "masked",
                "masked_target": target,
                "corruption": rate,
                "cuda_graph": False,
            }
            run = ask.pretrain(name, seed, **own)
            about = {"pre-training": words, "corrupted": f"{100 * rate:g} %"}
            yield Row(name, about, ask.transfers(run, seed), run, published(name))
    numbers = ask.transfers(None, seed, "scratch")
    about = {"pre-training": "none, from scratch", "corrupted": ""}
    yield Row("scratch", about, numbers, paper=published("scratch"))


def published(name: str) -> dict[str, float]:
    return {PAPER: PUBLISHED[name]} if name in PUBLISHED else {}


def figure(table: Table) -> "Figure":
    """Accuracy after fine-tuning, and the paper's."""
    names = [" ".join([line.about["pre-training"], line.about["corrupted"]]).strip() for line in table.lines]
    groups = [0 if line.name == "supervised" else 2 if line.name == "scratch" else 1 for line in table.lines]
    key = table.request.mean_heading("tuned")
    ours = Dots(f"{key}, here", "accuracy, %", names, [line.values[key] for line in table.lines], groups)
    published = [[line.paper[PAPER]] if PAPER in line.paper else [] for line in table.lines]
    return dots_figure([ours, Dots("the paper, ImageNet", "accuracy, %", names, published, groups, faint=True)])


STUDY = Study(
    "masked",
    "How far does self-supervision by masked patches go?",
    "appendix B.1.2",
    rows,
    figure,
    paper="79.9 % with mean colors: 2 % better than from scratch, 4 % worse than supervised pre-training. All targets "
    "work, L2 on pixels a little worse; 15 % corruption is a little worse than 50 %.",
    note="The paper's pre-training is on JFT-300M for a million steps, and its scores are of ImageNet.",
)
