"""Loggers of other programs, through the parts of their interfaces that are used: neither package is needed to test."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from small_runs import records, train_small

from vitlab.errors import UserError
from vitlab.training.recipe import flat
from vitlab.training.setup import read_recipe

SHORT: dict[str, Any] = {"steps": 4, "evaluate_every": 2, "checkpoint_every": 2, "log_every": 3, "warmup": 1}


class FakeWandB(ModuleType):
    """What wandb.init is called with, and what its runs are given."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.starts: list[dict[str, Any]] = []
        self.rows: list[dict[str, float]] = []
        self.finished = 0
        self.fail_after = 10**9

    def init(self, **options: Any) -> Any:
        self.starts.append(options)
        return SimpleNamespace(log=self.log, finish=self.finish, define_metric=lambda *a, **k: None)

    def log(self, row: dict[str, float]) -> None:
        if len(self.rows) >= self.fail_after:
            raise ConnectionError("no route to host")
        self.rows.append(row)

    def finish(self) -> None:
        self.finished += 1


class FakeMlflow:
    """The store behind MLflow's client."""

    def __init__(self) -> None:
        self.experiments: list[str] = []
        self.runs: dict[str, dict[str, Any]] = {}

    def modules(self) -> dict[str, ModuleType]:
        """The packages that are imported, with what is imported from them."""
        named = {name: ModuleType(name) for name in ("mlflow", "mlflow.entities", "mlflow.tracking")}
        named["mlflow.entities"].__dict__.update(
            Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step),
            Param=lambda key, value: SimpleNamespace(key=key, value=value),
        )
        named["mlflow.tracking"].__dict__["MlflowClient"] = lambda: self
        return named

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=name) if name in self.experiments else None

    def create_experiment(self, name: str) -> str:
        self.experiments.append(name)
        return name

    def create_run(self, experiment_id: str, run_name: str) -> Any:
        assert experiment_id in self.experiments
        self.runs[f"id {len(self.runs)}"] = {"name": run_name, "params": {}, "metrics": [], "ended": 0}
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id {len(self.runs) - 1}"))

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000
        assert len(params) <= 100  # as MLflow's server has it
        self.runs[run_id]["params"] |= {param.key: param.value for param in params}
        self.runs[run_id]["metrics"] += [(metric.step, metric.key, metric.value) for metric in metrics]

    def set_terminated(self, run_id: str) -> None:
        self.runs[run_id]["ended"] += 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> FakeWandB:
    fake = FakeWandB()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return fake


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> FakeMlflow:
    fake = FakeMlflow()
    for name, module in fake.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return fake


def logged(out: Path) -> list[tuple[int, str, float]]:
    """The numbers in log.jsonl: (step, name, number), those of a test as test/accuracy."""
    rows = []
    for record in records(out):
        for name, value in record.items():
            if "step" in record and name != "step":
                inner = value.items() if isinstance(value, dict) else [("", value)]
                rows += [(record["step"], f"{name}/{key}" if key else name, number) for key, number in inner]
    return rows


def test_wandb(wandb: FakeWandB, tmp_path: Path) -> None:
    train_small(tmp_path / "run", wandb=True, **SHORT)
    [start] = wandb.starts
    assert (start["project"], start["name"], start["dir"]) == ("vitlab", "run", str(tmp_path / "run"))
    stored = read_recipe(tmp_path / "run")
    assert stored is not None
    assert start["config"] == flat(stored)
    rows = [(row["step"], key, value) for row in wandb.rows for key, value in row.items() if key != "step"]
    assert rows == logged(tmp_path / "run")
    assert {"loss", "lr", "grad_norm", "validation/accuracy", "test/accuracy"} <= {key for _, key, _ in rows}
    assert wandb.finished == 1
    train_small(tmp_path / "run", resume=True, wandb=True, **SHORT)
    assert wandb.starts[1]["id"] == start["id"]
    assert wandb.starts[1]["resume"] == "allow"
    train_small(tmp_path / "other", wandb=True, **SHORT)
    assert wandb.starts[2]["id"] != start["id"]


def test_mlflow(mlflow: FakeMlflow, tmp_path: Path) -> None:
    train_small(tmp_path / "run", mlflow=True, **SHORT)
    [run] = mlflow.runs.values()
    assert run["name"] == "run"
    assert run["params"]["lr"] == "0.003"
    assert run["metrics"] == logged(tmp_path / "run")
    assert run["ended"] == 1
    train_small(tmp_path / "run", resume=True, mlflow=True, **SHORT)
    assert len(mlflow.runs) == 1
    train_small(tmp_path / "other", mlflow=True, **SHORT)
    assert (len(mlflow.runs), mlflow.experiments) == (2, ["vitlab"])


def test_a_logger_that_fails_does_not_end_the_run(
    wandb: FakeWandB, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wandb.fail_after = 3
    result = train_small(tmp_path / "run", wandb=True, **SHORT)
    assert result.report["accuracy"] >= 0
    assert len(wandb.rows) == 3
    warnings = [line for line in capsys.readouterr().err.splitlines() if "wandb" in line]
    assert warnings == [
        "warning: wandb has failed and gets no more of this run: no route to host; log.jsonl has everything"
    ]


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    if name == "wandb":
        train_small(tmp_path / "plain", **SHORT)  # not imported unless it is named
    with pytest.raises(UserError, match=rf"^{name}=true needs the package {name}: pip install {name}$"):
        train_small(tmp_path / "run", **SHORT | {name: True})


def test_no_account(wandb: FakeWandB, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> None:
        raise RuntimeError("api_key not configured (no-tty)\nlog in")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(UserError, match=r"did not start: api_key not configured \(no-tty\); WANDB_MODE=offline"):
        train_small(tmp_path / "run", wandb=True, **SHORT)
