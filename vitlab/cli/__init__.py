"""The command line: one file per verb. Importing a file registers its verb; `vitlab --help` keeps this order."""

from vitlab.cli import demo, finetune, train, recipes, bench, report, evaluate, fewshot, probe, vtab  # noqa: F401, I001
from vitlab.cli import study, transfer, results  # noqa: F401
from vitlab.cli import inspect, predict, embed, search, export, serve, data, models, cost, convert  # noqa: F401
from vitlab.cli.app import app, main

__all__ = ["app", "main"]
