"""`vitlab study compute`: the paper's figure 5."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vitlab.plots.studies import Lines, Series, lines_figure
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
#        in --quick: model, settings
QUICK: dict[str, tuple[tuple[str, dict[str, Any]], ...]] = {
    "ViT": (("Ti/16", {}), ("Ti/8", {}), ("S/8", {"depth": 4, "width": 64, "mlp": 256, "heads": 4})),
    "hybrid": (("R26+Ti/16", {}), ("R26+S/16", {"depth": 4})),
    "ResNet": (("R50x1", {}),),
}
#        family, model, epochs of JFT-300M, exaFLOPs, ImageNet accuracy
PAPER = (
    ("ViT", "B/32", 7, 55, 0.8073),
    ("ViT", "B/16", 7, 224, 0.8415),
    ("ViT", "L/32", 7, 196, 0.8437),
    ("ViT", "L/16", 7, 783, 0.8630),
    ("ViT", "L/16", 14, 1567, 0.8712),
    ("ViT", "H/14", 14, 4262, 0.8808),
    ("hybrid", "R50+B/32", 7, 106, 0.8490),
    ("hybrid", "R50+B/16", 7, 274, 0.8558),
    ("hybrid", "R50+L/32", 7, 246, 0.8568),
    ("hybrid", "R50+L/16", 7, 859, 0.8660),
    ("hybrid", "R50+L/16", 14, 1668, 0.8712),
    ("ResNet", "R50x1", 7, 50, 0.7754),
    ("ResNet", "R50x2", 7, 199, 0.8212),
    ("ResNet", "R101x1", 7, 96, 0.8067),
    ("ResNet", "R152x1", 7, 141, 0.8188),
    ("ResNet", "R152x2", 7, 563, 0.8497),
    ("ResNet", "R152x2", 14, 1126, 0.8556),
    ("ResNet", "R200x3", 14, 3306, 0.8722),
)


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for family, models in FAMILIES.items():
        plain: tuple[tuple[str, dict[str, Any]], ...] = tuple((model, {}) for model in models)
        for model, settings in QUICK[family] if ask.quick else plain:
            run = ask.pretrain(model, seed, model, **settings)
            numbers = ask.few_shots(run) | ask.transfers(run, seed)
            yield Row(model, {"family": family}, numbers, run)


def figure(table: Table) -> "Figure":
    """Transfer by the cost of pre-training, and the paper's own points."""
    panels = []
    for what in ("5-shot", "tuned"):
        key, series = table.request.mean_heading(what), []
        for family in FAMILIES:
            lines = sorted(
                (line for line in table.done if line.about["family"] == family), key=lambda line: line.flops or 0
            )
            x = [(line.flops or 0) / 1e18 for line in lines]
            series.append(Series(family, x, [line.values[key] for line in lines], [line.name for line in lines]))
        panels.append(Lines(f"{key}, here", "pre-training cost, exaFLOPs", "accuracy, %", series))
    paper = []
    for family in FAMILIES:
        points = sorted((cost, score) for kind, _, _, cost, score in PAPER if kind == family)
        paper.append(Series(family, [float(cost) for cost, _ in points], [[score] for _, score in points]))
    panels.append(Lines("the paper, ImageNet", "pre-training cost, exaFLOPs", "accuracy, %", paper, faint=True))
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
    note="All models see the same images for the same number of steps; the paper's see 7 or 14 epochs of JFT-300M.",
    published=(
        ("model", "epochs", "exaFLOPs", "ImageNet, %"),
        *((model, f"{epochs}", f"{cost:,}", f"{100 * score:.2f}") for _, model, epochs, cost, score in PAPER),
    ),
)
