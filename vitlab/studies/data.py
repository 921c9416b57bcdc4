"""`vitlab study data`: the paper's figures 3 and 4."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vitlab.plots.studies import Lines, Series, lines_figure
from vitlab.studies.request import Request
from vitlab.studies.study import Row, Study
from vitlab.studies.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUBSETS, QUICK_SUBSETS = (0.01, 0.03, 0.1, 0.3, 1.0), (0.2, 1.0)  # of the training images
#         name: model, its settings, those in --quick
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "ViT-Ti": ("Ti/8", {}, {}),
    "ViT-S": ("S/8", {}, {"depth": 3}),
    "hybrid": ("R26+Ti/16", {}, {}),
    "BiT": ("R50x1", {}, {}),
}


def rows(ask: Request, seed: int) -> Iterator[Row]:
    """Subsets of one seed are nested, and all runs have the same number of steps."""
    for subset in QUICK_SUBSETS if ask.quick else SUBSETS:
        for name, (model, settings, quick) in MODELS.items():
            own = quick if ask.quick else settings
            run = ask.pretrain(f"{name}-{subset:g}", seed, model, subset=subset, **own)
            numbers = ask.few_shots(run) | ask.transfers(run, seed)
            yield Row(f"{name}-{subset:g}", {"model": model, "subset": f"{100 * subset:g} %"}, numbers, run)


def figure(table: Table) -> "Figure":
    """Transfer by the number of images to pre-train on."""
    panels = []
    for what, title in (("5-shot", "few-shot"), ("tuned", "fine-tuned")):
        key = table.request.mean_heading(what)
        series = [
            Series(
                f"{name} ({model})",
                [float(line.images or 0) for line in lines],
                [line.values[key] for line in lines],
            )
            for name, (model, _, _) in MODELS.items()
            if (lines := [line for line in table.done if line.name.startswith(f"{name}-") and line.images])
        ]
        panels.append(Lines(f"{title}: {key}", "images to pre-train on", "accuracy, %", series))
    return lines_figure(panels)


STUDY = Study(
    "data",
    "How much data does a ViT need before it is better than a ResNet?",
    "figures 3 and 4",
    rows,
    figure,
    paper="On small sets ResNets are better and a larger ViT is no better than a small one; with enough images ViTs "
    "overtake, and the larger one leads.",
    seeds=1,
    note="The paper's subsets are of 9, 30, 90 and 300 million images; here they are nested parts of one small set, "
    "with the same number of steps for all.",
)
