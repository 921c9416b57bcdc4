"""`vitlab bench`: how fast a recipe trains here, and which part waits for which.

Three speeds of the same run: the loader alone, the training step alone on a batch that is in memory already, and the
two together. The last over the second is the share of the machine that the data lets it use.
"""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from vitlab.cost import cost
from vitlab.device import cpu_threads, peak_flops, sound_kernels
from vitlab.models.variants import build
from vitlab.training.loop import Run
from vitlab.training.parallel import process_group
from vitlab.training.recipe import Recipe
from vitlab.training.setup import prepare_run

WARM = 3  # steps before the clock starts: compiling, first files
AHEAD = 10  # steps that may wait in the device's queue


@dataclass(frozen=True)
class Speeds:
    """Images per second of all processes together; memory in bytes of the fullest device, where it can be told."""

    loader: float
    step: float
    both: float
    used: float | None  # share of the device's peak that the step alone reaches
    memory: int | None
    micro: int  # images of a process at a time
    workers: int
    held: bool  # the set lies in the device's memory

    @property
    def ratio(self) -> float:
        return self.both / self.step

    def verdict(self) -> str:
        """Which part waits, in words."""
        said = f"training runs at {self.ratio:.0%} of the speed it has on data in memory"
        if self.held:
            return f"{said}; the set is held in the device's memory and augmented there"
        each = self.loader / max(1, self.workers)
        if self.loader < self.step:
            need = self.step / each
            return (
                f"{said}: the device waits for images, of which {max(1, self.workers)} worker(s) bring {each:.0f} a "
                f"second each; {need:.0f} would keep up, or smaller files"
            )
        spare = self.loader / self.step
        return f"{said}: the workers wait for the device, and could bring {spare:.1f} times as many images"


def bench(recipe: Recipe, seconds: float) -> Speeds:
    """Measure a recipe's speeds, each for about so many seconds; nothing is kept."""
    recipe = dataclasses.replace(recipe, warmup=0)  # of no matter here, and a short run could not hold it
    with tempfile.TemporaryDirectory() as spare, process_group(recipe.device) as cluster, cpu_threads(recipe.threads):
        folder = cluster.agree(lambda: Path(spare) / "run")
        plan = prepare_run(recipe, folder, cluster, resume=False, lasting=False)
        with sound_kernels(cluster.device, plan.config.length):
            run = Run(plan, cluster, Console(quiet=True))
            try:
                return measure(run, seconds)
            finally:
                run.close()


def measure(run: Run, seconds: float) -> Speeds:
    device, batch = run.cluster.device, run.recipe.batch
    numbers = itertools.count()

    def step() -> None:
        run.step(next(numbers) % run.steps)
        run.window.clear()

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    both = batch * rate(step, seconds, device)
    held = [next(run.batches) for _ in range(run.parts)]

    def load() -> None:
        for _ in range(run.parts):
            next(run.batches)

    loader = batch * rate(load, seconds, device)
    run.batches = itertools.cycle(held)  # the loader's workers end: they would compete with the step
    alone = batch * rate(step, seconds, device)
    top = peak_flops(device)
    flops = cost(lambda: build(run.plan.config)).train_flops
    return Speeds(
        loader=loader,
        step=alone,
        both=both,
        used=None if top is None else alone * flops / top / run.cluster.world,
        memory=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        micro=run.micro,
        workers=run.loader.workers,
        held=run.loader.resident,
    )


def rate(act: Callable[[], None], seconds: float, device: torch.device) -> float:
    """How often per second; the device has finished when the clock is read."""
    for _ in range(WARM):
        act()
    settle(device)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or done < WARM:
        act()
        done += 1
        if done % AHEAD == 0:
            settle(device)  # a queue of work is not work done
    settle(device)
    return done / (time.perf_counter() - began)


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
