"""`vitlab study compute`: the paper's figure 5."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vitlab.plots.studies import Lines, Series, lines_figure
from vitlab.studies.published import COMPUTE
from vitlab.studies.request import Request
from vitlab.studies.study import Row, Study
from vitlab.studies.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAMILIES: dict[str, tuple[str, ...]] = {
    "ViT": ("Ti/16", "Ti/8", "S/16", "S/8", "B/8"),
    "hybrid": ("R26+Ti/16", "R26+S/16", "R50+S/16", "R50+B/16"),
    "ResNet": ("R50x1", "R101x1", "R50x2", "R101x2"),
}
COST = "pre-training cost, {}"
#        in --quick: model, settings
QUICK: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "ViT": (("Ti/16", {}), ("Ti/8", {}), ("S/8", {"depth": 4, "width": 64, "mlp": 256, "heads": 4})),
    "hybrid": (("R26+Ti/16", {}), ("R26+S/16", {"depth": 4})),
    "ResNet": (("R50x1", {}),),
}


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for family, models in FAMILIES.items():
        plain: tuple[tuple[str, dict[str, Any]], ...] = tuple((model, {}) for model in models)
        for model, settings in QUICK[family] if ask.quick else plain:
            run = ask.pretrain(model, seed, model, **settings)
            numbers = ask.few_shots(run) | ask.transfers(run, seed)
            yield Row(model, {"family": family}, numbers, run)


def figure(table: Table) -> "Figure":
    """Transfer by the cost of pre-training, and the paper's own points."""
    (unit, size), panels = table.cost, []
    for what in ("5-shot", "tuned"):
        key, series = table.request.mean_heading(what), []
        for family in FAMILIES:
            lines = sorted(
                (line for line in table.done if line.about["family"] == family), key=lambda line: line.flops or 0
            )
            x = [(line.flops or 0) / size for line in lines]
            series.append(Series(family, x, [line.values[key] for line in lines], [line.name for line in lines]))
        panels.append(Lines(f"{key}, here", COST.format(unit), "accuracy, %", series, frontier=True))
    paper = []
    for family in FAMILIES:
        points = sorted((row.exaflops, row.imagenet / 100) for row in COMPUTE if row.family == family)
        paper.append(Series(family, [cost for cost, _ in points], [[score] for _, score in points]))
    panels.append(
        Lines("the paper, ImageNet", COST.format("exaFLOPs"), "accuracy, %", paper, faint=True, frontier=True)
    )
    return lines_figure(panels)


STUDY = Study(
    "compute",
    "Which kind of model transfers best for the same pre-training compute?",
    "figure 5 and table 6",
    rows,
    figure,
    paper="ViTs need 2 to 4 times less compute than ResNets for the same accuracy; hybrids lead at small budgets, and "
    "the difference vanishes at large ones.",
    seeds=1,
    note="All models see the same images for the same number of steps; the paper's see 7 or 14 epochs of JFT-300M. "
    "Lines join the models that are better than all cheaper ones of their family.",
    published=(
        ("model", "epochs", "exaFLOPs", "ImageNet, %"),
        *((row.model, f"{row.epochs}", f"{row.exaflops:,.0f}", f"{row.imagenet:.2f}") for row in COMPUTE),
    ),
)
