"""A run's numbers in the tools that people watch runs with: TensorBoard, Weights & Biases, MLflow.

log.jsonl is the run's own log and always written; these are written beside it where the recipe names them. Their
packages are the user's own, imported only then and set up by their own variables (WANDB_MODE, MLFLOW_TRACKING_URI). One
that fails in the middle of a run is dropped with a warning: it must not end hours of training.
"""

import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from vitlab.errors import UserError
from vitlab.files import read_text, write_text
from vitlab.terminal import warn
from vitlab.text import brief
from vitlab.training.recipe import Recipe, flat

BATCH = 100  # numbers for MLflow at a time; it takes 1,000 at most
PROJECT = "vitlab"  # runs are collected under this name, unless WANDB_PROJECT or MLFLOW_EXPERIMENT_NAME has another


class Logger(Protocol):
    """Where numbers are shown."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def open_loggers(recipe: Recipe, out: Path, step: int) -> list[Logger]:
    """The loggers that a recipe names, for a run that begins or continues after `step` steps."""
    loggers: list[Logger] = []
    if recipe.tensorboard:
        loggers.append(TensorBoard(out / "tensorboard", step))
    if recipe.wandb:
        loggers.append(Guarded("wandb", lambda: WandB(recipe, out, step)))
    if recipe.mlflow:
        loggers.append(Guarded("mlflow", lambda: MLflow(recipe, out, step)))
    return loggers


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a log record; those of a test under its name, as in test/accuracy."""
    numbers = {}
    for name, value in record.items():
        for key, number in (value if isinstance(value, dict) else {"": value}).items():
            if name != "step":
                numbers[f"{name}/{key}" if key else name] = number
    return numbers


class TensorBoard:
    """TensorBoard's event files."""

    def __init__(self, folder: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError("tensorboard=true needs TensorBoard: pip install 'vitlab[board]'") from None
        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else 0)  # hides that step and later ones

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, number in numbers.items():
            self.writer.add_scalar(name, number, step)
        self.writer.flush()  # a killed run goes on from its checkpoint, and writes no step before that again

    def close(self) -> None:
        self.writer.close()


class WandB:
    """A run of Weights & Biases, which a resumed run continues."""

    def __init__(self, recipe: Recipe, out: Path, step: int) -> None:
        import wandb

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=out.absolute().name,
            dir=str(out),
            config=flat(recipe),
            id=stored_id(out / "wandb.id", step, lambda: secrets.token_hex(8)),
            resume="allow",
        )
        self.run.define_metric("*", step_metric="step")  # its own step may not go back, as a resumed run's may

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({"step": step, **numbers})

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """A run of MLflow, which a resumed run continues. Its server gets numbers in batches: a step should not wait."""

    def __init__(self, recipe: Recipe, out: Path, step: int) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self.client, self.metric, self.param = MlflowClient(), Metric, Param
        self.pending: list[Any] = []
        self.id = stored_id(out / "mlflow.id", step, lambda: self.begin(recipe, out))

    def begin(self, recipe: Recipe, out: Path) -> str:
        """A new run with the recipe's settings."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self.client.get_experiment_by_name(name)
        experiment = self.client.create_experiment(name) if found is None else found.experiment_id
        run = str(self.client.create_run(experiment, run_name=out.absolute().name).info.run_id)
        self.client.log_batch(run, params=[self.param(key, str(value)) for key, value in flat(recipe).items()])
        return run

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        now = int(1000 * time.time())
        self.pending += [self.metric(name, number, now, step) for name, number in numbers.items()]
        if len(self.pending) >= BATCH:
            self.send()

    def send(self) -> None:
        self.client.log_batch(self.id, metrics=self.pending)
        self.pending = []

    def close(self) -> None:
        self.send()
        self.client.set_terminated(self.id)


class Guarded:
    """A logger of another program: errors at its start are the user's to fix, later ones silence it."""

    def __init__(self, name: str, start: Callable[[], Logger]) -> None:
        self.name = name
        try:
            self.logger: Logger | None = start()
        except ImportError:
            raise UserError(f"{name}=true needs the package {name}: pip install {name}") from None
        except UserError:
            raise
        except Exception as error:  # no account, no server
            offline = "; WANDB_MODE=offline keeps its log in the run's folder" if name == "wandb" else ""
            raise UserError(f"{name}=true, and {name} did not start: {brief(error)}{offline}") from None

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self.attempt(lambda logger: logger.write(step, numbers))

    def close(self) -> None:
        self.attempt(lambda logger: logger.close())

    def attempt(self, act: Callable[[Logger], None]) -> None:
        if self.logger is None:
            return
        try:
            act(self.logger)
        except Exception as error:
            self.logger = None
            warn(f"{self.name} has failed and gets no more of this run: {brief(error)}; log.jsonl has everything")


def stored_id(path: Path, step: int, make: Callable[[], str]) -> str:
    """The name that a logger has for a run: that in its file if the run is resumed, else a new one."""
    if step and path.is_file():
        return read_text(path).strip()
    name = make()
    write_text(path, name + "\n")
    return name
