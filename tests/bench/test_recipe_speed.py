"""Speeds of a recipe, and their description."""

import dataclasses

from timing import measure_until

from vitlab.bench.recipe import Speeds, bench
from vitlab.training.recipe import override
from vitlab.training.recipes import find

SOME = Speeds(loader=100, step=400, both=90, used=None, memory=None, micro=8, workers=2, held=False)


def test_the_device_waits_for_images() -> None:
    line = SOME.verdict()
    assert "22% of the speed" in line  # 90 of 400
    assert "2 worker(s) load 50 per second each; 8 would keep up" in line


def test_the_workers_wait_for_the_device() -> None:
    line = dataclasses.replace(SOME, loader=1000, both=390).verdict()
    assert "could load 2.5 times as many" in line


def test_a_small_recipe_is_measured() -> None:
    settings = ["depth=1", "width=16", "mlp=16", "heads=2", "batch=8", "device=cpu", "resident=false", "workers=0"]
    recipe = override(find("digits").recipe, settings)
    speeds = measure_until(  # no faster than either part, but for noise
        lambda speeds: speeds.both < min(speeds.loader, speeds.step) * 1.5, lambda: bench(recipe, seconds=0.1)
    )
    assert not speeds.held
