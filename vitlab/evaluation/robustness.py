"""Accuracy under corruptions: the same images once for each corruption and severity, one table and its means."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vitlab.data.images import BrokenImage
from vitlab.data.source import ImageSource
from vitlab.evaluation.corrupted import Corrupted, Corrupting
from vitlab.evaluation.evaluate import evaluate
from vitlab.evaluation.result import csv_text
from vitlab.evaluation.scores import Rate
from vitlab.files import atomic_file, write_text
from vitlab.models.guest import Measured

CELL, GAP, LINE = 112, 4, 15  # of the sheet, in pixels


@dataclass(frozen=True)
class Robustness:
    """Scores under corruptions, in the order of the table."""

    corruptions: tuple[Corrupting, ...]
    top1: tuple[Rate, ...]
    top5: tuple[Rate | None, ...]

    @property
    def by_name(self) -> dict[str, dict[int, float]]:
        """Top-1 accuracy by corruption and severity."""
        table: dict[str, dict[int, float]] = {}
        for how, rate in zip(self.corruptions, self.top1, strict=True):
            table.setdefault(how.name, {})[how.severity] = rate.value
        return table

    @property
    def mean(self) -> float:
        """The mean over corruptions of their means over severities."""
        return float(np.mean([np.mean(list(row.values())) for row in self.by_name.values()]))

    def to_json(self) -> dict[str, Any]:
        scores = [
            {
                "name": how.name,
                "severity": how.severity,
                "top1": asdict(one),
                "top5": None if five is None else asdict(five),
            }
            for how, one, five in zip(self.corruptions, self.top1, self.top5, strict=True)
        ]
        means = {name: float(np.mean(list(row.values()))) for name, row in self.by_name.items()}
        return {"seed": self.corruptions[0].seed, "mean": self.mean, "means": means, "scores": scores}

    def write_csv(self, path: Path) -> None:
        rows = [
            (how.name, how.severity, one.value, one.low, one.high, "" if five is None else five.value)
            for how, one, five in zip(self.corruptions, self.top1, self.top5, strict=True)
        ]
        write_text(path, csv_text(("corruption", "severity", "top1", "top1_low", "top1_high", "top5"), rows))


def evaluate_corrupted(
    model: Measured, source: ImageSource, corruptions: Sequence[Corrupting], *, keep: Path | None = None, **options: Any
) -> Robustness:
    """Score a model under each corruption, which each have a folder in `keep`; `options` are those of `evaluate`."""
    one, five = [], []
    for number, how in enumerate(corruptions, 1):
        title = f"{how} ({number}/{len(corruptions)})"
        folder = None if keep is None else keep / f"{how.name}-{how.severity}"
        result = evaluate(model, source, corruption=how, title=title, keep=folder, **options)
        one.append(result.top1)
        five.append(result.top5)
    return Robustness(tuple(corruptions), tuple(one), tuple(five))


def write_sheet(path: Path, model: Measured, source: ImageSource, corruptions: Sequence[Corrupting]) -> None:
    """Write the first image that can be read under each corruption: a row by name, severities side by side."""
    rows: dict[str, list[Corrupting]] = {}
    for how in corruptions:
        rows.setdefault(how.name, []).append(how)
    size = model.config.image_size
    width = CELL * size[1] // max(size), CELL * size[0] // max(size)
    across, down = width[0] + GAP, width[1] + GAP + LINE
    sheet = Image.new("RGB", (GAP + max(map(len, rows.values())) * across, GAP + len(rows) * down), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(11)
    index = first_image(source)
    for i, row in enumerate(rows.values()):
        for j, how in enumerate(row):
            picture = Corrupted(source, how, size, model.card.preprocess).image(index)
            left, top = GAP + j * across, GAP + i * down
            sheet.paste(picture.resize(width), (left, top))
            pen.text((left, top + width[1]), str(how), "black", font)
    with atomic_file(path) as file:
        sheet.save(file, "PNG")


def first_image(source: ImageSource) -> int:
    for index in range(len(source)):
        try:
            source.image(index)
        except BrokenImage:
            continue
        return index
    return 0
