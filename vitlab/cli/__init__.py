"""The command line: thin verbs over the package, in the order of these imports; each file registers its own."""

from vitlab.cli import training, reporting, evaluating, representation, inside, using, serving, data, models  # noqa: F401, I001
from vitlab.cli.app import app, main

__all__ = ["app", "main"]
