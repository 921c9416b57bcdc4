"""The training loop, for pre-training and fine-tuning: steps, validations, checkpoints, the test, the model."""

import math
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from vitlab.data.source import Data
from vitlab.device import cpu_threads, memory_errors, sound_kernels
from vitlab.errors import Stopped, UserError
from vitlab.signals import Interrupted, Signals, stoppable
from vitlab.training.checkpoint import CheckpointMeta
from vitlab.training.lock import run_lock
from vitlab.training.log import LOG, last_report
from vitlab.training.minutes import fit_minutes
from vitlab.training.parallel import is_restarted, process_group
from vitlab.training.recipe import Recipe, is_settled
from vitlab.training.recorder import Recorder
from vitlab.training.saver import Saver
from vitlab.training.setup import prepare_run, training_lengths
from vitlab.training.trainer import Trainer


@dataclass(frozen=True)
class Stage:
    """A run that is a part of a longer one, which holds its folder's lock: it leaves checkpoints/best, writes no final
    model, and does not use the test split; its report is that of the last validation."""

    start: Path  # weights to start with, in place of the recipe's
    deadline: float | None = None  # a time of `time.monotonic` at which it validates once more and ends


@dataclass(frozen=True)
class TrainResult:
    """How a run ended: its folder, its test report, and how long it took this time."""

    folder: Path
    report: dict[str, float]
    score: float  # of the report: higher is better
    seconds: float
    first: bool  # whether this is the first of the run's processes
    data: Data  # it was trained and tested on


def train(
    recipe: Recipe,
    out: str | Path,
    *,
    resume: bool = False,
    accept_data_changes: bool = False,
    console: Console | None = None,
    data: Data | None = None,
    stage: Stage | None = None,
    began: float | None = None,
) -> TrainResult:
    """Run a recipe in the folder `out`; with `resume`, continue from its last checkpoint.

    A recipe's minutes count from `began`, a time of `time.monotonic`; None: from this call.
    Raises UserError for what the user can fix, and Stopped after SIGINT or SIGTERM, with the state saved.
    """
    began = time.monotonic() if began is None else began
    out, resume = Path(out), resume or is_restarted()
    with (
        stoppable("stopped before the next step was done; continue by the same command with --resume") as signals,
        memory_errors("training", "set a smaller micro, batch, image_size or model, or recompute=true"),
        process_group(recipe.device) as cluster,
        run_lock(out, cluster) if stage is None else nullcontext(),
        cpu_threads(recipe.threads),
    ):
        start = None if stage is None else stage.start
        setup = prepare_run(recipe, out, cluster, resume=resume, data=data, start=start, accept=accept_data_changes)
        with sound_kernels(cluster.device, *training_lengths(setup)), closing(Trainer(setup, cluster)) as trainer:
            console = console or Console()
            if not is_settled(setup.recipe):
                setup = fit_minutes(trainer, began, console)
            saver = Saver(setup, cluster, sharded=trainer.is_sharded)
            if cluster.first and setup.data.validation is not None:
                console.print(f"data: {setup.data.note}", highlight=False, markup=False, soft_wrap=True)
            run = Run(trainer, Recorder(setup, cluster, console, trainer.restored), saver, signals, stage)
            run.run()
            score = trainer.objective.score(run.report)
        if signals.number:  # during the last step or after it
            raise Stopped(signals.number, f"stopped; the run in {out} is complete, `vitlab report {out}` describes it")
        return TrainResult(out, run.report, score, time.monotonic() - began, cluster.first, setup.data)


