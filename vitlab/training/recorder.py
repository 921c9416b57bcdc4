"""What a run reports while it trains: log.jsonl, a progress bar, and the loggers that the recipe names."""

import math
import time
from types import TracebackType
from typing import Any, Self

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitlab.cost import cost
from vitlab.device import peak_flops
from vitlab.errors import UserError
from vitlab.models.shown import shown_config
from vitlab.models.variants import build
from vitlab.text import duration
from vitlab.training.checkpoint import CheckpointMeta, disk_errors
from vitlab.training.cuda_graph import StepResult
from vitlab.training.log import LOG, Log
from vitlab.training.loggers import numbers_of, open_loggers
from vitlab.training.parallel import Cluster
from vitlab.training.recipe import small_until
from vitlab.training.setup import RunSetup


class Diverged(UserError):
    """A loss or a gradient is no finite number any more."""


LINE_SECONDS = 5.0  # between lines where there is no terminal


class Recorder:
    """Records of a run's steps and tests. Every process has one, as losses are averaged; the first one writes.

    Losses stay on the device until `flush`, so that no step waits for them.
    """

    def __init__(self, setup: RunSetup, cluster: Cluster, console: Console, start: CheckpointMeta) -> None:
        self.setup, self.cluster, self.out = setup, cluster, setup.out
        self.pending: list[tuple[int, float, StepResult]] = []  # steps not yet logged, with their learning rates
        self.train_flops: dict[bool, int] = {}  # of images of small_size, and of the others
        self.bar = Bar(console, setup.recipe.steps or 0, start.step, shown=cluster.first)
        with disk_errors(self.out):
            self.log = Log(self.out / LOG, start.log_bytes) if cluster.first else None
            self.loggers = open_loggers(setup.recipe, self.out, start.step) if cluster.first else []
        self.restart_clock()

    def __enter__(self) -> Self:
        self.bar.progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.bar.progress.stop()
        with disk_errors(self.out):
            if self.log is not None:
                self.log.close()
            for logger in self.loggers:
                logger.close()

    def restart_clock(self) -> None:
        """Count the time for the speed from now on, as after a test."""
        self.clock = time.monotonic()

    def add_step(self, step: int, lr: float, result: StepResult) -> None:
        """Remember a step, counted from 1, for the next `flush`."""
        self.pending.append((step, lr, result))

    def flush(self) -> None:
        """Log the steps since the last time. Raises UserError where a loss is not finite, before it is saved."""
        if not self.pending:
            return
        steps, rates, results = zip(*self.pending, strict=True)
        self.pending = []
        losses, norms = zip(*results, strict=True)
        values = torch.stack([torch.stack(losses), torch.stack([n.to(losses[0]) for n in norms])])
        values[0] = self.cluster.sum(values[0].clone()) / self.cluster.world
        values = values.double().cpu()
        for step, rate, loss, norm in zip(steps, rates, *values.tolist(), strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise Diverged(
                    f"the loss of step {step} is {loss} and its gradient's norm {norm}: the run diverged; the last "
                    f"checkpoint is sound: start again in a new --out with a lower lr, a longer warmup or clip=1"
                )
            self.write({"step": step, "loss": loss, "grad_norm": norm, "lr": rate})
        images = len(steps) * self.setup.recipe.batch
        speed = images / max(1e-9, time.monotonic() - self.clock)
        self.restart_clock()
        self.write_speed(steps[-1], values[0, -1].item(), speed)

    def write_speed(self, step: int, loss: float, speed: float) -> None:
        """Log and show images per second; a record of its own, as it differs from run to run, unlike all others."""
        shown = {"loss": f"{loss:.4f}", "images/s": f"{speed:.0f}"}
        record: dict[str, Any] = {"step": step, "images_per_second": float(f"{speed:.5g}")}
        peak = peak_flops(self.cluster.device)
        if peak is not None:
            utilization = speed * self.flops_at(step) / peak / self.cluster.world
            shown["MFU"] = f"{utilization:.0%}"
            record["mfu"] = round(utilization, 4)
        self.write({"speed": record})
        self.bar.update(step, **shown)

    def flops_at(self, step: int) -> int:
        """Operations of a training image of a step, counted from 1."""
        r, config = self.setup.recipe, self.setup.config
        is_small = step * r.batch <= small_until(r)
        if is_small not in self.train_flops:
            seen = shown_config(config, r.small_size) if is_small and r.small_size else config
            self.train_flops[is_small] = cost(lambda: build(seen)).train_flops
        return self.train_flops[is_small]

    def add_evaluation(self, step: int, reports: dict[str, dict[str, float]], shown: dict[str, float]) -> None:
        """Log the reports on a split, and show the accuracy, or mean average precision, of one."""
        self.write({"step": step, **reports})
        self.bar.update(step, **{key: f"{shown[key]:.2%}" for key in ("accuracy", "map") if key in shown})

    def write(self, record: dict[str, Any]) -> None:
        if self.log is not None:
            with disk_errors(self.out / LOG):
                self.log.write(record)
        if "step" in record:
            with disk_errors(self.out / "tensorboard"):
                for logger in self.loggers:
                    logger.write(record["step"], numbers_of(record))

    def sync(self) -> int:
        """Log all steps and force the log to disk, before a checkpoint refers to it; its length in bytes."""
        self.flush()
        with disk_errors(self.out / LOG):
            return self.log.sync() if self.log is not None else 0


class Bar:
    """Loss, accuracy, images per second, time left and, on a known GPU, the share of its peak in use.

    On a terminal it is a progress bar, elsewhere a line every few seconds.
    """

    def __init__(self, console: Console, steps: int, start: int, *, shown: bool) -> None:
        self.console, self.steps, self.start, self.shown = console, steps, start, shown
        self.is_live = shown and console.is_terminal
        self.values: dict[str, str] = {}
        self.began, self.printed = time.monotonic(), 0.0
        values = TextColumn("{task.fields[values]}")
        columns = (MofNCompleteColumn(), BarColumn(10), values, TextColumn("left"), TimeRemainingColumn())
        self.progress = Progress(*columns, console=console, disable=not self.is_live)  # fits 80 characters
        self.task = self.progress.add_task("train", total=steps, completed=start, values="")

    def update(self, done: int, **values: str) -> None:
        """Show that `done` steps are done; each value is shown until it is replaced."""
        self.values |= values
        text = "  ".join(f"{key} {value}" for key, value in self.values.items())
        if self.is_live:
            self.progress.update(self.task, completed=done, values=text)
        elif self.shown and time.monotonic() - self.printed > LINE_SECONDS:
            self.printed = time.monotonic()
            pace = (self.printed - self.began) / max(1, done - self.start)
            line = f"step {done}/{self.steps}  {text}  left {duration(pace * (self.steps - done))}"
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
