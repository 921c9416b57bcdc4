"""What became of a run, as one page to read, print and hand on."""

from vitlab.report.make import write_report

__all__ = ["write_report"]
