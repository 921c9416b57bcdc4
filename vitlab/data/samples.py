"""samples.json: a few held-out images of a run as thumbnails, so that its page has some to try wherever the run is.

The file comes with a run, which may be a stranger's: what is read from it is checked, and it names no other file.
"""

import base64
import binascii
import io
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from vitlab.data.images import BrokenImage
from vitlab.data.source import ImageSource
from vitlab.errors import UserError
from vitlab.files import read_json, write_text

NAME = "samples.json"
MOST = 8
SIDE = 256  # pixels of the shorter side, and at most twice as many of the longer one
TINY = 64  # pixels; images up to this are kept as they are, since JPEG would blur them
MAX_BYTES = 300_000  # of one image
MAX_NAME = 200  # characters of a class
KINDS = {"jpeg": b"\xff\xd8\xff", "png": b"\x89PNG\r\n\x1a\n"}


@dataclass(frozen=True)
class Sample:
    """A thumbnail and the class of its image, of a multi-label set all of them."""

    label: str
    kind: str  # "jpeg" or "png"
    data: str  # base64


def write_samples(run: Path, source: ImageSource) -> None:
    """Write RUN/samples.json, complete or not at all: images of as many classes as there are, up to eight."""
    samples: list[Sample] = []
    for index in spread_over_classes(source):
        try:
            image = source.image(index, lambda size: min(size) / SIDE)
        except BrokenImage:
            continue
        label = ", ".join(source.classes[number] for number in source.labels_of(index))
        samples.append(Sample(label[:MAX_NAME], *encode(image)))
        if len(samples) == MOST:
            break
    write_text(run / NAME, json.dumps({"samples": [asdict(sample) for sample in samples]}, indent=1))


def spread_over_classes(source: ImageSource) -> Iterator[int]:
    """Images in the order in which they are tried: one of each class, then the next one of each.

    Of more classes than there are samples, every few are used; the images of a multi-label set come in even steps.
    """
    if source.label_sets is not None:
        yield from range(0, len(source), max(1, len(source) // MOST))
        return
    present = np.unique(source.labels)
    step = np.linspace(0, len(present) - 1, min(MOST, len(present))).round().astype(int)
    images = [np.flatnonzero(source.labels == number) for number in present[step]]
    for rank in range(max(map(len, images), default=0)):
        yield from (int(one[rank]) for one in images if rank < len(one))


def encode(image: Image.Image) -> tuple[str, str]:
    """The kind and the base64 of a thumbnail."""
    factor = min(1.0, SIDE / min(image.size), 2 * SIDE / max(image.size))
    if factor < 1:
        width, height = (max(1, round(side * factor)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    kind = "png" if max(image.size) <= TINY else "jpeg"
    file = io.BytesIO()
    image.save(file, kind, **({"quality": 88} if kind == "jpeg" else {}))
    return kind, base64.b64encode(file.getvalue()).decode()


def read_samples(run: Path) -> list[Sample]:
    """The samples of a run; none where it has no such file. Raises UserError where the file holds anything else."""
    path = run / NAME
    if not path.is_file():
        return []
    entries = read_json(path).get("samples")
    if not isinstance(entries, list) or len(entries) > MOST or not all(map(is_sample, entries)):
        raise UserError(f"{path} does not hold thumbnails; remove it, or write it again: vitlab report RUN")
    return [Sample(**entry) for entry in entries]


def is_sample(entry: object) -> bool:
    """Whether it is what `write_samples` writes; the image itself is left to whoever shows it."""
    if not isinstance(entry, dict) or set(entry) != {"label", "kind", "data"}:
        return False
    if not all(isinstance(value, str) for value in entry.values()) or len(entry["label"]) > MAX_NAME:
        return False
    try:
        data = base64.b64decode(entry["data"], validate=True)
    except (binascii.Error, ValueError):
        return False
    return entry["kind"] in KINDS and data.startswith(KINDS[entry["kind"]]) and len(data) <= MAX_BYTES
