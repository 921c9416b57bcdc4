"""Photos: generated ones of many shapes, with smooth colors, so that a shift changes them visibly; and real ones."""

import io
import os
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

SHARED = Path(os.environ.get("VITLAB_SHARED", Path(__file__).parents[3] / "shared"))
WEIGHTS = SHARED / "weights" / "vit_tiny_patch16_224.safetensors"
SHAPES = [(200, 150), (150, 201), (97, 110), (320, 240), (333, 500), (71, 71), (300, 129), (127, 64), (90, 350)]


@cache
def photos(number: int = len(SHAPES), seed: int = 0) -> list[Image.Image]:
    made = []
    for i in range(number):
        rng = np.random.default_rng([seed, i])
        coarse = Image.fromarray(rng.integers(0, 256, (9, 12, 3), dtype=np.uint8))
        made.append(coarse.resize(SHAPES[i % len(SHAPES)], Image.Resampling.BICUBIC))
    return made


def pets(number: int) -> list[Image.Image]:
    """Photos of the pets' test split, evenly spaced; the test is skipped where they or the real weights are missing."""
    file = SHARED / "data" / "pets" / "test.parquet"
    if not file.exists() or not WEIGHTS.exists():
        pytest.skip(f"photos and weights are not in {SHARED}; set VITLAB_SHARED to the folder that has them")
    column = pytest.importorskip("pyarrow.parquet").read_table(file, columns=["image"]).column("image")
    rows = [column[i].as_py() for i in range(0, len(column), len(column) // number)][:number]
    return [Image.open(io.BytesIO(row["bytes"])).convert("RGB") for row in rows]
