"""`vitlab study positions`: the paper's table 8 and figure 10."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vitlab.analysis.embeddings import position_similarity, position_trend
from vitlab.files import atomic_file
from vitlab.models.vit import ViT
from vitlab.plots.studies import Dots, dots_figure
from vitlab.studies.request import Request
from vitlab.studies.study import Measure, Number, Row, Study, python
from vitlab.studies.table import Table
from vitlab.weights import load

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#        kind, placement, the paper's ImageNet 5-shot accuracy of B/16
CELLS = (
    ("none", "stem", 0.61382),
    ("1d", "stem", 0.64206),
    ("1d", "every", 0.63964),
    ("1d", "shared", 0.64292),
    ("2d", "stem", 0.64001),
    ("2d", "every", 0.64046),
    ("2d", "shared", 0.64022),
    ("relative", "stem", 0.64032),
)
KINDS = tuple(dict.fromkeys(kind for kind, _, _ in CELLS))
WORDS = {"none": "none", "1d": "1-D learned", "2d": "2-D learned", "relative": "relative"}
PLACES = {"stem": "stem", "every": "every layer", "shared": "every layer, shared"}
PAPER = "ImageNet 5-shot, B/16"
SIMILARITY = "similarity.npy"


def rows(ask: Request, seed: int) -> Iterator[Row]:
    for kind, place, paper in CELLS:
        name = f"{kind}-{place}" if kind in ("1d", "2d") else kind
        run = ask.pretrain(name, seed, positions=kind, placement=place)
        numbers = ask.few_shots(run) | {"accuracy": Number(run, "accuracy")}
        about = {"positions": WORDS[kind], "placed": PLACES[place] if kind in ("1d", "2d") else "n/a"}
        repeat = python("vitlab.studies.positions", measure_similarity.__name__, measure_similarity.__name__)
        look = Measure(f"{run.name}-similarity", (run,), measure_similarity, repeat)
        others = (look,) if (kind, place) == ("1d", "stem") else ()
        yield Row(name, about, numbers, run, {PAPER: paper}, others)


def measure_similarity(runs: tuple[Path, ...], folder: Path) -> Mapping[str, float]:
    """Write the cosine similarities of the learned rows; return how they fall with distance, as a rank correlation."""
    model = load(runs[0])
    assert isinstance(model, ViT)
    similarity = position_similarity(model)
    with atomic_file(folder / SIMILARITY) as file:
        np.save(file, similarity)
    return {"trend": position_trend(similarity)}


def figure(table: Table) -> "Figure":
    """Our cells, the paper's, and the similarity of learned rows, of the first seed."""
    names = [", ".join([line.about["positions"], *placed(line.about["placed"])]) for line in table.lines]
    groups = [KINDS.index(line.name.partition("-")[0]) for line in table.lines]
    key = table.request.mean_heading("5-shot")
    ours = Dots(f"{key}, here", "accuracy, %", names, [line.values[key] for line in table.lines], groups)
    published = [[line.paper[PAPER]] for line in table.lines]
    theirs = Dots("the paper, ImageNet", "5-shot, %", names, published, groups, faint=True)
    files = table.files(f"1d-stem-seed-*-similarity/{SIMILARITY}")
    return dots_figure([ours, theirs], np.load(files[0]) if files else None)


def placed(place: str) -> list[str]:
    return [] if place == "n/a" else ["shared" if place.endswith("shared") else place]


STUDY = Study(
    "positions",
    "Does it matter how positions are encoded, and where?",
    "table 8 and figure 10",
    rows,
    figure,
    paper="Any encoding is better than none; which one, and where it is added, hardly matters.",
    note="Relative offsets are 2-D here and 1-D in the paper.",
)
