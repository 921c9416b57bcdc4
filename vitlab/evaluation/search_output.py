"""What a search found, as JSON lines or CSV and as a picture; never over another file."""

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from vitlab.errors import UserError
from vitlab.evaluation.search import Hit
from vitlab.files import atomic_path
from vitlab.text import listed

LINES, TABLE, PICTURES = (".json", ".jsonl", ".ndjson"), (".csv",), (".png", ".jpg", ".jpeg")


def check_outputs(out: Path | None, sheet: Path | None) -> None:
    """Raise UserError, before the work, for a file of another kind or one that exists."""
    for path, kinds in ((out, (*LINES, *TABLE)), (sheet, PICTURES)):
        if path is not None and path.suffix.lower() not in kinds:
            raise UserError(f"'{path}' cannot be written: its name must end in {listed(kinds)}")
        if path is not None and path.exists():
            raise UserError(f"{path} exists; remove it or name another file")


def write_hits(hits: Sequence[Hit], path: Path) -> None:
    text = to_csv(hits) if path.suffix.lower() in TABLE else "".join(json.dumps(to_json(hit)) + "\n" for hit in hits)
    with atomic_path(path, folder=False) as new:
        new.write_text(text, encoding="utf-8")


def write_sheet(picture: Image.Image, path: Path) -> None:
    with atomic_path(path, folder=False) as new:
        picture.save(new)


def to_json(hit: Hit) -> dict[str, object]:
    return {
        "path": hit.path,
        "similarity": round(hit.similarity, 7),
        "labels": list(hit.labels),
        "split": hit.split,
        "row": hit.row,
    }


def to_csv(hits: Sequence[Hit]) -> str:
    """path, similarity, labels (separated by ";"), split, row."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("path", "similarity", "labels", "split", "row"))
    for hit in hits:
        writer.writerow((hit.path, round(hit.similarity, 7), ";".join(hit.labels), hit.split or "", hit.row))
    return text.getvalue()
