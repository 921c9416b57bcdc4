"""`vitlab study speed`: the paper's figure 12, on this machine."""

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
from vitlab.training.capacity import largest_batch

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SIZES, QUICK_SIZES = (64, 128, 224, 384, 512), (32, 64)  # pixels
MODELS = ("Ti/16", "S/16", "B/16", "L/16", "R50x1", "R101x1", "R152x2")
QUICK_MODELS = ("Ti/16", "R50x1")
QUICK_SHAPE = {"depth": 2, "width": 32, "mlp": 64, "heads": 2}  # of a ViT


@dataclass(frozen=True)
class Timing:
    """What a row measures, of a fresh model: its speed does not depend on what it has learned."""

    model: str
    size: int
    device: str
    quick: bool

    def __call__(self, runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
        device = pick_device(self.device)
        shape: dict[str, Any] = QUICK_SHAPE if self.quick and "/" in self.model else {}
        config = configure(self.model, shape | {"image_size": self.size})
        speed, batch = peak_speed(build(config), device, **(QUICK if self.quick else {}))
        return {
            "images/s": speed,
            "batch": batch,
            "largest batch": largest_batch(config, device),
            "GFLOPs": forward_flops(config) / 1e9,
        }


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for model in QUICK_MODELS if ask.quick else MODELS:
        for size in QUICK_SIZES if ask.quick else SIZES:
            timing = Timing(model, size, ask.device, ask.quick)
            name = f"{model.replace('/', '')}-{size}"
            repeat = python("vitlab.studies.speed", "Timing", repr(timing))
            measured = Measure(f"{name}-seed-{seed}", (), timing, repeat, timed=True)
            numbers = {key: Number(measured, key, "") for key in ("images/s", "batch", "largest batch", "GFLOPs")}
            about = {"family": "ViT" if "/" in model else "ResNet", "model": model, "size": f"{size}"}
            yield Row(name, about, {**numbers})


def figure(table: Table) -> "Figure":
    """Images per second, and the largest batch of a training step, by the side of the images."""
    panels = []
    for key, title in (("images/s", "inference, images per second"), ("largest batch", "largest batch that trains")):
        series = []
        for model in dict.fromkeys(line.about["model"] for line in table.lines):
            lines = [line for line in table.lines if line.about["model"] == model]
            sides = [float(line.about["size"]) for line in lines]
            series.append(Series(model, sides, [line.values[key] for line in lines]))
        panels.append(Lines(title, "input size (pixels)", key, series, share=False, log_y=True))
    return lines_figure(panels)


STUDY = Study(
    "speed",
    "How fast is a ViT, and how much of a batch fits, by the size of the images, against a ResNet?",
    "figure 12",
    rows,
    figure,
    paper="A ViT is about as fast as a ResNet of the same cost; large ViTs hold far larger batches.",
    seeds=1,
    note="Inference at the fastest batch size, and the largest batch of a training step with AdamW, of which no more "
    "than 16,384 are tried, both in bf16 on a GPU that has it; on a CPU the batch is counted, not tried. The paper's "
    "machine is a TPUv3 core.",
)
