"""`vitlab bench`: how fast a recipe trains on this machine, and which part waits for which.

Three speeds of the same run: the loader alone, the training step alone on a batch that is in memory already, and the
two together. The last over the second is the share of the machine that the data lets it use.
"""

import dataclasses
import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch

from vitlab.cost import quick_cost
from vitlab.device import QUEUED, cpu_threads, peak_flops, sound_kernels, synchronize
from vitlab.training.parallel import process_group
from vitlab.training.recipe import Recipe, is_settled, settle
from vitlab.training.setup import prepare_run, training_lengths
from vitlab.training.trainer import Trainer

WARM_UP = 3  # calls before the clock starts: compiling, first files


@dataclass(frozen=True)
class Speeds:
    """Images per second of all processes together; memory in bytes of the fullest device, on a GPU."""

    loader: float
    step: float
    both: float
    used: float | None  # share of the device's peak that the step alone reaches
    memory: int | None
    micro: int  # images of a process at a time
    workers: int
    held: bool  # the set is in the device's memory

    def verdict(self) -> str:
        """A line that names the part which waits for the other."""
        share = f"training runs at {self.both / self.step:.0%} of the speed it has on data in memory"
        if self.held:
            return f"{share}; the set is held in the device's memory and augmented there"
        if self.loader >= self.step:
            spare = self.loader / self.step
            return f"{share}: the workers wait for the device, and could load {spare:.1f} times as many images"
        workers = max(1, self.workers)
        each = self.loader / workers
        return (
            f"{share}: the device waits for images, of which {workers} worker(s) load {each:.0f} per second each; "
            f"{self.step / each:.0f} would keep up, or smaller files (vitlab data shrink), or resize=device on a GPU"
        )


def bench(recipe: Recipe, seconds: float) -> Speeds:
    """Measure a recipe's speeds, each for about `seconds`; nothing is kept."""
    # irrelevant to speed, and a short run could not hold a warm-up; with small images first, the speed with the others
    recipe = dataclasses.replace(recipe, warmup=0, small_size=None)
    recipe = recipe if is_settled(recipe) else settle(recipe, 1_000)
    with tempfile.TemporaryDirectory() as spare, process_group(recipe.device) as cluster, cpu_threads(recipe.threads):
        folder = cluster.agree(lambda: Path(spare) / "run")
        setup = prepare_run(recipe, folder, cluster, resume=False, trial=True)
        with sound_kernels(cluster.device, *training_lengths(setup)), closing(Trainer(setup, cluster)) as trainer:
            return measure_speeds(trainer, seconds)


def measure_speeds(trainer: Trainer, seconds: float) -> Speeds:
    device, batch = trainer.cluster.device, trainer.recipe.batch
    numbers = itertools.count()

    def step() -> None:
        trainer.step(next(numbers) % trainer.steps)

    def load() -> None:
        for _ in range(trainer.parts):
            next(trainer.batches)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    both = batch * calls_per_second(step, seconds, device)
    in_memory = [next(trainer.batches) for _ in range(trainer.parts)]
    loader = batch * calls_per_second(load, seconds, device)
    trainer.batches = itertools.cycle(in_memory)  # the loader's workers end: they would compete with the step
    alone = batch * calls_per_second(step, seconds, device)
    flops = quick_cost(trainer.setup.config).train_flops
    used = alone * flops / peak / trainer.cluster.world if (peak := peak_flops(device)) is not None else None
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Speeds(loader, alone, both, used, memory, trainer.micro, trainer.loader.workers, trainer.loader.resident)


def calls_per_second(act: Callable[[], None], seconds: float, device: torch.device) -> float:
    """How often per second `act` completes, the work on the device included."""
    for _ in range(WARM_UP):
        act()
    synchronize(device)
    began, done = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or done < WARM_UP:
        act()
        done += 1
        if done % QUEUED == 0:
            synchronize(device)
    synchronize(device)
    return done / (time.perf_counter() - began)
