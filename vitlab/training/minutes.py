"""minutes=: as many steps as there is time for, by the speed that this machine has with this very run.

Steps are tried, timed and undone before the first one, so that the run which follows equals, to the bit, one with that
number of steps; once it is stored, a resumed run has it too. A machine that slows down later ends late: nothing of the
schedule changes any more.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from vitlab.device import QUEUED, synchronize
from vitlab.errors import UserError
from vitlab.text import duration
from vitlab.training import checkpoint
from vitlab.training.recipe import Recipe, evaluations, settle
from vitlab.training.setup import RunSetup, settle_run
from vitlab.training.trainer import Trainer

WARM_UP = 6  # steps before the clock starts: compiling, recording a CUDA graph, first files
FEW, MOST = 5, 1_000  # steps on the clock
SHARE = 0.015  # of the time, for the steps on the clock
CHEAP = 0.01  # of the time: an evaluation below that is repeated, since the first one reads the images
SPARE, SPARE_SECONDS = 0.01, 1.0  # of the time, and seconds, for what is not measured
ENDLESS = 10**9  # steps of a run whose number is not known yet; no rate depends on it in the time of the trial


@dataclass(frozen=True)
class Pace:
    """Seconds of a step, of saving a checkpoint, and of evaluating on the validation and the test images."""

    step: float
    save: float
    validate: float
    test: float

    def steps_in(self, seconds: float, recipe: Recipe) -> int:
        """The steps there is time for, with everything that happens between them and at the end."""
        at_end = self.test + self.validate + 2 * self.save
        every = self.step + self.save / recipe.checkpoint_every
        now_and_then = self.validate + self.save
        if recipe.evaluate_every is not None:
            every += now_and_then / recipe.evaluate_every
        else:
            at_end += evaluations(10**12, 1) * now_and_then
        return int((seconds - at_end) / every)


def fit_minutes(trainer: Trainer, began: float, console: Console) -> RunSetup:
    """Choose the number of steps of a run whose minutes count from `began`, store it, and rewind the trainer."""
    setup, cluster = trainer.setup, trainer.cluster
    total = 60 * (setup.recipe.minutes or 0)
    start = {name: tensor.clone() for name, tensor in trainer.state().items()}
    trainer.steps = ENDLESS
    pace = measure_pace(trainer, total)

    def choose() -> tuple[int, str]:
        gone = time.monotonic() - began
        steps = pace.steps_in(total * (1 - SPARE) - SPARE_SECONDS - gone, setup.recipe)
        minutes = f"minutes={setup.recipe.minutes:g}"
        facts = f"{duration(gone)} to start and {1e3 * pace.step:.3g} ms a step"
        if steps < 1:
            raise UserError(f"{minutes} leaves no time for a step on this machine, with {facts}; set more")
        epochs = steps * setup.recipe.batch / len(setup.data.train)
        return steps, f"{minutes}: {steps:,} steps ({epochs:.3g} epochs), with {facts}"

    steps, line = cluster.agree(choose)
    setup = settle_run(setup, steps, cluster)
    trainer.rewind(start, setup)
    if cluster.first:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return setup


def measure_pace(trainer: Trainer, total: float) -> Pace:
    """Try everything that a run of `total` seconds consists of; all processes do the same number of steps."""
    cluster = trainer.cluster
    step = measure_steps(trainer, total)
    save = 0.0 if trainer.is_sharded or not cluster.first else seconds_of(lambda: save_once(trainer))
    cluster.barrier()
    splits = {split: time_evaluation(trainer, split, CHEAP * total) for split in trainer.eval_loaders}
    return Pace(step, save, splits.get("validation", 0.0), splits["test"])


def measure_steps(trainer: Trainer, total: float) -> float:
    """Seconds of a step, on average over a run that starts with smaller images, if it does."""
    recipe = trainer.recipe
    if recipe.small_size is None:
        return measure_step(trainer, total)
    seconds, share = 0.0, recipe.small_start
    for part, tried in ((share, settle(recipe, ENDLESS)), (1 - share, replace(recipe, small_size=None))):
        trainer.recipe = tried
        trainer.batches = trainer.batches_from(0)
        seconds += part * measure_step(trainer, part * total)
    return seconds


def measure_step(trainer: Trainer, total: float) -> float:
    """Seconds of a step; `total` are those of all of them."""
    cluster, numbers = trainer.cluster, itertools.count()

    def try_steps(count: int) -> None:
        for done in range(1, count + 1):
            trainer.step(next(numbers))
            if done % QUEUED == 0:
                synchronize(cluster.device)  # as a run does to log its losses
        synchronize(cluster.device)

    try_steps(WARM_UP)
    few = seconds_of(lambda: try_steps(FEW)) / FEW
    count = cluster.agree(lambda: max(FEW, min(MOST, int(SHARE * total / few))))
    return seconds_of(lambda: try_steps(count)) / count


def time_evaluation(trainer: Trainer, split: str, cheap: float) -> float:
    """Seconds of an evaluation once its images are where they stay; its scores are not looked at."""
    first = seconds_of(lambda: trainer.evaluate(split))
    again = trainer.cluster.agree(lambda: first < cheap)
    return seconds_of(lambda: trainer.evaluate(split)) if again else first


def save_once(trainer: Trainer) -> None:
    """Write a checkpoint beside those of the run, and remove it."""
    with tempfile.TemporaryDirectory(prefix="timing-", dir=trainer.setup.out) as spare:
        checkpoint.write_checkpoint(Path(spare) / "last", trainer.state(), replace(trainer.restored, step=1))


def seconds_of(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
