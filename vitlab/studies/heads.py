"""`vitlab study heads`: the paper's figures 7 and 11."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitlab.analysis.distance import batch_size, cell_distances, mean_distance
from vitlab.device import pick_device
from vitlab.errors import UserError
from vitlab.evaluation.extract import eval_mode
from vitlab.files import atomic_file
from vitlab.models.vit import ViT
from vitlab.plots.heads import Heads, heads_figure
from vitlab.studies.request import Request
from vitlab.studies.shown_images import data_pairs, shown_batches
from vitlab.studies.study import Measure, Number, Row, Study, python
from vitlab.studies.table import Table
from vitlab.weights import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = {"ViT": "Ti/16", "hybrid": "R26+Ti/16"}
IMAGES, QUICK_IMAGES = 128, 16  # 128 as in the paper
SIZE, QUICK_SIZE = 128, 64  # pixels, unless image_size is given: 16 px apart, patches are too few at 64
DISTANCES = "distance.npz"
#        heading: what it is
NUMBERS = {
    "first layer": "mean over heads",
    "first, least": "the most local head",
    "first, greatest": "the most global head",
    "last layer": "mean over heads",
}


@dataclass(frozen=True)
class Look:
    """What a row measures, on so many test images of the data that these settings name."""

    images: int
    device: str
    data: tuple[str, ...]

    def __call__(self, runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
        """Write the distances of all heads; return some of them, in pixels."""
        model, device = load(runs[0]), pick_device(self.device)
        assert isinstance(model, ViT)
        batches = shown_batches(model, self.data, device, most=self.images, batch=batch_size(model.config))
        with eval_mode(model, device):
            distance = mean_distance(model, (batch.images for batch in batches))  # (L, H)
        even = cell_distances(model.config.grid, model.config.stride).mean()
        with atomic_file(folder / DISTANCES) as file:
            np.savez(file, distance=distance, even=even)
        first = distance[0]
        return dict(zip(NUMBERS, (first.mean(), first.min(), first.max(), distance[-1].mean()), strict=True))


def rows(ask: Request, seed: int) -> Iterator[Row]:
    size = {} if ask.sizes() else {"image_size": QUICK_SIZE if ask.quick else SIZE}
    for kind, model in MODELS.items():
        run = ask.pretrain(kind, seed, model, **size)
        look = Look(QUICK_IMAGES if ask.quick else IMAGES, ask.device, data_pairs(run))
        repeat = python("vitlab.studies.heads", "Look", repr(look))
        measured = Measure(f"{run.name}-distance", (run,), look, repeat)
        numbers = {"accuracy": Number(run, "accuracy")} | {key: Number(measured, key, "px") for key in NUMBERS}
        yield Row(kind, {"model": model}, {**numbers}, run)


def figure(table: Table) -> "Figure":
    """The distance of each head by its layer, of all seeds."""
    panels = []
    for kind, model in MODELS.items():
        files = [np.load(path) for path in table.files(f"{kind}-seed-*-distance/{DISTANCES}")]
        if files:
            distance = np.stack([file["distance"] for file in files])
            panels.append(Heads(f"{kind} ({model})", distance, float(files[0]["even"])))
    if not panels:
        raise UserError("no distance is measured yet")
    return heads_figure(panels)


STUDY = Study(
    "heads",
    "How far do heads look in each layer, in a ViT and in a hybrid?",
    "figures 7 and 11",
    rows,
    figure,
    paper="Some heads of the lowest layers already attend to most of the image; with depth all do. In a hybrid fewer "
    "heads of the low layers are local.",
    note="Ti/16 and R26+Ti/16 on images of 128 pixels; the paper's are L/16 and R50+L/16 on 224.",
)
