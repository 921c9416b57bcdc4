"""The benchmark of the loader, benchmarks/loader.py, runs and measures both loops."""

import sys
from pathlib import Path

import numpy as np
import pytest
from timing import measure_until

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.loader import loader_benchmark, photo, shards_benchmark


@pytest.mark.long
def test_the_loader_is_not_slower_than_a_plain_loop() -> None:
    def measure() -> list[float]:
        return [row.vitlab / row.plain for row in loader_benchmark(count=32, rounds=8)]

    measure_until(lambda ratios: bool(np.median(ratios) > 0.95 and min(ratios) > 0.6), measure)  # single rows vary


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_ways_to_read_shards_are_measured(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VITLAB_DATA", "")  # which the benchmark changes
    table, line = shards_benchmark(workers, seconds=0.1, rounds=1, batch=4, count=4, sides=[256])
    assert table.row_count == 5
    assert "at most 1 of 255" in line or "at most 0 of 255" in line


def test_bench_photos_are_like_photos() -> None:
    """Neighboring pixels resemble each other, and the file is neither blank nor noise."""
    grey = np.asarray(photo(0, (96, 128)).convert("L")).astype(float)
    assert grey.std() > 20
    assert np.abs(np.diff(grey, axis=1)).mean() < grey.std()
