"""`vitlab study optimizer`: the paper's table 7, with Muon and a ViT beside it."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vitlab.plots.studies import Dots, dots_figure
from vitlab.studies.request import PRETRAIN, Request
from vitlab.studies.study import Row, Study
from vitlab.studies.table import Table
from vitlab.training.recipe import override
from vitlab.training.recipes import find

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = {"ResNet": "R50x1", "ViT": "Ti/8"}
RATES = {"adamw": (3e-4, 1e-3), "sgd": (0.03, 0.1), "muon": (1e-3, 3e-3)}
WORDS = {"adamw": "Adam", "sgd": "SGD", "muon": "Muon"}
DECAY = 1e-4  # what a step at the peak rate takes from the weights where there is no gradient


def weight_decay(optimizer: str, rate: float, momentum: float) -> float:
    """The setting with which an optimizer shrinks the weights by DECAY in a step; SGD's momentum adds up its decay."""
    return DECAY * (1 - momentum if optimizer == "sgd" else 1) / rate


def rows(ask: Request, seed: int) -> Iterator[Row]:
    momentum = override(find(PRETRAIN).recipe, ask.pairs).momentum
    for kind, model in MODELS.items():
        for optimizer, rates in RATES.items():
            for rate in rates[:1] if ask.quick else rates:
                name = f"{kind}-{optimizer}-{rate:g}"
                decay = weight_decay(optimizer, rate, momentum)
                own = {"optimizer": optimizer, "lr": rate, "weight_decay": decay}
                run = ask.pretrain(name, seed, model, **own)
                numbers = ask.transfers(run, seed) | ask.few_shots(run)
                about = {"model": model, "optimizer": WORDS[optimizer], "learning rate": f"{rate:g}"}
                yield Row(name, about, numbers, run)


def figure(table: Table) -> "Figure":
    """Mean accuracy after fine-tuning, and 5-shot."""
    names = [f"{kind_of(line.name)}, {line.about['optimizer']} {line.about['learning rate']}" for line in table.lines]
    groups = [list(WORDS.values()).index(line.about["optimizer"]) for line in table.lines]
    panels = []
    for what in ("tuned", "5-shot"):
        key = table.request.mean_heading(what)
        panels.append(Dots(key, "accuracy, %", names, [line.values[key] for line in table.lines], groups))
    return dots_figure(panels)


def kind_of(name: str) -> str:
    return name.partition("-")[0]


STUDY = Study(
    "optimizer",
    "Is Adam or SGD better for pre-training, for ResNets and for ViTs?",
    "table 7",
    rows,
    figure,
    paper="Adam pre-training transfers better than SGD for ResNets too, on most sets.",
    note="Muon and the ViT are not in the paper's table. Each optimizer has two learning rates, so that none is judged "
    "by a wrong one. Weight decay is such that without a gradient the weights of all shrink equally fast.",
    published=(
        ("model", "optimizer", "ImageNet", "CIFAR-10", "CIFAR-100", "Pets", "Flowers", "average"),
        ("R50x1", "Adam", "77.54", "97.67", "86.07", "91.11", "94.26", "89.33"),
        ("R50x1", "SGD", "78.24", "97.46", "85.17", "91.00", "92.06", "88.79"),
        ("R152x2", "Adam", "84.97", "99.06", "92.05", "95.37", "98.62", "94.01"),
        ("R152x2", "SGD", "84.37", "99.07", "91.06", "94.79", "99.32", "93.72"),
    ),
)
