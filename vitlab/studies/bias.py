"""`vitlab study bias`: what the paper argues from, locality and translation, measured on predictions."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vitlab.analysis.bias import measure_bias
from vitlab.device import pick_device
from vitlab.evaluation.extract import eval_mode
from vitlab.plots.studies import Lines, Series, lines_figure
from vitlab.studies.request import Request
from vitlab.studies.shown_images import data_pairs, shown_batches
from vitlab.studies.study import Measure, Number, Row, Study, python
from vitlab.studies.table import Line, Table
from vitlab.weights import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MODELS = {"ViT": "Ti/8", "hybrid": "R26+Ti/16", "ResNet": "R50x1"}
SHARES, QUICK_SHARES = (0.05, 0.2, 1.0), (0.2, 1.0)  # of the training images
SHIFTS = (1, 4, 8, 16)  # pixels
TILES = (8, 16)  # pixels
IMAGES, QUICK_IMAGES, BATCH = 2_000, 40, 100
UNPLACED = "no positions"


@dataclass(frozen=True)
class Look:
    """What a row measures, on so many test images of the data that these settings name."""

    images: int
    device: str
    data: tuple[str, ...]

    def __call__(self, runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
        model, device = load(runs[0]), pick_device(self.device)
        batches = shown_batches(model, self.data, device, most=self.images, batch=BATCH)
        with eval_mode(model, device):
            found = measure_bias(model, batches, SHIFTS, TILES)
        shifted = dict(zip(map(shift_key, SHIFTS), found.shifted, strict=True))
        shuffled = dict(zip(map(tile_key, TILES), found.shuffled, strict=True))
        return shifted | shuffled | {UNPLACED: found.unplaced}


def shift_key(pixels: int) -> str:
    return f"shift {pixels} px"


def tile_key(side: int) -> str:
    return f"tiles {side} px"


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for kind, model in MODELS.items():
        for share in QUICK_SHARES if ask.quick else SHARES:
            name = f"{kind}-{share:g}"
            run = ask.pretrain(name, seed, model, subset=share)
            look = Look(QUICK_IMAGES if ask.quick else IMAGES, ask.device, data_pairs(run))
            repeat = python("vitlab.studies.bias", "Look", repr(look))
            measured = Measure(f"{run.name}-agreement", (run,), look, repeat)
            keys = [*map(shift_key, SHIFTS), *map(tile_key, TILES), UNPLACED]
            numbers = {"accuracy": Number(run, "accuracy")} | {key: Number(measured, key) for key in keys}
            about = {"model": f"{kind}, {model}", "training images": f"{share:.0%}"}
            yield Row(name, about, {**numbers}, run)


def figure(table: Table) -> "Figure":
    """Agreement by the shift, with all training images; and each kind of agreement by their number."""
    by_kind = {kind: [line for line in table.lines if line.name.startswith(f"{kind}-")] for kind in MODELS}
    full = {kind: lines[-1] for kind, lines in by_kind.items()}
    shifts = [Series(kind, SHIFTS, [line.values[shift_key(k)] for k in SHIFTS]) for kind, line in full.items()]
    panels = [Lines("shifted, all training images", "shift (pixels)", "same prediction, %", shifts, full=True)]
    shown = {
        shift_key(SHIFTS[0]): "shifted by a pixel",
        tile_key(TILES[-1]): f"tiles of {TILES[-1]} px shuffled",
        UNPLACED: "without positions",
    }
    for key, title in shown.items():
        series = [by_data(kind, lines, key) for kind, lines in by_kind.items()]
        series = [one for one in series if key != UNPLACED or one.name != "ResNet"]  # it has none
        panels.append(Lines(title, "training images", "same prediction, %", series, full=True))
    return lines_figure(panels)


def by_data(kind: str, lines: list[Line], key: str) -> Series:
    known = [line for line in lines if line.images]
    return Series(kind, [line.images or 0 for line in known], [line.values[key] for line in known])


STUDY = Study(
    "bias",
    "Does a model keep its answer as the image moves, in pieces, and without positions?",
    "section 3.1, inductive bias",
    rows,
    figure,
    paper="Convolutions are local and follow translations by themselves; a ViT learns all but its patches from data.",
    note="The paper argues and does not measure this. A prediction that stays need not be right, so agreement is read "
    "beside accuracy. Shifts wrap around. A ResNet has no positions to take away.",
)
