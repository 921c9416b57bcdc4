"""`vitlab study axial`: the paper's figure 13."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitlab.cost import forward_flops
from vitlab.device import pick_device
from vitlab.evaluation.speed import QUICK, peak_speed
from vitlab.models.names import configure
from vitlab.models.variants import build
from vitlab.plots.studies import Lines, Series, lines_figure
from vitlab.studies.request import Request
from vitlab.studies.study import Measure, Number, Row, Study, python
from vitlab.studies.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#        family, model, settings: all ViTs pool by mean, as axial ones must, so that nothing but attention differs
MODELS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("ViT", "Ti/16", {"pool": "mean"}),
    ("ViT", "Ti/8", {"pool": "mean"}),
    ("axial ViT", "Ti/16", {"pool": "mean", "attention": "axial"}),
    ("axial ViT", "Ti/8", {"pool": "mean", "attention": "axial"}),
    ("ResNet", "R50x1", {}),
    ("AxialResNet", "R50x1", {"attention": "axial"}),
)


@dataclass(frozen=True)
class Timing:
    """What a row measures of a fresh model, whose speed does not depend on what it learns: operations and time of an
    image in inference."""

    model: str
    settings: Mapping[str, Any]
    device: str
    quick: bool

    def __call__(self, runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
        config = configure(self.model, self.settings)
        speed, _ = peak_speed(build(config), pick_device(self.device), **(QUICK if self.quick else {}))
        return {"GFLOPs": forward_flops(config) / 1e9, "ms": 1e3 / speed}


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for family, model, settings in MODELS:
        name = f"axial-{model}" if settings.get("attention") == "axial" else model
        run = ask.pretrain(name, seed, model, **settings)
        recipe = run.settings()
        shape = {**recipe.model_settings, "image_size": recipe.image_size}
        timing = Timing(model, shape, ask.device, ask.quick)
        repeat = python("vitlab.studies.axial", "Timing", repr(timing))
        measured = Measure(f"{run.name}-speed", (), timing, repeat, timed=True)
        cost = {"GFLOPs": Number(measured, "GFLOPs", ""), "ms an image": Number(measured, "ms", "")}
        numbers = ask.few_shots(run) | {"accuracy": Number(run, "accuracy")} | cost
        yield Row(name.replace("/", ""), {"family": family, "model": model}, numbers, run)


def figure(table: Table) -> "Figure":
    """Few-shot accuracy by operations and by time."""
    key, panels = table.request.mean_heading("5-shot"), []
    for cost, label in (("GFLOPs", "GFLOPs of an image"), ("ms an image", "inference, ms an image")):
        series = []
        for family in dict.fromkeys(family for family, _, _ in MODELS):
            lines = [line for line in table.done if line.about["family"] == family and line.values[cost]]
            x = [line.mean(cost) or 0.0 for line in lines]
            names = [line.about["model"] for line in lines]
            series.append(Series(family, x, [line.values[key] for line in lines], names))
        panels.append(Lines(f"by {'operations' if cost == 'GFLOPs' else 'time'}", label, f"{key}, %", series))
    return lines_figure(panels)


STUDY = Study(
    "axial",
    "Is attention along rows and columns worth its cost?",
    "figure 13",
    rows,
    figure,
    paper="Axial ViTs are better than plain ones and cost more; AxialResNet is slow on the paper's machine.",
    note="All ViTs pool by mean. AxialResNet is the ResNet with axial attention in place of its 3x3 convolutions.",
)