class Run:
    """The loop: it calls the trainer, the recorder and the saver, and keeps count of what is done."""

    def __init__(
        self, trainer: Trainer, recorder: Recorder, saver: Saver, signals: Signals, stage: Stage | None
    ) -> None:
        self.trainer, self.recorder, self.saver, self.signals = trainer, recorder, saver, signals
        self.recipe, self.cluster, self.steps = trainer.recipe, trainer.cluster, trainer.steps
        start = trainer.restored
        self.done, self.tested = start.step, start.tested
        self.best, self.least, self.stale = start.best, start.least, start.stale
        self.final, self.late = stage is None, False
        self.deadline = None if stage is None else stage.deadline
        self.report: dict[str, float] = {}  # the test's

    def run(self) -> None:
        """Train to the last step and save the model.

        Signals are deferred to the end of a step, except the first step: it may compile for minutes and has nothing
        to save.
        """
        r, first = self.recipe, self.done
        with self.signals.deferred(), self.recorder:
            if not self.tested:
                self.evaluate()
                self.save(wait=True)
            while not self.is_over:
                step = self.done
                with self.signals.immediate() if step == first else nullcontext():
                    result = self.trainer.step(step)
                self.recorder.add_step(step + 1, self.trainer.learning_rate(step), result)
                self.saver.check_background()
                self.done = done = step + 1
                stop = self.stop_signal()
                self.late = self.is_late()
                if self.is_over or stop or done % r.log_every == 0:
                    self.recorder.flush()
                if self.is_over or done % (r.evaluate_every or self.steps) == 0:
                    self.evaluate()
                if self.is_over or stop or done % r.checkpoint_every == 0:
                    self.save(wait=bool(self.is_over or stop))
                if stop and not self.is_over:
                    raise self.stopped(stop)
            if self.final:
                self.saver.save_final(self.trainer.final_weights(), self.trainer.thresholds())
            if not self.report:  # resumed after its last step
                self.report = last_report(self.trainer.setup.out / LOG, "test" if self.final else "validation")

    @property
    def is_over(self) -> bool:
        """Whether there is no further step: the last is done, time is up, or validation has stopped to improve."""
        return self.done == self.steps or self.late or self.stale >= (self.recipe.patience or math.inf)

    def is_late(self) -> bool:
        """Whether the deadline has passed; several processes ask the first one, now and then."""
        if self.deadline is None:
            return False
        if self.cluster.world == 1:
            return time.monotonic() > self.deadline
        asks = self.done % self.recipe.log_every == 0
        return asks and self.cluster.agree(lambda: time.monotonic() > (self.deadline or 0))

    def stop_signal(self) -> int:
        """The signal to stop for, or 0. Processes compare theirs now and then, so that all stop at the same step."""
        if self.cluster.world == 1:
            return self.signals.number
        if self.done % self.recipe.log_every:
            return 0
        numbers = torch.zeros(self.cluster.world, dtype=torch.long)
        numbers[self.cluster.rank] = self.signals.number
        return int(self.cluster.sum(numbers).max())

    def stopped(self, number: int) -> Stopped:
        return Stopped(number, f"stopped at step {self.done} of {self.steps}, saved; continue with --resume")

    def evaluate(self) -> None:
        """Validate the model and save it if it is the best so far; after the last step, test it.

        The test set chooses nothing, so it is used once. A signal interrupts an evaluation: the run is saved without
        it, and evaluated first when it is resumed. Several processes finish it, as each waits for the others in it.
        """
        self.recorder.flush()  # the log stays in the order of steps, wherever a run is interrupted
        reports: dict[str, dict[str, dict[str, float]]] = {}
        validated: dict[str, float] = {}
        score, stale = None, 0
        try:
            with self.signals.immediate() if self.cluster.world == 1 else nullcontext():
                if "validation" in self.trainer.eval_loaders:
                    reports["validation"] = self.trainer.evaluate("validation")
                    validated = newest(reports["validation"], "validation")
                    score = self.trainer.objective.score(validated)
                    better = self.best is None or self.least is None or score > self.best
                    stale = 0 if better or validated["loss"] < (self.least or 0) else self.stale + 1
                over = self.is_over or stale >= (self.recipe.patience or math.inf)
                if over and self.final:
                    reports["test"] = self.trainer.evaluate("test")
        except Interrupted:
            self.tested = False
            self.trainer.put_back()
            self.save(wait=True)
            raise self.stopped(self.signals.number) from None
        except UserError:  # such as images that cannot be read
            if self.cluster.world == 1:  # else the others may not be here
                self.tested = False
                self.save(wait=True)
            raise
        self.tested, self.stale = True, stale
        for name, each in reports.items():
            report = newest(each, name)
            self.recorder.add_evaluation(self.done, each, report)
            if name == "test" or not self.final:
                self.report = report
        if score is not None:
            self.keep_best(score)
            self.least = min(validated["loss"], math.inf if self.least is None else self.least)
        self.recorder.restart_clock()

    def keep_best(self, score: float) -> None:
        """Save the model as the best one if its score on the validation split is; of equals, the later one.

        A stage has few images to validate on, so that a schedule's end is better than a lucky draw before it.
        """
        at_end = self.done == self.steps and not self.final
        if self.best is None or score >= self.best or at_end:
            self.best = score
            self.saver.save_best(self.trainer.final_weights(), self.trainer.thresholds())

    def save(self, wait: bool) -> None:
        """Save all that is needed to resume at this step, the length of the log included."""
        log_bytes, micro = self.recorder.sync(), self.trainer.micro
        best, world = (self.best, self.cluster.world)
        meta = CheckpointMeta(self.done, log_bytes, micro, best, world, self.tested, self.stale, self.least)
        self.saver.save(self.trainer.state(), meta, wait=wait)


def newest(reports: dict[str, dict[str, float]], name: str) -> dict[str, float]:
    """Of the reports on a split, that of the averaged weights where the run has them."""
    return reports.get("ema", reports[name])
