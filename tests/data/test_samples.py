"""The thumbnails of a run: which images they are of, how large they are, and that a stranger's file is only data."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from vitlab.data.images import BrokenImage
from vitlab.data.label_sets import LabelSets
from vitlab.data.samples import MAX_BYTES, NAME, Sample, read_samples, write_samples
from vitlab.data.source import ArraySource
from vitlab.errors import UserError


def source(labels: list[int], height: int = 40, width: int = 90) -> ArraySource:
    """Flat images whose shade of gray is their index."""
    shades = np.arange(len(labels), dtype=np.uint8)[:, None, None, None]
    pixels = np.broadcast_to(shades, (len(labels), height, width, 3)).copy()
    classes = tuple(f"kind {i}" for i in range(max(labels) + 1))
    return ArraySource("flat", pixels, np.array(labels), classes)


def decoded(sample: Sample) -> Image.Image:
    image = Image.open(io.BytesIO(base64.b64decode(sample.data)))
    assert image.format == sample.kind.upper()
    return image


def shades(samples: list[Sample]) -> list[int]:
    return [round(float(np.asarray(decoded(sample)).mean())) for sample in samples]


def test_classes_take_turns(tmp_path: Path) -> None:
    write_samples(tmp_path, source([0] * 10 + [1] * 10 + [2]))
    samples = read_samples(tmp_path)
    assert shades(samples) == [0, 10, 20, 1, 11, 2, 12, 3]
    assert [sample.label for sample in samples[:4]] == ["kind 0", "kind 1", "kind 2", "kind 0"]


def test_of_many_classes_some_from_the_first_to_the_last(tmp_path: Path) -> None:
    write_samples(tmp_path, source([i // 2 for i in range(60)]))
    found = [int(sample.label.split()[1]) for sample in read_samples(tmp_path)]
    assert len(set(found)) == 8
    assert (found[0], found[-1]) == (0, 29)
    assert max(np.diff(found)) <= 5


def test_large_images_become_small_and_tiny_ones_stay_exact(tmp_path: Path) -> None:
    for height, width, expected in [
        (700, 1400, (512, 256)),
        (300, 3000, (512, 51)),
        (100, 90, (90, 100)),
        (8, 8, (8, 8)),
    ]:
        write_samples(tmp_path, source([0, 1], height, width))
        samples = read_samples(tmp_path)
        assert [decoded(sample).size for sample in samples] == [expected] * 2
        assert {sample.kind for sample in samples} == {"png" if height == 8 else "jpeg"}


def test_several_labels_and_images_that_cannot_be_read(tmp_path: Path) -> None:
    class Broken(ArraySource):
        def image(self, index: int, shrink: Any = None) -> Image.Image:
            if index % 2:
                raise BrokenImage("x", "broken")
            return super().image(index)

    pixels = np.zeros((20, 30, 30, 3), np.uint8)
    write_samples(tmp_path, Broken("x", pixels, np.arange(20) % 2, ("even", "odd")))
    assert [sample.label for sample in read_samples(tmp_path)] == ["even"] * 8
    sets = LabelSets(np.arange(0, 41, 2), np.tile([0, 1], 20))
    write_samples(tmp_path, ArraySource("x", pixels, sets, ("cat", "dog")))
    assert [sample.label for sample in read_samples(tmp_path)] == ["cat, dog"] * 8


def test_a_run_without_samples(tmp_path: Path) -> None:
    assert read_samples(tmp_path) == []
    assert read_samples(tmp_path / "nowhere") == []


PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
GOOD = {"label": "cat", "kind": "png", "data": PNG}


@pytest.mark.parametrize(
    "entries",
    [
        "cat",
        ["cat"],
        [GOOD] * 9,
        [GOOD | {"path": "/etc/passwd"}],
        [GOOD | {"kind": "svg+xml"}],
        [GOOD | {"kind": "jpeg"}],
        [GOOD | {"label": "x" * 201}],
        [GOOD | {"label": 3}],
        [GOOD | {"data": "not base64!"}],
        [GOOD | {"data": base64.b64encode(b"<svg onload='alert(1)'/>").decode()}],
        [GOOD | {"data": base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(MAX_BYTES)).decode()}],
    ],
)
def test_anything_else_in_the_file_is_refused(tmp_path: Path, entries: object) -> None:
    (tmp_path / NAME).write_text(json.dumps({"samples": [GOOD]}))
    assert read_samples(tmp_path) == [Sample(**GOOD)]
    (tmp_path / NAME).write_text(json.dumps({"samples": entries}))
    with pytest.raises(UserError, match="does not hold thumbnails; remove it"):
        read_samples(tmp_path)
